// Malformed GGUF files: each has one fault and one exact message.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <kvzap/core/types.hpp>
#include <string>
#include <vector>

#include "files/quote.hpp"
#include "gguf/architectures.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "model/gguf_metadata.hpp"
#include "model/gguf_store.hpp"
#include "unit/gguf/gguf_bytes.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap::test {
namespace {

struct Case {
  std::string name;
  std::function<void(GgufDraft&)> damage;
  std::string message;  // after "FILE: "
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Sets a value of the draft.
std::function<void(GgufDraft&)> with(const std::string& key, const std::string& value) {
  return [=](GgufDraft& draft) { draft.set(key, value); };
}

/// Replaces the draft's tensor.
std::function<void(GgufDraft&)> with_tensor(const std::string& entry) {
  return [=](GgufDraft& draft) { draft.tensors = {entry}; };
}

void expect_messages(const std::vector<Case>& cases,
                     const std::function<void(const std::filesystem::path&)>& read) {
  TemporaryFolder folder;
  const auto file = folder.path() / "x.gguf";
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    GgufDraft draft = small_draft();
    test.damage(draft);
    folder.write("x.gguf", draft.bytes());
    EXPECT_EQ(message_of([&] { read(file); }), file.string() + ": " + test.message);
  }
}

constexpr std::uint64_t largest = 0xffffffffffffffffu;

TEST(GgufMalformed, Headers) {
  expect_messages(
      {{"magic", [](auto& draft) { draft.begin = "GGML" + u32(3); },
        "not a GGUF file: expected \"GGUF\" at its beginning, found 0x4c4d4747"},
       {"version 1", [](auto& draft) { draft.begin = "GGUF" + u32(1); },
        "version: expected 2 or 3, found 1"},
       {"version 4", [](auto& draft) { draft.begin = "GGUF" + u32(4); },
        "version: expected 2 or 3, found 4"},
       {"big-endian", [](auto& draft) { draft.begin = "GGUF" + u32(3u << 24); },
        "byte order: expected little-endian numbers, found a big-endian file; convert it first"},
       {"number of tensors", [](auto& draft) { draft.tensor_count = largest; },
        "number of tensors: expected at most 262144, found 18446744073709551615"},
       {"number of values", [](auto& draft) { draft.value_count = largest; },
        "number of metadata values: expected at most 65536, found 18446744073709551615"}},
      [](const auto& file) { gguf::GgufFile::open(file); });
}

TEST(GgufMalformed, Values) {
  const auto first = [](const std::string& key, const std::string& value) {
    return [=](GgufDraft& draft) { draft.values.insert(draft.values.begin(), {key, value}); };
  };
  expect_messages(
      {{"no key", first("", u32_value(1)),
        "key 0 of the metadata: expected a text in UTF-8, not empty, found ''"},
       {"key of bytes", first("\xff", u32_value(1)),
        "key 0 of the metadata: expected a text in UTF-8, not empty, found '\\xff'"},
       {"key twice", first("llama.block_count", u32_value(1)),
        "llama.block_count: expected each key once, found a second value"},
       {"long key", first(std::string(70000, 'k'), u32_value(1)),
        "key 0 of the metadata: expected a string of at most 65535 bytes, found 70000"},
       {"type", first("k", u32(13) + u32(0)), "k: expected a type from 0 to 12, found 13"},
       {"type of elements", first("k", u32(9) + u32(99) + u64(1)),
        "k: expected a type from 0 to 12, found 99"},
       {"array of arrays", first("k", u32(9) + u32(9) + u64(1)),
        "k: expected an array of numbers or strings, found an array of arrays"},
       {"alignment", with("general.alignment", u32_value(48)),
        "general.alignment: expected a power of two, found 48"},
       {"large alignment", with("general.alignment", u32_value(1u << 30)),
        "general.alignment: expected a whole number from 8 to 1048576, found 1073741824"},
       {"type of alignment", with("general.alignment", text_value("32")),
        "general.alignment: expected a whole number from 8 to 1048576, found a value of type "
        "string"},
       {"split", with("split.count", u32_value(3)),
        "split.count: expected 1, by the file's name, found 3"}},
      [](const auto& file) { gguf::GgufFile::open(file); });
}

/// Ends of files. The numbers of bytes left depend on the value alone: it is the file's last.
TEST(GgufMalformed, Ends) {
  TemporaryFolder folder;
  const auto file = folder.path() / "x.gguf";
  const std::string again = "; download or copy it again";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {u32(4), "the file is truncated: k at byte 37: expected 4 bytes, found 0" + again},
      {u32(8) + u64(9), "the file is truncated: k at byte 45: expected 9 bytes, found 0" + again},
      {u32(8) + u64(largest),
       "the file is truncated: k at byte 45: expected 18446744073709551615 bytes, found 0" + again},
      {u32(9) + u32(5) + u64(3) + u64(0),
       "k: expected at most 2 values before the end of the file, found 3"},
      {u32(9) + u32(10) + u64(largest) + u64(0),
       "k: expected at most 1 values before the end of the file, found 18446744073709551615"},
      {u32(9) + u32(8) + u64(2) + u64(0),
       "k: expected at most 1 strings before the end of the file, found 2"}};
  for (const auto& [value, message] : cases) {
    folder.write("x.gguf", "GGUF" + u32(3) + u64(0) + u64(1) + text("k") + value);
    EXPECT_EQ(message_of([&] { gguf::GgufFile::open(file); }), file.string() + ": " + message);
  }
}

