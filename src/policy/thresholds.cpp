#include <fmt/format.h>

#include <cmath>
#include <kvzap/engine/thresholds.hpp>
#include <limits>

#include "base/json_file.hpp"
#include "base/temporary_file.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* thresholds_format = "kvzap.thresholds";
constexpr const char* thresholds_kind = "thresholds";

/// Reads fields of an object in the file. Its error messages name the wrong field.
class ThresholdFields {
 public:
  ThresholdFields(const json& object, fs::path file, std::string prefix)
      : m_object(object), m_file(std::move(file)), m_prefix(std::move(prefix)) {}

  [[noreturn]] void fail(const char* field, const std::string& expected) const {
    const auto found = m_object.find(field);
    throw Error(fmt::format("{}: {}{}: expected {}, found {}", m_file.string(), m_prefix, field,
                            expected,
                            found == m_object.end() ? "nothing" : detail::described(*found)));
  }
  const json& at(const char* field, const std::string& expected) const {
    const auto found = m_object.find(field);
    if (found == m_object.end()) fail(field, expected);
    return *found;
  }
  std::string text(const char* field) const {
    const json& value = at(field, "text");
    if (!value.is_string()) fail(field, "text");
    return value.get<std::string>();
  }
  bool flag(const char* field) const {
    const json& value = at(field, "true or false");
    if (!value.is_boolean()) fail(field, "true or false");
    return value.get<bool>();
  }
  std::int64_t integer(const char* field, std::int64_t least, std::int64_t most) const {
    const std::string expected = fmt::format("a whole number from {} to {}", least, most);
    const json& value = at(field, expected);
    // Numbers from 2^63 on do not fit std::int64_t.
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() ||
                       value.get<std::uint64_t>() <=
                           static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits || value.get<std::int64_t>() < least || value.get<std::int64_t>() > most) {
      fail(field, expected);
    }
    return value.get<std::int64_t>();
  }
  double number(const char* field) const {
    const json& value = at(field, "a number");
    if (!value.is_number() || !std::isfinite(value.get<double>())) fail(field, "a number");
    return value.get<double>();
  }
  double share(const char* field) const {
    const double value = number(field);
    if (value < 0 || value > 1) fail(field, "a number from 0 to 1");
    return value;
  }

 private:
  const json& m_object;
  fs::path m_file;
  std::string m_prefix;
};

ThresholdTable::Row read_threshold_row(const ThresholdFields& fields,
                                       const ThresholdTable::Row* before) {
  ThresholdTable::Row row;
  row.evict_ratio = fields.number("evict_ratio");
  const double floor = before ? before->evict_ratio : 0;
  if (!(row.evict_ratio > floor && row.evict_ratio < 1)) {
    fields.fail("evict_ratio", fmt::format("a number above {} and below 1", floor));
  }
  row.threshold = fields.number("threshold");
  // Scores are compared as floats. A threshold outside their range would evict all pairs, or none.
  constexpr float most = std::numeric_limits<float>::max();
  if (std::abs(row.threshold) > most) {
    fields.fail("threshold", fmt::format("a number of size {} at most", most));
  }
  if (before && row.threshold < before->threshold) {
    fields.fail("threshold", fmt::format("at least {}, that of the row before", before->threshold));
  }
  row.mean = fields.share("mean");
  row.deviation = fields.share("deviation");
  row.least = fields.share("least");
  row.most = fields.share("most");
  return row;
}

}  // namespace

fs::path ThresholdTable::file_in(const fs::path& surrogate) {
  return surrogate / "thresholds.json";
}

ThresholdTable ThresholdTable::load(const fs::path& file) {
  const json object = detail::read_json_object(file);
  const ThresholdFields fields(object, file, "");
  if (fields.text("format") != thresholds_format) {
    fields.fail("format", fmt::format("\"{}\"", thresholds_format));
  }
  fields.integer("format_version", 1, 1);
  ThresholdTable table;
  table.model = fields.text("model");
  const std::string dtype = fields.text("dtype");
  if (dtype != "f32" && dtype != "bf16" && dtype != "f16") fields.fail("dtype", "f32, bf16 or f16");
  table.dtype = dtype_from_name(dtype);
  table.chat_template = fields.flag("chat_template");
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  table.texts = fields.integer("texts", 1, most);
  table.tokens = fields.integer("tokens", 1, most);
  table.window = static_cast<int>(fields.integer("window", 1, 1 << 24));
  table.sink = fields.integer("sink", 0, most);
  const std::string expected_rows = "a list of objects that is not empty";
  const json& rows = fields.at("rows", expected_rows);
  if (!rows.is_array() || rows.empty()) fields.fail("rows", expected_rows);
  for (const json& row : rows) {
    if (!row.is_object()) fields.fail("rows", expected_rows);
    const ThresholdFields of_row(row, file, fmt::format("rows[{}].", table.rows.size()));
    table.rows.push_back(
        read_threshold_row(of_row, table.rows.empty() ? nullptr : &table.rows.back()));
  }
  return table;
}

