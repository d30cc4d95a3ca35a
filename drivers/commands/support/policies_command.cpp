#include "commands/support/policies_command.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "policy/check_names.hpp"
#include "policy/named.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::ordered_json;
using Kind = PolicyParameter::Kind;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::integer:
      return "integer";
    case Kind::number:
      return "number";
    case Kind::flag:
      return "flag";
    case Kind::text:
      return "text";
    case Kind::file:
      return "file";
  }
  return "unknown";
}

bool has_range(const PolicyParameter& p) {
  return p.kind == Kind::integer || p.kind == Kind::number;
}

/// Returns whether the value is a real bound, not a placeholder for none.
bool is_bound(double value) { return std::fabs(value) < 1e15; }

std::string values_text(const PolicyParameter& p) {
  if (p.kind == Kind::flag) return "on or off";
  if (p.kind == Kind::text) return fmt::format("{}", fmt::join(p.choices, ", "));
  if (p.kind == Kind::file) return "file or folder";
  const std::string kind = p.kind == Kind::integer ? "whole number" : "number";
  if (is_bound(p.least) && is_bound(p.most)) {
    return fmt::format("{}, {:.15g} to {:.15g}", kind, p.least, p.most);
  }
  return is_bound(p.least) ? fmt::format("{}, {:.15g} or more", kind, p.least) : kind;
}

std::string row(const std::string& name, const std::string& text, int width) {
  return text.empty() ? "" : fmt::format("  {:<{}} {}\n", name, width, text);
}

/// Returns "window=64", "surrogate=FILE" for a required parameter, and "[file=FILE]" for an
/// optional one.
std::string assignment(const PolicyParameter& p) {
  const std::string value =
      !p.standard.empty() ? p.standard : (p.kind == Kind::file ? "FILE" : "VALUE");
  const std::string text = p.name + "=" + value;
  return p.standard.empty() && p.optional ? "[" + text + "]" : text;
}

std::string parameter_rows(const std::vector<PolicyParameter>& parameters) {
  std::string text;
  for (const PolicyParameter& p : parameters) {
    text += row(text.empty() ? "keys" : "",
                fmt::format("{} ({}): {}", assignment(p), values_text(p), p.help), 8);
  }
  return text;
}

std::string amounts_text(const PolicyInfo& info) {
  if (info.has_own_budget)
    return "its own; accepts no --threshold, --evict-ratio, --keep-tokens or --kv-budget";
  if (info.repeats_context) return "--evict-ratio, --keep-tokens or --kv-budget";
  return "--threshold, --evict-ratio, --keep-tokens or --kv-budget";
}

std::string decode_text(const PolicyInfo& info) {
  const bool cuts = info.scores_again && !info.has_own_budget;
  if (info.judges_tokens) {
    return cuts ? "--prune always with --threshold, or --decode-every"
                : "--prune always with --threshold";
  }
  return cuts ? "--decode-every" : "all generated tokens stay";
}

std::string in_full(const PolicyInfo& info) {
  return info.name + "\n" + row("paper", info.paper, 8) + row("score", info.formula, 8) +
         row("needs", info.needs, 8) + row("cost", info.cost, 8) +
         row("budget", amounts_text(info), 8) + row("decode", decode_text(info), 8) +
         row("moment", info.needs_question ? "--prune-after question" : "", 8) +
         parameter_rows(info.parameters);
}

std::string in_full(const ModifierInfo& info) {
  return "+" + info.name + "\n" + row("paper", info.paper, 8) + row("effect", info.effect, 8) +
         parameter_rows(info.parameters);
}

