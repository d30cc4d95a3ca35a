#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/pruning.hpp>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "files/escaped_list.hpp"
#include "files/json_field.hpp"
#include "files/missing_file.hpp"
#include "files/nearest.hpp"
#include "model/find_model.hpp"
#include "model/model_folder.hpp"
#include "policy/check_names.hpp"
#include "policy/named.hpp"
#include "policy/pruning_text.hpp"

namespace kvzap {
namespace {

using Kind = PolicyParameter::Kind;

template <class Number>
std::optional<Number> read_number(std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [used, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || used != end) return std::nullopt;
  return number;
}

// Returns the shortest text that gives the number: 0.02, 1e-6.
std::string shortest(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number);
  std::string result(text.data(), end.ptr);
  const std::size_t exponent = result.find("e-0");
  return exponent == std::string::npos ? result : result.erase(exponent + 2, 1);
}

// Joins names: "a, b, c".
std::string list_of(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

// Returns the end of an error message: the name that `name` means, if there is one.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& names) {
  const std::string nearest = policy::nearest_policy(name, names);
  return nearest.empty() ? "." : fmt::format("; did you mean {}?", nearest);
}

// Describes the values of a parameter for messages: "a whole number from 1 to 64".
std::string expected(const PolicyParameter& parameter) {
  const bool at_least = std::isfinite(parameter.least) && parameter.least > -1e300;
  const bool at_most = std::isfinite(parameter.most) && parameter.most < 1e300;
  std::string range;
  if (at_least && at_most) {
    range = fmt::format(" from {:.12g} to {:.12g}", parameter.least, parameter.most);
  } else if (at_least) {
    range = fmt::format(" of at least {:.12g}", parameter.least);
  } else if (at_most) {
    range = fmt::format(" of at most {:.12g}", parameter.most);
  }
  switch (parameter.kind) {
    case Kind::integer:
      return "a whole number" + range;
    case Kind::number:
      return "a number" + range;
    case Kind::flag:
      return "on or off";
    case Kind::text:
      return "one of " + list_of(parameter.choices);
    case Kind::file:
      return "a file or folder";
  }
  return "";
}

bool is_valid(const PolicyParameter& parameter, const std::string& value) {
  const auto within = [&](double number) {
    // (False for NaN.)
    return number >= parameter.least && number <= parameter.most && std::isfinite(number);
  };
  switch (parameter.kind) {
    case Kind::integer: {
      const auto number = read_number<std::int64_t>(value);
      return number && within(static_cast<double>(*number));
    }
    case Kind::number: {
      const auto number = read_number<double>(value);
      return number && within(*number);
    }
    case Kind::flag:
      return value == "on" || value == "off";
    case Kind::text:
      return parameter.choices.empty() ||
             std::find(parameter.choices.begin(), parameter.choices.end(), value) !=
                 parameter.choices.end();
    case Kind::file:
      return !value.empty();
  }
  return false;
}

/// How much of a policy's text must be there.
enum class Completeness { names, all };

void check(const std::string& what, const PolicyParameter& parameter, const std::string& value,
           Completeness completeness) {
  if (!is_valid(parameter, value)) {
    throw Error(fmt::format("{}: {} is \"{}\"; expected {}", what, parameter.name, value,
                            expected(parameter)));
  }
  // A file parameter that may be omitted has a default such as "none".
  std::error_code ignored;
  if (completeness == Completeness::all && parameter.kind == Kind::file &&
      value != parameter.standard && !std::filesystem::exists(value, ignored)) {
    throw files::MissingFile(fmt::format("{}: {} is \"{}\", and there is no such file{}", what,
                                         parameter.name, value, model::hub_hint(value)));
  }
}

PolicyText::Part part_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return {text, {}};
  return {text.substr(0, colon), files::split_unescaped(text.substr(colon + 1), ',')};
}

std::string text_of(const PolicyText::Part& part) {
  if (part.arguments.empty()) return part.name;
  return fmt::format("{}:{}", part.name, fmt::join(part.arguments, ","));
}

std::string key_of(const std::string& argument) { return argument.substr(0, argument.find('=')); }

// Returns the value of "key=value"; empty without one.
std::string value_of(const std::string& argument) {
  const std::size_t equals = std::min(argument.find('='), argument.size() - 1);
  return files::without_escapes(argument.substr(equals + 1), ",+");
}

