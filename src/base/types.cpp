#include <kvzap/core/types.hpp>

namespace kvzap {

std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "unknown";
}

DType dtype_from_name(std::string_view name) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw Error("unknown value type '" + std::string(name) + "': expected f32, f16 or bf16");
}

}  // namespace kvzap
