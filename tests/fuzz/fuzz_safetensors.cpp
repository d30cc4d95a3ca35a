// *.safetensors, and model.safetensors.index.json (inputs that begin with `{`).
#include <cstdint>
#include <cstring>
#include <kvzap/model/safetensors.hpp>
#include <string>

#include "harness.hpp"
#include "json_mutator.hpp"

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {};

namespace {

constexpr std::size_t length_bytes = 8;

std::uint64_t header_bytes(const std::uint8_t* data) {
  std::uint64_t length = 0;
  std::memcpy(&length, data, length_bytes);
  return length;
}

void check_tensors(const SafetensorsFolder& folder, std::size_t data_bytes) {
  const std::byte* begin = nullptr;
  for (const std::string& name : folder.names()) {
    const TensorInfo* const info = folder.find(name);
    require(info != nullptr && info->name == name, "a tensor under another's name");
    if (begin == nullptr || info->data < begin) begin = info->data;
  }
  for (const std::string& name : folder.names()) {
    const TensorInfo& info = *folder.find(name);
    const auto offset = static_cast<std::size_t>(info.data - begin);
    require(offset <= data_bytes && info.bytes <= data_bytes - offset, "a tensor leaves its file");
    if (info.bytes > 0) {  // read, so that a page that is not there shows
      require(std::to_integer<unsigned>(info.data[0]) +
                      std::to_integer<unsigned>(info.data[info.bytes - 1]) <
                  512,
              "bytes");
    }
    if (info.is_weight) {
      std::size_t count = 1;
      for (const std::int64_t extent : info.shape) count *= static_cast<std::size_t>(extent);
      require(count * size_of(info.dtype) == info.bytes, "a shape that is not the tensor's bytes");
      folder.at(name, info.shape);
    }
    folder.release(info);
  }
}

}  // namespace

void run_one(std::string_view input) {
  static InputFile file;
  file.assign(input);
  if (!input.empty() && input.front() == '{') {
    static InputFile shard;
    static const InputFolder folder;
    static const bool linked = [] {
      const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                 R"("b":{"dtype":"I64","shape":[0],"data_offsets":[4,4]}})";
      const std::uint64_t length = header.size();
      std::string content(reinterpret_cast<const char*>(&length), length_bytes);
      shard.assign(content + header + "data");
      folder.link("model.safetensors.index.json", file);
      folder.link("s.safetensors", shard);
      folder.link("t.safetensors", shard);
      return true;
    }();
    static_cast<void>(linked);
    const auto opened = SafetensorsFolder::open(folder.path());
    require(opened.names().size() <= 2, "more tensors than the shard has");
    return;
  }
  const auto opened = SafetensorsFolder::open(file.path());
  check_tensors(opened, input.size() - length_bytes -
                            header_bytes(reinterpret_cast<const std::uint8_t*>(input.data())));
}

}  // namespace kvzap::fuzz

// A header that has become longer or shorter is of no use to anyone while its length is wrong.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  using kvzap::fuzz::header_bytes;
  using kvzap::fuzz::length_bytes;
  if (size > 0 && data[0] == '{') {
    return kvzap::fuzz::mutate_json_input(data, size, max_size, seed);
  }
  if (size <= length_bytes || seed % 8 == 0) return LLVMFuzzerMutate(data, size, max_size);
  std::size_t header = header_bytes(data) < size - length_bytes
                           ? static_cast<std::size_t>(header_bytes(data))
                           : size - length_bytes;
  const std::string rest(reinterpret_cast<char*>(data) + length_bytes + header,
                         size - length_bytes - header);
  if (length_bytes + rest.size() >= max_size) return LLVMFuzzerMutate(data, size, max_size);
  header = kvzap::fuzz::mutate_json_input(data + length_bytes, header,
                                          max_size - length_bytes - rest.size(), seed / 8);
  const std::uint64_t length = header;
  std::memcpy(data, &length, length_bytes);
  std::memcpy(data + length_bytes + header, rest.data(), rest.size());
  return length_bytes + header + rest.size();
}
