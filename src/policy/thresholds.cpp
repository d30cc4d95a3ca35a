#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <kvzap/engine/thresholds.hpp>
#include <limits>

#include "files/json_field.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "parallel/message.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using files::JsonField;
using nlohmann::json;

constexpr const char* thresholds_format = "kvzap.thresholds";
constexpr const char* thresholds_kind = "thresholds";

double share_of(const JsonField& row, const char* name) { return row.member(name).number(0, 1); }

ThresholdTable::Row read_threshold_row(const JsonField& field, const ThresholdTable::Row* before) {
  ThresholdTable::Row row;
  const JsonField ratio = field.member("evict_ratio");
  row.evict_ratio = ratio.number();
  const double floor = before ? before->evict_ratio : 0;
  if (!(row.evict_ratio > floor && row.evict_ratio < 1)) {
    ratio.fail(fmt::format("a number above {} and below 1", floor));
  }
  const JsonField threshold = field.member("threshold");
  row.threshold = threshold.number();
  // Scores are compared as floats: a larger threshold would evict all pairs, or none.
  constexpr float most = std::numeric_limits<float>::max();
  if (std::abs(row.threshold) > most) {
    threshold.fail(fmt::format("a number of size {} at most", most));
  }
  if (before && row.threshold < before->threshold) {
    threshold.fail(fmt::format("at least {}, that of the row before", before->threshold));
  }
  row.mean = share_of(field, "mean");
  row.deviation = share_of(field, "deviation");
  row.least = share_of(field, "least");
  row.most = share_of(field, "most");
  return row;
}

int read_window(const JsonField& field) { return static_cast<int>(field.integer(1, 1 << 24)); }

ThresholdTable::Window read_rows(int window, const JsonField& rows) {
  if (!rows.value().is_array() || rows.value().empty()) {
    rows.fail("a list of objects that is not empty");
  }
  ThresholdTable::Window table{window, {}};
  for (std::size_t i = 0; i < rows.array_size(); ++i) {
    table.rows.push_back(
        read_threshold_row(rows.element(i), i == 0 ? nullptr : &table.rows.back()));
  }
  return table;
}

/// The windows of a file of version 2.
std::vector<ThresholdTable::Window> read_windows(const JsonField& list) {
  if (!list.value().is_array() || list.value().empty()) {
    list.fail("a list of objects that is not empty");
  }
  std::vector<ThresholdTable::Window> windows;
  for (std::size_t i = 0; i < list.array_size(); ++i) {
    const JsonField entry = list.element(i).object();
    const JsonField field = entry.member("window");
    const int window = read_window(field);
    if (i > 0 && window >= windows.back().window) {
      field.fail(fmt::format("less than {}, that of the entry before", windows.back().window));
    }
    windows.push_back(read_rows(window, entry.member("rows")));
  }
  return windows;
}

ThresholdTable::Recommendation read_recommendation(const JsonField& field, std::int64_t version,
                                                   int usual_window) {
  ThresholdTable::Recommendation recommended;
  constexpr double most = std::numeric_limits<float>::max();
  recommended.threshold = field.member("threshold").number(-most, most);
  const JsonField window = field.member("window");
  // Earlier writers of version 1 left it out.
  recommended.window = version == 1 && window.is_null() ? usual_window : read_window(window);
  recommended.evict_ratio = share_of(field, "evict_ratio");
  recommended.accuracy = share_of(field, "accuracy");
  recommended.accuracy_low = share_of(field, "accuracy_low");
  recommended.accuracy_high = share_of(field, "accuracy_high");
  recommended.full_accuracy = share_of(field, "full_accuracy");
  recommended.prompts = field.member("prompts").integer(1);
  recommended.evaluation = field.member("evaluation").string();
  return recommended;
}

std::string missing_table_text(const fs::path& file) {
  return fmt::format(
      "{}, the surrogate's table of thresholds, does not exist: make it with kvzap calibrate",
      file.string());
}

