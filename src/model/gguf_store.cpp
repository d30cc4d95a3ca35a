#include "model/gguf_store.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <kvzap/core/types.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "files/mapped_file.hpp"
#include "gguf/tensor_names.hpp"
#include "model/families/family.hpp"
#include "model/gguf_latent.hpp"
#include "model/gguf_tensors.hpp"

namespace kvzap::model {
namespace {

/// The format's RoPE of the architecture llama turns neighbouring values, that of Hugging Face
/// value i of a head with value i + head / 2. Converters reorder the rows that make queries and
/// keys. Returns the row of the file that holds a row of Hugging Face's order.
std::int64_t stored_row(std::int64_t row, std::int64_t head) {
  if (head == 0) return row;
  const std::int64_t half = head / 2;
  const std::int64_t in_head = row % head;
  return row - in_head + in_head % half * 2 + in_head / half;
}

using Shape = std::vector<std::int64_t>;

/// The part of a tensor of the file that is one tensor of a checkpoint.
struct Slice {
  const gguf::TensorEntry& entry;
  const std::byte* data;
  std::int64_t rows;
  std::int64_t columns;
  std::string where;
};

class GgufTensor final : public StoredTensor {
 public:
  /// `is_vector`: a tensor of one extent.
  GgufTensor(Slice slice, bool is_vector, std::int64_t interleaved_head)
      : m_slice(std::move(slice)),
        m_format(*m_slice.entry.format),
        m_is_vector(is_vector),
        m_head(interleaved_head),
        m_columns(m_slice.columns) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    if (m_is_vector) return read_vector(begin, end, target);
    if (m_head == 0 && begin == 0 && end == m_columns) {
      return decode(row_begin, 0, (row_end - row_begin) * m_columns, target);
    }
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      decode(stored_row(row, m_head), begin, end, target);
      target += end - begin;
    }
  }

  std::optional<PlainValues> plain() const override {
    if (m_head != 0) return std::nullopt;
    if (m_format.name == "F32") return PlainValues{m_slice.data, DType::f32};
    if (m_format.name == "F16") return PlainValues{m_slice.data, DType::f16};
    if (m_format.name == "BF16") return PlainValues{m_slice.data, DType::bf16};
    return std::nullopt;
  }

  std::string_view block_format() const override {
    return m_format.values > 1 && !m_is_vector ? m_format.name : std::string_view();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& /*buffer*/) const override {
    return m_slice.data + stored_row(row, m_head) * row_bytes();
  }

  std::string description() const override { return m_slice.where; }
  void release() const override {
    files::release_pages(m_slice.data, static_cast<std::size_t>(m_slice.rows * row_bytes()));
  }

 private:
  /// Decodes values begin … end - 1, counted from the begin of a stored row.
  void decode(std::int64_t row, std::int64_t begin, std::int64_t end, float* target) const {
    gguf::decode_range(m_format, m_slice.data + row * row_bytes(), begin, end, target);
  }

  std::int64_t row_bytes() const { return m_columns / m_format.values * m_format.bytes; }

  void read_vector(std::int64_t begin, std::int64_t end, float* target) const {
    if (m_head == 0) return decode(0, begin, end, target);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t stored = stored_row(i, m_head);
      decode(0, stored, stored + 1, target++);
    }
  }

  Slice m_slice;
  const gguf::BlockFormat& m_format;
  bool m_is_vector;
  std::int64_t m_head;
  std::int64_t m_columns;
};

bool makes_queries_or_keys(std::string_view name) {
  return name.find(".self_attn.q_proj.") != name.npos ||
         name.find(".self_attn.k_proj.") != name.npos;
}

/// Returns whether files may hold a tensor of shape `expected` with shape `found`. A matrix of one
/// row is a vector in most files.
bool fits(const Shape& expected, const Shape& found) {
  if (expected == found) return true;
  return expected.size() == 2 && expected.front() == 1 && found.size() == 1 &&
         found.front() == expected.back();
}

}  // namespace

GgufStore::GgufStore(const std::filesystem::path& file) : m_file(gguf::GgufFile::open(file)) {
  m_config = ModelConfig::load(file);
  m_architecture = gguf::architecture_of(m_config.architecture, m_config.experts.has_value());
  if (m_architecture->interleaves_heads) m_interleaved_head = m_config.head_dim;
  if (m_config.experts) m_experts = m_config.experts->count;
}

const gguf::TensorEntry* GgufStore::find(const gguf::TensorName& place) const {
  const gguf::TensorEntry* const entry = m_file.find(place.name);
  return entry != nullptr ? entry : m_file.find(gguf::older_expert_name(place));
}

