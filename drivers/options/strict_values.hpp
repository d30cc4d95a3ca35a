// Strict parsing of option values: texts unchanged, numbers in decimal.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Adds an option that may be given several times, each time with one text, which is used
/// unchanged. (CLI11 reads "[a, b]" and "{}" as lists if the variable is a std::vector.)
CLI::Option* add_texts(CLI::App& app, const std::string& names, std::vector<std::string>& texts,
                       const std::string& help);

/// Makes every option of `app` and of its subcommands take exactly the given value. Texts are
/// unchanged, one for each flag. Numbers are decimal and within range, with no text before or
/// after. Call it once all options are declared. An option's type name tells whether it is a
/// number. Throws std::logic_error for an unknown type name.
void make_strict(CLI::App& app);

/// Returns files::in_quotes(text), with the length of a long text.
std::string in_quotes(const std::string& text);

}  // namespace kvzap::driver
