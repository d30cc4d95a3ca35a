// Decks: TOML as --config takes it.
#include <kvzap/core/types.hpp>
#include <stdexcept>

#include "../../drivers/options/toml_file.hpp"
#include "harness.hpp"

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {"kvzap-fuzz-"};

void run_one(std::string_view input) {
  static InputFile file;
  file.assign(input);
  std::vector<driver::TomlEntry> entries;
  try {
    entries = driver::read_toml(file.path().string());
  } catch (const std::runtime_error& error) {
    throw Error(error.what());
  }
  for (const driver::TomlEntry& entry : entries) {
    require(entry.line > 0, "an entry without a line");
    require(entry.is_list || entry.values.size() == 1, "an entry without one value");
  }
}

}  // namespace kvzap::fuzz
