#include "jinja/printing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "jinja/unicode.hpp"

namespace kvzap::jinja {
namespace {

void append(std::string& output, std::string_view text, Meter& meter) {
  meter.allocate(text.size());
  output.append(text);
}

/// Appends the elements, with `print` for each, between the brackets.
template <class Elements, class Print>
void append_all(std::string& output, std::string_view open, const Elements& elements,
                std::string_view close, Meter& meter, const Print& print) {
  append(output, open, meter);
  bool is_first = true;
  for (const auto& element : elements) {
    if (!is_first) append(output, ", ", meter);
    is_first = false;
    print(element);
  }
  append(output, close, meter);
}

void append_sequence(std::string& output, const Sequence& sequence, Meter& meter) {
  const auto print = [&](const Value& value) { append_quoted(output, value, meter); };
  const auto all = [&](std::string_view open, std::string_view close) {
    append_all(output, open, sequence.values, close, meter, print);
  };
  switch (sequence.shape) {
    case Sequence::Shape::list:
      return all("[", "]");
    case Sequence::Shape::tuple:
    case Sequence::Shape::group:
      return all("(", sequence.values.size() == 1 ? ",)" : ")");
    case Sequence::Shape::keys:
      return all("dict_keys([", "])");
    case Sequence::Shape::values:
      return all("dict_values([", "])");
    case Sequence::Shape::items:
      return all("dict_items([", "])");
    case Sequence::Shape::range:
    case Sequence::Shape::iterator:
      break;
  }
  throw Failure("a range or an iterator has no text; use the filter list");
}

}  // namespace

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // The shortest digits that read back as the value, and the place of the decimal point.
  const std::string shortest = fmt::format("{}", std::abs(value));
  std::string digits;
  int point = 0, exponent = 0;
  bool has_point = false;
  for (std::size_t i = 0; i < shortest.size(); ++i) {
    if (shortest[i] == 'e') {
      exponent = std::stoi(shortest.substr(i + 1));
      break;
    }
    if (shortest[i] == '.') {
      has_point = true;
    } else {
      digits += shortest[i];
      if (!has_point) ++point;
    }
  }
  point += exponent;
  const std::size_t zeros = std::min(digits.find_first_not_of('0'), digits.size());
  digits.erase(0, zeros);
  point -= static_cast<int>(zeros);
  digits.erase(digits.find_last_not_of('0') + 1);
  const std::string sign = std::signbit(value) ? "-" : "";
  if (digits.empty()) return sign + "0.0";
  const int count = static_cast<int>(digits.size());
  if (point > 16 || point <= -4) {
    const int power = point - 1;
    return sign + digits.substr(0, 1) + (count > 1 ? "." + digits.substr(1) : "") +
           fmt::format("e{}{:02}", power < 0 ? '-' : '+', std::abs(power));
  }
  if (point <= 0) return sign + "0." + std::string(static_cast<std::size_t>(-point), '0') + digits;
  if (count <= point) {
    return sign + digits + std::string(static_cast<std::size_t>(point - count), '0') + ".0";
  }
  const auto split = static_cast<std::size_t>(point);
  return sign + digits.substr(0, split) + "." + digits.substr(split);
}

void append_text(std::string& output, const Value& value, Meter& meter) {
  if (value.is_undefined()) return;
  if (const Text* const text = value.text()) return append(output, text->bytes, meter);
  append_quoted(output, value, meter);
}

void append_quoted(std::string& output, const Value& value, Meter& meter) {
  meter.step();
  if (value.is_undefined()) return append(output, "Undefined", meter);
  if (value.is_none()) return append(output, "None", meter);
  if (const auto* const boolean = value.boolean()) {
    return append(output, *boolean ? "True" : "False", meter);
  }
  if (const auto* const integer = value.integer()) {
    return append(output, std::to_string(*integer), meter);
  }
  if (const auto* const floating = value.floating()) {
    return append(output, float_text(*floating), meter);
  }
  if (const Text* const text = value.text()) {
    meter.allocate(text->bytes.size());
    const std::string quoted = quoted_text(text->bytes);
    return append(output, text->is_safe ? "Markup(" + quoted + ")" : quoted, meter);
  }
  if (const auto* const sequence = value.sequence()) {
    return append_sequence(output, *sequence, meter);
  }
  if (const auto* const dict = value.dict()) {
    return append_all(output, "{", dict->items, "}", meter, [&](const auto& item) {
      append_quoted(output, item.first, meter);
      append(output, ": ", meter);
      append_quoted(output, item.second, meter);
    });
  }
  throw Failure(fmt::format("a {} has no text", value.type_name()));
}

