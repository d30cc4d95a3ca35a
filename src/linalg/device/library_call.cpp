#include "linalg/device/library_call.hpp"

namespace kvzap::linalg {

LibraryCall library_call(const Product& p) {
  if (p.batch != 1) throw Error("product: a bias or an epilogue takes no batch");
  LibraryCall call;
  call.a_transposed = p.transposed;
  call.a = {p.dtype, p.transposed ? p.k : p.n, p.transposed ? p.n : p.k, p.b_stride};
  call.a_data = p.b;
  call.b_transposed = p.a_transposed;
  call.b = {p.dtype, p.a_transposed ? p.m : p.k, p.a_transposed ? p.k : p.m, p.a_stride};
  call.b_data = p.a;
  call.d = {p.c_dtype, p.n, p.m, p.c_stride};
  call.d_data = p.c;
  call.alpha = p.alpha;
  call.beta = p.beta;
  call.bias = p.bias;
  call.epilogue = p.epilogue;
  return call;
}

LibraryCall library_call(const Float8Product& p) {
  LibraryCall call;
  call.a_transposed = true;
  call.a = {DType::f32, p.b.inputs, p.b.rows, p.b.inputs};
  call.a_data = p.b.codes;
  call.b = {DType::f32, p.a.inputs, p.a.rows, p.a.inputs};
  call.b_data = p.a.codes;
  call.is_float8 = true;
  if (p.has_blocks()) {
    call.a_scales = p.b.scales;
    call.b_scales = p.a.scales;
  }
  call.d = {DType::f32, p.b.rows, p.a.rows, p.c_stride};
  call.d_data = p.c;
  return call;
}

std::int64_t columns_of_choice(const LibraryCall& call) {
  const std::int64_t columns = call.d.columns;
  // Columns of d that are rows of the stored b would reach beyond its columns.
  if (call.b_transposed) return columns;
  std::int64_t step = 1;
  while (16 * step < columns) step *= 2;
  // Products of 8-bit floats need columns in multiples of 4.
  if (call.is_float8) step = step < 4 ? 4 : step;
  return (columns + step - 1) / step * step;
}

LibraryCall choice_of(const LibraryCall& call) {
  LibraryCall choice = call;
  choice.d.columns = columns_of_choice(call);
  if (!call.b_transposed) choice.b.columns = choice.d.columns;
  return choice;
}

int alignment_of(const void* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  int alignment = 16;
  while (value % alignment != 0) alignment /= 2;
  return alignment;
}

LibraryKey key_of(const LibraryCall& call) {
  const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
  return {number(call.a.dtype),
          number(call.is_float8),
          number(call.a_scales != nullptr),
          number(call.d.dtype),
          number(call.a_transposed),
          number(call.b_transposed),
          call.d.rows,
          columns_of_choice(call),
          call.a_transposed ? call.a.rows : call.a.columns,
          call.a.stride,
          call.b.stride,
          call.d.stride,
          number(call.beta != 0),
          number(call.epilogue),
          number(call.bias != nullptr),
          alignment_of(call.a_data),
          alignment_of(call.b_data),
          alignment_of(call.d_data),
          call.bias == nullptr ? 0 : alignment_of(call.bias)};
}

}  // namespace kvzap::linalg
