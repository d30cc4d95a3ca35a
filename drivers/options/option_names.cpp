#include "options/option_names.hpp"

#include <algorithm>
#include <string_view>
#include <vector>

#include "files/nearest.hpp"
#include "options/foreign_flags.hpp"

namespace kvzap::driver {

const CLI::App* find_command(const CLI::App& app, const std::string& name) {
  const auto found =
      app.get_subcommands([&](const CLI::App* one) { return one->get_name() == name; });
  return found.empty() ? nullptr : found.front();
}

std::string plain_spelling(const std::string& flag) {
  std::string text = flag;
  std::replace(text.begin(), text.end(), '_', '-');
  return text;
}

std::string with_plain_dashes(const std::string& argument) {
  // U+2010 to U+2015 and the minus sign
  static const std::vector<std::string> dashes = {"\u2010", "\u2011", "\u2012", "\u2013",
                                                  "\u2014", "\u2015", "\u2212"};
  std::string_view rest = argument;
  const auto skip = [&](std::string_view dash) {
    const bool is_there = rest.substr(0, dash.size()) == dash;
    if (is_there) rest.remove_prefix(dash.size());
    return is_there;
  };
  const auto skip_any = [&] { return std::any_of(dashes.begin(), dashes.end(), skip); };
  if (!skip_any()) return argument;
  while (skip_any() || skip("-")) continue;
  const bool is_short = rest.substr(0, rest.find('=')).size() == 1;
  return (is_short ? "-" : "--") + std::string(rest);
}

const CLI::Option* own_option(const CLI::App& command, const std::string& flag) {
  if (const CLI::Option* const option = command.get_option_no_throw(flag)) return option;
  const std::string plain = plain_spelling(flag);
  if (plain.rfind("--", 0) == 0) return command.get_option_no_throw(plain);
  return plain.size() > 2 ? command.get_option_no_throw("-" + plain) : nullptr;
}

std::string own_name(const CLI::App& command, const std::string& name) {
  const std::string plain = plain_spelling(name);
  if (command.get_option_no_throw("--" + plain)) return plain;
  const ForeignFlag* const foreign = find_foreign_flag(command, "--" + plain);
  if (!foreign || foreign->remedy != ForeignFlag::Remedy::alias) return "";
  // Its text has a value if it stands for one of several.
  const bool is_option = command.get_option_no_throw(std::string(foreign->text)) != nullptr;
  return is_option ? std::string(foreign->text.substr(2)) : "";
}

std::string nearest_option(const CLI::App& command, const std::string& name) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  }
  for (const ForeignFlag& flag : foreign_flags()) {
    const std::string ours(flag.text.substr(0, flag.text.find('=')));
    if (flag.remedy != ForeignFlag::Remedy::alias || !command.get_option_no_throw(ours)) continue;
    for (const std::string_view foreign : flag.names) {
      if (foreign.rfind("--", 0) == 0) names.emplace_back(foreign.substr(2));
    }
  }
  return files::nearest_name(name, names);
}

std::string commands_with(const CLI::App& app, const std::string& flag) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_option_no_throw(flag)) names.push_back(command->get_name());
  }
  if (names.empty()) return "";
  std::string text = "kvzap ";
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " and ") + names[i];
  }
  return text + (names.size() == 1 ? " has" : " have");
}

}  // namespace kvzap::driver
