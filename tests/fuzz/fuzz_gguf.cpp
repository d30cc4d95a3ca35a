// *.gguf: the file's parts, the JSON files made from its metadata, and its tensors' values.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "harness.hpp"
#include "kvzap/core/types.hpp"
#include "kvzap/model/model_config.hpp"
#include "model/gguf_metadata.hpp"
#include "model/gguf_store.hpp"
#include "model/read_weights.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {"x.gguf"};

namespace {

constexpr std::int64_t most_values = 1 << 14;  // that a run decodes of each tensor

/// Reads the first rows of a tensor under its published name.
void read_values(const model::GgufStore& store, const model::NamedTensor& named) {
  const std::int64_t columns = named.shape.back();
  const std::int64_t rows = named.shape.size() == 2 ? named.shape.front() : 1;
  if (!store.has(named.name) || columns > most_values) return;
  const auto stored = store.at(named.name, named.shape);
  const std::int64_t last = std::min(rows, most_values / columns);
  std::vector<float> values(static_cast<std::size_t>(last * columns));
  stored->read(0, last, 0, columns, values.data());
  if (rows > 1) stored->read(rows - 1, rows, columns / 2, columns, values.data());
  require(stored->description().size() < 4096, "a long description");
  stored->release();
}

void check_tensors(const std::filesystem::path& path, const gguf::GgufFile& file,
                   std::size_t file_bytes) {
  std::uint64_t sum = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    require(tensor.name == name && file.find(name) == &tensor, "a tensor under another's name");
    require(tensor.bytes <= file_bytes, "a tensor larger than its file");
    sum += tensor.bytes;
    for (const std::size_t i : {std::size_t{0}, tensor.bytes - 1}) {
      if (tensor.bytes > 0) require(std::to_integer<int>(tensor.data[i]) < 256, "bytes");
    }
  }
  require(sum <= file_bytes, "tensors that overlap");
  const model::GgufStore store(path);
  const ModelConfig config = ModelConfig::load(path);
  constexpr std::int64_t most_layers = 64, most_experts = 64;
  if (config.num_hidden_layers > most_layers) return;
  if (config.experts && config.experts->count > most_experts) return;
  for (const model::NamedTensor& named : model::tensors_of(config)) read_values(store, named);
}

}  // namespace

void run_one(std::string_view input) {
  static InputFile file;
  static const InputFolder folder;
  static const bool linked = [] {
    folder.link("x.gguf", file);
    return true;
  }();
  static_cast<void>(linked);
  file.assign(input);
  const auto path = folder.path() / "x.gguf";
  const auto opened = gguf::GgufFile::open(path);
  // Each maker gets its turn where another one refuses the file.
  std::string refusal;
  for (const char* name :
       {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}) {
    try {
      const auto made = name == std::string_view("config.json")
                            ? model::read_config(path)
                            : gguf::read_model_object(path, name);
      if (made) require(!made->content.dump().empty(), "a file without text");
    } catch (const Error& error) {
      refusal = error.what();
    }
  }
  check_tensors(path, opened, input.size());
  // A message is looked at like any other.
  if (!refusal.empty()) throw Error(refusal);
}

namespace {

/// The parts of a file, as far as they can be told apart.
struct Parts {
  std::string begin;                // magic and version
  std::vector<std::string> values;  // key, type and value
  std::vector<std::string> tensors;
  std::string rest;
};

class Splitter {
 public:
  explicit Splitter(std::string_view file) : m_file(file) {}

  bool split(Parts& parts) {
    std::uint64_t tensors = 0, values = 0;
    parts.begin = take(8);
    if (!number(tensors) || !number(values) || tensors > 4096 || values > 4096) return false;
    for (std::uint64_t i = 0; i < values; ++i) {
      const std::size_t begin = m_at;
      if (!skip_string() || !skip_value()) return false;
      parts.values.emplace_back(m_file.substr(begin, m_at - begin));
    }
    for (std::uint64_t i = 0; i < tensors; ++i) {
      const std::size_t begin = m_at;
      std::uint32_t dimensions = 0;
      if (!skip_string() || !number(dimensions) || dimensions > 8 || !skip(8u * dimensions + 12u)) {
        return false;
      }
      parts.tensors.emplace_back(m_file.substr(begin, m_at - begin));
    }
    parts.rest = m_file.substr(std::min(m_file.size(), (m_at + 31) / 32 * 32));
    return true;
  }

