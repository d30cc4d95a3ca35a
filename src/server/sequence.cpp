#include "server/sequence.hpp"

#include <algorithm>
#include <string>

namespace kvzap::server {
namespace {

// Marks in keys (PrefixKey).
constexpr std::int32_t context_begins = -1;
constexpr std::int32_t context_ends = -2;
constexpr std::int32_t question_begins = -3;
constexpr std::int32_t generated_begins = -4;

std::int32_t mark_of(Segment::Kind kind) {
  switch (kind) {
    case Segment::Kind::context:
      return context_begins;
    case Segment::Kind::question:
      return question_begins;
    case Segment::Kind::generated:
      break;
  }
  return generated_begins;
}

}  // namespace

std::int64_t tokens_of(const std::vector<Segment>& prompt) {
  std::int64_t count = 0;
  for (const Segment& segment : prompt) count += static_cast<std::int64_t>(segment.tokens.size());
  return count;
}

PrefixKey key_of(const GenerationRequest& request) {
  const std::string text = request.pruning->text();
  PrefixKey key = {static_cast<int>(request.page_format->keys),
                   static_cast<int>(request.page_format->values)};
  key.insert(key.end(), text.begin(), text.end());
  return key;
}

std::int64_t key_length(const Segment& segment) {
  const bool is_context = segment.kind == Segment::Kind::context;
  return 1 + static_cast<std::int64_t>(segment.tokens.size()) + (is_context ? 1 : 0);
}

void append_segment(PrefixKey& key, const Segment& segment) {
  key.push_back(mark_of(segment.kind));
  key.insert(key.end(), segment.tokens.begin(), segment.tokens.end());
  if (segment.kind == Segment::Kind::context) key.push_back(context_ends);
}

void append_answer(PrefixKey& key, const std::vector<TokenId>& tokens, bool begins) {
  if (begins) key.push_back(generated_begins);
  key.insert(key.end(), tokens.begin(), tokens.end());
}

std::int64_t longest_start(const PrefixKey& prompt) {
  return static_cast<std::int64_t>(prompt.size()) - (prompt.back() == context_ends ? 2 : 1);
}

std::int64_t Sequence::fresh_tokens(std::size_t segment_index) const {
  const auto all = static_cast<std::int64_t>(request().prompt.at(segment_index).tokens.size());
  if (segment_index != segment) return all;
  return all - std::max<std::int64_t>(0, cached - (tokens - static_cast<std::int64_t>(offset)));
}

PrefixKey Sequence::prompt_key_after(std::int64_t count) const {
  const Segment& part = request().prompt[segment];
  std::size_t length = key.size() + static_cast<std::size_t>(count);
  if (offset == 0) ++length;  // the mark of its beginning
  const bool is_context = part.kind == Segment::Kind::context;
  if (is_context && offset + static_cast<std::size_t>(count) == part.tokens.size()) ++length;
  return {job->key.begin(), job->key.begin() + static_cast<std::ptrdiff_t>(length)};
}

const std::vector<TokenId>& Sequence::answered() const {
  static const std::vector<TokenId> none;
  return said ? said->tokens() : none;
}

std::int64_t Sequence::left_to_read() const {
  if (handle < 0) return to_read;
  return prompt_left() + static_cast<std::int64_t>(answered().size() - fed);
}

void Sequence::rewind() {
  handle = -1;
  key.clear();
  whole_from = 0;
  tokens = cached = 0;
  segment = offset = 0;
  fed = 0;
  pooled.clear();
}

bool Sequence::skip(std::int64_t length) {
  std::int64_t place = job->key_begin;
  std::int64_t count = 0;
  std::size_t s = 0, from = 0;
  for (; s < request().prompt.size() && place < length; ++s) {
    const Segment& part = request().prompt[s];
    if (place + key_length(part) <= length) {
      place += key_length(part);
      count += static_cast<std::int64_t>(part.tokens.size());
      continue;
    }
    from = static_cast<std::size_t>(length - place - 1);
    if (from == part.tokens.size()) return false;
    if (from == 0) --length;  // a mark belongs to the first token after it
    count += static_cast<std::int64_t>(from);
    break;
  }
  segment = s;
  offset = from;
  tokens = cached = count;
  key.assign(job->key.begin(), job->key.begin() + length);
  return true;
}

}  // namespace kvzap::server
