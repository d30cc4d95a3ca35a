#include "model/convert_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/model/model_config.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "base/temporary_file.hpp"
#include "gguf/gguf_writer.hpp"
#include "gguf/model_file.hpp"
#include "gguf/tensor_names.hpp"
#include "gguf/write_tokenizer.hpp"
#include "model/model_folder.hpp"
#include "model/safetensors_writer.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t piece_values = std::int64_t{1} << 20;

struct NamedTensor {
  std::string name;                 // of Hugging Face
  std::vector<std::int64_t> shape;  // (outputs, inputs) or (extent)
};

/// Returns the tensors that a model of this configuration has.
std::vector<NamedTensor> tensors_of(const ModelConfig& config) {
  const std::int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const std::int64_t queries = config.num_attention_heads * config.head_dim;
  const std::int64_t keys = config.num_key_value_heads * config.head_dim;
  std::vector<NamedTensor> tensors = {{"model.embed_tokens.weight", {config.vocab_size, hidden}}};
  const auto linear = [&](const std::string& name, std::int64_t outputs, std::int64_t inputs,
                          bool has_bias) {
    tensors.push_back({name + ".weight", {outputs, inputs}});
    if (has_bias) tensors.push_back({name + ".bias", {outputs}});
  };
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    tensors.push_back({prefix + "input_layernorm.weight", {hidden}});
    linear(prefix + "self_attn.q_proj", queries, hidden, config.qkv_bias);
    linear(prefix + "self_attn.k_proj", keys, hidden, config.qkv_bias);
    linear(prefix + "self_attn.v_proj", keys, hidden, config.qkv_bias);
    linear(prefix + "self_attn.o_proj", hidden, queries, config.o_bias);
    if (config.qk_norm) {
      tensors.push_back({prefix + "self_attn.q_norm.weight", {config.head_dim}});
      tensors.push_back({prefix + "self_attn.k_norm.weight", {config.head_dim}});
    }
    tensors.push_back({prefix + "post_attention_layernorm.weight", {hidden}});
    linear(prefix + "mlp.gate_proj", inner, hidden, config.mlp_bias);
    linear(prefix + "mlp.up_proj", inner, hidden, config.mlp_bias);
    linear(prefix + "mlp.down_proj", hidden, inner, config.mlp_bias);
  }
  tensors.push_back({"model.norm.weight", {hidden}});
  if (!config.tie_word_embeddings) {
    tensors.push_back({"lm_head.weight", {config.vocab_size, hidden}});
  }
  return tensors;
}

std::vector<bfloat16> rounded(const std::vector<float>& values) {
  std::vector<bfloat16> result;
  result.reserve(values.size());
  for (const float value : values) result.push_back(bfloat16(value));
  return result;
}

/// Calls `take` with all values of a tensor, in pieces of whole rows. `row_at` returns the row of
/// `tensor` that comes at a place.
template <class RowAt, class Take>
void for_each_piece(const StoredTensor& tensor, const std::vector<std::int64_t>& shape,
                    const RowAt& row_at, const Take& take) {
  const std::int64_t columns = shape.back();
  const std::int64_t rows = shape.size() == 2 ? shape.front() : 1;
  const std::int64_t step = std::max<std::int64_t>(1, piece_values / columns);
  std::vector<float> values;
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t end = std::min(rows, first + step);
    values.resize(static_cast<std::size_t>((end - first) * columns));
    for (std::int64_t row = first; row < end; ++row) {
      const std::int64_t stored = row_at(row);
      tensor.read(stored, stored + 1, 0, columns, values.data() + (row - first) * columns);
    }
    take(values);
  }
  tensor.release();
}

void refuse_existing(const fs::path& target) {
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target, ignored))) {
    throw Error(fmt::format("{}: exists already; expected a new name", target.string()));
  }
}

/// Returns GGUF's name of the architecture.
std::string_view architecture_of(const ModelConfig& config) {
  if (config.architecture == "Qwen2ForCausalLM") return "qwen2";
  return config.architecture == "Qwen3ForCausalLM" ? "qwen3" : "llama";
}

std::uint32_t number(std::int64_t value) { return static_cast<std::uint32_t>(value); }

