// Names of options and commands in the spellings that users type.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace kvzap::driver {

/// Returns the command of this name, or nullptr.
const CLI::App* find_command(const CLI::App& app, const std::string& name);

/// Returns a flag with - for _.
std::string plain_spelling(const std::string& flag);

/// Returns the argument with plain dashes if it begins with a dash of typography, which word
/// processors make of --.
std::string with_plain_dashes(const std::string& argument);

/// Returns the option of this name, or of the same name in another spelling (--n_predict, -window),
/// or nullptr. `flag` has its dashes.
const CLI::Option* own_option(const CLI::App& command, const std::string& flag);

/// Returns kvzap's name of an option of `command`, without dashes, for a name in another spelling
/// or of another program: n-predict for n_predict and max-tokens. Returns "" if there is none.
std::string own_name(const CLI::App& command, const std::string& name);

/// Returns the long option of `command`, or the flag of another program that it accepts, of which
/// `name` (without dashes) is likely a misspelling; "" if there is none.
std::string nearest_option(const CLI::App& command, const std::string& name);

/// Returns the commands with an option: "kvzap run, chat and eval have", "kvzap serve has", or "".
std::string commands_with(const CLI::App& app, const std::string& flag);

}  // namespace kvzap::driver
