// Products in the terms of cuBLASLt but without its types, so that hosts can check them.
#pragma once

#include <array>
#include <cstdint>

#include "linalg/device/float8.hpp"
#include "linalg/product.hpp"

namespace kvzap::linalg {

/// A matrix stored by columns.
struct StoredMatrix {
  DType dtype = DType::f32;  // not read for a and b of 8-bit floats
  std::int64_t rows = 0, columns = 0;
  std::int64_t stride = 0;  // elements from one column to the next
};

/// d = epilogue(alpha * op(a) * op(b) + beta * d + bias). The bias has a value for each row of d.
struct LibraryCall {
  StoredMatrix a, b, d;
  bool a_transposed = false, b_transposed = false;
  const void* a_data = nullptr;
  const void* b_data = nullptr;
  void* d_data = nullptr;
  float alpha = 1, beta = 0;
  const void* bias = nullptr;  // of the type of d, or null
  Epilogue epilogue = Epilogue::none;
  /// a and b are e4m3.
  bool is_float8 = false;
  /// A value multiplies 128 elements of the inner dimension: that of row i of op(a) and block l is
  /// a_scales[l * d.rows + i], that of column j of op(b) is b_scales[l * d.columns + j]. Or null.
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;
};

/// Returns the call for a product without batch. Columns of the library are our rows, so the
/// operands are exchanged.
LibraryCall library_call(const Product& product);
/// The same. Stored matrices are transposed, not transposed: the only form that Hopper has.
LibraryCall library_call(const Float8Product& product);

/// Returns the columns of d for which an algorithm is chosen: so many or up to an eighth more.
/// Rounding keeps the number of choices small. Columns are far apart in memory, so an algorithm for
/// more of them fits fewer ones.
std::int64_t columns_of_choice(const LibraryCall& call);

/// The call for which the library chooses an algorithm: `call` with columns_of_choice.
LibraryCall choice_of(const LibraryCall& call);

/// The largest power of two up to 16 that divides an address.
int alignment_of(const void* address);

/// What a chosen algorithm depends on. Equal for calls that may share one.
using LibraryKey = std::array<std::int64_t, 19>;
LibraryKey key_of(const LibraryCall& call);

}  // namespace kvzap::linalg