TEST(GgufMalformed, Tensors) {
  const std::string where = "tensor 'token_embd.weight': ";
  const auto entry = [](std::initializer_list<std::uint64_t> extents, std::uint32_t type,
                        std::uint64_t offset) {
    return with_tensor(tensor_entry("token_embd.weight", extents, type, offset));
  };
  const auto second = [](const std::string& added) {
    return [=](GgufDraft& draft) { draft.tensors.push_back(added); };
  };
  expect_messages(
      {{"no dimension", entry({}, 0, 0), where + "expected 1 to 4 dimensions, found 0"},
       {"dimensions", entry({1, 1, 1, 1, 1}, 0, 0), where + "expected 1 to 4 dimensions, found 5"},
       {"extent 0", entry({64, 0}, 0, 0),
        where + "expected an extent from 1 to 9223372036854775807, found 0"},
       {"negative extent", entry({64, largest}, 0, 0),
        where + "expected an extent from 1 to 9223372036854775807, found 18446744073709551615"},
       {"values", entry({1ull << 40, 1ull << 40}, 0, 0),
        where + "expected a number of values that fits 64 bits, found more"},
       {"bytes", entry({1ull << 62}, 0, 0),
        where + "expected a number of bytes that fits 64 bits, found more"},
       {"blocks", entry({48, 4}, 2, 0),
        where + "expected rows of whole blocks of 32 values of type Q4_0, found 48 values a row"},
       {"offset", entry({64, 5}, 0, 8),
        where + "expected an offset that is a multiple of 32, found 8"},
       {"end", entry({64, 6}, 0, 0),
        where + "expected 1536 bytes at offset 0 of the data, found a file that ends after 1280 "
                "bytes of data: download or copy it again"},
       {"far offset", entry({64, 5}, 0, 1ull << 60),
        where + "expected 1280 bytes at offset 1152921504606846976 of the data, found a file that "
                "ends after 1280 bytes of data: download or copy it again"},
       {"no name", with_tensor(tensor_entry("", {1}, 0, 0)),
        "name of tensor 0: expected a text in UTF-8, not empty, found ''"},
       {"long name", with_tensor(tensor_entry(std::string(256, 'n'), {1}, 0, 0)),
        "name of tensor 0: expected a string of at most 255 bytes, found 256"},
       {"name twice", second(tensor_entry("token_embd.weight", {8}, 30, 1280)),
        where + "expected 16 bytes at offset 1280 of the data, found a file that ends after 1280 "
                "bytes of data: download or copy it again"},
       {"overlap", second(tensor_entry("output_norm.weight", {64}, 0, 1024)),
        "tensor 'output_norm.weight': expected an offset of at least 1280, where the tensor before "
        "it ends, found 1024"}},
      [](const auto& file) { gguf::GgufFile::open(file); });
}

