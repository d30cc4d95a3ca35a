#include "model/gguf_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "gguf/block_formats.hpp"
#include "model/families/family.hpp"

namespace kvzap::model {
namespace {

float value_of_form(ValueForm form, float value) {
  switch (form) {
    case ValueForm::same:
      return value;
    case ValueForm::plus_one:
      return value - 1;
    case ValueForm::negative_exponential:
      return std::log(-value);
  }
  return value;
}

class FormedTensor final : public StoredTensor {
 public:
  FormedTensor(std::unique_ptr<StoredTensor> tensor, ValueForm form)
      : m_tensor(std::move(tensor)), m_form(form) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    m_tensor->read(row_begin, row_end, begin, end, target);
    std::for_each(target, target + (row_end - row_begin) * (end - begin),
                  [this](float& value) { value = value_of_form(m_form, value); });
  }
  std::string description() const override { return m_tensor->description(); }
  void release() const override { m_tensor->release(); }

 private:
  std::unique_ptr<StoredTensor> m_tensor;
  ValueForm m_form;
};

class JoinedRows final : public StoredTensor {
 public:
  JoinedRows(std::vector<std::unique_ptr<StoredTensor>> parts, std::int64_t rows, bool is_vector)
      : m_parts(std::move(parts)), m_rows(rows), m_is_vector(is_vector) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    while (row_begin < row_end) {
      const std::int64_t first = row_begin % m_rows;
      const std::int64_t last = std::min(m_rows, first + row_end - row_begin);
      const StoredTensor& part = part_of(row_begin);
      if (m_is_vector) {
        part.read(0, 1, first, last, target);
      } else {
        part.read(first, last, begin, end, target);
      }
      target += (last - first) * (end - begin);
      row_begin += last - first;
    }
  }

  std::string_view block_format() const override {
    const std::string_view format = m_parts.front()->block_format();
    const bool is_common = std::all_of(m_parts.begin(), m_parts.end(), [&](const auto& part) {
      return part->block_format() == format;
    });
    return is_common && !m_is_vector ? format : std::string_view();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    return part_of(row).row_blocks(row % m_rows, buffer);
  }
  std::string description() const override { return m_parts.front()->description(); }
  void release() const override {
    for (const auto& part : m_parts) part->release();
  }

 private:
  const StoredTensor& part_of(std::int64_t row) const {
    return *m_parts[static_cast<std::size_t>(row / m_rows)];
  }

  std::vector<std::unique_ptr<StoredTensor>> m_parts;
  std::int64_t m_rows;
  bool m_is_vector;
};

class SingleValue final : public StoredTensor {
 public:
  SingleValue(float value, std::string description)
      : m_value(value), m_description(std::move(description)) {}

  void read(std::int64_t /*row_begin*/, std::int64_t /*row_end*/, std::int64_t begin,
            std::int64_t end, float* target) const override {
    std::fill(target, target + (end - begin), m_value);
  }
  std::string description() const override { return m_description; }
  void release() const override {}

 private:
  float m_value;
  std::string m_description;
};

class PickedRows final : public StoredTensor {
 public:
  PickedRows(std::unique_ptr<StoredTensor> tensor, std::vector<std::int64_t> rows)
      : m_tensor(std::move(tensor)), m_rows(std::move(rows)) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    for (std::int64_t row = row_begin; row < row_end; ++row, target += end - begin) {
      m_tensor->read(stored(row), stored(row) + 1, begin, end, target);
    }
  }
  std::string_view block_format() const override { return m_tensor->block_format(); }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    return m_tensor->row_blocks(stored(row), buffer);
  }
  std::string description() const override { return m_tensor->description(); }
  void release() const override { m_tensor->release(); }

 private:
  std::int64_t stored(std::int64_t row) const { return m_rows[static_cast<std::size_t>(row)]; }

  std::unique_ptr<StoredTensor> m_tensor;
  std::vector<std::int64_t> m_rows;
};

