// Structs as messages between ranks. A struct that crosses ranks lists its fields once, in its own
// namespace:
//
//   template <class Visit>
//   void list_fields(Text& text, Visit& visit) {
//     visit("ids", text.ids);
//     visit("begin", text.begin);
//   }
//
// files/json_fields.hpp makes JSON of such a list.
#pragma once

#include <array>
#include <kvzap/core/communicator.hpp>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvzap::parallel {

/// Numbers and enumerations, which are sent byte by byte.
template <class Field>
inline constexpr bool is_number = std::is_arithmetic_v<Field> || std::is_enum_v<Field>;

/// Appends values to a message.
class MessageWriter {
 public:
  static constexpr bool reads = false;

  template <class Field>
  void operator()(const char* /*name*/, const Field& value) {
    add(value);
  }
  std::string take() { return std::move(m_bytes); }

 private:
  template <class Field>
  void add(const Field& value) {
    if constexpr (is_number<Field>) {
      append(&value, sizeof(value));
    } else {
      list_fields(const_cast<Field&>(value), *this);
    }
  }
  void add(const std::string& text) {
    add(text.size());
    append(text.data(), text.size());
  }
  template <class Field>
  void add(const std::vector<Field>& values) {
    add(values.size());
    if constexpr (is_number<Field> && !std::is_same_v<Field, bool>) {
      append(values.data(), values.size() * sizeof(Field));
    } else {
      for (const Field& value : values) add(value);
    }
  }
  template <class Field, std::size_t count>
  void add(const std::array<Field, count>& values) {
    for (const Field& value : values) add(value);
  }
  template <class First, class Second>
  void add(const std::pair<First, Second>& values) {
    add(values.first);
    add(values.second);
  }
  template <class Field>
  void add(const std::optional<Field>& value) {
    add(value.has_value());
    if (value) add(*value);
  }
  template <class Key, class Field>
  void add(const std::map<Key, Field>& values) {
    add(values.size());
    for (const auto& [key, value] : values) {
      add(key);
      add(value);
    }
  }
  void append(const void* data, std::size_t bytes) {
    m_bytes.append(static_cast<const char*>(data), bytes);
  }

  std::string m_bytes;
};

/// Reads the values of a MessageWriter, in their order. Throws Error for a message of other values.
class MessageReader {
 public:
  static constexpr bool reads = true;

  explicit MessageReader(const std::string& bytes)
      : m_next(bytes.data()), m_end(bytes.data() + bytes.size()) {}

  template <class Field>
  void operator()(const char* /*name*/, Field& value) {
    take(value);
  }
  void expect_end() const {
    if (m_next != m_end) fail();
  }

 private:
  template <class Field>
  void take(Field& value) {
    if constexpr (is_number<Field>) {
      copy(&value, sizeof(value));
    } else {
      list_fields(value, *this);
    }
  }
  void take(std::string& text) {
    text.resize(count_of(1));
    copy(text.data(), text.size());
  }
  template <class Field>
  void take(std::vector<Field>& values) {
    if constexpr (is_number<Field> && !std::is_same_v<Field, bool>) {
      values.resize(count_of(sizeof(Field)));
      copy(values.data(), values.size() * sizeof(Field));
    } else {
      const std::size_t count = count_of(1);
      values.clear();
      for (std::size_t i = 0; i < count; ++i) {
        Field value{};
        take(value);
        values.push_back(std::move(value));
      }
    }
  }
  template <class Field, std::size_t count>
  void take(std::array<Field, count>& values) {
    for (Field& value : values) take(value);
  }
  template <class First, class Second>
  void take(std::pair<First, Second>& values) {
    take(values.first);
    take(values.second);
  }
  template <class Field>
  void take(std::optional<Field>& value) {
    bool exists = false;
    take(exists);
    value.reset();
    if (exists) take(value.emplace());
  }
  template <class Key, class Field>
  void take(std::map<Key, Field>& values) {
    const std::size_t count = count_of(1);
    values.clear();
    for (std::size_t i = 0; i < count; ++i) {
      Key key{};
      take(key);
      take(values[key]);
    }
  }
  /// Reads the number of elements that follow, each of at least this size.
  std::size_t count_of(std::size_t bytes) {
    std::size_t count = 0;
    take(count);
    if (count > static_cast<std::size_t>(m_end - m_next) / bytes) fail();
    return count;
  }
  void copy(void* target, std::size_t bytes);
  [[noreturn]] static void fail();

  const char* m_next;
  const char* m_end;
};

/// Returns the values as one message.
template <class... Fields>
std::string to_message(const Fields&... values) {
  MessageWriter writer;
  (writer("", values), ...);
  return writer.take();
}

/// Sets the values from a message of to_message.
template <class... Fields>
void from_message(const std::string& message, Fields&... values) {
  MessageReader reader(message);
  (reader("", values), ...);
  reader.expect_end();
}

/// Copies the root's message to all ranks, up to about 8 KiB by one broadcast. Collective.
void broadcast_message(const Communicator& comm, std::string& message, int root);
/// Returns the messages of all ranks, in rank order, on every rank. Collective.
std::vector<std::string> all_gather_messages(const Communicator& comm, const std::string& message);

/// Copies the root's values to all ranks, as one message. Collective.
template <class... Fields>
void broadcast(const Communicator& comm, int root, Fields&... values) {
  if (comm.size() == 1) return;
  std::string message;
  if (comm.rank() == root) message = to_message(values...);
  broadcast_message(comm, message, root);
  if (comm.rank() != root) from_message(message, values...);
}

/// Returns the values of all ranks, in rank order, on every rank. Collective.
template <class Field>
std::vector<Field> all_gather(const Communicator& comm, const Field& mine) {
  if (comm.size() == 1) return {mine};
  std::vector<Field> all;
  for (const std::string& message : all_gather_messages(comm, to_message(mine))) {
    from_message(message, all.emplace_back());
  }
  return all;
}

/// Lists the numbers of a struct.
class NumberLister {
 public:
  static constexpr bool reads = false;

  void operator()(const char* /*name*/, std::int64_t& number) { m_numbers.push_back(&number); }
  template <class Field>
  void operator()(const char* name, std::vector<Field>& values) {
    for (Field& value : values) (*this)(name, value);
  }
  template <class Field>
  void operator()(const char* /*name*/, Field& value) {
    list_fields(value, *this);
  }
  const std::vector<std::int64_t*>& numbers() const { return m_numbers; }

 private:
  std::vector<std::int64_t*> m_numbers;
};

/// Sums each of the numbers over the ranks, in place. Collective.
void all_reduce_sum(const Communicator& comm, const std::vector<std::int64_t*>& numbers);

/// Sums each number of a struct over the ranks, in place. All its fields are std::int64_t, or
/// vectors and structs of them, as many on every rank. Collective.
template <class Field>
void all_reduce_sum(const Communicator& comm, Field& value) {
  NumberLister lister;
  lister("", value);
  all_reduce_sum(comm, lister.numbers());
}

}  // namespace kvzap::parallel