std::string missing_threshold_text(const Pruning& pruning, const fs::path& file,
                                   const PruningNames& names) {
  const std::string threshold = names(PruningField::threshold);
  const std::string missing = missing_table_text(file);
  if (pruning.amount.recommended) {
    return fmt::format("{} auto: {}, or give {} a number", threshold, missing, threshold);
  }
  return fmt::format(
      "{} {}: {}, or give {}, or {} kvzap+ada:alpha=1, which takes an evict ratio as a budget of "
      "each head",
      names(PruningField::evict_ratio), *pruning.amount.evict_ratio, missing, threshold,
      names(PruningField::policy));
}

/// Returns the threshold that the pruning asks for. Throws Error, naming the file, if the table
/// lacks it.
LookedUpThreshold select_threshold(const ThresholdTable& table, const std::string& file,
                                   const Pruning& pruning, const PruningNames& names) {
  if (pruning.amount.recommended) {
    if (!table.recommended) {
      throw Error(
          fmt::format("{} auto: {}: expected the field recommended, which kvzap calibrate "
                      "--evaluation stores, found none",
                      names(PruningField::threshold), file));
    }
    return {table.recommended->evict_ratio, table.recommended->threshold, file, {}};
  }
  const double ratio = pruning.amount.evict_ratio.value();
  try {
    // the float that the cache compares
    const double threshold = table.nearest(pruning.window).threshold(ratio);
    return {ratio, static_cast<float>(threshold), file, {}};
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}: {}", names(PruningField::evict_ratio), file, error.what()));
  }
}

/// Returns the window of an auto_window. Throws Error, naming the file, if there is none.
int look_up_window(const Pruning& pruning, const PruningNames& names) {
  const std::string window = names(PruningField::window);
  const fs::path file = ThresholdTable::file_in(pruning.used_surrogate());
  std::error_code ignored;
  if (!fs::exists(file, ignored)) {
    throw Error(
        fmt::format("{} auto: {}, or give {} a number", window, missing_table_text(file), window));
  }
  const ThresholdTable table = ThresholdTable::load(file);
  // Small windows cost generated text far more than contexts: with 8 tokens perplexity rises by
  // 26 % at an evict ratio of 0.5, with 128 by 2 % (docs/reference/real-model.md).
  if (pruning.mode_in_force() == PruneMode::always) return table.windows.front().window;
  if (pruning.looks_up_threshold() && pruning.amount.evict_ratio) {
    return table.window_for(*pruning.amount.evict_ratio);
  }
  if (table.recommended) return table.recommended->window;
  throw Error(
      fmt::format("{} auto: {}: expected the field recommended, which kvzap calibrate --evaluation "
                  "stores, found none; give {} a number",
                  window, file.string(), window));
}

}  // namespace

fs::path ThresholdTable::file_in(const fs::path& surrogate) {
  return surrogate / "thresholds.json";
}

ThresholdTable ThresholdTable::load(const fs::path& file) {
  const json object = files::read_json_object(file);
  const JsonField fields(object, file.string());
  if (const JsonField format = fields.member("format"); format.string() != thresholds_format) {
    format.fail(fmt::format("\"{}\"", thresholds_format));
  }
  const std::int64_t version = fields.member("format_version").integer(1, 2);
  ThresholdTable table;
  table.model = fields.member("model").string();
  const JsonField dtype = fields.member("dtype");
  const std::string& name = dtype.string();
  if (name != "f32" && name != "bf16" && name != "f16") dtype.fail("f32, bf16 or f16");
  table.dtype = dtype_from_name(name);
  table.chat_template = fields.member("chat_template").boolean();
  table.texts = fields.member("texts").integer(1);
  table.tokens = fields.member("tokens").integer(1);
  table.sink = fields.member("sink").integer(0);
  if (version == 1) {
    const int window = read_window(fields.member("window"));
    table.windows = {read_rows(window, fields.member("rows"))};
  } else {
    table.windows = read_windows(fields.member("windows"));
  }
  const JsonField recommended = fields.member("recommended");
  if (!recommended.is_null()) {
    table.recommended =
        read_recommendation(recommended.object(), version, table.windows.front().window);
  }
  return table;
}