class FusedExperts final : public StoredTensor {
 public:
  FusedExperts(std::vector<std::unique_ptr<StoredTensor>> experts, std::int64_t rows,
               std::int64_t columns, bool alternates)
      : m_experts(std::move(experts)),
        m_half(alternates ? rows / 2 : rows),
        m_columns(columns),
        m_alternates(alternates) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    std::vector<float> values;
    const std::int64_t width = end - begin;
    while (row_begin < row_end) {
      const std::int64_t first = row_begin % m_columns;
      const std::int64_t last = std::min(m_columns, first + row_end - row_begin);
      const StoredTensor& expert = *m_experts[static_cast<std::size_t>(row_begin / m_columns)];
      values.resize(static_cast<std::size_t>(last - first));
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = m_alternates ? i % 2 * m_half + i / 2 : i;
        expert.read(row, row + 1, first, last, values.data());
        for (std::int64_t c = 0; c < last - first; ++c) {
          target[c * width + i - begin] = values[static_cast<std::size_t>(c)];
        }
      }
      target += (last - first) * width;
      row_begin += last - first;
    }
  }
  std::string description() const override { return m_experts.front()->description(); }
  void release() const override {
    for (const auto& expert : m_experts) expert->release();
  }

 private:
  std::vector<std::unique_ptr<StoredTensor>> m_experts;
  std::int64_t m_half, m_columns;
  bool m_alternates;
};

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::vector<std::int64_t> inverse(const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> result(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    result[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  }
  return result;
}

class ReorderedTensor final : public StoredTensor {
 public:
  ReorderedTensor(std::vector<std::unique_ptr<StoredTensor>> parts,
                  const std::vector<std::int64_t>& rows, std::int64_t columns,
                  const TensorOrder& order)
      : m_parts(std::move(parts)),
        m_columns(columns),
        m_stored_rows(inverse(order.rows)),
        m_stored_columns(inverse(order.columns)) {
    for (std::size_t part = 0; part < rows.size(); ++part) {
      for (std::int64_t row = 0; row < rows[part]; ++row) m_places.push_back({part, row});
    }
  }

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    if (m_columns == 0) return read_vector(begin, end, target);
    std::vector<float> values(static_cast<std::size_t>(m_stored_columns.empty() ? 0 : m_columns));
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      const Place& place = place_of(row);
      const StoredTensor& part = *m_parts[place.part];
      if (m_stored_columns.empty()) {
        part.read(place.row, place.row + 1, begin, end, target);
      } else {
        part.read(place.row, place.row + 1, 0, m_columns, values.data());
        for (std::int64_t column = begin; column < end; ++column) {
          const std::int64_t stored = m_stored_columns[static_cast<std::size_t>(column)];
          target[column - begin] = values[static_cast<std::size_t>(stored)];
        }
      }
      target += end - begin;
    }
  }

  std::string_view block_format() const override {
    if (m_columns == 0) return {};
    const std::string_view format = m_parts.front()->block_format();
    const bool is_common = std::all_of(m_parts.begin(), m_parts.end(), [&](const auto& part) {
      return part->block_format() == format;
    });
    return is_common && moves_blocks(format) ? format : std::string_view();
  }
  const std::byte* row_blocks(std::int64_t row, std::vector<std::byte>& buffer) const override {
    const Place& place = place_of(row);
    const StoredTensor& part = *m_parts[place.part];
    if (m_stored_columns.empty()) return part.row_blocks(place.row, buffer);
    std::vector<std::byte> room;
    const std::byte* const blocks = part.row_blocks(place.row, room);
    const gguf::BlockFormat& format = *gguf::find_block_format(part.block_format());
    buffer.resize(static_cast<std::size_t>(m_columns / format.values * format.bytes));
    std::byte* target = buffer.data();
    for (std::int64_t column = 0; column < m_columns; column += format.values) {
      const std::int64_t stored = m_stored_columns[static_cast<std::size_t>(column)];
      const std::byte* const block = blocks + stored / format.values * format.bytes;
      target = std::copy(block, block + format.bytes, target);
    }
    return buffer.data();
  }
  std::string description() const override { return m_parts.front()->description(); }
  void release() const override {
    for (const auto& part : m_parts) part->release();
  }

 private:
  struct Place {
    std::size_t part;
    std::int64_t row;
  };

  const Place& place_of(std::int64_t row) const {
    const auto index = static_cast<std::size_t>(row);
    return m_places[m_stored_rows.empty() ? index : static_cast<std::size_t>(m_stored_rows[index])];
  }

  /// Returns whether the order of columns keeps the values of each block together. Blocks of 256
  /// values may hold two heads.
  bool moves_blocks(std::string_view format) const {
    if (m_stored_columns.empty() || format.empty()) return true;
    const std::int64_t values = gguf::find_block_format(format)->values;
    for (std::size_t i = 0; i < m_stored_columns.size(); ++i) {
      const bool begins = static_cast<std::int64_t>(i) % values == 0;
      const std::int64_t stored = m_stored_columns[i];
      if (begins ? stored % values != 0 : stored != m_stored_columns[i - 1] + 1) return false;
    }
    return true;
  }

  void read_vector(std::int64_t begin, std::int64_t end, float* target) const {
    for (std::int64_t i = begin; i < end; ++i) {
      const Place& place = place_of(i);
      m_parts[place.part]->read(0, 1, place.row, place.row + 1, target++);
    }
  }

  std::vector<std::unique_ptr<StoredTensor>> m_parts;
  std::int64_t m_columns;
  std::vector<std::int64_t> m_stored_rows, m_stored_columns;
  std::vector<Place> m_places;  // of all rows of the file
};

