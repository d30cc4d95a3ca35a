// Reads values of a safetensors file as floats, for policies with small tensors.
#pragma once

#include <cstdint>
#include <cstring>
#include <kvzap/model/safetensors.hpp>

namespace kvzap::policy {

template <class Value>
void floats_as(const std::byte* source, std::int64_t count, float* target) {
  for (std::int64_t i = 0; i < count; ++i) {
    Value value = {};
    // The file guarantees no alignment.
    std::memcpy(&value, source + i * sizeof(Value), sizeof(Value));
    target[i] = static_cast<float>(value);
  }
}

/// target[i] = value `first` + i of the tensor, for i < count. Only for weights
/// (TensorInfo::is_weight).
inline void floats_of(const TensorInfo& tensor, std::int64_t first, std::int64_t count,
                      float* target) {
  const std::byte* const source =
      tensor.data + first * static_cast<std::int64_t>(size_of(tensor.dtype));
  switch (tensor.dtype) {
    case DType::f32:
      return floats_as<float>(source, count, target);
    case DType::f16:
      return floats_as<half>(source, count, target);
    case DType::bf16:
      return floats_as<bfloat16>(source, count, target);
  }
}

}  // namespace kvzap::policy
