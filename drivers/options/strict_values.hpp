// Values of options: texts as they stand, numbers as they are written.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// An option that may be given several times, each time with one text, which is taken as it stands.
/// (CLI11 reads "[a, b]" and "{}" as lists where the variable is a std::vector.)
CLI::Option* add_texts(CLI::App& app, const std::string& names, std::vector<std::string>& texts,
                       const std::string& help);

/// Makes every option of `app` and of its subcommands take exactly what it was given: texts as they
/// stand, one for each flag, and decimal numbers within range, with nothing before or behind. Call
/// it once all options are declared. Which options are numbers, the names of their types say;
/// throws std::logic_error for a name that is unknown here.
void make_strict(CLI::App& app);

/// detail::in_quotes(text), with the length of a long one.
std::string in_quotes(const std::string& text);

}  // namespace kvzap::driver
