#include "model/gguf_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/mapped_pages.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "gguf/tensor_names.hpp"
#include "gguf/write_tokenizer.hpp"
#include "model/read_weights.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

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

void add_configuration(const ModelConfig& config, const fs::path& folder, std::uint32_t file_type,
                       gguf::GgufWriter& writer) {
  const std::string prefix = fmt::format("{}.", architecture_of(config));
  writer.add_string("general.architecture", architecture_of(config));
  writer.add_string("general.name", folder.filename().string());
  writer.add_u32("general.file_type", file_type);
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

bool reorders_queries_and_keys(const std::string& name) {
  return name.find(".self_attn.q_proj.") != name.npos ||
         name.find(".self_attn.k_proj.") != name.npos;
}

/// Returns the row of Hugging Face's order that GGUF holds in place `i`. `head`: values of a head
/// whose halves take turns in the file, else 0.
std::int64_t published_row(std::int64_t i, std::int64_t head) {
  return head == 0 ? i : i - i % head + i % head / 2 + i % 2 * (head / 2);
}

/// Reads rows of a matrix, or the whole vector, in GGUF's order.
void read_reordered(const StoredTensor& tensor, const std::vector<std::int64_t>& shape,
                    std::int64_t head, std::int64_t first, std::int64_t end, float* target) {
  const std::int64_t columns = shape.back();
  if (head == 0) return tensor.read(first, end, 0, columns, target);
  if (shape.size() == 1) {
    std::vector<float> values(static_cast<std::size_t>(columns));
    tensor.read(0, 1, 0, columns, values.data());
    for (std::int64_t i = 0; i < columns; ++i) {
      target[i] = values[static_cast<std::size_t>(published_row(i, head))];
    }
    return;
  }
  for (std::int64_t row = first; row < end; ++row) {
    const std::int64_t stored = published_row(row, head);
    tensor.read(stored, stored + 1, 0, columns, target);
    target += columns;
  }
}

std::uintmax_t bytes_in(const fs::path& folder) {
  std::uintmax_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") bytes += entry.file_size();
  }
  return bytes;
}

SourceTensor rope_tensor(const fs::path& folder, std::vector<float> factors) {
  SourceTensor tensor;
  tensor.name = "rope_freqs.weight";
  tensor.shape = {static_cast<std::int64_t>(factors.size())};
  tensor.where = fmt::format("{}: RoPE factors", gguf::name_of_model_file(folder, "config.json"));
  tensor.read = [factors = std::move(factors)](std::int64_t, std::int64_t, float* target) {
    std::copy(factors.begin(), factors.end(), target);
  };
  tensor.release = [] {};
  return tensor;
}

GgufSource open_folder(const fs::path& folder) {
  const ModelConfig config = ModelConfig::load(folder);
  const std::shared_ptr<const WeightStore> store = open_weights(folder);
  GgufSource source;
  source.n_layers = config.num_hidden_layers;
  source.heads_per_group = config.num_attention_heads / config.num_key_value_heads;
  source.is_tied = config.tie_word_embeddings;
  source.file_bytes = bytes_in(folder);
  source.add_metadata = [config, folder](std::uint32_t file_type, gguf::GgufWriter& writer) {
    add_configuration(config, folder, file_type, writer);
    gguf::add_tokenizer(folder, config.vocab_size, writer);
  };
  const bool interleaves = architecture_of(config) == "llama";
  for (const NamedTensor& named : tensors_of(config)) {
    const std::shared_ptr<const StoredTensor> stored = store->at(named.name, named.shape);
    const bool is_interleaved = interleaves && reorders_queries_and_keys(named.name);
    const std::int64_t head = is_interleaved ? config.head_dim : 0;
    SourceTensor tensor;
    tensor.name = gguf::gguf_name(named.name).value();
    tensor.shape = named.shape;
    tensor.where = stored->description();
    tensor.read = [stored, shape = named.shape, head](std::int64_t first, std::int64_t end,
                                                      float* target) {
      read_reordered(*stored, shape, head, first, end, target);
    };
    tensor.release = [stored] { stored->release(); };
    source.tensors.push_back(std::move(tensor));
  }
  std::vector<float> factors = rope_factors(config);
  if (!factors.empty()) source.tensors.push_back(rope_tensor(folder, std::move(factors)));
  source.files = store;
  return source;
}

/// Returns whether the writer sets the key itself, or the key describes the parts of a split file.
bool is_of_file(std::string_view key) {
  constexpr std::string_view own[] = {
      "general.alignment", "general.file_type", "general.quantization_version",
      "split.no",          "split.count",       "split.tensors.count"};
  return std::find(std::begin(own), std::end(own), key) != std::end(own);
}

SourceTensor stored_tensor(const gguf::TensorEntry& entry) {
  SourceTensor tensor;
  tensor.name = entry.name;
  tensor.shape = entry.shape;
  tensor.where = fmt::format("{}: tensor {}", *entry.file, entry.name);
  if (entry.format == nullptr) {
    throw Error(fmt::format("{}: expected a type that kvzap reads, found type {}", tensor.where,
                            gguf::type_name(entry)));
  }
  tensor.format = entry.format;
  tensor.blocks = entry.data;
  tensor.read = [&entry](std::int64_t first, std::int64_t end, float* target) {
    const std::int64_t blocks = entry.shape.back() / entry.format->values;
    entry.format->decode(entry.data + first * blocks * entry.format->bytes, (end - first) * blocks,
                         target);
  };
  tensor.release = [&entry] { base::release_pages(entry.data, entry.bytes); };
  return tensor;
}

GgufSource open_file(const fs::path& model) {
  const ModelConfig config = ModelConfig::load(model);
  const auto store = open_weights(model);
  for (const NamedTensor& named : tensors_of(config)) store->at(named.name, named.shape);
  const auto file = std::make_shared<const gguf::GgufFile>(gguf::GgufFile::open(model));
  GgufSource source;
  source.n_layers = config.num_hidden_layers;
  source.heads_per_group = config.num_attention_heads / config.num_key_value_heads;
  source.is_tied = file->find("output.weight") == nullptr;
  for (const fs::path& part : gguf::parts_of(model)) source.file_bytes += fs::file_size(part);
  std::vector<const gguf::TensorEntry*> entries;
  for (const auto& [name, entry] : file->tensors()) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
    return std::pair(std::string_view(*a->file), a->data) <
           std::pair(std::string_view(*b->file), b->data);
  });
  for (const gguf::TensorEntry* entry : entries) source.tensors.push_back(stored_tensor(*entry));
  source.add_metadata = [file](std::uint32_t file_type, gguf::GgufWriter& writer) {
    for (const auto& [key, value] : file->metadata().values()) {
      if (!is_of_file(key)) writer.add_copy(key, value);
    }
    writer.add_u32("general.file_type", file_type);
  };
  source.files = file;
  return source;
}

}  // namespace

std::int64_t SourceTensor::rows() const {
  std::int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}

GgufSource open_gguf_source(const fs::path& model) {
  return gguf::is_gguf(model) ? open_file(model) : open_folder(model);
}

}  // namespace kvzap::model
