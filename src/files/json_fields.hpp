// JSON objects of structs that list their fields (parallel/message.hpp says how).
#pragma once

#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "files/json_field.hpp"

namespace kvzap::files {

/// Adds listed fields to an object. NaN and infinity become null.
class JsonWriter {
 public:
  explicit JsonWriter(nlohmann::ordered_json& object) : m_object(object) {}

  template <class Field>
  void operator()(const char* name, const Field& value) {
    m_object[name] = value;
  }

 private:
  nlohmann::ordered_json& m_object;
};

/// Reads listed fields of an object: numbers, where null is NaN and whole ones are at least 0,
/// booleans, texts and lists of these. Throws Error that names a field of another kind.
class JsonReader {
 public:
  explicit JsonReader(const JsonField& object) : m_object(object) {}

  template <class Field>
  void operator()(const char* name, Field& value) {
    read(m_object.member(name), value);
  }

  template <class Field>
  static void read(const JsonField& field, Field& value) {
    if constexpr (std::is_same_v<Field, bool>) {
      value = field.boolean();
    } else if constexpr (std::is_integral_v<Field>) {
      value = static_cast<Field>(field.integer(0, std::numeric_limits<Field>::max()));
    } else {
      static_assert(std::is_floating_point_v<Field>);
      value = field.is_null() ? std::numeric_limits<Field>::quiet_NaN()
                              : static_cast<Field>(field.number());
    }
  }
  static void read(const JsonField& field, std::string& value) { value = field.string(); }
  template <class Element>
  static void read(const JsonField& field, std::vector<Element>& values) {
    values.clear();
    for (std::size_t i = 0; i < field.array_size(); ++i) {
      Element value{};
      read(field.element(i), value);
      values.push_back(std::move(value));
    }
  }

 private:
  const JsonField& m_object;
};

}  // namespace kvzap::files
