#include <fmt/format.h>

#include <set>
#include <string>

#include "options/option_names.hpp"
#include "options/options.hpp"
#include "options/toml_file.hpp"
#include "options/usage.hpp"

namespace kvzap::driver {

void read_deck(CLI::App& app, const std::string& file) {
  std::vector<TomlEntry> deck;
  try {
    deck = read_toml(file);
  } catch (const std::runtime_error& error) {
    throw UsageError(error.what());
  }
  // A prompt on the command line replaces the deck's prompt, even if the two use different options.
  const auto is_given = [&](const char* name) {
    const CLI::Option* option = app.get_option_no_throw(name);
    return option && option->count() > 0;
  };
  const bool has_prompt = is_given("--prompt") || is_given("--file");
  // If the deck resumes a run, context and questions are in the snapshot.
  const bool resumes = is_given("--resume");
  std::set<std::string> seen;
  for (const TomlEntry& entry : deck) {
    const std::string where = fmt::format("{}:{}: {}", file, entry.line, entry.key);
    std::string key = entry.key;
    if (!app.get_option_no_throw("--" + key)) key = own_name(app, key);
    CLI::Option* option = key.empty() || key == "config" || key == "help"
                              ? nullptr
                              : app.get_option_no_throw("--" + key);
    if (!option) {
      if (!key.empty()) {
        throw UsageError(where + ": belongs on the command line, not in a deck");
      }
      const std::string nearest = nearest_option(app, entry.key);
      throw UsageError(where + ": unknown key" +
                       (nearest.empty() ? "" : "; did you mean '" + nearest + "'?"));
    }
    if (!seen.insert(key).second) throw UsageError(where + ": the deck sets " + key + " twice");
    if (option->count() > 0) continue;  // the command line overrides
    if ((has_prompt || resumes) && (key == "prompt" || key == "file")) continue;
    if (resumes && key == "question") continue;
    if (entry.is_list && option->get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll) {
      throw UsageError(where + ": expected one value, found a list");
    }
    if (entry.values.empty()) throw UsageError(where + ": the list is empty");
    std::vector<std::string> values;
    for (const auto& value : entry.values) {
      if (!value) throw UsageError(where + ": expected a text, a number, true or false");
      values.push_back(*value);
    }
    const bool is_flag = option->get_expected_max() == 0;
    if (is_flag != entry.is_flag) {
      throw UsageError(where +
                       (is_flag ? ": expected true or false" : ": expected a text or a number"));
    }
    try {
      for (const std::string& value : values) {
        // Inverts "no-trim = true" as the flag --no-trim does.
        option->add_result(is_flag ? option->get_flag_value(key, value) : value);
      }
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw UsageError(where + ": " + explain(app, error));
    }
  }
}

}  // namespace kvzap::driver