// `what` names the policy or modifier in messages.
PolicyArguments read_arguments(const PolicyText::Part& part, const std::string& what,
                               const std::vector<PolicyParameter>& parameters,
                               Completeness completeness) {
  std::map<std::string, std::string> values;
  for (const std::string& argument : part.arguments) {
    if (argument.find('=') == std::string::npos) {
      throw Error(fmt::format("{}: \"{}\" is not key=value", what, argument));
    }
    const std::string key = key_of(argument);
    const PolicyParameter* const parameter = policy::find_named(parameters, key);
    if (!parameter) {
      if (parameters.empty()) {
        throw Error(fmt::format("{} has no parameter \"{}\", nor any other", what, key));
      }
      const std::vector<std::string> keys = policy::names_of(parameters);
      throw Error(fmt::format("{} has no parameter \"{}\"{} It has {}", what, key,
                              did_you_mean(key, keys), list_of(keys)));
    }
    const std::string value = value_of(argument);
    check(what, *parameter, value, completeness);
    if (!values.emplace(key, value).second) {
      throw Error(fmt::format("{}: {} is given twice", what, key));
    }
  }
  for (const PolicyParameter& parameter : parameters) {
    if (values.count(parameter.name) != 0) continue;
    if (parameter.standard.empty() && !parameter.optional && completeness == Completeness::all) {
      throw Error(fmt::format("{0} needs {1}: {2} ({1}={3})", what, parameter.name, parameter.help,
                              parameter.kind == Kind::file ? "FILE" : "VALUE"));
    }
    values.emplace(parameter.name, parameter.standard);
  }
  return PolicyArguments(std::move(values));
}

void check_alone(const PolicySpec& spec) {
  for (const auto& [alone, arguments] : spec.modifiers) {
    if (!alone->is_alone || spec.modifiers.size() < 2) continue;
    const std::size_t other = spec.modifiers[0].first == alone ? 1 : 0;
    throw Error(fmt::format("modifier {} gives each head its own rows: it excludes modifier {}",
                            alone->name, spec.modifiers[other].first->name));
  }
}

PolicySpec parse_as(const PolicyText& text, Completeness completeness) {
  PolicySpec spec;
  spec.text = text.text();
  const std::string& name = text.name();
  spec.info = text.info();
  if (!spec.info) {
    if (policy::find_named(modifiers(), name)) {
      throw Error(fmt::format("{0} is a modifier, not a policy: write POLICY+{0}", name));
    }
    const std::vector<std::string> names = policy::names_of(policies());
    throw Error(fmt::format("there is no policy {}{} Policies: {}", files::abbreviated(name),
                            did_you_mean(name, names), list_of(names)));
  }
  spec.arguments =
      read_arguments(text.policy(), "policy " + name, spec.info->parameters, completeness);
  for (const PolicyText::Part& part : text.modifiers()) {
    const std::string& modifier = part.name;
    const ModifierInfo* const info = policy::find_named(modifiers(), modifier);
    if (!info) {
      if (policy::find_named(policies(), modifier)) {
        throw Error(fmt::format("{} and {} are both policies: give one", name, modifier));
      }
      const std::vector<std::string> names = policy::names_of(modifiers());
      throw Error(fmt::format("there is no modifier {}{} Modifiers: {}",
                              files::abbreviated(modifier), did_you_mean(modifier, names),
                              list_of(names)));
    }
    for (const auto& [other, arguments] : spec.modifiers) {
      if (other == info) throw Error(fmt::format("modifier {} is given twice", modifier));
    }
    spec.modifiers.emplace_back(
        info, read_arguments(part, "modifier " + modifier, info->parameters, completeness));
  }
  // All infos lie in one vector, so their addresses have its order.
  std::sort(spec.modifiers.begin(), spec.modifiers.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  check_alone(spec);
  return spec;
}

}  // namespace

const std::string& PolicyArguments::text(const std::string& name) const {
  const auto found = m_values.find(name);
  if (found == m_values.end()) throw Error(fmt::format("policy: no parameter {} here", name));
  return found->second;
}

std::int64_t PolicyArguments::integer(const std::string& name) const {
  const auto number = read_number<std::int64_t>(text(name));
  if (!number) throw Error(fmt::format("policy: {} is \"{}\"", name, text(name)));
  return *number;
}

double PolicyArguments::number(const std::string& name) const {
  const auto number = read_number<double>(text(name));
  if (!number) throw Error(fmt::format("policy: {} is \"{}\"", name, text(name)));
  return *number;
}

bool PolicyArguments::flag(const std::string& name) const { return text(name) == "on"; }

const std::string* PolicyParameters::read(const PolicyParameter& parameter) {
  if (m_list) m_list->push_back(parameter);
  return m_arguments ? &m_arguments->text(parameter.name) : nullptr;
}

std::int64_t PolicyParameters::integer(const char* name, std::int64_t standard, Range range,
                                       const char* help) {
  const bool given = read(
      {name, Kind::integer, std::to_string(standard), range.least, range.most, {}, help, false});
  return given ? m_arguments->integer(name) : standard;
}

