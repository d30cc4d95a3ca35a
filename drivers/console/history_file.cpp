#include <cstdlib>

#include "console/line_editor.hpp"

namespace kvzap::driver {

std::filesystem::path history_file() {
  const auto folder_in = [](const char* variable) {
    const char* const value = std::getenv(variable);
    const std::filesystem::path folder = value ? value : "";
    return folder.is_absolute() ? folder : std::filesystem::path();  // the standard ignores others
  };
  std::filesystem::path folder = folder_in("XDG_STATE_HOME");
  if (folder.empty() && !folder_in("HOME").empty()) folder = folder_in("HOME") / ".local/state";
  return folder.empty() ? folder : folder / "kvzap/history";
}

}  // namespace kvzap::driver