/// "FILE (config.json)" is the place of faults that the readers of the made files find; those of
/// values name the file itself.
TEST(GgufMalformed, Configurations) {
  std::vector<std::string_view> names;
  for (const gguf::Architecture& known : gguf::architectures()) {
    if (names.empty() || names.back() != known.name) names.push_back(known.name);
  }
  expect_messages(
      {{"architecture", with("general.architecture", text_value("mamba")),
        fmt::format("general.architecture: expected {}, found 'mamba'",
                    files::alternatives(names))},
       {"no architecture", [](auto& draft) { draft.remove("general.architecture"); },
        "general.architecture: expected a string, found none"},
       {"kind", with("general.type", text_value("adapter")),
        "general.type: expected 'model', found 'adapter'"},
       {"layers", with("llama.block_count", u32_value(0)),
        "llama.block_count: expected a whole number from 1 to 65536, found 0"},
       {"heads of layers", with("llama.attention.head_count_kv", i32s_value({2, 1})),
        "llama.attention.head_count_kv: expected an array of 1 whole numbers, found an array of 2 "
        "values of type i32"},
       {"odd heads", with("llama.attention.key_length", u32_value(1)),
        "llama.attention.key_length: expected an even number of values in a head, found 1"},
       {"heads", with("llama.attention.head_count", u32_value(3)),
        "llama.embedding_length: expected a multiple of 3, as there is no "
        "llama.attention.key_length, found 64"},
       {"length of values", with("llama.attention.value_length", u32_value(8)),
        "llama.attention.value_length: expected 16, the length of a head, found 8"},
       {"epsilon", [](auto& draft) { draft.remove("llama.attention.layer_norm_rms_epsilon"); },
        "llama.attention.layer_norm_rms_epsilon: expected a number above 0, found none"},
       {"not a number", with("llama.rope.freq_base", f32_value(NAN)),
        "llama.rope.freq_base: expected a finite number, found nan"},
       {"scaling", with("llama.rope.scaling.type", text_value("spiral")),
        "llama.rope.scaling.type: expected none, linear or yarn, found 'spiral'"},
       {"experts without a number", with("llama.expert_count", u32_value(8)),
        "llama.expert_used_count: expected a whole number from 1 to 8, found none"},
       {"shared experts", with("llama.expert_shared_count", u32_value(1)),
        "llama.expert_shared_count: expected 0 (other values are not supported), found 1"},
       {"axes", with("llama.rope.dimension_sections", i32s_value({2, 2, 4, 0})),
        "llama.rope.dimension_sections: expected none (RoPE of several axes is not supported), "
        "found a value"},
       {"part of a head", with("llama.rope.dimension_count", u32_value(8)),
        "llama.rope.dimension_count: expected 16, the length of a head, found 8"},
       {"experts of a dense model",
        with_tensor(tensor_entry("blk.0.ffn_up_exps.weight", {64, 5}, 0, 0)),
        "tensor 'blk.0.ffn_up_exps.weight': expected no such tensor in a model of 1 layers of the "
        "architecture llama"},
       {"tensor", with_tensor(tensor_entry("blk.1.attn_q.weight", {64, 4}, 0, 0)),
        "tensor 'blk.1.attn_q.weight': expected no such tensor in a model of 1 layers of the "
        "architecture llama"}},
      [](const auto& file) { model::read_config(file); });
}

/// The draft with experts, and with another architecture.
GgufDraft draft_of_experts(const std::string& architecture) {
  GgufDraft draft = small_draft();
  for (auto& [key, value] : draft.values) {
    if (key.rfind("llama.", 0) == 0) key = architecture + key.substr(5);
  }
  draft.set("general.architecture", text_value(architecture));
  draft.set(architecture + ".expert_count", u32_value(4));
  draft.set(architecture + ".expert_used_count", u32_value(2));
  draft.set(architecture + ".expert_feed_forward_length", u32_value(8));
  draft.set(architecture + ".expert_shared_count", u32_value(1));
  if (architecture != "glm4moe") draft.remove(architecture + ".expert_shared_count");
  return draft;
}