void append_run(std::vector<std::int64_t>& rows, std::int64_t first, std::int64_t count) {
  for (std::int64_t row = first; row < first + count; ++row) rows.push_back(row);
}

/// Appends the rows of all value heads, `size` of each from `first` on, in the order of files that
/// deal them.
void append_dealt(const DeltaNetConfig& net, std::int64_t first, std::int64_t size,
                  std::vector<std::int64_t>& rows) {
  for (std::int64_t in_group = 0; in_group < net.group(); ++in_group) {
    for (std::int64_t head = 0; head < net.key_heads; ++head) {
      append_run(rows, first + (head * net.group() + in_group) * size, size);
    }
  }
}

/// Returns the rows of all queries, then of all keys, then of all values, in a tensor with a block
/// for each KV head.
std::vector<std::int64_t> rows_without_heads(const ModelConfig& config) {
  const std::int64_t dim = config.head_dim, group = config.query_group();
  const std::int64_t block = (group + 2) * dim;
  std::vector<std::int64_t> rows;
  const std::pair<std::int64_t, std::int64_t> pieces[] = {
      {0, group * dim}, {group * dim, dim}, {(group + 1) * dim, dim}};
  for (const auto& [first, count] : pieces) {
    for (std::int64_t head = 0; head < config.num_key_value_heads; ++head) {
      append_run(rows, head * block + first, count);
    }
  }
  return rows;
}

/// Returns the rows of the tensor with a block for each key head: query, key, values, gates.
std::vector<std::int64_t> rows_without_blocks(const DeltaNetConfig& net) {
  const std::int64_t key = net.key_dim, values = net.group() * net.value_dim;
  const std::int64_t block = net.channels() + values;
  std::vector<std::int64_t> rows;
  const std::pair<std::int64_t, std::int64_t> pieces[] = {
      {0, key}, {key, key}, {2 * key, values}, {2 * key + values, values}};
  for (const auto& [first, count] : pieces) {
    for (std::int64_t head = 0; head < net.key_heads; ++head) {
      append_run(rows, head * block + first, count);
    }
  }
  return rows;
}

}  // namespace