 private:
  std::string take(std::size_t bytes) {
    const std::string taken(m_file.substr(std::min(m_at, m_file.size()), bytes));
    m_at += taken.size();
    return taken;
  }
  bool skip(std::uint64_t bytes) {
    if (bytes > m_file.size() - m_at) return false;
    m_at += static_cast<std::size_t>(bytes);
    return true;
  }
  template <class T>
  bool number(T& value) {
    if (sizeof(T) > m_file.size() - m_at) return false;
    std::memcpy(&value, m_file.data() + m_at, sizeof(T));
    return skip(sizeof(T));
  }
  bool skip_string() {
    std::uint64_t length = 0;
    return number(length) && skip(length);
  }
  bool skip_value() {
    std::uint32_t type = 0;
    std::uint64_t count = 1;
    if (!number(type)) return false;
    if (type == 9 && (!number(type) || !number(count))) return false;
    if (type == 8) {
      for (std::uint64_t i = 0; i < count; ++i) {
        if (!skip_string()) return false;
      }
      return true;
    }
    static constexpr std::uint64_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < 13 && count <= m_file.size() && skip(count * bytes[type]);
  }

  std::string_view m_file;
  std::size_t m_at = 0;
};

std::string joined(const Parts& parts) {
  std::string file = parts.begin;
  for (const std::uint64_t count : {parts.tensors.size(), parts.values.size()}) {
    file.append(reinterpret_cast<const char*>(&count), sizeof(count));
  }
  for (const std::string& value : parts.values) file += value;
  for (const std::string& tensor : parts.tensors) file += tensor;
  file.resize((file.size() + 31) / 32 * 32);
  return file + parts.rest;
}

void mutate_bytes(std::string& bytes, std::size_t begin, std::size_t max_growth) {
  const std::size_t size = bytes.size() - std::min(begin, bytes.size());
  std::string part = bytes.substr(bytes.size() - size);
  part.resize(size + max_growth);
  part.resize(LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(part.data()), size, part.size()));
  bytes.replace(bytes.size() - size, size, part);
}

/// Changes one entry: its bytes, or it disappears, doubles or changes places.
void mutate_entries(std::vector<std::string>& entries, std::mt19937& random) {
  if (entries.empty()) return;
  const std::size_t one = random() % entries.size(), other = random() % entries.size();
  switch (random() % 8) {
    case 0:
      entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(one));
      break;
    case 1:
      entries.push_back(entries[one]);
      break;
    case 2:
      std::swap(entries[one], entries[other]);
      break;
    case 3: {  // the key of one, the rest of the other
      std::uint64_t length = 0;
      std::memcpy(&length, entries[one].data(), sizeof(length));
      std::uint64_t other_length = 0;
      std::memcpy(&other_length, entries[other].data(), sizeof(other_length));
      entries[one] = entries[one].substr(0, 8 + length) + entries[other].substr(8 + other_length);
      break;
    }
    default: {
      std::uint64_t length = 0;
      std::memcpy(&length, entries[one].data(), sizeof(length));
      mutate_bytes(entries[one], 8 + static_cast<std::size_t>(length), random() % 4 == 0 ? 8 : 0);
    }
  }
}

}  // namespace
}  // namespace kvzap::fuzz

// Counts and lengths that fit their entries let a run reach the readers after them.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  using namespace kvzap::fuzz;
  std::mt19937 random(seed);
  Parts parts;
  if (seed % 8 == 0 || !Splitter({reinterpret_cast<const char*>(data), size}).split(parts)) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const unsigned kind = static_cast<unsigned>(random() % 16);
  if (kind < 10) {
    mutate_entries(parts.values, random);
  } else if (kind < 15) {
    mutate_entries(parts.tensors, random);
  } else {
    mutate_bytes(parts.rest, 0, 32);
  }
  const std::string file = joined(parts);
  if (file.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, file.data(), file.size());
  return file.size();
}
