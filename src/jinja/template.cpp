#include "jinja/template.hpp"

#include <fmt/format.h>

#include <kvzap/core/types.hpp>

#include "files/quote.hpp"
#include "jinja/evaluator.hpp"

namespace kvzap::jinja {
namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void fail(const std::string& name, int line, const char* message) {
  throw Error(fmt::format("{}: line {}: {}", name, line, files::shown(message, 600)));
}

/// Converts a variable. The meter's bounds grow with its size.
Value value_of(Evaluator& evaluator, const Json& json, int depth = 1) {
  if (depth > max_value_depth) throw Error("a chat's messages are nested too deep");
  const auto text_of = [&](const std::string& text) {
    evaluator.meter().grow(text.size());
    return evaluator.make_text(text);
  };
  evaluator.meter().grow(16);
  switch (json.type()) {
    case Json::value_t::boolean:
      return json.get<bool>();
    case Json::value_t::number_integer:
      return json.get<std::int64_t>();
    case Json::value_t::number_unsigned:  // Python's integers have no bound.
      if (json.get<std::uint64_t>() > INT64_MAX) return json.get<double>();
      return json.get<std::int64_t>();
    case Json::value_t::number_float:
      return json.get<double>();
    case Json::value_t::string:
      return text_of(json.get_ref<const std::string&>());
    case Json::value_t::array: {
      std::vector<Value> values;
      for (const Json& element : json) values.push_back(value_of(evaluator, element, depth + 1));
      return evaluator.make_sequence(std::move(values));
    }
    case Json::value_t::object: {
      std::vector<std::pair<Value, Value>> items;
      for (const auto& [key, element] : json.items()) {
        items.emplace_back(text_of(key), value_of(evaluator, element, depth + 1));
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
  Meter meter(1'000'000, 32 << 20);
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