ValueForm form_in_gguf(const ModelConfig& config, std::string_view name) {
  if (ends_with(name, ".A_log")) return ValueForm::negative_exponential;
  const bool adds_one =
      ends_with(name, "norm.weight") && !ends_with(name, ".linear_attn.norm.weight");
  return adds_one && family_of(config).tensors.norms_add_one ? ValueForm::plus_one
                                                             : ValueForm::same;
}

float to_form(ValueForm form, float value) {
  switch (form) {
    case ValueForm::same:
      return value;
    case ValueForm::plus_one:
      return value + 1;
    case ValueForm::negative_exponential:
      return -std::exp(value);
  }
  return value;
}

std::unique_ptr<StoredTensor> from_form(std::unique_ptr<StoredTensor> tensor, ValueForm form) {
  if (form == ValueForm::same) return tensor;
  return std::make_unique<FormedTensor>(std::move(tensor), form);
}

std::vector<std::int64_t> shape_in_gguf(const ModelConfig& config, std::string_view name,
                                        const std::vector<std::int64_t>& shape) {
  if (shape.size() == 3) return {shape.front(), shape.back()};  // a convolution
  if (!config.state_space || shape.size() != 1) return shape;
  if (config.state_space->is_mamba1()) return shape;
  if (ends_with(name, ".A_log") || ends_with(name, ".D")) return {shape.front(), 1};
  const std::string norm = fmt::format(".{}.norm.weight", family_of(config).tensors.state_space);
  const std::int64_t groups = config.state_space->groups;
  if (ends_with(name, norm)) return {groups, shape.front() / groups};
  return shape;
}

std::vector<float> row_factors(const ModelConfig& config, std::string_view name,
                               std::int64_t rows) {
  if (!gguf_includes_factors(config)) return {};
  const auto all = [rows](double factor) {
    return factor == 1
               ? std::vector<float>()
               : std::vector<float>(static_cast<std::size_t>(rows), static_cast<float>(factor));
  };
  const TensorNames& names = family_of(config).tensors;
  const auto is = [&](std::string_view tensor) {
    return name.find(tensor) != name.npos && !ends_with(name, ".norm.weight");
  };
  const StateSpaceConfig& space = *config.state_space;
  if (is(names.embedding)) return all(config.embedding_multiplier);
  if (is(names.head)) return all(1 / config.logits_divisor);
  if (is(names.key)) {
    return all(*config.attention_multiplier * std::sqrt(static_cast<double>(config.head_dim)));
  }
  if (is(names.output)) return all(config.attention_out_multiplier);
  if (is(fmt::format(".{}.", names.gate))) return all(config.gate_multiplier);
  if (is(fmt::format(".{}.", names.down))) return all(config.feed_forward_multiplier);
  if (is(fmt::format("{}.out_proj.", names.state_space))) return all(space.out_multiplier);
  if (!is(fmt::format("{}.in_proj.", names.state_space))) return {};
  const std::int64_t inner = space.inner_size(), of_groups = space.groups * space.state_dim;
  const std::int64_t parts[] = {inner, inner, of_groups, of_groups, space.heads};
  std::vector<float> factors;
  for (std::size_t i = 0; i < std::size(parts); ++i) {
    factors.insert(factors.end(), static_cast<std::size_t>(parts[i]),
                   static_cast<float>(space.in_multipliers[i]));
  }
  const bool are_one = std::all_of(factors.begin(), factors.end(), [](float f) { return f == 1; });
  return are_one ? std::vector<float>() : factors;
}

bool gguf_includes_factors(const ModelConfig& config) {
  return config.layer(0).mixing == TokenMixing::attention_and_state_space;
}

bool is_transposed_map(const ModelConfig& config, std::string_view name,
                       const std::vector<std::int64_t>& shape) {
  const TensorNames& names = family_of(config).tensors;
  return names.maps_are_transposed && shape.size() == 2 &&
         name.substr(0, names.layers.size()) == names.layers;
}

