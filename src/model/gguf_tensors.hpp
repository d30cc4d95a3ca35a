// Tensors whose form in GGUF files differs from that in checkpoints of Hugging Face.
#pragma once

#include <cstdint>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/architectures.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// What files hold instead of a value x of a checkpoint: x, 1 + x or -exp(x).
enum class ValueForm { same, plus_one, negative_exponential };

/// Returns plus_one for norms of families that multiply by 1 + weight (TensorNames::norms_add_one),
/// and negative_exponential for the logarithms of decays of delta nets and state spaces.
ValueForm form_in_gguf(const ModelConfig& config, std::string_view name);

/// Returns the value of the file.
float to_form(ValueForm form, float value);

/// Returns the checkpoint's tensor of a file's `tensor`.
std::unique_ptr<StoredTensor> from_form(std::unique_ptr<StoredTensor> tensor, ValueForm form);

/// Returns the shape in files of a tensor of this shape in checkpoints. Convolutions are matrices;
/// vectors of state spaces have one column, and their norm has a row for each group.
std::vector<std::int64_t> shape_in_gguf(const ModelConfig& config, std::string_view name,
                                        const std::vector<std::int64_t>& shape);

/// Returns whether the weights of files include the model's factors of embedding, attention, state
/// spaces, feed-forward parts and logits, for which the format has no keys (Falcon-H1).
bool gguf_includes_factors(const ModelConfig& config);

/// Returns the factor of each row of a tensor that its values in files include; empty: all are 1.
std::vector<float> row_factors(const ModelConfig& config, std::string_view name, std::int64_t rows);

/// Returns whether checkpoints hold the map `name` as (inputs, outputs), unlike files
/// (TensorNames::maps_are_transposed).
bool is_transposed_map(const ModelConfig& config, std::string_view name,
                       const std::vector<std::int64_t>& shape);

/// The order of a tensor's values: for each row, or each value of a vector, and for each column the
/// one of another tensor in its place. Empty lists: the same order.
struct TensorOrder {
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> columns;
};

/// Returns the rows and columns of the checkpoint's tensor `name` in the order of files. It differs
/// for delta nets: files hold all queries, then all keys, all values and all gates, and some have
/// another order of value heads (gguf::Architecture::deals_value_heads). It also differs where a
/// checkpoint has queries, keys and values head by head (TensorNames::qkv_by_head).
TensorOrder order_in_gguf(const ModelConfig& config, const gguf::Architecture& architecture,
                          std::string_view name);

/// Returns the checkpoint's tensor whose rows `parts` hold one after the other in the order of
/// files. `rows`: those of each part, or the values of a vector. `columns`: 0 for a vector.
std::unique_ptr<StoredTensor> from_order(std::vector<std::unique_ptr<StoredTensor>> parts,
                                         const std::vector<std::int64_t>& rows,
                                         std::int64_t columns, const TensorOrder& order);

/// A tensor of all experts in a checkpoint: its matrices (rows, columns), or vectors (columns = 0).
struct FusedExpertsShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t count = 0;
  /// See TensorSlice.
  bool alternates = false;
  bool rows_first = false;
  bool is_flat = false;

  TensorSlice slice(std::int64_t expert) const {
    return {expert, count, alternates, rows_first, is_flat};
  }
};

/// Returns that of the tensor `name` of this shape.
FusedExpertsShape fused_experts_shape(const ModelConfig& config, std::string_view name,
                                      const std::vector<std::int64_t>& shape);

/// Returns a vector of one value. `description`: see StoredTensor.
std::unique_ptr<StoredTensor> single_value(float value, std::string description);

/// Returns these rows of a matrix.
std::unique_ptr<StoredTensor> from_rows(std::unique_ptr<StoredTensor> tensor,
                                        std::vector<std::int64_t> rows);

/// Returns the rows of `parts`, `rows` of each, one part after the other. `is_vector`:
/// the parts are vectors, which become matrices of one column.
std::unique_ptr<StoredTensor> joined_rows(std::vector<std::unique_ptr<StoredTensor>> parts,
                                          std::int64_t rows, bool is_vector);

/// Returns the tensor (expert, column, row) of all experts, the matrices of which are (row,
/// column). `alternates`: see TensorSlice.
std::unique_ptr<StoredTensor> fused_experts(std::vector<std::unique_ptr<StoredTensor>> experts,
                                            std::int64_t rows, std::int64_t columns,
                                            bool alternates);

}  // namespace kvzap::model
