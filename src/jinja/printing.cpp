#include "jinja/printing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

using Shape = Sequence::Shape;

/// Writes Python's repr() of values or, with a style, JSON.
class Writer {
 public:
  Writer(std::string& output, Meter& meter, const JsonStyle* json)
      : m_output(output), m_meter(meter), m_json(json), m_style(json ? *json : JsonStyle()) {}

  void write(const Value& value) {
    m_meter.step();
    if (value.is_none()) return put(m_json ? "null" : "None");
    if (const auto* const found = value.boolean()) {
      return *found ? put(m_json ? "true" : "True") : put(m_json ? "false" : "False");
    }
    if (const auto* const integer = value.integer()) return put(std::to_string(*integer));
    if (const auto* const number = value.floating()) return put_float(*number);
    if (const Text* const text = value.text()) return put_text(*text);
    if (const Dict* const dict = value.dict()) return put_dict(*dict);
    if (const Sequence* const sequence = value.sequence()) return put_sequence(value, *sequence);
    if (!value.is_undefined() || m_json) fail(value);
    put("Undefined");
  }

 private:
  void put(std::string_view text) {
    m_meter.allocate(text.size());
    m_output += text;
  }

  [[noreturn]] void fail(const Value& value) const {
    throw Failure(fmt::format("a {} {}", value.type_name(),
                              m_json ? "cannot be written as JSON" : "has no text"));
  }

  void put_float(double value) {
    if (std::isnan(value)) return put(m_json ? "NaN" : "nan");
    if (std::isinf(value) && value < 0) put("-");
    if (std::isinf(value)) return put(m_json ? "Infinity" : "inf");
    // fmt writes the shortest digits, with an exponent where Python does.
    const std::string text = fmt::format("{}", value);
    put(text);
    if (text.find_first_not_of("-0123456789") == std::string::npos) put(".0");
  }

  void put_text(const Text& text) {
    using Json = nlohmann::json;
    m_meter.allocate(text.bytes.size());
    if (m_json) {
      return put(
          Json(text.bytes).dump(-1, ' ', m_style.ensure_ascii, Json::error_handler_t::replace));
    }
    const std::string quoted = quoted_text(text.bytes);
    put(text.is_safe ? "Markup(" + quoted + ")" : quoted);
  }

  void put_line() {
    if (!m_style.indent) return;
    put("\n");
    for (int i = 0; i < m_level; ++i) put(*m_style.indent);
  }

  template <class Elements, class Write>
  void put_all(std::string_view open, const Elements& elements, std::string_view close,
               const Write& write_element) {
    put(open);
    ++m_level;
    for (const auto& element : elements) {
      if (&element != &*elements.begin()) put(m_style.item_separator);
      put_line();
      write_element(element);
    }
    --m_level;
    if (!elements.empty()) put_line();
    put(close);
  }

  void put_sequence(const Value& value, const Sequence& sequence) {
    // In the order of shapes.
    constexpr std::pair<std::string_view, std::string_view> brackets[] = {{"[", "]"},
                                                                          {"(", ")"},
                                                                          {"(", ")"},
                                                                          {},
                                                                          {"dict_keys([", "])"},
                                                                          {"dict_values([", "])"},
                                                                          {"dict_items([", "])"},
                                                                          {}};
    auto [open, close] = brackets[static_cast<std::size_t>(sequence.shape)];
    const bool is_json = sequence.shape == Shape::list || sequence.is_tuple();
    if (m_json && !is_json) fail(value);
    if (m_json) std::tie(open, close) = brackets[0];
    if (open.empty()) throw Failure("a range or an iterator has no text; use the filter list");
    if (open == "(" && sequence.values.size() == 1) close = ",)";
    put_all(open, sequence.values, close, [&](const Value& element) { write(element); });
  }

  void put_key(const Value& key) {
    if (m_json && !key.is_string() && !key.is_none() && !as_float(key)) {
      throw Failure(fmt::format("a key of type {} cannot be written as JSON", key.type_name()));
    }
    const std::string_view quote = m_json && !key.is_string() ? "\"" : "";
    put(quote);
    write(key);
    put(quote);
  }

  void put_dict(const Dict& dict) {
    std::vector<const std::pair<Value, Value>*> items;
    m_meter.allocate(dict.items.size() * sizeof(void*));
    for (const auto& item : dict.items) items.push_back(&item);
    if (m_style.sort_keys) {
      std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
        return order_of(a->first, b->first, m_meter) == -1;
      });
    }
    put_all("{", items, "}", [&](const auto* item) {
      put_key(item->first);
      put(m_style.key_separator);
      write(item->second);
    });
  }

  std::string& m_output;
  Meter& m_meter;
  const JsonStyle* m_json;
  const JsonStyle m_style;
  int m_level = 0;
};

}  // namespace

void append_text(std::string& output, const Value& value, Meter& meter) {
  if (value.is_undefined()) return;
  const Text* const text = value.text();
  if (text == nullptr) return append_quoted(output, value, meter);
  meter.allocate(text->bytes.size());
  output += text->bytes;
}

void append_quoted(std::string& output, const Value& value, Meter& meter, const JsonStyle* json) {
  Writer(output, meter, json).write(value);
}

}  // namespace kvzap::jinja
