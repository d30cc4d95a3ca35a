// A policy as a text names it, split into its parts.
#pragma once

#include <functional>
#include <kvzap/engine/policy_parameters.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvzap {

struct PolicyInfo;

/// A policy with its modifiers: "name:key=value,key=value+modifier:key=value+…". A backslash before
/// , or + makes it part of a value. The text is split once, when it is given. Names, keys and
/// values need not be valid: parse_policy checks them.
class PolicyText {
 public:
  /// "name:key=value,key=value"
  struct Part {
    std::string name;
    std::vector<std::string> arguments;  // "key=value", with backslashes
  };

  PolicyText() = default;
  PolicyText(const std::string& text);  // NOLINT(google-explicit-constructor)
  PolicyText(const char* text)          // NOLINT(google-explicit-constructor)
      : PolicyText(std::string(text)) {}
  /// A policy of the caller's own, whatever its name in the registry.
  explicit PolicyText(std::shared_ptr<const PolicyInfo> own);

  bool operator==(const PolicyText& other) const {
    return m_own == other.m_own && text() == other.text();
  }
  bool operator!=(const PolicyText& other) const { return !(*this == other); }

  /// Returns the text, unchanged.
  std::string text() const;
  bool empty() const {
    return m_policy.name.empty() && m_policy.arguments.empty() && m_modifiers.empty();
  }
  const Part& policy() const { return m_policy; }
  const std::vector<Part>& modifiers() const { return m_modifiers; }
  const std::string& name() const { return m_policy.name; }
  /// Returns the policy with this name, or null if there is none.
  const PolicyInfo* info() const { return m_info; }
  bool is_own() const { return m_own != nullptr; }

  /// Returns the value of a parameter of the policy itself, if the text gives it.
  std::optional<std::string> value(const std::string& parameter) const;
  /// Puts an argument of the policy itself before the others.
  void add(const std::string& parameter, const std::string& value);
  /// Returns the text with other files: `change(name, parameter, value)` replaces each argument
  /// that can be a file. `name`: of the policy or modifier.
  using FileChange = std::function<std::string(
      const std::string& name, const PolicyParameter& parameter, const std::string& value)>;
  PolicyText with_files(const FileChange& change) const;

 private:
  Part m_policy;
  std::vector<Part> m_modifiers;
  const PolicyInfo* m_info = nullptr;
  std::shared_ptr<const PolicyInfo> m_own;
};

}  // namespace kvzap
