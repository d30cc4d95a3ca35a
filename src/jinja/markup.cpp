#include "jinja/markup.hpp"

#include <utility>
#include <vector>

#include "jinja/methods.hpp"

namespace kvzap::jinja {
namespace {

Value escape(Evaluator& evaluator, const Value& value) {
  return is_safe(value) ? value : evaluator.make_safe(escaped(evaluator.text_of(value)));
}

/// Returns a string, or the strings of a list or tuple, as escaped ones.
Value marked(Evaluator& evaluator, const Value& value) {
  if (const Text* const text = value.text()) return evaluator.make_safe(text->bytes);
  const Sequence* const sequence = value.sequence();
  if (sequence == nullptr) return value;
  std::vector<Value> values;
  for (const Value& element : sequence->values) values.push_back(marked(evaluator, element));
  return evaluator.make_sequence(std::move(values), sequence->shape);
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&#34;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

Value make_like(Evaluator& evaluator, const Value& model, std::string text) {
  return is_safe(model) ? evaluator.make_safe(std::move(text))
                        : evaluator.make_text(std::move(text));
}

Value call_of_safe(Evaluator& evaluator, const Callable& method, Arguments& arguments) {
  const auto is = [&](std::string_view name) {
    return method.function == find_string_method(name);
  };
  auto& given = arguments.positional;
  if (is("join") && !given.empty()) {
    std::vector<Value> elements = evaluator.elements_of(given[0]);
    for (Value& element : elements) element = escape(evaluator, element);
    given[0] = evaluator.make_sequence(std::move(elements));
  }
  const bool has_text = is("replace") || is("ljust") || is("rjust") || is("center");
  if (has_text && given.size() > 1 && given[1].is_string()) given[1] = escape(evaluator, given[1]);
  return marked(evaluator, method.function(evaluator, method.self, arguments));
}

}  // namespace kvzap::jinja