/// Returns the factors that divide RoPE's frequencies if scaling is of the type llama3.
std::vector<float> rope_factors(const ModelConfig& config) {
  std::vector<float> factors;
  if (!config.rope_scaling || config.rope_scaling->type != RopeType::llama3) return factors;
  const std::vector<float> scaled = rope_inverse_frequencies(config, 0);
  for (std::size_t i = 0; i < scaled.size(); ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(config.head_dim);
    factors.push_back(static_cast<float>(std::pow(config.rope_theta, -exponent) / scaled[i]));
  }
  return factors;
}

void add_rope(const ModelConfig& config, const std::string& prefix, const fs::path& folder,
              gguf::GgufWriter& writer) {
  writer.add_f32(prefix + "rope.freq_base", static_cast<float>(config.rope_theta));
  writer.add_u32(prefix + "rope.dimension_count", number(config.head_dim));
  if (!config.rope_scaling || config.rope_scaling->type == RopeType::llama3) return;
  const RopeScaling& scaling = *config.rope_scaling;
  const std::string key = prefix + "rope.scaling.";
  // The format has no place for another attention factor.
  const bool is_yarn = scaling.type == RopeType::yarn && scaling.truncate &&
                       std::abs(scaling.attention_factor - (0.1 * std::log(scaling.factor) + 1)) <
                           1e-6 * scaling.attention_factor;
  if (scaling.type != RopeType::linear && !is_yarn) {
    throw Error(
        fmt::format("{}: RoPE scaling: expected linear, llama3, or yarn with its usual "
                    "attention factor, found {}",
                    gguf::name_of_model_file(folder, "config.json"), name_of(scaling.type)));
  }
  writer.add_string(key + "type", name_of(scaling.type));
  writer.add_f32(key + "factor", static_cast<float>(scaling.factor));
  if (!is_yarn) return;
  writer.add_u32(key + "original_context_length", number(scaling.original_max_position_embeddings));
  writer.add_f32(key + "yarn_beta_fast", static_cast<float>(scaling.beta_fast));
  writer.add_f32(key + "yarn_beta_slow", static_cast<float>(scaling.beta_slow));
}

void add_configuration(const ModelConfig& config, const fs::path& folder,
                       gguf::GgufWriter& writer) {
  constexpr std::uint32_t mostly_bf16 = 32;
  const std::string prefix = fmt::format("{}.", architecture_of(config));
  writer.add_string("general.architecture", architecture_of(config));
  writer.add_string("general.name", folder.filename().string());
  writer.add_u32("general.file_type", mostly_bf16);
  writer.add_u32(prefix + "block_count", number(config.num_hidden_layers));
  // The format has no window of this architecture: texts end where it would begin to matter.
  const std::int64_t longest = config.max_position_embeddings;
  const std::int64_t window = config.sliding_window;
  writer.add_u32(prefix + "context_length",
                 number(window > 0 ? std::min(longest, window) : longest));
  writer.add_u32(prefix + "embedding_length", number(config.hidden_size));
  writer.add_u32(prefix + "feed_forward_length", number(config.intermediate_size));
  writer.add_u32(prefix + "attention.head_count", number(config.num_attention_heads));
  writer.add_u32(prefix + "attention.head_count_kv", number(config.num_key_value_heads));
  writer.add_u32(prefix + "attention.key_length", number(config.head_dim));
  writer.add_u32(prefix + "attention.value_length", number(config.head_dim));
  writer.add_f32(prefix + "attention.layer_norm_rms_epsilon",
                 static_cast<float>(config.rms_norm_eps));
  writer.add_u32(prefix + "vocab_size", number(config.vocab_size));
  add_rope(config, prefix, folder, writer);
}