std::unique_ptr<StoredTensor> GgufStore::at(std::string_view name, const Shape& shape) const {
  if (!gguf::fused_expert_names(*m_architecture, name).empty()) {
    const FusedExpertsShape fused = fused_experts_shape(m_config, name, shape);
    std::vector<std::unique_ptr<StoredTensor>> experts;
    for (std::int64_t expert = 0; expert < fused.count; ++expert) {
      experts.push_back(slice(std::string(name), fused.slice(expert), fused.rows, fused.columns));
    }
    if (fused.rows_first) return joined_rows(std::move(experts), fused.rows, false);
    return fused_experts(std::move(experts), fused.rows, std::max<std::int64_t>(1, fused.columns),
                         fused.alternates);
  }
  const auto inputs = gguf::delta_input_names(*m_architecture, name);
  if (!inputs.empty()) return delta_inputs(name, inputs, shape);
  const auto shared = gguf::shared_input_names(*m_architecture, name);
  if (!shared.empty()) {
    const std::int64_t rows = shape.front() / static_cast<std::int64_t>(shared.size());
    std::vector<std::unique_ptr<StoredTensor>> parts;
    for (const std::string& part : shared) parts.push_back(open({part}, {rows, shape.back()}, 0));
    return joined_rows(std::move(parts), rows, false);
  }
  if (const auto parameter = gguf::activation_key(*m_architecture, name)) {
    const std::string& key = parameter->first;
    const gguf::Metadata& metadata = m_file.metadata();
    const auto count = static_cast<std::uint64_t>(m_config.num_hidden_layers);
    const auto values = metadata.find_floats(key, count);
    if (!values) metadata.fail(key, "a number for each layer", "none");
    return single_value(values->at(static_cast<std::size_t>(parameter->second)),
                        fmt::format("{}: {}", metadata.file(), key));
  }
  const auto maps = gguf::latent_map_names(*m_architecture, name);
  if (!maps.empty() && m_file.find(maps.front()) != nullptr) {
    const LatentConfig& latent = m_config.latent.value();
    const std::int64_t heads = m_config.num_attention_heads;
    return joined_latent_maps(open({maps[0]}, {heads, latent.rank, latent.nope_dim}, 0),
                              open({maps[1]}, {heads, latent.value_dim, latent.rank}, 0), latent);
  }
  const auto place = gguf::gguf_name(*m_architecture, name);
  if (!place) {
    throw Error(fmt::format("{}: tensor '{}' of shape [{}] is missing", m_file.metadata().file(),
                            name, fmt::join(shape, ", ")));
  }
  if (is_transposed_map(m_config, name, shape)) {
    std::vector<std::unique_ptr<StoredTensor>> parts;
    parts.push_back(open(*place, {shape.back(), shape.front()}, 0));
    return fused_experts(std::move(parts), shape.back(), shape.front(), false);
  }
  const Shape stored = shape_in_gguf(m_config, name, shape);
  auto tensor =
      open(*place, stored, makes_queries_or_keys(name) ? m_interleaved_head : 0, shape.size() == 1);
  const TensorOrder order = order_in_gguf(m_config, *m_architecture, name);
  if (!order.rows.empty() || !order.columns.empty()) {
    std::vector<std::unique_ptr<StoredTensor>> parts;
    parts.push_back(std::move(tensor));
    tensor = from_order(std::move(parts), {stored.front()}, stored.size() > 1 ? stored.back() : 0,
                        order);
  }
  return from_form(std::move(tensor), form_in_gguf(m_config, name));
}

std::unique_ptr<StoredTensor> GgufStore::delta_inputs(std::string_view name,
                                                      const std::vector<std::string>& places,
                                                      const Shape& shape) const {
  if (m_file.find(places.back()) != nullptr) return open({places.back()}, shape, 0);
  const DeltaNetConfig& net = m_config.delta_net.value();
  const std::int64_t gates = net.value_heads * net.value_dim;
  const std::vector<std::int64_t> rows = {shape.front() - gates, gates};
  std::vector<std::unique_ptr<StoredTensor>> parts;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    parts.push_back(open({places[i]}, {rows[i], shape.back()}, 0));
  }
  return from_order(std::move(parts), rows, shape.back(),
                    order_in_gguf(m_config, *m_architecture, name));
}

std::unique_ptr<StoredTensor> GgufStore::slice(const std::string& name, const TensorSlice& slice,
                                               std::int64_t rows, std::int64_t columns) const {
  const std::vector<std::string> names = gguf::fused_expert_names(*m_architecture, name);
  if (columns > 0 && is_transposed_map(m_config, name, {columns, rows})) {
    if (const auto place = gguf::gguf_name(*m_architecture, name)) {
      return open(*place, {rows, columns}, 0);
    }
  }
  if (names.empty()) return WeightStore::slice(name, slice, rows, columns);
  const std::int64_t rows_of_part = rows / static_cast<std::int64_t>(names.size());
  const Shape shape = columns == 0 ? Shape{rows_of_part} : Shape{rows_of_part, columns};
  std::vector<std::unique_ptr<StoredTensor>> parts;
  for (const std::string& part : names) parts.push_back(open({part, slice.index}, shape, 0));
  return joined_rows(std::move(parts), rows_of_part, columns == 0);
}

