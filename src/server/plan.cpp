#include "server/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace kvzap::server {
namespace {

// Numbers in the first broadcast, with the message's length: 8 KiB.
constexpr std::size_t first_numbers = 1024;

class Reader {
 public:
  explicit Reader(const std::vector<std::int64_t>& message) : m_message(message) {}
  std::int64_t next() {
    if (m_place >= m_message.size()) throw Error("rank 0 sent a plan that ends too early");
    return m_message[m_place++];
  }
  int next_int() { return static_cast<int>(next()); }
  std::size_t next_count() {
    const std::int64_t count = next();
    if (count < 0 || static_cast<std::size_t>(count) > m_message.size() - m_place) {
      throw Error(fmt::format("rank 0 sent a plan with {} elements in a list", count));
    }
    return static_cast<std::size_t>(count);
  }
  bool is_at_end() const { return m_place == m_message.size(); }

 private:
  const std::vector<std::int64_t>& m_message;
  std::size_t m_place = 0;
};

void append(std::vector<std::int64_t>& message, const std::vector<int>& values) {
  message.push_back(static_cast<std::int64_t>(values.size()));
  message.insert(message.end(), values.begin(), values.end());
}

// Eight bytes a number.
void append(std::vector<std::int64_t>& message, const std::string& text) {
  message.push_back(static_cast<std::int64_t>(text.size()));
  for (std::size_t begin = 0; begin < text.size(); begin += sizeof(std::int64_t)) {
    std::int64_t number = 0;
    std::memcpy(&number, text.data() + begin, std::min(sizeof(number), text.size() - begin));
    message.push_back(number);
  }
}

std::string read_text(Reader& reader) {
  const std::int64_t size = reader.next();
  std::string text;
  while (static_cast<std::int64_t>(text.size()) < size) {
    const std::int64_t number = reader.next();
    const std::size_t left = static_cast<std::size_t>(size) - text.size();
    text.append(reinterpret_cast<const char*>(&number), std::min(sizeof(number), left));
  }
  return text;
}

constexpr int row_types = 3;

std::int64_t code_of(const PageFormat& format) {
  return static_cast<int>(format.keys) * row_types + static_cast<int>(format.values);
}

PageFormat format_of_code(std::int64_t code) {
  if (code >= row_types * row_types) {
    throw Error(fmt::format("rank 0 sent a plan with the format {}", code));
  }
  return {static_cast<RowType>(code / row_types), static_cast<RowType>(code % row_types)};
}

std::vector<int> read_ints(Reader& reader) {
  std::vector<int> values(reader.next_count());
  for (int& value : values) value = reader.next_int();
  return values;
}

}  // namespace

std::vector<std::int64_t> Plan::encode() const {
  std::vector<std::int64_t> message;
  message.push_back((trims ? 1 : 0) | (sleeps ? 2 : 0) | (ends ? 4 : 0));
  append(message, reports);
  append(message, frees);
  message.push_back(static_cast<std::int64_t>(creates.size()));
  for (const PlannedSequence& create : creates) {
    message.insert(message.end(), {create.handle, create.source, create.tokens});
    append(message, create.pruning ? create.pruning->text() : std::string());
    message.push_back(create.page_format ? 1 + code_of(*create.page_format) : 0);
  }
  message.push_back(static_cast<std::int64_t>(spans.size()));
  for (const PlannedSpan& span : spans) {
    message.insert(message.end(),
                   {span.handle, static_cast<std::int64_t>(span.part),
                    static_cast<std::int64_t>(span.output), span.ends_context ? 1 : 0, span.keep_as,
                    span.spare_as, static_cast<std::int64_t>(span.tokens.size())});
    message.insert(message.end(), span.tokens.begin(), span.tokens.end());
  }
  return message;
}

Plan Plan::decode(const std::vector<std::int64_t>& message) {
  Reader reader(message);
  Plan plan;
  const std::int64_t flags = reader.next();
  plan.trims = (flags & 1) != 0;
  plan.sleeps = (flags & 2) != 0;
  plan.ends = (flags & 4) != 0;
  plan.reports = read_ints(reader);
  plan.frees = read_ints(reader);
  plan.creates.resize(reader.next_count());
  for (PlannedSequence& create : plan.creates) {
    create.handle = reader.next_int();
    create.source = reader.next_int();
    create.tokens = reader.next();
    const std::string pruning = read_text(reader);
    if (!pruning.empty()) create.pruning = Pruning::parse(pruning);
    const std::int64_t format = reader.next();
    if (format > 0) create.page_format = format_of_code(format - 1);
  }
  plan.spans.resize(reader.next_count());
  for (PlannedSpan& span : plan.spans) {
    span.handle = reader.next_int();
    span.part = static_cast<StepPart>(reader.next());
    span.output = static_cast<StepOutput>(reader.next());
    span.ends_context = reader.next() != 0;
    span.keep_as = reader.next_int();
    span.spare_as = reader.next_int();
    span.tokens.resize(reader.next_count());
    for (TokenId& token : span.tokens) token = static_cast<TokenId>(reader.next());
  }
  if (!reader.is_at_end()) throw Error("rank 0 sent a plan with numbers after its end");
  return plan;
}

void share(Plan& plan, const Communicator& comm) {
  if (comm.size() == 1) return;
  std::vector<std::int64_t> message;
  if (comm.is_root()) message = plan.encode();
  std::vector<std::int64_t> first(first_numbers, 0);
  if (comm.is_root()) {
    first[0] = static_cast<std::int64_t>(message.size());
    const std::size_t count = std::min(message.size(), first_numbers - 1);
    std::copy_n(message.begin(), count, first.begin() + 1);
  }
  comm.broadcast(first.data(), first.size() * sizeof(std::int64_t), 0);
  const auto size = static_cast<std::size_t>(first[0]);
  const std::size_t taken = std::min(size, first_numbers - 1);
  message.resize(size);
  if (!comm.is_root()) std::copy_n(first.begin() + 1, taken, message.begin());
  if (size > taken) {
    comm.broadcast(message.data() + taken, (size - taken) * sizeof(std::int64_t), 0);
  }
  if (!comm.is_root()) plan = Plan::decode(message);
}

}  // namespace kvzap::server