// ---- JSON ---------------------------------------------------------------------------------------

namespace {

class JsonWriter {
 public:
  JsonWriter(std::string& output, const JsonStyle& style, Meter& meter)
      : m_output(output), m_style(style), m_meter(meter) {}

  void write(const Value& value) {
    m_meter.step();
    if (value.is_none()) return put("null");
    if (const auto* const boolean = value.boolean()) return put(*boolean ? "true" : "false");
    if (const auto* const integer = value.integer()) return put(std::to_string(*integer));
    if (const auto* const floating = value.floating()) return put(number(*floating));
    if (const Text* const text = value.text()) return put_string(text->bytes);
    if (const Dict* const dict = value.dict()) return put_dict(*dict);
    const Sequence* const sequence = value.sequence();
    if (sequence != nullptr && sequence->shape <= Sequence::Shape::group) {
      return put_list(*sequence);
    }
    throw Failure(fmt::format("a {} cannot be written as JSON", value.type_name()));
  }

 private:
  void put(std::string_view text) { append(m_output, text, m_meter); }

  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return float_text(value);
  }

  void put_escaped(std::int32_t character) {
    if (character >= 0x10000) {
      const std::int32_t rest = character - 0x10000;
      put(fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF)));
    } else {
      put(fmt::format("\\u{:04x}", character));
    }
  }

  void put_string(std::string_view text) {
    constexpr std::string_view special = "\"\\\n\r\t\b\f", letters = "\"\\nrtbf";
    put("\"");
    std::size_t plain = 0;  // begin of the characters that are not written yet
    for (std::size_t offset = 0; offset < text.size();) {
      const auto byte = static_cast<unsigned char>(text[offset]);
      const std::size_t found = special.find(text[offset]);
      if (found == special.npos && byte >= 0x20 && (byte < 0x7F || !m_style.ensure_ascii)) {
        ++offset;
        continue;
      }
      put(text.substr(plain, offset - plain));
      const auto [character, length] = character_at(text, offset);
      if (found != special.npos) {
        put(std::string{'\\', letters[found]});
      } else {
        put_escaped(character);
      }
      plain = offset += length;
    }
    put(text.substr(plain));
    put("\"");
  }

  void put_line() {
    if (!m_style.indent) return;
    put("\n");
    for (int i = 0; i < m_level; ++i) put(*m_style.indent);
  }

  template <class Elements, class Write>
  void put_all(char open, const Elements& elements, char close, const Write& write) {
    put(std::string_view(&open, 1));
    if (!elements.empty()) {
      ++m_level;
      bool is_first = true;
      for (const auto& element : elements) {
        if (!is_first) put(m_style.item_separator);
        is_first = false;
        put_line();
        write(element);
      }
      --m_level;
      put_line();
    }
    put(std::string_view(&close, 1));
  }

  void put_list(const Sequence& sequence) {
    put_all('[', sequence.values, ']', [&](const Value& value) { write(value); });
  }

  void put_key(const Value& key) {
    if (key.is_string()) return write(key);
    if (!key.is_none() && !as_float(key)) {
      throw Failure(fmt::format("a key of type {} cannot be written as JSON", key.type_name()));
    }
    put("\"");
    write(key);
    put("\"");
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
    put_all('{', items, '}', [&](const auto* item) {
      put_key(item->first);
      put(m_style.key_separator);
      write(item->second);
    });
  }

  std::string& m_output;
  const JsonStyle& m_style;
  Meter& m_meter;
  int m_level = 0;
};

}  // namespace

void append_json(std::string& output, const Value& value, const JsonStyle& style, Meter& meter) {
  JsonWriter(output, style, meter).write(value);
}

}  // namespace kvzap::jinja