std::int64_t GgufStore::count_at(const gguf::TensorName& place) const {
  const bool is_of_streams = m_config.alt_up && place.name.substr(0, 4) != "blk.";
  return is_of_streams ? m_config.alt_up->streams - 1 : m_experts;
}

std::unique_ptr<StoredTensor> GgufStore::open_half(const gguf::TensorName& place,
                                                   const Shape& shape) const {
  constexpr std::string_view gate = "ffn_gate_exps.", up = "ffn_up_exps.";
  if (!place.expert || shape.size() != 2 || !m_architecture->has_tensor("ffn_gate_up_exps")) {
    return nullptr;
  }
  const bool is_up = place.name.find(up) != place.name.npos;
  const std::size_t begin = place.name.find(is_up ? up : gate);
  if (begin == place.name.npos) return nullptr;
  const std::string both = place.name.substr(0, begin) + "ffn_gate_up_exps.weight";
  if (m_file.find(both) == nullptr) return nullptr;
  const std::int64_t rows = shape.front();
  std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
  std::iota(order.begin(), order.end(), is_up ? rows : 0);
  return from_rows(open({both, place.expert}, {2 * rows, shape.back()}, 0), std::move(order));
}

std::unique_ptr<StoredTensor> GgufStore::open(const gguf::TensorName& place, const Shape& shape,
                                              std::int64_t head, bool is_vector) const {
  if (auto half = open_half(place, shape)) return half;
  const gguf::TensorEntry* const entry = find(place);
  const bool is_stacked = place.expert && (entry == nullptr || entry->name == place.name);
  Shape expected = shape;
  const std::int64_t count = count_at(place);
  if (is_stacked) expected.insert(expected.begin(), count);
  if (entry == nullptr) {
    throw Error(fmt::format("{}: tensor '{}' of shape [{}] is missing", m_file.metadata().file(),
                            place.name, fmt::join(expected, ", ")));
  }
  const std::string where = fmt::format("{}: tensor '{}'", *entry->file, entry->name);
  if (entry->format == nullptr) {
    std::string names;
    for (const gguf::BlockFormat& format : gguf::block_formats()) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", format.name);
    }
    throw Error(fmt::format("{}: expected one of the types {}, found type {}", where, names,
                            gguf::type_name(*entry)));
  }
  if (!fits(expected, entry->shape)) {
    throw Error(fmt::format("{}: expected shape [{}], found [{}]", where, fmt::join(expected, ", "),
                            fmt::join(entry->shape, ", ")));
  }
  std::int64_t rows =
      std::accumulate(shape.begin(), shape.end() - 1, std::int64_t(1), std::multiplies<>());
  std::int64_t columns = shape.back();
  if (is_vector) columns *= std::exchange(rows, 1);
  Slice slice{*entry, entry->data, rows, columns,
              fmt::format("{}: tensor {}", *entry->file, entry->name)};
  if (is_stacked) {
    if (*place.expert >= count) {
      throw Error(
          fmt::format("{}: expected an expert below {}, found {}", where, count, *place.expert));
    }
    // The shape is that of the entry, all of whose bytes lie in the file.
    slice.data +=
        entry->bytes / static_cast<std::size_t>(count) * static_cast<std::size_t>(*place.expert);
    slice.where += fmt::format(", expert {}", *place.expert);
  }
  return std::make_unique<GgufTensor>(std::move(slice), is_vector || shape.size() == 1, head);
}

bool GgufStore::has(std::string_view name) const {
  if (const auto parameter = gguf::activation_key(*m_architecture, name)) {
    return m_file.metadata().has(parameter->first);
  }
  const std::vector<std::string> names = gguf::fused_expert_names(*m_architecture, name);
  if (!names.empty()) return m_file.find(names.front()) != nullptr;
  const auto shared = gguf::shared_input_names(*m_architecture, name);
  if (!shared.empty()) return m_file.find(shared.front()) != nullptr;
  const auto inputs = gguf::delta_input_names(*m_architecture, name);
  if (!inputs.empty()) {
    return m_file.find(inputs.front()) != nullptr || m_file.find(inputs.back()) != nullptr;
  }
  const auto maps = gguf::latent_map_names(*m_architecture, name);
  if (!maps.empty() && m_file.find(maps.front()) != nullptr) return true;
  const auto place = gguf::gguf_name(*m_architecture, name);
  return place && find(*place) != nullptr;
}

}  // namespace kvzap::model
