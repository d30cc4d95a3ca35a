#include "commands/lab/leaderboard_page.hpp"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "commands/lab/leaderboard_html.hpp"
#include "eval/settings.hpp"
#include "files/ascii.hpp"
#include "files/counted.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::ordered_json;

// --- cells

/// A cell of the table: its text, and the number by which it is sorted.
struct TableCell {
  std::string text;
  std::optional<double> number;
  std::string more;  // tooltip
};

struct TableColumn {
  std::string title;
  bool is_number;
};

std::string percent(double share) { return fmt::format("{:.1f}", 100 * share); }

std::string interval_of(const TaskFigures& f) {
  return f.low && f.high ? fmt::format("[{}, {}]", percent(*f.low), percent(*f.high)) : "";
}

/// Shows accuracy, with its interval in the cell or its tooltip. Without accuracy, shows the
/// perplexity.
TableCell quality(const TaskFigures* f, bool with_interval) {
  if (f && f->accuracy) {
    const std::string interval = interval_of(*f);
    std::string text = percent(*f->accuracy);
    if (with_interval && !interval.empty()) text += " " + interval;
    return {text, f->accuracy,
            fmt::format("{} {}", files::counted(f->prompts, "prompt"), interval)};
  }
  if (f && f->perplexity) {
    return {fmt::format("perplexity {:.4g}", *f->perplexity), f->perplexity,
            files::counted(f->prompts, "prompt")};
  }
  return {"-", std::nullopt, ""};
}

/// Formats three significant digits, or more if the integer part has more.
std::string megabytes(double bytes) {
  const double value = bytes / 1e6;
  return value >= 100 ? fmt::format("{:.0f}", value)
                      : fmt::format("{:.{}f}", value, value >= 10 ? 1 : 2);
}

/// Returns the setting in words, without its policy: "evict ratio 0.5, prune after question".
std::string settings_text(const LeaderboardRow& row, const TaskFigures& figures) {
  const std::string words = eval::setting_words(row.setting, figures.evict_ratio, row.threshold);
  const bool is_full = row.policy == "none";
  for (const char* separator : {", ", " "}) {
    const std::string begin = row.policy + separator;
    if (words.rfind(begin, 0) == 0) {
      return (is_full ? "full cache, " : "") + words.substr(begin.size());
    }
  }
  return is_full ? "full cache" : words;
}

std::vector<TableColumn> columns_of(const Leaderboard& board) {
  std::vector<TableColumn> columns;
  if (board.has_evaluations()) columns.push_back({"evaluation", false});
  columns.insert(columns.end(), {{"model", false},
                                 {"policy", false},
                                 {"setting", false},
                                 {"about", true},
                                 {"evict ratio (least to most)", true}});
  const std::string what = board.task == all_prompts ? "all prompts" : board.task;
  columns.push_back({what + ", % [95 % interval]", true});
  for (const auto& task : board.tasks) columns.push_back({task + ", %", true});
  columns.insert(columns.end(), {{"KV, MB", true}, {"of full, %", true}, {"seconds", true}});
  return columns;
}

std::vector<TableCell> cells_of(const Leaderboard& board, const LeaderboardRow& row) {
  const auto figures_of = [&](const std::string& task) {
    const auto found = row.tasks.find(task);
    return found == row.tasks.end() ? nullptr : &found->second;
  };
  const TaskFigures& f = *figures_of(board.task);
  const LeaderboardEvaluation& evaluation = board.evaluations[row.evaluation];
  std::vector<TableCell> cells;
  if (board.has_evaluations()) cells.push_back({evaluation.name, std::nullopt, evaluation.folder});
  cells.push_back({evaluation.model, std::nullopt, ""});
  cells.push_back({row.policy, std::nullopt, ""});
  cells.push_back({settings_text(row, f), std::nullopt, row.setting});
  const double band = f.ratio_band();
  cells.push_back({fmt::format("{:g}", band), band, ""});
  const std::string least = fmt::format("{:.2f}", f.least);
  const std::string most = fmt::format("{:.2f}", f.most);
  const std::string range = least == most ? "" : fmt::format(" ({} to {})", least, most);
  cells.push_back({fmt::format("{:.3f}{}", f.evict_ratio, range), f.evict_ratio, ""});
  cells.push_back(quality(&f, true));
  for (const auto& task : board.tasks) cells.push_back(quality(figures_of(task), false));
  cells.push_back({megabytes(f.kv_bytes), f.kv_bytes, ""});
  const double share = f.full_kv_bytes > 0 ? f.kv_bytes / f.full_kv_bytes : 1;
  cells.push_back({percent(share), share, ""});
  cells.push_back({fmt::format("{:.2f}", f.seconds), f.seconds, ""});
  return cells;
}

// --- pages