TensorOrder order_in_gguf(const ModelConfig& config, const gguf::Architecture& architecture,
                          std::string_view name) {
  TensorOrder order;
  const TensorNames& names = family_of(config).tensors;
  if (names.qkv_by_head && name.find(names.qkv) != name.npos) {
    order.rows = rows_without_heads(config);
    return order;
  }
  constexpr std::string_view block = ".linear_attn.";
  const std::size_t begin = name.find(block);
  if (begin == name.npos || !config.delta_net) return {};
  const std::string_view rest = name.substr(begin + block.size());
  const DeltaNetConfig& net = *config.delta_net;
  if (rest == "in_proj_qkvz.weight") order.rows = rows_without_blocks(net);
  if (!architecture.deals_value_heads || net.group() == 1) return order;
  if (rest == "in_proj_qkv.weight" || rest == "conv1d.weight") {
    const std::int64_t queries_and_keys = 2 * net.key_heads * net.key_dim;
    append_run(order.rows, 0, queries_and_keys);
    append_dealt(net, queries_and_keys, net.value_dim, order.rows);
  } else if (rest == "in_proj_z.weight") {
    append_dealt(net, 0, net.value_dim, order.rows);
  } else if (rest == "out_proj.weight") {
    append_dealt(net, 0, net.value_dim, order.columns);
  } else if (rest != "norm.weight") {  // a row or value for each value head
    append_dealt(net, 0, 1, order.rows);
  }
  return order;
}

std::unique_ptr<StoredTensor> from_order(std::vector<std::unique_ptr<StoredTensor>> parts,
                                         const std::vector<std::int64_t>& rows,
                                         std::int64_t columns, const TensorOrder& order) {
  if (order.rows.empty() && order.columns.empty() && parts.size() == 1) {
    return std::move(parts.front());
  }
  return std::make_unique<ReorderedTensor>(std::move(parts), rows, columns, order);
}

FusedExpertsShape fused_experts_shape(const ModelConfig& config, std::string_view name,
                                      const std::vector<std::int64_t>& shape) {
  const TensorNames& names = family_of(config).tensors;
  const auto is = [&](std::string_view tensor) {
    return !tensor.empty() && name.find(tensor) != name.npos;
  };
  FusedExpertsShape result;
  result.count = config.experts->count;
  const bool is_bias = ends_with(name, "_bias");
  const bool is_down = is(names.experts_down);
  result.is_flat = !names.experts_up.empty() && !names.rows_first;
  result.rows_first = !is_bias && (names.rows_first || (result.is_flat && !is_down));
  result.alternates = names.alternates && !is_down;
  const std::int64_t before = shape.front() / (result.is_flat ? result.count : 1);
  const std::int64_t first = result.is_flat ? before : shape[1];
  result.rows = is_bias || !result.rows_first ? shape.back() : first;
  result.columns = is_bias ? 0 : result.rows_first ? shape.back() : first;
  return result;
}

std::unique_ptr<StoredTensor> single_value(float value, std::string description) {
  return std::make_unique<SingleValue>(value, std::move(description));
}

std::unique_ptr<StoredTensor> from_rows(std::unique_ptr<StoredTensor> tensor,
                                        std::vector<std::int64_t> rows) {
  return std::make_unique<PickedRows>(std::move(tensor), std::move(rows));
}

std::unique_ptr<StoredTensor> joined_rows(std::vector<std::unique_ptr<StoredTensor>> parts,
                                          std::int64_t rows, bool is_vector) {
  return std::make_unique<JoinedRows>(std::move(parts), rows, is_vector);
}

std::unique_ptr<StoredTensor> fused_experts(std::vector<std::unique_ptr<StoredTensor>> experts,
                                            std::int64_t rows, std::int64_t columns,
                                            bool alternates) {
  return std::make_unique<FusedExperts>(std::move(experts), rows, columns, alternates);
}

}  // namespace kvzap::model
