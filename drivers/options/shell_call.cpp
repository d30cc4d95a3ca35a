#include "options/shell_call.hpp"

#include "files/quote.hpp"

namespace kvzap::driver {

using files::shell_quoted;

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

}  // namespace kvzap::driver