/// Names come from untrusted files: replaces characters that control a terminal or change the
/// direction of text, and puts everything on one line.
std::string harmless(const std::string& text) {
  constexpr const char* replacement = "\xEF\xBF\xBD";
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    const auto last = i + 2 < text.size() ? static_cast<unsigned char>(text[i + 2]) : 0U;
    if (byte == '\t' || byte == '\n' || byte == '\r') {
      out += ' ';
    } else if (byte < 0x20 || byte == 0x7F) {
      out += replacement;
    } else if (byte == 0xC2 && next >= 0x80 && next < 0xA0) {  // U+0080 to U+009F
      out += replacement;
      i += 1;
    } else if (byte == 0xE2 && ((next == 0x80 && (last == 0x8E || last == 0x8F ||
                                                  (last >= 0xA8 && last <= 0xAE))) ||
                                (next == 0x81 && last >= 0xA6 && last <= 0xA9))) {
      // U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069
      out += replacement;
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

/// Escapes text for a cell of a Markdown table.
std::string markdown(const std::string& raw) {
  const std::string text = harmless(raw);
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    // An underscore within a word is no emphasis. Names of tasks contain many.
    const bool is_within_word = c == '_' && i > 0 && i + 1 < text.size() &&
                                files::is_letter_or_digit(text[i - 1]) &&
                                files::is_letter_or_digit(text[i + 1]);
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (std::string_view("\\`*_[]>|~$@!").find(c) != std::string_view::npos &&
               !is_within_word) {
      out += std::string("\\") + c;
    } else {
      out += c;
    }
  }
  return out;
}

std::string html(const std::string& raw) {
  std::string out;
  for (const char c : harmless(raw)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

constexpr const char* explanation =
    "Rows are ordered by the evict ratio reached, to the nearest eighth (column about); rows of "
    "the "
    "same eighth by accuracy, best first. KV: mean bytes of keys and values of a prompt after "
    "pruning. Seconds: prefill and decode of all prompts.";

/// Replaces each {{name}} of the template by the value of that name.
std::string filled(std::string_view page, const std::map<std::string_view, std::string>& values) {
  std::string out;
  for (std::size_t open = page.find("{{"); open != std::string_view::npos; open = page.find("{{")) {
    const std::size_t close = page.find("}}", open);
    out += page.substr(0, open);
    out += values.at(page.substr(open + 2, close - open - 2));
    page.remove_prefix(close + 2);
  }
  out += page;
  return out;
}

}  // namespace

std::string markdown_page(const Leaderboard& board) {
  std::string text = "# Leaderboard\n\n";
  for (const auto& note : board.notes) text += "- " + markdown(note) + "\n";
  if (!board.notes.empty()) text += "\n";
  std::string rule;
  for (const auto& column : columns_of(board)) {
    text += "| " + markdown(column.title) + " ";
    rule += column.is_number ? "| ---: " : "| --- ";
  }
  text += "|\n" + rule + "|\n";
  for (const auto& row : board.rows) {
    for (const auto& cell : cells_of(board, row)) text += "| " + markdown(cell.text) + " ";
    text += "|\n";
  }
  return text + "\n" + explanation + "\n";
}

std::string html_page(const Leaderboard& board, const std::string& version) {
  const auto columns = columns_of(board);
  std::string notes, headings, rows;
  for (const auto& note : board.notes) notes += "<li>" + html(note) + "</li>\n";
  if (!notes.empty()) notes = "<ul>\n" + notes + "</ul>\n";
  for (const auto& column : columns) {
    headings += fmt::format("<th scope=\"col\"{}><button type=\"button\">{}</button></th>",
                            column.is_number ? " class=\"number\"" : "", html(column.title));
  }
  for (const auto& row : board.rows) {
    rows += "<tr>";
    const auto cells = cells_of(board, row);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const TableCell& cell = cells[i];
      rows += columns[i].is_number ? "<td class=\"number\"" : "<td";
      if (cell.number) rows += fmt::format(" data-value=\"{:.10g}\"", *cell.number);
      if (!cell.more.empty()) rows += fmt::format(" title=\"{}\"", html(cell.more));
      rows += fmt::format("><bdi>{}</bdi></td>", html(cell.text));
    }
    rows += "</tr>\n";
  }
  return filled(leaderboard_html, {{"version", html(version)},
                                   {"notes", notes},
                                   {"headings", headings},
                                   {"rows", rows},
                                   {"explanation", html(explanation)}});
}

ordered_json to_json(const Leaderboard& board, const std::string& version) {
  ordered_json page = {{"format", "kvzap.leaderboard"},
                       {"format_version", 1},
                       {"version", version},
                       {"task", board.task},
                       {"notes", board.notes},
                       {"rows", ordered_json::array()}};
  const auto maybe = [](const std::optional<double>& value) {
    return value ? ordered_json(*value) : ordered_json();
  };
  for (const auto& row : board.rows) {
    const LeaderboardEvaluation& evaluation = board.evaluations[row.evaluation];
    ordered_json tasks = ordered_json::object();
    for (const auto& [task, f] : row.tasks) {
      tasks[task] = {{"prompts", f.prompts},
                     {"accuracy", maybe(f.accuracy)},
                     {"accuracy_low", maybe(f.low)},
                     {"accuracy_high", maybe(f.high)},
                     {"perplexity", maybe(f.perplexity)},
                     {"evict_ratio_mean", f.evict_ratio},
                     {"evict_ratio_min", f.least},
                     {"evict_ratio_max", f.most},
                     {"kv_bytes", f.kv_bytes},
                     {"full_kv_bytes", f.full_kv_bytes},
                     {"seconds", f.seconds}};
    }
    page["rows"].push_back({{"evaluation", evaluation.folder},
                            {"model", evaluation.model},
                            {"policy", row.policy},
                            {"setting", row.setting},
                            {"about", row.tasks.at(board.task).ratio_band()},
                            {"tasks", std::move(tasks)}});
  }
  return page;
}

}  // namespace kvzap::driver
