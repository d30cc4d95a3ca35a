// The arguments of one command, with kvzap's own names for everything.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "options/foreign_flags.hpp"
#include "options/shell_call.hpp"

namespace kvzap::driver {

/// Returns whether an argument asks for help, or for the version, of a command or of the program.
bool is_help(const std::string& argument);
bool is_version(const std::string& argument);
/// Returns whether an argument begins with a dash and is not "-" alone.
bool is_option(const std::string& argument);
/// Returns whether a command takes arguments without a flag.
bool has_positionals(const CLI::App& command);

/// Reads the arguments of one command.
class CommandReader {
 public:
  CommandReader(const CLI::App& app, const CLI::App& command) : m_app(app), m_command(command) {}

  void read(const std::vector<std::string>& arguments);

  bool wants_help() const { return m_wants_help; }
  bool wants_version() const { return m_wants_version; }
  const std::vector<std::string>& kokkos() const { return m_kokkos; }
  const std::vector<std::string>& notes() const { return m_notes; }
  /// The first fault, or "".
  std::string error() const;
  /// Whether every option is known, here or as one of another program.
  bool knows_all() const { return !m_fault; }
  bool has(const char* flag) const;
  std::vector<std::string> own() const;
  /// The command line with its positional arguments given as options; "kvzap COMMAND …" if one of
  /// them has no option, or if an option is not of this command.
  std::string call() const;
  /// "did you mean: " and the call; with a fault, the command and the fault.
  std::string suggestion() const;

 private:
  std::size_t read_option(const std::vector<std::string>& arguments, std::size_t at);
  void add_own(const CLI::Option& option, const std::string& given,
               const std::optional<std::string>& value);
  std::size_t read_foreign(const ForeignFlag& foreign, const std::string& flag,
                           const std::optional<std::string>& joined,
                           const std::vector<std::string>& arguments, std::size_t at);
  std::optional<std::string> value_at(const CLI::Option& option, const std::string& flag,
                                      const std::vector<std::string>& arguments, std::size_t at);
  void refuse(const std::function<std::string()>& fault) {
    if (!m_fault) m_fault = fault;
    ++m_faults;
  }
  std::string instead_of(const ForeignFlag& foreign, const std::string& value) const;
  bool place(std::vector<Argument>& arguments, std::size_t at, bool& continues) const;
  std::optional<std::vector<Argument>> placed() const;

  const CLI::App& m_app;
  const CLI::App& m_command;
  std::vector<Argument> m_arguments;
  std::vector<std::string> m_kokkos;
  std::vector<std::string> m_notes;
  std::function<std::string()> m_fault;  // the first
  int m_faults = 0;
  bool m_wants_help = false;
  bool m_wants_version = false;
};

}  // namespace kvzap::driver