void ThresholdTable::write(const fs::path& file) const {
  using nlohmann::ordered_json;
  // Readers of version 1 take the table's window for the recommendation's.
  const bool is_first_version =
      windows.size() == 1 && (!recommended || recommended->window == windows.front().window);
  ordered_json object = {{"format", thresholds_format},
                         {"format_version", is_first_version ? 1 : 2},
                         {"model", model},
                         {"dtype", name_of(dtype)},
                         {"chat_template", chat_template},
                         {"texts", texts},
                         {"tokens", tokens}};
  std::vector<ordered_json> tables;
  for (const Window& table : windows) {
    ordered_json rows = ordered_json::array();
    for (const Row& row : table.rows) {
      rows.push_back({{"evict_ratio", row.evict_ratio},
                      {"threshold", row.threshold},
                      {"mean", row.mean},
                      {"deviation", row.deviation},
                      {"least", row.least},
                      {"most", row.most}});
    }
    tables.push_back({{"window", table.window}, {"rows", std::move(rows)}});
  }
  if (is_first_version) object["window"] = windows.front().window;
  object["sink"] = sink;
  if (is_first_version) {
    object["rows"] = tables.front()["rows"];
  } else {
    object["windows"] = tables;
  }
  if (recommended) {
    object["recommended"] = {{"threshold", recommended->threshold},
                             {"window", recommended->window},
                             {"evict_ratio", recommended->evict_ratio},
                             {"accuracy", recommended->accuracy},
                             {"accuracy_low", recommended->accuracy_low},
                             {"accuracy_high", recommended->accuracy_high},
                             {"full_accuracy", recommended->full_accuracy},
                             {"prompts", recommended->prompts},
                             {"evaluation", recommended->evaluation}};
  }
  files::write_text(file, files::json_lines(object), thresholds_kind);
}

bool ThresholdTable::Window::covers(double evict_ratio) const {
  return !rows.empty() && evict_ratio >= rows.front().evict_ratio &&
         evict_ratio <= rows.back().evict_ratio;
}

double ThresholdTable::Window::threshold(double evict_ratio) const {
  if (rows.empty()) throw Error("the table of thresholds is empty");
  if (!covers(evict_ratio)) {
    std::string known;
    for (const Row& row : rows) {
      known += fmt::format("{}{:.3f} for {:.4g}", known.empty() ? "" : ", ", row.threshold,
                           row.evict_ratio);
    }
    throw Error(fmt::format(
        "evict ratio {} with a window of {} is outside of the calibrated ones, {} to {}; calibrate "
        "it, or give a threshold ({})",
        evict_ratio, window, rows.front().evict_ratio, rows.back().evict_ratio, known));
  }
  std::size_t upper = 0;
  while (rows[upper].evict_ratio < evict_ratio) ++upper;
  const Row& above = rows[upper];
  if (above.evict_ratio == evict_ratio) return above.threshold;
  const Row& below = rows[upper - 1];
  const double part = (evict_ratio - below.evict_ratio) / (above.evict_ratio - below.evict_ratio);
  return below.threshold + part * (above.threshold - below.threshold);
}

const ThresholdTable::Window& ThresholdTable::nearest(int window) const {
  if (windows.empty()) throw Error("the table of thresholds is empty");
  return *std::min_element(windows.begin(), windows.end(), [&](const Window& a, const Window& b) {
    return std::abs(a.window - window) < std::abs(b.window - window);
  });
}

int ThresholdTable::window_for(double evict_ratio) const {
  if (windows.empty()) throw Error("the table of thresholds is empty");
  const double rows = (1 - evict_ratio) * static_cast<double>(tokens) / static_cast<double>(texts);
  for (const Window& table : windows) {
    if (table.window <= rows / 4) return table.window;
  }
  return windows.back().window;
}