double PolicyParameters::number(const char* name, double standard, Range range, const char* help) {
  const bool given =
      read({name, Kind::number, shortest(standard), range.least, range.most, {}, help, false});
  return given ? m_arguments->number(name) : standard;
}

std::optional<double> PolicyParameters::optional_number(const char* name, const char* help) {
  using Limits = std::numeric_limits<double>;
  const std::string* const given =
      read({name, Kind::number, "", Limits::lowest(), Limits::max(), {}, help, true});
  if (!given || given->empty()) return std::nullopt;
  return m_arguments->number(name);
}

bool PolicyParameters::flag(const char* name, bool standard, const char* help) {
  const bool given = read({name, Kind::flag, standard ? "on" : "off", 0, 0, {}, help, false});
  return given ? m_arguments->flag(name) : standard;
}

std::string PolicyParameters::text(const char* name, const char* standard,
                                   std::vector<std::string> choices, const char* help) {
  const std::string* const given =
      read({name, Kind::text, standard, 0, 0, std::move(choices), help, false});
  return given ? *given : standard;
}

std::string PolicyParameters::file(const char* name, const char* standard, const char* help) {
  const std::string* const given = read({name, Kind::file, standard, 0, 0, {}, help, false});
  return given ? *given : standard;
}

std::string PolicyParameters::optional_file(const char* name, const char* help) {
  const std::string* const given = read({name, Kind::file, "", 0, 0, {}, help, true});
  return given ? *given : "";
}

PolicyText::PolicyText(const std::string& text) {
  const std::vector<std::string> parts = files::split_unescaped(text, '+');
  m_policy = part_of(parts.front());
  for (std::size_t i = 1; i < parts.size(); ++i) m_modifiers.push_back(part_of(parts[i]));
  m_info = policy::find_named(policies(), m_policy.name);
}

PolicyText::PolicyText(std::shared_ptr<const PolicyInfo> own)
    : m_policy{own->name, {}}, m_info(own.get()), m_own(std::move(own)) {}

std::string PolicyText::text() const {
  std::string text = text_of(m_policy);
  for (const Part& part : m_modifiers) text += "+" + text_of(part);
  return text;
}

std::optional<std::string> PolicyText::value(const std::string& parameter) const {
  for (const std::string& argument : m_policy.arguments) {
    if (key_of(argument) == parameter) return value_of(argument);
  }
  return {};
}

void PolicyText::add(const std::string& parameter, const std::string& value) {
  m_policy.arguments.insert(m_policy.arguments.begin(), parameter + "=" + escaped_in_policy(value));
}

PolicyText PolicyText::with_files(const FileChange& change) const {
  PolicyText changed = *this;
  const auto change_part = [&](Part& part, const auto* info) {
    if (!info) return;
    for (std::string& argument : part.arguments) {
      const PolicyParameter* const parameter =
          policy::find_named(info->parameters, key_of(argument));
      if (!parameter || parameter->kind != Kind::file) continue;
      const std::string file = change(part.name, *parameter, value_of(argument));
      argument = parameter->name + "=" + escaped_in_policy(file);
    }
  };
  change_part(changed.m_policy, m_info);
  for (Part& part : changed.m_modifiers)
    change_part(part, policy::find_named(kvzap::modifiers(), part.name));
  return changed;
}

const PolicyInfo& policy::with_surrogate() {
  return *std::find_if(policies().begin(), policies().end(),
                       [](const PolicyInfo& info) { return !info.surrogate.empty(); });
}

PolicySpec parse_policy(const PolicyText& text) { return parse_as(text, Completeness::all); }

std::string policy::nearest_policy(std::string_view name, const std::vector<std::string>& names) {
  constexpr std::string_view ending = "Press";
  constexpr std::size_t shortest = 3;
  if (name.size() > ending.size() && name.substr(name.size() - ending.size()) == ending) {
    name.remove_suffix(ending.size());
  }
  const auto begins = [](std::string_view text, std::string_view begin) {
    return text.substr(0, begin.size()) == begin;
  };
  const auto longer = std::find_if(names.begin(), names.end(), [&](const std::string& one) {
    const bool adds = begins(name, one) && name.substr(one.size()).find_first_of("-_") == 0;
    return name.size() >= shortest && (begins(one, name) || adds);
  });
  return longer != names.end() ? *longer : files::nearest_name(name, names);
}

void policy::check_names(const PolicyText& text) {
  if (!text.empty()) static_cast<void>(parse_as(text, Completeness::names));
}

}  // namespace kvzap
