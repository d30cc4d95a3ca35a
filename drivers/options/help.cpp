#include "options/help.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "commands/support/option_table.hpp"
#include "files/ascii.hpp"
#include "files/decimal.hpp"

namespace kvzap::driver {
namespace {

constexpr int least_columns = 60;
constexpr int most_columns = 120;
constexpr int usual_columns = 80;

/// Column in which descriptions begin.
constexpr std::size_t description_column = 26;

/// Returns the number of characters; in UTF-8 a character may take several bytes.
std::size_t width_of(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](unsigned char c) { return (c & 0xc0) != 0x80; });
}

/// Appends `text` to `line`, broken at blanks; further lines begin in column `indent`.
std::string wrapped(std::string line, const std::string& text, std::size_t indent, int columns) {
  std::string out;
  std::size_t begin = 0;
  bool is_first = true;  // first word of the line
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    std::string word = text.substr(begin, end - begin);
    // A word that is too long for a line, such as the pattern of a policy, is broken before a
    // bracket.
    for (const std::size_t room = columns - indent; width_of(word) > room;) {
      const std::size_t bracket = word.rfind('[', room);
      const std::size_t cut = bracket == 0 || bracket == std::string::npos ? room : bracket;
      if (!is_first) {
        out += line + "\n";
        line = std::string(indent, ' ');
      }
      out += line + word.substr(0, cut) + "\n";
      line = std::string(indent, ' ');
      word.erase(0, cut);
      is_first = true;
    }
    const std::size_t blank = is_first ? 0 : 1;
    if (!is_first && width_of(line) + blank + width_of(word) > static_cast<std::size_t>(columns)) {
      out += line + "\n";
      line = std::string(indent, ' ') + word;
    } else {
      line += (is_first ? "" : " ") + word;
    }
    is_first = false;
    if (end < text.size() && text[end] == '\n') {
      out += line + "\n";
      line = std::string(indent, ' ');
      is_first = true;
    }
    begin = end + 1;
  }
  return out + line + "\n";
}

/// "  name   description", with the description in its own column.
std::string row(const std::string& name, const std::string& description, std::size_t column,
                int columns) {
  std::string line = "  " + name;
  std::string out;
  if (width_of(line) + 2 > column) {
    out = wrapped("  ", name, 6, columns);
    line.clear();
  }
  line.resize(line.size() + column - width_of(line), ' ');
  return out + wrapped(line, description, column, columns);
}

/// "-m, --model DIR"
std::string name_of(const Entry& entry) {
  if (entry.flags.empty()) return entry.repeats ? entry.name + " ..." : entry.name;
  std::string text = fmt::format("{}", fmt::join(entry.flags, ", "));
  // Align long flags in one column.
  if (entry.flags.front().rfind("--", 0) == 0) text = "    " + text;
  if (entry.kind == ValueKind::choice) {
    text += fmt::format(" {}", fmt::join(entry.choices, "|"));
  } else if (entry.kind != ValueKind::none) {
    text += " " + entry.type;
  }
  return text;
}

std::string description_of(const Entry& entry) {
  std::string text = entry.description;
  if (entry.flags.empty() && entry.kind == ValueKind::choice) {
    text += fmt::format(": {}", fmt::join(entry.choices, ", "));
  }
  if (!entry.default_text.empty()) text += "; default: " + entry.default_text;
  return text;
}

/// Returns an example's lines. All but the last end in a backslash, so that a shell joins them.
std::string wrapped_example(const std::string& example, int columns) {
  std::string text, line = " ";
  char quote = 0;  // the one that is open
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= example.size(); ++i) {
    if (i < example.size() && (example[i] == '"' || example[i] == '\'')) {
      quote = quote == 0 ? example[i] : quote == example[i] ? 0 : quote;
    }
    if (i < example.size() && (example[i] != ' ' || quote != 0)) continue;
    const std::string word = example.substr(begin, i - begin);
    begin = i + 1;
    // Leaves room for the backslash.
    if (width_of(line) + 1 + width_of(word) + 2 > static_cast<std::size_t>(columns)) {
      text += line + " \\\n";
      line = std::string(7, ' ');
    }
    line += " " + word;
  }
  return text + line + "\n";
}