std::string ThresholdTable::text() const {
  std::string text;
  for (const Window& table : windows) {
    if (windows.size() > 1) text += fmt::format("window {}:\n", table.window);
    text += "evict ratio  threshold  mean over texts  deviation  least of a text   most\n";
    for (const Row& row : table.rows) {
      text +=
          fmt::format("{:11.4g}  {:9.3f}  {:15.3f}  {:9.3f}  {:15.3f}  {:5.3f}\n", row.evict_ratio,
                      row.threshold, row.mean, row.deviation, row.least, row.most);
    }
  }
  if (recommended) {
    text += fmt::format(
        "recommended: {:.3f} with a window of {}; evicts {:.3f} at accuracy {:.3f} ({:.3f} to "
        "{:.3f}), full cache {:.3f}, {} prompts of {}\n",
        recommended->threshold, recommended->window, recommended->evict_ratio,
        recommended->accuracy, recommended->accuracy_low, recommended->accuracy_high,
        recommended->full_accuracy, recommended->prompts, recommended->evaluation);
  }
  return text;
}

LookedUpThreshold look_up_threshold(const Pruning& pruning, std::optional<bool> chat_template,
                                    const PruningNames& names) {
  const auto name = [&](PruningField field) { return names(field); };
  const fs::path file = ThresholdTable::file_in(pruning.plain_surrogate());
  std::error_code ignored;
  if (!fs::exists(file, ignored)) throw Error(missing_threshold_text(pruning, file, names));
  const ThresholdTable table = ThresholdTable::load(file);
  LookedUpThreshold found = select_threshold(table, file.string(), pruning, names);
  const auto differs = [&](PruningField field, std::int64_t of_table, std::int64_t of_run,
                           const std::string& advice) {
    if (of_table == of_run) return;
    found.warnings.push_back(
        fmt::format("{} was calibrated with {} {}, but {} is {}: the evicted share will differ{}",
                    found.file, name(field), of_table, name(field), of_run, advice));
  };
  // The recommendation is for contexts. See look_up_window.
  if (pruning.amount.recommended && pruning.mode_in_force() != PruneMode::always) {
    differs(
        PruningField::window, table.recommended->window, pruning.window,
        fmt::format(" ({} auto takes {})", name(PruningField::window), table.recommended->window));
  } else {
    differs(PruningField::window, table.nearest(pruning.window).window, pruning.window, "");
  }
  differs(PruningField::sink, table.sink, pruning.sink, "");
  if (chat_template && table.chat_template != *chat_template) {
    found.warnings.push_back(fmt::format(
        "{} was calibrated {} the chat template, but this run is {} it: the evicted share "
        "will differ",
        found.file, table.chat_template ? "with" : "without", *chat_template ? "with" : "without"));
  }
  return found;
}

void resolve_window(Pruning& pruning, const Communicator& comm, const PruningNames& names) {
  if (!pruning.auto_window) return;
  int window = Pruning().window;
  if (pruning.prunes()) comm.agree_on_root([&] { window = look_up_window(pruning, names); });
  parallel::broadcast(comm, 0, window);
  pruning.window = window;
  pruning.auto_window = false;
}

std::optional<LookedUpThreshold> resolve_threshold(Pruning& pruning, const Communicator& comm,
                                                   std::optional<bool> chat_template,
                                                   const PruningNames& names) {
  resolve_window(pruning, comm, names);
  if (!pruning.looks_up_threshold() || !pruning.prunes()) return {};
  LookedUpThreshold found;
  comm.agree_on_root([&] { found = look_up_threshold(pruning, chat_template, names); });
  parallel::broadcast(comm, 0, found.threshold, found.evict_ratio);
  pruning.amount = {};
  pruning.threshold(found.threshold);
  return found;
}

}  // namespace kvzap
