#include "commands/serve/api_keys.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <kvzap/core/types.hpp>
#include <sstream>

#include "console/console.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"

namespace kvzap::driver {
namespace {

constexpr std::size_t longest_key = 4096;

/// Says what keeps a line of the key file from being a key; "" if it is one.
std::string fault_of_key(const std::string& line) {
  if (line.rfind("\xef\xbb\xbf", 0) == 0) return "begins with a byte order mark";
  if (line.front() == '#') return "is a comment";
  if (line.size() > longest_key) return fmt::format("has {} bytes", line.size());
  if (line.back() == ' ' || line.back() == '\t') return "ends with a blank";
  const auto place =
      std::find_if(line.begin(), line.end(), [](char c) { return c <= ' ' || c >= '\x7f'; });
  if (place == line.end()) return {};
  if (*place == ' ' || *place == '\t') return "has a blank";
  return fmt::format("has the byte 0x{:02x}", static_cast<unsigned char>(*place));
}

}  // namespace

std::vector<std::string> read_keys(const std::string& file) {
  if (file.empty()) return {};
  constexpr std::uintmax_t most_bytes = 1 << 20;
  // A pipe could keep the server waiting for ever.
  if (std::filesystem::exists(file) && !std::filesystem::is_regular_file(file)) {
    throw Error(fmt::format(
        "--api-key-file {}: expected a regular file, found a pipe, device or folder; write the "
        "keys to a file that only you can read",
        file));
  }
  std::istringstream stream(files::read_text_file(file, most_bytes));
  std::vector<std::string> keys;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    if (const std::string fault = fault_of_key(line); !fault.empty()) {
      throw Error(
          fmt::format("--api-key-file {}: line {} {}; expected a key of up to {} printable "
                      "characters without blanks",
                      file, number, fault, longest_key));
    }
    keys.push_back(line);
  }
  if (keys.empty()) {
    throw Error(fmt::format("--api-key-file {}: no key found; expected one a line", file));
  }
  struct stat status = {};
  if (stat(file.c_str(), &status) == 0 && (status.st_mode & (S_IRGRP | S_IROTH)) != 0) {
    say("kvzap: warning: --api-key-file {}: other users may read the file\n",
        files::shown_message(file));
  }
  return keys;
}

std::string key_in_environment() {
  const char* const value = std::getenv("KVZAP_API_KEY");
  const std::string key = value ? value : "";
  if (key.empty()) return {};
  if (const std::string fault = fault_of_key(key); !fault.empty()) {
    throw Error(
        fmt::format("KVZAP_API_KEY {}; expected a key of up to {} printable characters without "
                    "blanks",
                    fault, longest_key));
  }
  return key;
}

}  // namespace kvzap::driver
