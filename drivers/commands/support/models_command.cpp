#include "commands/support/models_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <kvzap/model/supported_models.hpp>
#include <string_view>
#include <vector>

#include "files/ascii.hpp"

namespace kvzap::driver {
namespace {

/// Parts with the same detail and tests share lines.
struct Row {
  std::string names;
  const SupportedPart* part;
};

std::vector<Row> rows_of(const SupportedKind& kind) {
  std::vector<Row> rows;
  for (const SupportedPart& part : kind.parts) {
    const auto same = std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
      return row.part->detail == part.detail && row.part->tested == part.tested;
    });
    if (same == rows.end()) {
      rows.push_back({part.name, &part});
    } else {
      same->names += ", " + part.name;
    }
  }
  return rows;
}

constexpr std::size_t width = 100;

/// Appends `text` in lines that begin with `first`, and then with as many spaces.
void append_lines(std::string& out, std::string first, const std::string& text) {
  const std::size_t room = width - first.size();
  for (std::string rest = text; !rest.empty();) {
    std::size_t end = rest.size();
    if (end > room) end = std::min(rest.rfind(' ', room), rest.find(' ', room));
    if (end == std::string::npos) end = rest.size();
    out += fmt::format("{}{}\n", first, rest.substr(0, end));
    rest.erase(0, end + 1);
    first.assign(first.size(), ' ');
  }
}

/// Returns the tests that more than half of the parts share; "" if there are none.
std::string common_tests(const SupportedKind& kind) {
  for (const SupportedPart& part : kind.parts) {
    const auto same = std::count_if(kind.parts.begin(), kind.parts.end(),
                                    [&](const auto& other) { return other.tested == part.tested; });
    if (same > 1 && 2 * static_cast<std::size_t>(same) > kind.parts.size()) return part.tested;
  }
  return "";
}

void append_tests(std::string& out, const std::string& tested, const std::string& common) {
  if (tested != common) append_lines(out, "      tested: ", tested);
}

/// One line for each architecture, in the order of their names.
std::string table_of_architectures(const SupportedKind& kind, const std::string& common) {
  std::vector<const SupportedPart*> parts;
  std::array<std::size_t, 2> columns = {5, 10};  // widths of the titles
  for (const SupportedPart& part : kind.parts) {
    parts.push_back(&part);
    columns = {std::max(columns[0], part.name.size()),
               std::max(columns[1], part.model_type.size())};
  }
  const auto is_before = [](char a, char b) { return files::lower(a) < files::lower(b); };
  std::sort(parts.begin(), parts.end(), [&](const auto* a, const auto* b) {
    return std::lexicographical_compare(a->name.begin(), a->name.end(), b->name.begin(),
                                        b->name.end(), is_before);
  });
  std::string out;
  const auto append = [&](std::string_view name, std::string_view type, std::string_view gguf) {
    std::string line =
        fmt::format("  {:<{}}  {:<{}}  {}", name, columns[0], type, columns[1], gguf);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  };
  append("class", "model_type", "in GGUF");
  for (const SupportedPart* part : parts) {
    append(part->name, part->model_type, part->gguf_name);
    append_tests(out, part->tested, common);
  }
  return out;
}

std::string list_of_parts(const SupportedKind& kind, const std::string& common) {
  constexpr std::size_t indent = 22;
  std::string out;
  for (const Row& row : rows_of(kind)) {
    std::string label = "  " + row.names;
    if (label.size() >= indent || row.part->detail.empty()) {
      out += label + "\n";
      label.clear();
    }
    label.resize(indent, ' ');
    append_lines(out, label, row.part->detail);
    append_tests(out, row.part->tested, common);
  }
  return out;
}

}  // namespace

std::string models_text() {
  std::string text;
  for (const SupportedKind& kind : supported_models()) {
    const std::string common = common_tests(kind);
    text += fmt::format("{}{} ({}):\n", text.empty() ? "" : "\n", kind.title, kind.parts.size());
    if (!common.empty()) append_lines(text, "  tested, unless a row says otherwise: ", common);
    const bool has_types = !kind.parts.front().model_type.empty();
    text += has_types ? table_of_architectures(kind, common) : list_of_parts(kind, common);
  }
  return text + "\nAny other setting that would change the result is an error.\n";
}

nlohmann::ordered_json models_json() {
  nlohmann::ordered_json json = {{"format", "kvzap.models"}, {"format_version", 1}};
  for (const SupportedKind& kind : supported_models()) {
    nlohmann::ordered_json& list = json[kind.key] = nlohmann::ordered_json::array();
    for (const SupportedPart& part : kind.parts) {
      list.push_back({{"name", part.name}, {"detail", part.detail}, {"tested", part.tested}});
    }
  }
  return json;
}

}  // namespace kvzap::driver