/// Writes a tensor's blocks: BF16 for matrices, F32 for vectors. `head`: values of a head whose
/// halves take turns in the file, else 0.
void write_blocks(const StoredTensor& tensor, const std::vector<std::int64_t>& shape,
                  std::int64_t head, const gguf::GgufWriter::Sink& sink) {
  const auto published = [&](std::int64_t i) {
    return head == 0 ? i : i - i % head + i % head / 2 + i % 2 * (head / 2);
  };
  if (shape.size() == 2) {
    return for_each_piece(tensor, shape, published, [&](const std::vector<float>& values) {
      const std::vector<bfloat16> narrow = rounded(values);
      sink(narrow.data(), narrow.size() * sizeof(bfloat16));
    });
  }
  std::vector<float> values(static_cast<std::size_t>(shape.front()));
  tensor.read(0, 1, 0, shape.front(), values.data());
  std::vector<float> ordered(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    ordered[i] = values[static_cast<std::size_t>(published(static_cast<std::int64_t>(i)))];
  }
  sink(ordered.data(), ordered.size() * sizeof(float));
}

bool makes_queries_or_keys(const std::string& name) {
  return name.find(".self_attn.q_proj.") != name.npos ||
         name.find(".self_attn.k_proj.") != name.npos;
}

}  // namespace

void write_gguf(const fs::path& folder, const fs::path& file) {
  refuse_existing(file);
  const ModelConfig config = ModelConfig::load(folder);
  const auto store = open_weights(folder);
  gguf::GgufWriter writer;
  add_configuration(config, folder, writer);
  gguf::add_tokenizer(folder, config.vocab_size, writer);
  const gguf::BlockFormat& f32 = *gguf::find_block_format("F32");
  const gguf::BlockFormat& bf16 = *gguf::find_block_format("BF16");
  const std::vector<NamedTensor> tensors = tensors_of(config);
  for (const NamedTensor& tensor : tensors) {
    store->at(tensor.name, tensor.shape);  // throws before anything is written
    writer.add_tensor(gguf::gguf_name(tensor.name).value(), tensor.shape,
                      tensor.shape.size() == 2 ? bf16 : f32);
  }
  const std::vector<float> factors = rope_factors(config);
  if (!factors.empty()) {
    writer.add_tensor("rope_freqs.weight", {static_cast<std::int64_t>(factors.size())}, f32);
  }
  const bool interleaves = architecture_of(config) == "llama";
  writer.write(file, [&](std::size_t index, const gguf::GgufWriter::Sink& sink) {
    if (index == tensors.size()) return sink(factors.data(), factors.size() * sizeof(float));
    const NamedTensor& tensor = tensors[index];
    const bool is_interleaved = interleaves && makes_queries_or_keys(tensor.name);
    write_blocks(*store->at(tensor.name, tensor.shape), tensor.shape,
                 is_interleaved ? config.head_dim : 0, sink);
  });
}

void write_folder(const fs::path& file, const fs::path& folder) {
  refuse_existing(folder);
  const ModelConfig config = ModelConfig::load(file);
  const auto store = open_weights(file);
  std::vector<SafetensorsEntry> entries;
  for (const NamedTensor& tensor : tensors_of(config)) {
    store->at(tensor.name, tensor.shape);  // throws before anything is written
    SafetensorsEntry entry{tensor.name, "BF16", tensor.shape};
    entry.write = [&store, tensor](const SafetensorsEntry::Sink& sink) {
      const auto stored = store->at(tensor.name, tensor.shape);
      for_each_piece(
          *stored, tensor.shape, [](std::int64_t row) { return row; },
          [&](const std::vector<float>& values) {
            const std::vector<bfloat16> narrow = rounded(values);
            sink(narrow.data(), narrow.size() * sizeof(bfloat16));
          });
    };
    entries.push_back(std::move(entry));
  }
  const std::vector<const char*> names = {"config.json", "generation_config.json", "tokenizer.json",
                                          "tokenizer_config.json"};
  std::vector<std::optional<gguf::ModelFile>> files;
  for (const char* name : names) files.push_back(gguf::read_model_file(file, name));
  files.front()->content["torch_dtype"] = "bfloat16";
  std::error_code failed;
  if (!fs::create_directory(folder, failed)) {
    throw Error(fmt::format("{}: cannot create the folder: {}", folder.string(), failed.message()));
  }
  write_safetensors(folder / "model.safetensors", entries, {{"format", "pt"}});
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (files[i]) base::write_text(folder / names[i], files[i]->content.dump(2) + "\n");
  }
}

}  // namespace kvzap::model
