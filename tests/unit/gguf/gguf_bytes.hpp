// GGUF files for tests, made byte by byte: also such that no writer would make.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::test {

template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

inline std::string u32(std::uint32_t value) { return bytes_of(value); }
inline std::string u64(std::uint64_t value) { return bytes_of(value); }
inline std::string text(std::string_view value) { return u64(value.size()) + std::string(value); }

/// Values with the numbers of their types.
inline std::string u32_value(std::uint32_t value) { return u32(4) + u32(value); }
inline std::string f32_value(float value) { return u32(6) + bytes_of(value); }
inline std::string flag_value(std::uint8_t value) { return u32(7) + bytes_of(value); }
inline std::string text_value(std::string_view value) { return u32(8) + text(value); }
inline std::string texts_value(const std::vector<std::string>& values) {
  std::string bytes = u32(9) + u32(8) + u64(values.size());
  for (const std::string& value : values) bytes += text(value);
  return bytes;
}
inline std::string i32s_value(const std::vector<std::int32_t>& values) {
  std::string bytes = u32(9) + u32(5) + u64(values.size());
  for (const std::int32_t value : values) bytes += bytes_of(value);
  return bytes;
}
inline std::string f32s_value(const std::vector<float>& values) {
  std::string bytes = u32(9) + u32(6) + u64(values.size());
  for (const float value : values) bytes += bytes_of(value);
  return bytes;
}

/// An entry of a tensor; `extents` fastest first, as the file has them.
inline std::string tensor_entry(std::string_view name, std::initializer_list<std::uint64_t> extents,
                                std::uint32_t type, std::uint64_t offset) {
  std::string bytes = text(name) + u32(static_cast<std::uint32_t>(extents.size()));
  for (const std::uint64_t extent : extents) bytes += u64(extent);
  return bytes + u32(type) + u64(offset);
}

/// A file in parts.
struct GgufDraft {
  std::string begin = "GGUF" + u32(3);
  std::optional<std::uint64_t> tensor_count, value_count;   // default: as many as there are
  std::vector<std::pair<std::string, std::string>> values;  // key, value with its type
  std::vector<std::string> tensors;
  std::string data;

  /// Replaces or adds a value.
  void set(const std::string& key, const std::string& value) {
    const auto found = std::find_if(values.begin(), values.end(),
                                    [&](const auto& entry) { return entry.first == key; });
    if (found != values.end()) {
      found->second = value;
    } else {
      values.emplace_back(key, value);
    }
  }
  void remove(const std::string& key) {
    values.erase(std::remove_if(values.begin(), values.end(),
                                [&](const auto& entry) { return entry.first == key; }),
                 values.end());
  }

  std::string bytes() const {
    std::string file = begin + u64(tensor_count.value_or(tensors.size())) +
                       u64(value_count.value_or(values.size()));
    for (const auto& [key, value] : values) file += text(key) + value;
    for (const std::string& tensor : tensors) file += tensor;
    file.resize((file.size() + 31) / 32 * 32);
    return file + data;
  }
};

/// The metadata of a model of one layer, with a byte-level tokenizer of four tokens, and a table of
/// embeddings of four rows of 64 values of type F32.
inline GgufDraft small_draft() {
  GgufDraft draft;
  draft.set("general.architecture", text_value("llama"));
  draft.set("llama.block_count", u32_value(1));
  draft.set("llama.context_length", u32_value(128));
  draft.set("llama.embedding_length", u32_value(64));
  draft.set("llama.feed_forward_length", u32_value(32));
  draft.set("llama.attention.head_count", u32_value(4));
  draft.set("llama.attention.head_count_kv", u32_value(2));
  draft.set("llama.attention.layer_norm_rms_epsilon", f32_value(1e-5f));
  draft.set("llama.rope.freq_base", f32_value(5e5f));
  draft.set("tokenizer.ggml.model", text_value("gpt2"));
  draft.set("tokenizer.ggml.pre", text_value("smollm"));
  draft.set("tokenizer.ggml.tokens", texts_value({"<s>", "<|im_end|>", "a", "b", "ab"}));
  draft.set("tokenizer.ggml.token_type", i32s_value({3, 3, 1, 1, 1}));
  draft.set("tokenizer.ggml.merges", texts_value({"a b"}));
  draft.set("tokenizer.ggml.bos_token_id", u32_value(0));
  draft.set("tokenizer.ggml.eos_token_id", u32_value(1));
  draft.set("tokenizer.chat_template", text_value("{{ messages }}"));
  draft.tensors.push_back(tensor_entry("token_embd.weight", {64, 5}, 0, 0));
  draft.data.assign(64 * 5 * 4, '\0');
  return draft;
}

}  // namespace kvzap::test
