// The parameters of a policy or modifier: their declaration, and their values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvzap {

/// A parameter of a policy or modifier.
struct PolicyParameter {
  enum class Kind { integer, number, flag, text, file };

  std::string name;  // the name in name:key=value
  Kind kind = Kind::number;
  std::string standard;  // default value; empty: the parameter is required
  double least = 0;      // integer and number: the valid range
  double most = 0;
  std::vector<std::string> choices;  // text: the valid values
  std::string help;                  // meaning, with its unit
  /// May be omitted although it has no default value; its text is then empty.
  bool optional = false;

  /// Returns whether this value is the name of a file or folder, and not a default such as "none".
  bool names_file(const std::string& value) const {
    return kind == Kind::file && !value.empty() && value != standard;
  }
};

/// Values of a policy's parameters. All of them are present and valid.
class PolicyArguments {
 public:
  PolicyArguments() = default;
  explicit PolicyArguments(std::map<std::string, std::string> values)
      : m_values(std::move(values)) {}
  /// Returns whether an optional parameter was given.
  bool has(const std::string& name) const { return !text(name).empty(); }
  std::int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  bool flag(const std::string& name) const;
  const std::string& text(const std::string& name) const;

 private:
  std::map<std::string, std::string> m_values;
};

/// Base of a struct with the values of a policy's parameters. One line declares, documents and
/// reads a parameter:
///
///     struct Parameters : PolicyParameters {
///       std::int64_t window = integer("window", 64, {1, 4096}, "newest tokens that count");
///       bool scaled = flag("scaled", false, "divide products by sqrt(head_dim)");
///     };
///
/// Parameters{} has the default values, values_of<Parameters> those of PolicyArguments.
class PolicyParameters {
 public:
  PolicyParameters() = default;
  /// Appends the description of each parameter to `list`.
  explicit PolicyParameters(std::vector<PolicyParameter>& list) : m_list(&list) {}
  explicit PolicyParameters(const PolicyArguments& arguments) : m_arguments(&arguments) {}

 protected:
  /// The valid values of a number, both ends included.
  struct Range {
    double least;
    double most;
  };
  std::int64_t integer(const char* name, std::int64_t standard, Range range, const char* help);
  double number(const char* name, double standard, Range range, const char* help);
  /// A number of any size that may be omitted.
  std::optional<double> optional_number(const char* name, const char* help);
  bool flag(const char* name, bool standard, const char* help);
  /// One of `choices`.
  std::string text(const char* name, const char* standard, std::vector<std::string> choices,
                   const char* help);
  /// A file or folder. Required if `standard` is empty.
  std::string file(const char* name, const char* standard, const char* help);
  /// A file or folder; "" if it is omitted.
  std::string optional_file(const char* name, const char* help);

 private:
  /// Describes the parameter if there is a list. Returns its value, or nothing for its default.
  const std::string* read(const PolicyParameter& parameter);

  // They are used only while the members of the derived struct are initialized.
  std::vector<PolicyParameter>* m_list = nullptr;
  const PolicyArguments* m_arguments = nullptr;
};

// A struct may have parameters of another struct as its base: the braces of the bases between are
// left out.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-braces"

/// Returns the descriptions of a struct of PolicyParameters, in the order of its members.
template <class Parameters>
std::vector<PolicyParameter> described() {
  std::vector<PolicyParameter> list;
  static_cast<void>(Parameters{PolicyParameters(list)});
  return list;
}

/// Returns the struct with the values of `arguments`.
template <class Parameters>
Parameters values_of(const PolicyArguments& arguments) {
  return Parameters{PolicyParameters(arguments)};
}

#pragma GCC diagnostic pop

}  // namespace kvzap