std::string usage_of(const CLI::App& app, const std::string& name) {
  if (!commands_of(app).empty()) return fmt::format("Usage: {} COMMAND [options]", name);
  std::string text = fmt::format("Usage: {} [options]", name);
  for (const Entry& entry : entries_of(app)) {
    if (!entry.flags.empty()) continue;
    const std::string shown = name_of(entry);
    text += entry.is_required ? " " + shown : fmt::format(" [{}]", shown);
  }
  return text;
}

}  // namespace

int help_columns() {
  const auto bounded = [](long columns) {
    return static_cast<int>(std::clamp<long>(columns, least_columns, most_columns));
  };
  const char* const told = std::getenv("COLUMNS");
  long columns = 0;
  if (told && files::read_whole(told, columns) == files::DecimalFault::none && columns > 0) {
    return bounded(columns);
  }
  winsize size{};
  if (isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return bounded(size.ws_col);
  }
  return usual_columns;
}

const std::vector<EnvironmentVariable>& environment_variables() {
  static const std::vector<EnvironmentVariable> variables = {
      {"KVZAP_SIMD",
       "instruction set of the inner loops: amx, avx512_bf16, avx512, avx2 or baseline; default: "
       "the widest of the processor, which --version names. A set that the processor lacks is an "
       "error"},
      {"KVZAP_PACK", "off: keep weights as plain rows; default: oneDNN's layout for the processor"},
      {"KVZAP_GRAPH",
       "off: launch each kernel of a decode step on a GPU by itself; default: all at once"},
      {"KVZAP_NCCL",
       "off: ranks on GPUs exchange values by MPI alone; default: by NCCL, if this "
       "build has it and each rank has a GPU of its own"},
      {"KVZAP_FP8",
       "on: an H100 or H200 rounds activations of 32 tokens and more to 8 bits for products with "
       "FP8 weights; default: off"},
      {"KVZAP_API_KEY", "kvzap serve: an API key, beside those of --api-key-file"},
      {"COLUMNS", "characters per line of help and progress; default: those of the terminal"},
  };
  return variables;
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name,
                                     CLI::AppFormatMode /*mode*/) const {
  const int columns = help_columns();
  // CLI11 passes the names of the parent commands, without the last one.
  if (name.empty()) name = app->get_name();
  const CLI::App* const parent = app->get_parent();
  if (parent) name = parent->get_name() + " " + app->get_name();
  std::string text = wrapped("", usage_of(*app, name), 7, columns) + "\n";
  std::string description = app->get_description();
  if (parent && !description.empty()) {
    description.front() = files::upper(description.front());
    description += ".";
  }
  text += wrapped("", description, 0, columns);

  const std::vector<const CLI::App*> commands = commands_of(*app);
  if (!commands.empty()) {
    std::size_t widest = 0;
    for (const CLI::App* command : commands) {
      widest = std::max(widest, command->get_name().size());
    }
    text += "\nCommands:\n";
    for (const CLI::App* command : commands) {
      text += row(command->get_name(), command->get_description(), widest + 4, columns);
    }
  }
  std::vector<std::string> groups;
  const std::vector<Entry> entries = entries_of(*app);
  for (const Entry& entry : entries) {
    const bool is_new = std::find(groups.begin(), groups.end(), entry.group) == groups.end();
    if (is_new && !entry.group.empty()) groups.push_back(entry.group);
  }
  for (const std::string& group : groups) {
    text += "\n" + wrapped("", group + ":", 0, columns);
    for (const Entry& entry : entries) {
      if (entry.group != group) continue;
      text += row(name_of(entry), description_of(entry), description_column, columns);
    }
  }
  if (!parent) {
    text += "\nEnvironment:\n";
    for (const EnvironmentVariable& variable : environment_variables()) {
      text += row(variable.name, variable.description, 14, columns);
    }
  }
  if (parent && !examples_of(app->get_name()).empty()) {
    text += "\nExamples:\n";
    for (const std::string& example : examples_of(app->get_name())) {
      text += wrapped_example(example, columns);
    }
  }
  if (!app->get_footer().empty()) text += "\n" + wrapped("", app->get_footer(), 0, columns);
  return text;
}

}  // namespace kvzap::driver