void ThresholdTable::write(const fs::path& file) const {
  nlohmann::ordered_json object = {{"format", thresholds_format},
                                   {"format_version", 1},
                                   {"model", model},
                                   {"dtype", name_of(dtype)},
                                   {"chat_template", chat_template},
                                   {"texts", texts},
                                   {"tokens", tokens},
                                   {"window", window},
                                   {"sink", sink},
                                   {"rows", nlohmann::ordered_json::array()}};
  for (const Row& row : rows) {
    object["rows"].push_back({{"evict_ratio", row.evict_ratio},
                              {"threshold", row.threshold},
                              {"mean", row.mean},
                              {"deviation", row.deviation},
                              {"least", row.least},
                              {"most", row.most}});
  }
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  detail::write_text(file, object.dump(2, ' ', false, replace) + "\n", thresholds_kind);
}

double ThresholdTable::threshold(double evict_ratio) const {
  if (rows.empty()) throw Error("the table of thresholds is empty");
  // Written so that NaN does not pass.
  if (!(evict_ratio >= rows.front().evict_ratio && evict_ratio <= rows.back().evict_ratio)) {
    throw Error(fmt::format(
        "evict ratio {} is outside of the calibrated ones, {} to {}; the thresholds are\n{}",
        evict_ratio, rows.front().evict_ratio, rows.back().evict_ratio, text()));
  }
  std::size_t upper = 0;
  while (rows[upper].evict_ratio < evict_ratio) ++upper;
  const Row& above = rows[upper];
  if (above.evict_ratio == evict_ratio) return above.threshold;
  const Row& below = rows[upper - 1];
  const double part = (evict_ratio - below.evict_ratio) / (above.evict_ratio - below.evict_ratio);
  return below.threshold + part * (above.threshold - below.threshold);
}

std::string ThresholdTable::text() const {
  std::string text = "evict ratio  threshold  mean over texts  deviation  least of a text   most\n";
  for (const Row& row : rows) {
    text +=
        fmt::format("{:11.4g}  {:9.4f}  {:15.3f}  {:9.3f}  {:15.3f}  {:5.3f}\n", row.evict_ratio,
                    row.threshold, row.mean, row.deviation, row.least, row.most);
  }
  return text;
}

LookedUpThreshold look_up_threshold(const Pruning& pruning, std::optional<bool> chat_template,
                                    const PruningNames& names) {
  const auto name = [&](PruningField field) { return names(field); };
  const double ratio = pruning.amount.evict_ratio.value();
  const fs::path file = ThresholdTable::file_in(pruning.surrogate);
  std::error_code ignored;
  if (!fs::exists(file, ignored)) {
    throw Error(fmt::format(
        "{} {}: {}, the surrogate's table of thresholds, does not exist: make it with kvzap "
        "calibrate, or give {}, or {} kvzap, which takes an evict ratio as a budget",
        name(PruningField::evict_ratio), ratio, file.string(), name(PruningField::threshold),
        name(PruningField::policy)));
  }
  const ThresholdTable table = ThresholdTable::load(file);
  LookedUpThreshold found;
  found.evict_ratio = ratio;
  found.file = file.string();
  try {
    // the float that the cache compares
    found.threshold = static_cast<float>(table.threshold(ratio));
  } catch (const Error& error) {
    throw Error(
        fmt::format("{}: {}: {}", name(PruningField::evict_ratio), found.file, error.what()));
  }
  const auto differs = [&](PruningField field, std::int64_t of_table, std::int64_t of_run) {
    if (of_table == of_run) return;
    found.warnings.push_back(
        fmt::format("{} was calibrated with {} {}, but {} is {}: the evicted share will differ",
                    found.file, name(field), of_table, name(field), of_run));
  };
  differs(PruningField::window, table.window, pruning.window);
  differs(PruningField::sink, table.sink, pruning.sink);
  if (chat_template && table.chat_template != *chat_template) {
    found.warnings.push_back(fmt::format(
        "{} was calibrated {} the chat template, but this run is {} it: the evicted "
        "will differ",
        found.file, table.chat_template ? "with" : "without", *chat_template ? "with" : "without"));
  }
  return found;
}

std::optional<LookedUpThreshold> resolve_threshold(Pruning& pruning, const Communicator& comm,
                                                   std::optional<bool> chat_template,
                                                   const PruningNames& names) {
  if (!pruning.looks_up_threshold() || !pruning.prunes()) return {};
  LookedUpThreshold found;
  comm.agree_on_root([&] { found = look_up_threshold(pruning, chat_template, names); });
  comm.broadcast(&found.threshold, sizeof(found.threshold), 0);
  found.evict_ratio = *pruning.amount.evict_ratio;
  pruning.amount = {};
  pruning.threshold(found.threshold);
  return found;
}

}  // namespace kvzap
