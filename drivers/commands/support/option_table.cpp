#include "commands/support/option_table.hpp"

#include "commands/support/policies_command.hpp"

namespace kvzap::driver {
namespace {

Entry entry_of(const CLI::Option& option) {
  Entry entry;
  for (const std::string& name : option.get_snames()) entry.flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) entry.flags.push_back("--" + name);
  entry.name = option.get_name(true);
  entry.description = option.get_description();
  entry.default_text = option.get_default_str();
  entry.group = option.get_group();
  entry.repeats = option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
  entry.is_required = option.get_required();
  // CLI11's type, such as "TEXT:{f32,bf16}", with the text of validators
  const std::string type = option.get_type_name();
  entry.type = type.substr(0, type.find(':'));
  if (entry.type == "UINT") entry.type = "INT";  // CLI11's word for unsigned integers
  const auto begin = type.find('{');
  const auto end = type.find('}', begin);
  if (option.get_expected_max() == 0) {
    entry.kind = ValueKind::none;
  } else if (begin != std::string::npos && end != std::string::npos) {
    entry.kind = ValueKind::choice;
    std::string choice;
    for (const char c : type.substr(begin + 1, end - begin - 1) + ",") {
      if (c == ',') {
        entry.choices.push_back(choice);
        choice.clear();
      } else if (c != ' ') {
        choice += c;
      }
    }
  } else if (entry.type == "POLICY") {
    // The option takes the text of a policy.
    entry.kind = ValueKind::policy;
    entry.choices = policy_names();
    if (entry.flags.empty()) {
      for (const std::string& name : modifier_names()) entry.choices.push_back(name);
    }
  } else if (entry.type == "DIR") {
    entry.kind = ValueKind::folder;
  } else if (entry.type == "FILE" || entry.type == "DECK") {
    entry.kind = ValueKind::file;
  } else if (entry.type == "MODEL") {
    entry.kind = ValueKind::model;
  }
  return entry;
}

}  // namespace

std::vector<Entry> entries_of(const CLI::App& app) {
  std::vector<Entry> entries;
  for (const CLI::Option* option : app.get_options()) entries.push_back(entry_of(*option));
  return entries;
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  const auto any = [](const CLI::App*) { return true; };
  return app.get_subcommands(any);
}

}  // namespace kvzap::driver
