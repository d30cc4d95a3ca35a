#include "attention/device/split_parts.hpp"

namespace kvzap::attention {

void attend_packed_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                         const PageFormat& format, const std::uintptr_t* addresses, int page_rows,
                         const float* queries, const Strides& query_strides, float soft_cap) {
  constexpr RowType q8 = RowType::q8, q4 = RowType::q4;
  const auto attend = [&](const auto& rows) {
    attend_groups(exec, spans, parts, rows, queries, query_strides, soft_cap);
  };
  if (format.keys == q8 && format.values == q8) {
    attend(PackedCodes<q8, q8>{addresses, page_rows});
  } else if (format.keys == q8) {
    attend(PackedCodes<q8, q4>{addresses, page_rows});
  } else if (format.values == q8) {
    attend(PackedCodes<q4, q8>{addresses, page_rows});
  } else {
    attend(PackedCodes<q4, q4>{addresses, page_rows});
  }
}

}  // namespace kvzap::attention
