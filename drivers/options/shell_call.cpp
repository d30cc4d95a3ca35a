#include "options/shell_call.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/quote.hpp"

namespace kvzap::driver {

using base::shell_quoted;

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