TEST(GgufMalformed, Experts) {
  struct ExpertCase {
    const char* architecture;
    const char* key;
    std::string value;
    std::string message;
  };
  const std::vector<ExpertCase> cases = {
      {"qwen3moe", "expert_count", u32_value(0),
       "qwen3moe.expert_count: expected a whole number from 1 to 65536, found 0"},
      {"qwen3moe", "expert_count", u32_value(1u << 31),
       "qwen3moe.expert_count: expected a whole number from 1 to 65536, found 2147483648"},
      {"qwen3moe", "expert_used_count", u32_value(5),
       "qwen3moe.expert_used_count: expected a whole number from 1 to 4, found 5"},
      {"qwen3moe", "expert_feed_forward_length", u32_value(0),
       "qwen3moe.expert_feed_forward_length: expected a whole number from 1 to 2147483647, found "
       "0"},
      {"qwen3moe", "expert_gating_func", u32_value(2),
       "qwen3moe.expert_gating_func: expected 1, as the architecture has no other, found 2"},
      {"qwen2moe", "expert_weights_norm", flag_value(1),
       "qwen2moe.expert_weights_norm: expected false, as the architecture has no other, found "
       "true"},
      {"minimax-m2", "expert_gating_func", u32_value(1),
       "minimax-m2.expert_gating_func: expected 2, as the architecture has no other, found 1"},
      {"glm4moe", "nextn_predict_layers", u32_value(1),
       "glm4moe.nextn_predict_layers: expected a whole number from 0 to 0, found 1"},
      {"glm4moe", "expert_shared_count", u32_value(0),
       "glm4moe.expert_shared_count: expected a whole number from 1 to 4, found 0"},
      {"glm4moe", "rope.dimension_count", u32_value(18),
       "glm4moe.rope.dimension_count: expected an even number up to 16, the length of a head, "
       "found "
       "18"},
      {"glm4moe", "rope.dimension_count", u32_value(7),
       "glm4moe.rope.dimension_count: expected an even number up to 16, the length of a head, "
       "found "
       "7"}};
  TemporaryFolder folder;
  const auto file = folder.path() / "x.gguf";
  for (const ExpertCase& test : cases) {
    GgufDraft draft = draft_of_experts(test.architecture);
    draft.set(std::string(test.architecture) + "." + test.key, test.value);
    folder.write("x.gguf", draft.bytes());
    EXPECT_EQ(message_of([&] { model::read_config(file); }), file.string() + ": " + test.message);
  }
}

/// Tensors of experts: their number, extents and bytes.
TEST(GgufMalformed, TensorsOfExperts) {
  TemporaryFolder folder;
  const auto file = folder.path() / "x.gguf";
  const auto write = [&](const std::string& name, std::initializer_list<std::uint64_t> extents) {
    GgufDraft draft = draft_of_experts("qwen3moe");
    draft.tensors.push_back(tensor_entry(name, extents, 0, 64 * 5 * 4));
    draft.data.resize(64 * 5 * 4 + 4 * 8 * 64 * 4);
    folder.write("x.gguf", draft.bytes());
  };
  const auto message = [&](const char* expert = "0") {
    return message_of([&] {
      const model::GgufStore store(file);
      const auto name = std::string("model.layers.0.mlp.experts.") + expert + ".up_proj.weight";
      store.at(name, {8, 64});
    });
  };
  const std::string where = file.string() + ": tensor 'blk.0.ffn_up_exps.weight'";
  write("blk.0.ffn_up_exps.weight", {64, 8, 4});
  EXPECT_EQ(message(), "no error");
  EXPECT_EQ(message("3"), "no error");
  EXPECT_EQ(message("4"), where + ": expected an expert below 4, found 4");
  const auto expect_shape = [&](std::initializer_list<std::uint64_t> extents,
                                const std::string& found) {
    write("blk.0.ffn_up_exps.weight", extents);
    EXPECT_EQ(message(), where + ": expected shape [4, 8, 64], found [" + found + "]");
  };
  expect_shape({64, 8, 3}, "3, 8, 64");
  expect_shape({8, 64, 4}, "4, 64, 8");
  expect_shape({64, 32}, "32, 64");
  expect_shape({64, 4, 4, 2}, "2, 4, 4, 64");
  write("blk.0.ffn_down_exps.weight", {8, 64, 4});
  EXPECT_EQ(message(), where + " of shape [4, 8, 64] is missing");
  // Older files have a tensor for each expert.
  write("blk.0.ffn_up.2.weight", {64, 8});
  EXPECT_EQ(message("2"), "no error");
  EXPECT_EQ(message("1"), where + " of shape [4, 8, 64] is missing");
  write("blk.0.ffn_up.2.weight", {64, 7});
  EXPECT_EQ(
      message("2"),
      file.string() + ": tensor 'blk.0.ffn_up.2.weight': expected shape [8, 64], found [7, 64]");
}

