#include "attention/device/split_parts.hpp"

namespace kvzap::attention {
namespace {

bool narrower_than_q4(RowType type) { return type == RowType::q3 || type == RowType::q2; }

}  // namespace

void attend_quantised_parts(const ExecutionSpace& exec, const SplitSpans& spans, std::int64_t parts,
                            const QuantisedPages& pages, const float* queries,
                            const Strides& query_strides, float soft_cap) {
  constexpr RowType q8 = RowType::q8, q4 = RowType::q4;
  const bool shared = pages.format.values_are_keys;
  const auto attend = [&](const auto& rows) {
    attend_groups(exec, spans, parts, rows, queries, query_strides, soft_cap);
  };
  if (narrower_than_q4(pages.format.keys) || narrower_than_q4(pages.format.values)) {
    attend(AnyQuantisedCodes{{pages.format, pages.addresses, pages.page_rows}});
  } else if (pages.format.keys == q8 && pages.format.values == q8) {
    attend(QuantisedCodes<q8, q8>{pages.addresses, pages.page_rows, shared});
  } else if (pages.format.keys == q8) {
    attend(QuantisedCodes<q8, q4>{pages.addresses, pages.page_rows, shared});
  } else if (pages.format.values == q8) {
    attend(QuantisedCodes<q4, q8>{pages.addresses, pages.page_rows, shared});
  } else {
    attend(QuantisedCodes<q4, q4>{pages.addresses, pages.page_rows, shared});
  }
}

}  // namespace kvzap::attention
