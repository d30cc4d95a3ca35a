#include "options/shell_call.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/quote.hpp"

namespace kvzap::driver {

std::string shell_quoted(std::string_view word) {
  // Longer texts make a line that nobody reads; the user has them anyway.
  constexpr std::size_t most_bytes = 2000;
  const std::string_view plain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-";
  if (!word.empty() && word.size() <= most_bytes &&
      word.find_first_not_of(plain) == std::string_view::npos) {
    return std::string(word);
  }
  const std::string shown = base::shown(word, most_bytes);
  if (shown == word) {
    std::string text = "'";
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return text + "'";
  }
  // Control characters, in the notation of bash and zsh.
  const bool is_cut = word.size() > most_bytes;
  std::string escaped;
  for (const char c : word.substr(0, most_bytes)) {
    if (c == '\\' || c == '\'') escaped += '\\';
    escaped += c;
  }
  return fmt::format("$'{}{}'", base::shown(escaped, escaped.size() + 1), is_cut ? "…" : "");
}

std::string shell_call(const std::string& command, const std::vector<Argument>& arguments) {
  std::string text = "kvzap " + command;
  for (const Argument& argument : arguments) {
    if (!argument.flag.empty()) text += " " + shell_quoted(argument.flag);
    if (!argument.value) continue;
    // A value that begins with a dash looks like an option.
    const bool joins = argument.flag.rfind("--", 0) == 0 && !argument.value->empty() &&
                       argument.value->front() == '-';
    text += (joins ? "=" : " ") + shell_quoted(*argument.value);
  }
  return text;
}

std::string folder_of_download(const std::string& name) {
  const std::string repository = name.substr(0, name.find(':'));
  const std::string folder = repository.substr(repository.rfind('/') + 1);
  return folder.empty() ? "DIR" : folder;
}

std::string download_call(const std::string& name) {
  const std::size_t colon = name.find(':');
  const std::string repository = name.substr(0, colon);
  std::string text =
      fmt::format("hf download {}", repository.empty() ? "NAME" : shell_quoted(repository));
  if (colon != std::string::npos) {
    text += " --include " + shell_quoted("*" + name.substr(colon + 1) + "*.gguf");
  }
  return text + " --local-dir " + shell_quoted(folder_of_download(name));
}

}  // namespace kvzap::driver