TEST(GgufMalformed, Tokenizers) {
  expect_messages(
      {{"kind", with("tokenizer.ggml.model", text_value("bert")),
        "tokenizer.ggml.model: expected 'gpt2', 'llama' or 'gemma4', found 'bert'"},
       {"pre-tokenizer", with("tokenizer.ggml.pre", text_value("none")),
        "tokenizer.ggml.pre: expected the name of a supported pre-tokenizer, found 'none'"},
       {"no tokens", with("tokenizer.ggml.tokens", texts_value({})),
        "tokenizer.ggml.tokens: expected tokens, found none"},
       {"type of tokens", with("tokenizer.ggml.tokens", i32s_value({1, 2})),
        "tokenizer.ggml.tokens: expected an array of strings, found an array of 2 values of type "
        "i32"},
       {"bytes", with("tokenizer.ggml.tokens", texts_value({"a", "\x80", "c", "d", "e"})),
        "tokenizer.ggml.tokens[1]: expected a text in UTF-8, found '\\x80'"},
       {"token twice", with("tokenizer.ggml.tokens", texts_value({"<s>", "</s>", "a", "a", "ab"})),
        "tokenizer.ggml.tokens[3]: expected each token once, found 'a' again"},
       {"types", with("tokenizer.ggml.token_type", i32s_value({1})),
        "tokenizer.ggml.token_type: expected an array of 5 whole numbers, found an array of 1 "
        "values of type i32"},
       {"a type", with("tokenizer.ggml.token_type", i32s_value({1, 1, 9, 1, 1})),
        "tokenizer.ggml.token_type[2]: expected a whole number from 0 to 6, found 9"},
       {"no merges", [](auto& draft) { draft.remove("tokenizer.ggml.merges"); },
        "tokenizer.ggml.merges: expected an array of strings, found none"},
       {"a merge", with("tokenizer.ggml.merges", texts_value({"a b", "\xff b"})),
        "tokenizer.ggml.merges[1]: expected a text in UTF-8, found '\\xff b'"},
       {"no scores",
        [](auto& draft) {
          draft.set("tokenizer.ggml.model", text_value("llama"));
          draft.remove("tokenizer.ggml.merges");
        },
        "tokenizer.ggml.scores: expected an array of numbers, found none"},
       {"flag", with("tokenizer.ggml.add_bos_token", flag_value(2)),
        "tokenizer.ggml.add_bos_token: expected 0 or 1 (false or true), found 2"},
       {"special token", with("tokenizer.ggml.bos_token_id", u32_value(7)),
        "tokenizer.ggml.bos_token_id: expected a whole number from 0 to 4, found 7"}},
      [](const auto& file) {
        gguf::read_model_file(file, "tokenizer.json");
        gguf::read_model_file(file, "tokenizer_config.json");
      });
}

TEST(GgufMalformed, Templates) {
  expect_messages({{"type", with("tokenizer.chat_template", u32_value(1)),
                    "tokenizer.chat_template: expected a string, found a value of type u32"}},
                  [](const auto& file) { gguf::read_model_file(file, "tokenizer_config.json"); });
}

}  // namespace
}  // namespace kvzap::test
