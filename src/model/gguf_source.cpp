#include "model/gguf_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "files/mapped_file.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/model_file.hpp"
#include "gguf/tensor_names.hpp"
#include "gguf/write_tokenizer.hpp"
#include "model/families/family.hpp"
#include "model/gguf_latent.hpp"
#include "model/gguf_metadata.hpp"
#include "model/gguf_tensors.hpp"
#include "model/read_weights.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

bool reorders_queries_and_keys(const std::string& name) {
  return name.find(".self_attn.q_proj.") != name.npos ||
         name.find(".self_attn.k_proj.") != name.npos;
}

/// Returns the rows of Hugging Face's order in that of GGUF. `head`: values of a head whose halves
/// take turns in the file.
std::vector<std::int64_t> interleaved_rows(std::int64_t rows, std::int64_t head) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) {
    order[static_cast<std::size_t>(i)] = i - i % head + i % head / 2 + i % 2 * (head / 2);
  }
  return order;
}

/// Writes to `target` the values in this order.
void pick(const std::vector<float>& values, const std::vector<std::int64_t>& order, float* target) {
  for (const std::int64_t index : order) *target++ = values[static_cast<std::size_t>(index)];
}

/// Reads rows of a matrix, or the whole vector, in GGUF's order.
void read_reordered(const StoredTensor& tensor, const std::vector<std::int64_t>& shape,
                    const TensorOrder& order, std::int64_t first, std::int64_t end, float* target) {
  const std::int64_t columns = shape.back();
  if (order.rows.empty() && order.columns.empty()) {
    return tensor.read(first, end, 0, columns, target);
  }
  std::vector<float> values(static_cast<std::size_t>(columns));
  if (shape.size() == 1) {
    tensor.read(0, 1, 0, columns, values.data());
    return pick(values, order.rows, target);
  }
  for (std::int64_t row = first; row < end; ++row) {
    const std::int64_t stored =
        order.rows.empty() ? row : order.rows[static_cast<std::size_t>(row)];
    if (order.columns.empty()) {
      tensor.read(stored, stored + 1, 0, columns, target);
    } else {
      tensor.read(stored, stored + 1, 0, columns, values.data());
      pick(values, order.columns, target);
    }
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

/// Tensors of zeros that llama.cpp expects in layers without keys and values of their own, and does
/// not use.
std::vector<SourceTensor> unused_tensors(const ModelConfig& config) {
  std::vector<SourceTensor> tensors;
  const auto add = [&](std::int64_t layer, const char* name, std::vector<std::int64_t> shape) {
    SourceTensor tensor;
    tensor.name = gguf::name_in_layer(layer, name);
    tensor.shape = std::move(shape);
    tensor.where = tensor.name;
    const std::int64_t columns = tensor.columns();
    tensor.read = [columns](std::int64_t first, std::int64_t end, float* target) {
      std::fill(target, target + (end - first) * columns, 0.0F);
    };
    tensor.release = [] {};
    tensors.push_back(std::move(tensor));
  };
  for (std::int64_t l = 0; config.alt_up && l < config.num_hidden_layers; ++l) {
    if (config.layer(l).rows_of < 0) continue;
    const std::vector<std::int64_t> map = {config.num_key_value_heads * config.head_dim,
                                           config.hidden_size};
    add(l, "attn_k.weight", map);
    add(l, "attn_v.weight", map);
    add(l, "attn_k_norm.weight", {config.head_dim});
  }
  return tensors;
}

SourceTensor rope_tensor(const fs::path& folder, RopeFactors factors) {
  SourceTensor tensor;
  tensor.name = factors.name;
  tensor.shape = {static_cast<std::int64_t>(factors.values.size())};
  tensor.where = fmt::format("{}: RoPE factors", gguf::name_of_model_file(folder, "config.json"));
  tensor.read = [values = std::move(factors.values)](std::int64_t, std::int64_t, float* target) {
    std::copy(values.begin(), values.end(), target);
  };
  tensor.release = [] {};
  return tensor;
}

/// A tensor of the file: one of the folder's, or those of all experts.
struct Stack {
  std::string name;
  std::vector<std::int64_t> shape;  // of one of them
  std::vector<std::shared_ptr<const StoredTensor>> parts = {};
  bool is_of_experts = false;
  TensorOrder order = {};  // of one that is not of experts
  /// The first row within each part, which has further rows if it belongs to several tensors of the
  /// file.
  std::int64_t first_row = 0;
  ValueForm form = ValueForm::same;
  std::vector<float> factors = {};  // of rows; empty: 1
  /// The folder has a vector, the file's shape rows.
  bool is_vector = false;
  /// Reads rows in another way, if set.
  std::function<void(std::int64_t first, std::int64_t end, float* target)> read = nullptr;
};

/// Reads rows of experts one after the other. A vector of each expert is one row.
void read_stack(const Stack& stack, std::int64_t first, std::int64_t end, float* target) {
  if (stack.shape.size() == 1) {
    for (; first < end; ++first, target += stack.shape.front()) {
      const StoredTensor& part = *stack.parts[static_cast<std::size_t>(first)];
      part.read(stack.first_row, stack.first_row + stack.shape.front(), 0, 1, target);
    }
    return;
  }
  const std::int64_t rows = stack.shape.front(), columns = stack.shape.back();
  while (first < end) {
    const std::int64_t expert = first / rows, begin = first % rows;
    const std::int64_t count = std::min(end - first, rows - begin);
    const StoredTensor& part = *stack.parts[static_cast<std::size_t>(expert)];
    part.read(stack.first_row + begin, stack.first_row + begin + count, 0, columns, target);
    first += count;
    target += count * columns;
  }
}

SourceTensor tensor_of(Stack stack) {
  SourceTensor tensor;
  tensor.name = stack.name;
  tensor.shape = stack.shape;
  tensor.where = stack.parts.front()->description();
  if (stack.is_of_experts) {
    tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(stack.parts.size()));
  } else if (!stack.is_vector && tensor.shape.size() == 2 && tensor.shape.front() == 1) {
    tensor.shape.erase(tensor.shape.begin());  // as other programs write it
  }
  tensor.release = [parts = stack.parts] {
    for (const auto& part : parts) part->release();
  };
  if (stack.read) {
    tensor.read = std::move(stack.read);
    return tensor;
  }
  tensor.read = [stack = std::move(stack)](std::int64_t first, std::int64_t end, float* target) {
    if (stack.is_of_experts) return read_stack(stack, first, end, target);
    if (stack.is_vector) {
      const std::int64_t columns = stack.shape.back();
      stack.parts.front()->read(0, 1, first * columns, end * columns, target);
    } else {
      read_reordered(*stack.parts.front(), stack.shape, stack.order, first, end, target);
    }
    for (std::int64_t row = first; row < end && !stack.factors.empty(); ++row) {
      const float factor = stack.factors[static_cast<std::size_t>(row)];
      float* const values = target + (row - first) * stack.shape.back();
      std::for_each(values, values + stack.shape.back(), [=](float& value) { value *= factor; });
    }
    if (stack.form == ValueForm::same) return;
    std::for_each(target, target + (end - first) * stack.shape.back(),
                  [&](float& value) { value = to_form(stack.form, value); });
  };
  return tensor;
}

/// Appends the tensors of the file that hold a tensor of all experts.
void append_fused(const NamedTensor& named, const std::vector<std::string>& names,
                  const ModelConfig& config, const WeightStore& store, std::vector<Stack>& stacks) {
  const FusedExpertsShape fused = fused_experts_shape(config, named.name, named.shape);
  const std::int64_t rows_of_part = fused.rows / static_cast<std::int64_t>(names.size());
  std::int64_t first_row = 0;
  for (const std::string& name : names) {
    Stack stack{name, {rows_of_part}, {}, true, {}, first_row};
    if (fused.columns > 0) stack.shape.push_back(fused.columns);
    for (std::int64_t expert = 0; expert < fused.count; ++expert) {
      stack.parts.push_back(
          store.slice(named.name, fused.slice(expert), fused.rows, fused.columns));
    }
    stacks.push_back(std::move(stack));
    first_row += rows_of_part;
  }
}

/// Appends two tensors of the file that hold a tensor's rows, in this order: `second` of them in
/// the second one.
void append_halves(const NamedTensor& named, const std::vector<std::string>& names,
                   const std::vector<std::int64_t>& rows, std::int64_t second,
                   const WeightStore& store, std::vector<Stack>& stacks) {
  const std::vector<std::int64_t> parts[] = {{rows.begin(), rows.end() - second},
                                             {rows.end() - second, rows.end()}};
  for (std::size_t i = 0; i < std::size(parts); ++i) {
    Stack stack{names[i], {static_cast<std::int64_t>(parts[i].size()), named.shape.back()}};
    stack.order.rows = parts[i];
    stack.parts.push_back(store.at(named.name, named.shape));
    stacks.push_back(std::move(stack));
  }
}

/// Appends the two tensors of the file that hold the maps of a latent.
void append_latent_maps(const NamedTensor& named, const std::vector<std::string>& names,
                        const ModelConfig& config, const WeightStore& store,
                        std::vector<Stack>& stacks) {
  const LatentConfig latent = *config.latent;
  const std::int64_t heads = config.num_attention_heads;
  const std::shared_ptr<const StoredTensor> maps = store.at(named.name, named.shape);
  for (const bool is_of_keys : {true, false}) {
    const std::vector<std::int64_t> shape = {heads, is_of_keys ? latent.rank : latent.value_dim,
                                             is_of_keys ? latent.nope_dim : latent.rank};
    Stack stack{names[is_of_keys ? 0 : 1], shape, {maps}};
    const auto read = is_of_keys ? read_latent_keys : read_latent_values;
    stack.read = [=](std::int64_t first, std::int64_t end, float* target) {
      read(*maps, latent, first, end, target);
    };
    stacks.push_back(std::move(stack));
  }
}

/// Appends the table of inputs of layers with a row for each token: tokens beyond the folder's rows
/// have the first one.
void append_layer_table(const gguf::TensorName& place, const NamedTensor& named,
                        const ModelConfig& config, const WeightStore& store,
                        std::vector<Stack>& stacks) {
  const std::int64_t rows = named.shape.front(), columns = named.shape.back();
  const std::shared_ptr<const StoredTensor> table = store.at(named.name, named.shape);
  Stack stack{place.name, {config.vocab_size, columns}, {table}};
  stack.read = [=](std::int64_t first, std::int64_t end, float* target) {
    for (std::int64_t row = first; row < end; ++row, target += columns) {
      const std::int64_t own = row < rows ? row : 0;
      table->read(own, own + 1, 0, columns, target);
    }
  };
  stacks.push_back(std::move(stack));
}

Stack stack_of(const gguf::TensorName& place, const NamedTensor& named, const ModelConfig& config,
               const gguf::Architecture& architecture) {
  Stack stack{place.name, named.shape};
  stack.is_of_experts = place.expert.has_value();
  stack.shape = shape_in_gguf(config, named.name, named.shape);
  stack.is_vector = named.shape.size() == 1 && stack.shape.size() > 1;
  stack.order = order_in_gguf(config, architecture, named.name);
  if (architecture.interleaves_heads && reorders_queries_and_keys(named.name)) {
    stack.order.rows = interleaved_rows(named.shape.front(), config.head_dim);
  }
  stack.form = form_in_gguf(config, named.name);
  stack.factors = row_factors(config, named.name, named.shape.front());
  return stack;
}

/// Returns the tensors of the file in the order in which a model reads them.
std::vector<Stack> stacks_of(const ModelConfig& config, const gguf::Architecture& architecture,
                             const WeightStore& store) {
  std::vector<Stack> stacks;
  std::map<std::string, std::size_t> places;
  for (const NamedTensor& named : tensors_of(config)) {
    if (gguf::activation_key(architecture, named.name)) continue;  // metadata
    const std::int64_t rows = named.shape.front();
    const auto fused = gguf::fused_expert_names(architecture, named.name);
    if (!fused.empty()) {
      append_fused(named, fused, config, store, stacks);
      continue;
    }
    const auto inputs = gguf::delta_input_names(architecture, named.name);
    if (!inputs.empty()) {
      const DeltaNetConfig& net = *config.delta_net;
      append_halves(named, inputs, order_in_gguf(config, architecture, named.name).rows,
                    net.value_heads * net.value_dim, store, stacks);
      continue;
    }
    const auto maps = gguf::latent_map_names(architecture, named.name);
    if (!maps.empty()) {
      append_latent_maps(named, maps, config, store, stacks);
      continue;
    }
    const auto shared = gguf::shared_input_names(architecture, named.name);
    if (!shared.empty()) {
      std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
      std::iota(order.begin(), order.end(), 0);
      append_halves(named, shared, order, rows / 2, store, stacks);
      continue;
    }
    const gguf::TensorName place = gguf::gguf_name(architecture, named.name).value();
    if (config.layer_inputs && place.name == "per_layer_token_embd.weight") {
      append_layer_table(place, named, config, store, stacks);
      continue;
    }
    const auto [found, is_new] = places.emplace(place.name, stacks.size());
    if (is_new) stacks.push_back(stack_of(place, named, config, architecture));
    if (is_transposed_map(config, named.name, named.shape)) {
      Stack& stack = stacks[found->second];
      std::swap(stack.shape.front(), stack.shape.back());
      stack.parts.push_back(store.slice(named.name, {0, 0}, stack.shape.front(), rows));
      continue;
    }
    // Experts come in the order of their numbers.
    stacks[found->second].parts.push_back(store.at(named.name, named.shape));
  }
  return stacks;
}

/// Adds the parameters of the activations of all layers.
void add_activations(const ModelConfig& config, const WeightStore& store,
                     gguf::GgufWriter& writer) {
  const gguf::Architecture& architecture =
      *gguf::architecture_of(config.architecture, config.experts.has_value());
  std::map<std::string, std::vector<float>> values;
  for (const NamedTensor& named : tensors_of(config)) {
    const auto key = gguf::activation_key(architecture, named.name);
    if (!key) continue;
    float value = 0;
    store.at(named.name, named.shape)->read(0, 1, 0, 1, &value);
    values[key->first].push_back(value);  // layers come in the order of their numbers
  }
  for (const auto& [key, of_layers] : values) {
    writer.add_f32s(key, of_layers);
  }
}

void describe(const ModelConfig& config, GgufSource& source) {
  source.n_layers = config.num_hidden_layers;
  source.heads_per_group = config.query_group();
  source.n_experts = config.experts ? config.experts->count : 0;
}

GgufSource open_folder(const fs::path& folder) {
  const ModelConfig config = ModelConfig::load(folder);
  const gguf::Architecture& architecture = gguf_architecture(config, folder);
  // Refuses settings first: the tensors of such models may have no names in files.
  gguf::GgufWriter unused;
  add_configuration(config, folder, 0, unused);
  const std::shared_ptr<const WeightStore> store = open_weights(folder);
  GgufSource source;
  describe(config, source);
  // Files that include factors have those of a tied table in two tables.
  const auto scales_alike = [](const ModelConfig& model) {
    return model.embedding_multiplier == 1 && model.logits_divisor == 1;
  };
  const bool adds_head =
      config.tie_word_embeddings && gguf_includes_factors(config) && !scales_alike(config);
  source.is_tied = config.tie_word_embeddings && !adds_head;
  source.file_bytes = bytes_in(folder);
  source.add_metadata = [config, folder, store](std::uint32_t file_type, gguf::GgufWriter& writer) {
    add_configuration(config, folder, file_type, writer);
    add_activations(config, *store, writer);
    gguf::add_tokenizer(folder, config.vocab_size, writer);
  };
  for (Stack& stack : stacks_of(config, architecture, *store)) {
    source.tensors.push_back(tensor_of(std::move(stack)));
  }
  for (SourceTensor& tensor : unused_tensors(config)) source.tensors.push_back(std::move(tensor));
  if (adds_head) {
    const std::vector<std::int64_t> shape = {config.vocab_size, config.hidden_size};
    const std::string table = fmt::format("{}.weight", family_of(config).tensors.embedding);
    Stack head{"output.weight", shape, {store->at(table, shape)}};
    head.factors = row_factors(config, family_of(config).tensors.head, config.vocab_size);
    source.tensors.push_back(tensor_of(std::move(head)));
  }
  for (RopeFactors& factors : rope_factors(config)) {
    source.tensors.push_back(rope_tensor(folder, std::move(factors)));
  }
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
  tensor.release = [&entry] { files::release_pages(entry.data, entry.bytes); };
  return tensor;
}

GgufSource open_file(const fs::path& model) {
  const ModelConfig config = ModelConfig::load(model);
  const auto store = open_weights(model);
  for (const NamedTensor& named : tensors_of(config)) store->at(named.name, named.shape);
  const auto file = std::make_shared<const gguf::GgufFile>(gguf::GgufFile::open(model));
  GgufSource source;
  describe(config, source);
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
