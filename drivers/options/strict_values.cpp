#include "options/strict_values.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>

#include "files/decimal.hpp"
#include "files/quote.hpp"
#include "model/find_model.hpp"

namespace kvzap::driver {
namespace {

using files::DecimalFault;

/// Quotes a text that would otherwise be hard to see.
std::string quoted_value(const std::string& text) {
  const bool is_plain =
      !text.empty() && text.size() <= 40 &&
      std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  return is_plain ? text : in_quotes(text);
}

/// Rewrites `text` such that CLI11 reads the same decimal number: it would read 010 as octal.
/// Returns the error in it, or "".
template <class T>
std::string normalize_whole(std::string& text) {
  T number{};
  switch (files::read_whole(text, number)) {
    case DecimalFault::none:
      text = fmt::format("{}", number);
      return "";
    case DecimalFault::range:
      if (std::is_unsigned_v<T> && text.front() == '-') {
        return fmt::format("is {}; expected 0 or more", quoted_value(text));
      }
      return fmt::format("is {}; expected a whole number from {} to {}", quoted_value(text),
                         std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
    default:
      return fmt::format("is {}; expected a whole number", quoted_value(text));
  }
}

std::string normalize_real(std::string& text) {
  double number = 0;
  switch (files::read_real(text, number)) {
    case DecimalFault::none:
      return "";
    case DecimalFault::range:
      return fmt::format("is {}; expected a number in the range of double", quoted_value(text));
    default:
      return fmt::format("is {}; expected a number", quoted_value(text));
  }
}

std::string normalize_score(std::string& text) {
  return text == "auto" ? "" : normalize_real(text);
}

std::string normalize_tokens(std::string& text) {
  return text == "auto" ? "" : normalize_whole<std::int64_t>(text);
}

/// Returns the error in a flag's value. CLI11 itself accepts any number as true.
std::string fault_of_flag(const std::string& text) {
  for (const char* value : {"true", "false", "on", "off", "yes", "no", "1", "0"}) {
    if (text == value) return "";
  }
  return fmt::format("is {}; expected no value, true or false", quoted_value(text));
}

/// A seed may be -1, which stands for a random one where the option allows it.
std::string normalize_seed(std::string& text) {
  return text == "-1" ? "" : normalize_whole<std::uint64_t>(text);
}

bool names_model(const CLI::Option& option) {
  return option.get_type_name() == "MODEL" || option.get_name() == "--surrogate";
}

std::string find_model(std::string& name) {
  if (!name.empty()) name = model::find_model(name);
  return "";
}

enum class ValueType { text, whole, unsigned_whole, real, score, tokens, seed };

ValueType type_of(const CLI::Option& option) {
  static const std::map<std::string, ValueType> types = {
      {"TEXT", ValueType::text},           {"DIR", ValueType::text},
      {"FILE", ValueType::text},           {"DECK", ValueType::text},
      {"MODEL", ValueType::text},          {"NAME", ValueType::text},
      {"TYPE", ValueType::text},           {"POLICY", ValueType::text},
      {"LIST", ValueType::text},           {"SIZE", ValueType::text},
      {"PAGES", ValueType::text},          {"INT", ValueType::whole},
      {"LEVEL", ValueType::whole},         {"FLOAT", ValueType::real},
      {"FACTOR", ValueType::real},         {"SEED", ValueType::seed},
      {"UINT", ValueType::unsigned_whole}, {"SCORE", ValueType::score},
      {"TOKENS", ValueType::tokens}};
  // Text from validators follows the type's name.
  const std::string type = option.get_type_name();
  if (type.find('{') != std::string::npos) return ValueType::text;  // one of several names
  const auto found = types.find(type.substr(0, type.find_first_of(":,;")));
  if (found == types.end()) {
    throw std::logic_error(fmt::format("option {}: type {} is not known to strict_values.cpp",
                                       option.get_name(), type));
  }
  return found->second;
}

}  // namespace

CLI::Option* add_texts(CLI::App& app, const std::string& names, std::vector<std::string>& texts,
                       const std::string& help) {
  return app
      .add_option(
          names,
          [&texts](const CLI::results_t& given) {
            texts = given;
            return true;
          },
          help)
      ->type_name("TEXT")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void make_strict(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    // Otherwise CLI11 reads "[a, b]" as a list, and takes the argument after a value as one more
    // value.
    if (option->get_positional()) continue;
    option->allow_extra_args(false);
    if (option->get_expected_max() == 0) {
      option->check(fault_of_flag);
      continue;
    }
    // A transformation runs before all checks.
    switch (type_of(*option)) {
      case ValueType::text:
        if (names_model(*option)) option->transform(CLI::Validator(find_model, ""));
        break;
      case ValueType::whole:
        option->transform(CLI::Validator(normalize_whole<std::int64_t>, ""));
        break;
      case ValueType::unsigned_whole:
        option->transform(CLI::Validator(normalize_whole<std::uint64_t>, ""));
        break;
      case ValueType::seed:
        option->transform(CLI::Validator(normalize_seed, ""));
        break;
      case ValueType::real:
        option->transform(CLI::Validator(normalize_real, ""));
        break;
      case ValueType::score:
        option->transform(CLI::Validator(normalize_score, ""));
        break;
      case ValueType::tokens:
        option->transform(CLI::Validator(normalize_tokens, ""));
        break;
    }
  }
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    make_strict(*command);
  }
}

std::string in_quotes(const std::string& text) {
  constexpr std::size_t most = 60;
  const std::string quoted = files::in_quotes(text, most);
  return text.size() <= most ? quoted : fmt::format("{} ({} bytes)", quoted, text.size());
}

}  // namespace kvzap::driver
