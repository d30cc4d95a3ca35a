#include "jinja/template.hpp"

#include <fmt/format.h>

#include <kvzap/core/types.hpp>
#include <limits>
#include <utility>
#include <vector>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"
#include "jinja/parser.hpp"

namespace kvzap::jinja {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t base_steps = 1'000'000, base_bytes = 32 << 20, growth = 64;

[[noreturn]] void fail(const std::string& name, int line, const char* message) {
  throw Error(fmt::format("{}: line {}: {}", name, line, files::shown(message, 600)));
}

/// Returns about the bytes of a value.
std::int64_t size_of(const Json& json) {
  std::int64_t size = 16;
  if (json.is_string())
    size += static_cast<std::int64_t>(json.get_ref<const std::string&>().size());
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) {
      size += static_cast<std::int64_t>(key.size()) + size_of(value);
    }
  } else if (json.is_array()) {
    for (const Json& value : json) size += size_of(value);
  }
  return size;
}

int nesting_of(const Json& json, int depth = 0) {
  if (depth > max_value_depth) throw Error("a chat's messages are nested too deep");
  int deepest = depth;
  if (json.is_structured()) {
    for (const Json& value : json) deepest = std::max(deepest, nesting_of(value, depth + 1));
  }
  return deepest;
}

Value value_of(Evaluator& evaluator, const Json& json) {
  switch (json.type()) {
    case Json::value_t::boolean:
      return json.get<bool>();
    case Json::value_t::number_integer:
      return json.get<std::int64_t>();
    case Json::value_t::number_unsigned: {
      const auto number = json.get<std::uint64_t>();
      // Python's integers have no bound.
      if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return static_cast<double>(number);
      }
      return static_cast<std::int64_t>(number);
    }
    case Json::value_t::number_float:
      return json.get<double>();
    case Json::value_t::string:
      return evaluator.make_text(json.get<std::string>());
    case Json::value_t::array: {
      std::vector<Value> values;
      for (const Json& element : json) values.push_back(value_of(evaluator, element));
      return evaluator.make_sequence(std::move(values));
    }
    case Json::value_t::object: {
      std::vector<std::pair<Value, Value>> items;
      for (const auto& [key, element] : json.items()) {
        items.emplace_back(evaluator.make_text(key), value_of(evaluator, element));
      }
      return evaluator.make_dict(std::move(items));
    }
    default:
      return {};
  }
}

}  // namespace

struct Template::Parsed {
  std::string name;
  Body body;
};

Template::Template(std::string_view source, std::string name) {
  try {
    m_parsed = std::make_shared<const Parsed>(Parsed{name, parse(source)});
  } catch (const SyntaxFailure& failure) {
    fail(name, failure.line, failure.what());
  }
}

std::string Template::render(const nlohmann::ordered_json& variables) const {
  nesting_of(variables);
  const std::int64_t size = size_of(variables);
  Meter meter(base_steps + growth * size, base_bytes + growth * size);
  Evaluator evaluator(meter);
  try {
    for (const auto& [name, value] : variables.items()) {
      evaluator.set(name, value_of(evaluator, value));
    }
    return evaluator.run(m_parsed->body);
  } catch (const Failure& failure) {
    fail(m_parsed->name, evaluator.line(), failure.what());
  }
}

}  // namespace kvzap::jinja
