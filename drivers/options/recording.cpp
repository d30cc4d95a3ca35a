#include "options/recording.hpp"

#include <string>

namespace kvzap::driver {
namespace {

CLI::Validator mark(const std::string& name) {
  return CLI::Validator([](std::string&) { return std::string(); }, "", name);
}

bool has(const CLI::Option& option, const CLI::Validator& mark) {
  try {
    // CLI11 has no const access to validators.
    return const_cast<CLI::Option&>(option).get_validator(mark.get_name()) != nullptr;
  } catch (const CLI::OptionNotFound&) {
    return false;
  }
}

}  // namespace

const CLI::Validator& not_recorded() {
  static const CLI::Validator validator = mark("not recorded");
  return validator;
}

const CLI::Validator& may_change() {
  static const CLI::Validator validator = mark("may change");
  return validator;
}

Recording recording_of(const CLI::Option& option) {
  const std::string& group = option.get_group();
  if (group == "Output" || group == "Snapshots" || has(option, not_recorded())) {
    return Recording::none;
  }
  return group == "Generation" || has(option, may_change()) ? Recording::free : Recording::fixed;
}

}  // namespace kvzap::driver
