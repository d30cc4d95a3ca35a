// Tensors whose form in GGUF files differs from that in checkpoints of Hugging Face.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <memory>
#include <string_view>
#include <vector>

#include "model/weight_store.hpp"

namespace kvzap::model {

/// Returns the number that files add to a tensor. It is 1 for norms of families that multiply by 1
/// + weight (TensorNames::norms_add_one), because files hold this sum, else 0.
float added_in_gguf(const ModelConfig& config, std::string_view name);

/// Returns `tensor` plus a number.
std::unique_ptr<StoredTensor> with_offset(std::unique_ptr<StoredTensor> tensor, float offset);

/// Returns one expert: the rows of `parts`, `rows` of each, one part after the other. `is_vector`:
/// the parts are vectors, which become matrices of one column.
std::unique_ptr<StoredTensor> joined_rows(std::vector<std::unique_ptr<StoredTensor>> parts,
                                          std::int64_t rows, bool is_vector);

/// Returns the tensor (expert, column, row) of all experts, the matrices of which are (row,
/// column). `alternates`: see TensorSlice.
std::unique_ptr<StoredTensor> fused_experts(std::vector<std::unique_ptr<StoredTensor>> experts,
                                            std::int64_t rows, std::int64_t columns,
                                            bool alternates);

}  // namespace kvzap::model
