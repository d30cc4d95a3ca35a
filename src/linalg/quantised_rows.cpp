#include <kvzap/core/quantised_rows.hpp>

namespace kvzap {

std::string_view name_of(RowType type) {
  switch (type) {
    case RowType::wide:
      return "wide";
    case RowType::q8:
      return "q8";
    case RowType::q4:
      return "q4";
    case RowType::q3:
      return "q3";
    case RowType::q2:
      return "q2";
  }
  return "unknown";
}

std::string name_of(const PageFormat& format, DType dtype) {
  if (!format.quantised()) return std::string(name_of(dtype));
  const std::string keys(name_of(format.keys)), values(name_of(format.values));
  return keys == values ? keys : keys + "," + values;
}

PageFormat page_format_from_name(const std::string& name, DType dtype) {
  if (name == name_of(dtype)) return {};
  const std::size_t comma = name.find(',');
  const std::string keys = name.substr(0, comma);
  const std::string values = comma == std::string::npos ? keys : name.substr(comma + 1);
  PageFormat format;
  for (const RowType type : quantised_types) {
    if (keys == name_of(type)) format.keys = type;
    if (values == name_of(type)) format.values = type;
  }
  if (format.keys != RowType::wide && format.values != RowType::wide) return format;
  throw Error(
      "type of keys and values: expected " + std::string(name_of(dtype)) +
      " (as dtype), q8, q4, q3, q2, or one of these for keys and one for values as in q8,q4; "
      "found '" +
      name + "'");
}

}  // namespace kvzap
