#include <fmt/format.h>
#include <toml++/toml.h>

#include "options.hpp"

namespace kvzap::driver {
namespace {

std::string text_of(const toml::node& node, const std::string& where) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  if (const auto* integer = node.as_integer()) return fmt::format("{}", integer->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  throw Error(where + ": expected a text, a number, true or false");
}

}  // namespace

void read_deck(CLI::App& app, const std::string& file) {
  toml::table deck;
  try {
    deck = toml::parse_file(file);
  } catch (const toml::parse_error& error) {
    const auto line = error.source().begin.line;  // 0 if the file could not even be read
    throw Error(fmt::format("{}{}: {}", file, line > 0 ? fmt::format(":{}", line) : "",
                            error.description()));
  }
  // A prompt on the command line replaces the deck's in whichever of the two ways that gives it.
  const auto is_given = [&](const char* name) {
    const CLI::Option* option = app.get_option_no_throw(name);
    return option && option->count() > 0;
  };
  const bool has_prompt = is_given("--prompt") || is_given("--file");
  for (const auto& [toml_key, node] : deck) {
    const std::string key(toml_key.str());
    const std::string where = fmt::format("{}:{}: {}", file, node.source().begin.line, key);
    CLI::Option* option =
        key == "config" || key == "help" ? nullptr : app.get_option_no_throw("--" + key);
    if (!option) {
      const std::string nearest = nearest_option(app, key);
      throw Error(where + ": unknown key" +
                  (nearest.empty() ? "" : "; did you mean '" + nearest + "'?"));
    }
    if (option->count() > 0) continue;  // the command line overrides
    if (has_prompt && (key == "prompt" || key == "file")) continue;
    std::vector<std::string> values;
    if (const auto* list = node.as_array()) {
      if (option->get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll) {
        throw Error(where + ": expected one value, found a list");
      }
      if (list->empty()) throw Error(where + ": the list is empty");
      for (const auto& item : *list) values.push_back(text_of(item, where));
    } else {
      values.push_back(text_of(node, where));
    }
    const bool is_flag = option->get_expected_max() == 0;
    if (is_flag != node.is_boolean()) {
      throw Error(where + (is_flag ? ": expected true or false" : ": expected a text or a number"));
    }
    try {
      for (const std::string& value : values) {
        // Turns "no-trim = true" around, as the flag --no-trim does.
        option->add_result(is_flag ? option->get_flag_value(key, value) : value);
      }
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw Error(where + ": " + explain(app, error));
    }
  }
}

}  // namespace kvzap::driver