ordered_json to_json(const std::vector<PolicyParameter>& parameters) {
  ordered_json list = ordered_json::array();
  for (const PolicyParameter& p : parameters) {
    ordered_json json = {{"name", p.name}, {"kind", name_of(p.kind)}};
    json["default"] = p.standard.empty() ? ordered_json() : ordered_json(p.standard);
    json["required"] = p.standard.empty() && !p.optional;
    if (has_range(p)) {
      // JSON has no infinity: null means no bound.
      json["least"] = is_bound(p.least) ? ordered_json(p.least) : ordered_json();
      json["most"] = is_bound(p.most) ? ordered_json(p.most) : ordered_json();
    }
    if (p.kind == Kind::text) json["choices"] = p.choices;
    json["help"] = p.help;
    list.push_back(std::move(json));
  }
  return list;
}

ordered_json to_json(const PolicyInfo& info) {
  return {{"name", info.name},
          {"paper", info.paper},
          {"formula", info.formula},
          {"needs", info.needs},
          {"cost", info.cost},
          {"judges_tokens", info.judges_tokens},
          {"scores_parts", info.scores_parts},
          {"scores_again", info.scores_again},
          {"needs_question", info.needs_question},
          {"repeats_context", info.repeats_context},
          {"has_own_budget", info.has_own_budget},
          {"parameters", to_json(info.parameters)}};
}

ordered_json to_json(const ModifierInfo& info) {
  return {{"name", info.name},
          {"paper", info.paper},
          {"effect", info.effect},
          {"parameters", to_json(info.parameters)}};
}

/// Removes a leading +: "+ada" and "ada" are the same modifier.
std::string plain(const std::string& name) {
  return name.rfind('+', 0) == 0 ? name.substr(1) : name;
}

}  // namespace

std::vector<std::string> policy_names() { return policy::names_of(policies()); }

std::vector<std::string> modifier_names() { return policy::names_of(modifiers()); }

std::string known_policy(const std::string& name) {
  if (policy::find_named(policies(), name) || policy::find_named(modifiers(), plain(name)))
    return "";
  std::vector<std::string> names = policy_names();
  for (const std::string& modifier : modifier_names()) names.push_back(modifier);
  const std::string nearest = policy::nearest_policy(plain(name), names);
  return fmt::format(
      "'{}' is not a policy or modifier{}", name,
      nearest.empty() ? "; kvzap policies lists them" : "; did you mean " + nearest + "?");
}

std::string parameters_text(const std::vector<PolicyParameter>& parameters) {
  std::vector<std::string> parts;
  parts.reserve(parameters.size());
  for (const PolicyParameter& p : parameters) {
    parts.push_back(assignment(p));
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

std::string policies_text(const std::string& name) {
  if (!name.empty()) {
    const PolicyInfo* policy = policy::find_named(policies(), name);
    return policy ? in_full(*policy) : in_full(*policy::find_named(modifiers(), plain(name)));
  }
  std::string text = "Policies, for kvzap run --policy NAME[:key=value,...][+MODIFIER...]:\n";
  const int width = 19;
  for (const PolicyInfo& info : policies()) {
    text += row(info.name, info.paper, width) + row("", "needs " + info.needs, width) +
            row("", parameters_text(info.parameters), width);
  }
  text += "\nModifiers; a combination without a meaning is an error:\n";
  for (const ModifierInfo& info : modifiers()) {
    text += row("+" + info.name, info.effect, width) + row("", info.paper, width) +
            row("", parameters_text(info.parameters), width);
  }
  return text + "\nkvzap policies NAME shows one of them in detail.\n";
}

ordered_json policies_json(const std::string& name) {
  if (!name.empty()) {
    const PolicyInfo* policy = policy::find_named(policies(), name);
    return policy ? to_json(*policy) : to_json(*policy::find_named(modifiers(), plain(name)));
  }
  ordered_json json = {{"format", "kvzap.policies"},
                       {"format_version", 1},
                       {"policies", ordered_json::array()},
                       {"modifiers", ordered_json::array()}};
  for (const PolicyInfo& info : policies()) json["policies"].push_back(to_json(info));
  for (const ModifierInfo& info : modifiers()) json["modifiers"].push_back(to_json(info));
  return json;
}

}  // namespace kvzap::driver
