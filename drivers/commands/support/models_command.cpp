#include "commands/support/models_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <kvzap/model/supported_models.hpp>
#include <vector>

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

/// Returns a line; lists that are longer than a line continue below.
std::string line(const std::string& name, const std::string& text) {
  constexpr int indent = 22;
  constexpr std::size_t width = 78;
  std::string out, rest = text;
  std::string label = name;
  if (label.size() > static_cast<std::size_t>(indent) - 3) {
    out += fmt::format("  {}\n", label);
    label.clear();
  }
  while (!rest.empty()) {
    std::size_t end = rest.size();
    if (end > width) end = std::min(rest.rfind(' ', width), rest.find(' ', width));
    if (end == std::string::npos) end = rest.size();
    out += fmt::format("  {:<{}}{}\n", label, indent - 2, rest.substr(0, end));
    rest.erase(0, end + 1);
    label.clear();
  }
  return out;
}

}  // namespace

std::string models_text() {
  std::string text;
  for (const SupportedKind& kind : supported_models()) {
    text += (text.empty() ? "" : "\n") + kind.title + ":\n";
    for (const Row& row : rows_of(kind)) {
      const std::string tested = "tested: " + row.part->tested;
      if (row.part->detail.empty()) {
        text += line(row.names, tested);
      } else {
        text += line(row.names, row.part->detail) + line("", tested);
      }
    }
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
