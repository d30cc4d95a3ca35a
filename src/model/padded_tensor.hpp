// A tensor whose heads are padded with zeros.
#pragma once

#include <cstdint>
#include <memory>

#include "model/weight_store.hpp"

namespace kvzap::model {

/// Heads have `stored` rows or columns in the file; zeros follow them, up to `padded` ones.
struct HeadPadding {
  std::int64_t stored = 0;
  std::int64_t padded = 0;
  bool of_columns = false;
};

/// Returns `tensor` with padded heads: a matrix of `columns` columns, or with columns = 0 a vector.
/// `columns` counts the padding. Quantised tensors stay quantised where no block has parts of two
/// heads.
std::unique_ptr<StoredTensor> pad_heads(std::unique_ptr<StoredTensor> tensor,
                                        const HeadPadding& padding, std::int64_t columns);

}  // namespace kvzap::model
