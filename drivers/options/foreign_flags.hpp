// Flags of llama.cpp, vLLM, ollama and transformers, and what they mean in kvzap.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap::driver {

/// A flag of other programs. A command that declares an option of this name uses its own. Of
/// several entries of one name, the first counts that is no alias, or one of an option of the
/// command.
struct ForeignFlag {
  enum class Value {
    none,     // takes no value
    one,      // takes one
    may_have  // may take one: on, off, auto, true, false, 0 or 1
  };
  enum class Remedy {
    alias,    // `text` is kvzap's option, which has the same meaning: "--n-predict"
    ignored,  // kvzap does this already; `text` says how
    refused   // `text` names kvzap's option, or says why there is none
  };
  std::vector<std::string_view> names;
  std::string_view programs;
  Value value = Value::none;
  Remedy remedy = Remedy::refused;
  /// {value} stands for the user's value; {chat}, {mpirun} and {download} for command lines with
  /// the user's other arguments.
  std::string_view text;
  /// Of a flag that is ignored, or an alias: an option of the commands in which it has a meaning.
  std::string_view where = "";
  /// Of a flag that is refused: values that are the same as kvzap's default, with which it is
  /// ignored.
  std::vector<std::string_view> harmless = {};
};

const std::vector<ForeignFlag>& foreign_flags();

/// Returns the entry of a flag for a command, or the last one if none is for it; nullptr if there
/// is no entry. `name` has its dashes, and - for _.
const ForeignFlag* find_foreign_flag(const CLI::App& command, std::string_view name);

}  // namespace kvzap::driver
