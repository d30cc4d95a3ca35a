// Kokkos' lifetime, the lock of the engine, and errors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <kvzap/core/types.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace kvzap::python {

namespace nb = nanobind;

/// Starts Kokkos at the first call. Throws Error in a process that was forked after it. After the
/// interpreter has begun to exit, throws Error on its thread and raises SystemExit on others.
void ensure_running();

/// Whether this process was forked after Kokkos had started: it cannot use, or free, what the
/// parent has made.
bool is_forked_child();

/// Gives up an object before Kokkos ends at the interpreter's exit.
class AtExit {
 public:
  /// `take`: returns the object.
  explicit AtExit(std::function<std::shared_ptr<void>()> take);
  ~AtExit();
  AtExit(const AtExit&) = delete;
  AtExit& operator=(const AtExit&) = delete;

 private:
  std::function<std::shared_ptr<void>()> m_take;
  friend void end_running();
};

/// Ends the engine's call of another thread at its next check_signals, frees the objects of all
/// AtExit, then ends Kokkos.
void end_running();

/// Raises ValueError if the argument is a str that UTF-8 cannot encode, because it has a surrogate.
void require_unicode(const nb::handle& object, const char* name);

/// Returns an argument of Python as T. Raises TypeError with its name and what is expected, and
/// ValueError for text with surrogates.
template <class T>
T as(const nb::handle& object, const char* name, const char* expected) {
  T value;
  if (nb::try_cast(object, value)) return value;
  require_unicode(object, name);
  const bool is_too_large = std::is_arithmetic_v<T> && PyLong_Check(object.ptr());
  const std::string found =
      is_too_large ? nb::repr(object).c_str() : nb::type_name(object.type()).c_str();
  throw nb::type_error((std::string(name) + ": expected " + expected + ", found " + found).c_str());
}

/// Returns a text. Raises ValueError with the argument's name if it has surrogates.
inline std::string text_of(const nb::str& text, const char* name) {
  return as<std::string>(text, name, "a text");
}

/// Raises IndexError unless 0 <= value < count.
void require_index(const char* name, std::int64_t value, std::int64_t count);

/// Returns an object of Python that threads without the interpreter's lock may release.
std::shared_ptr<nb::object> held(const nb::object& object);

/// How a thread waits for the engine while another one uses it.
enum class Wait {
  interruptibly,  // until it is free; a signal such as Ctrl-C, or the interpreter's end, ends it
  until_free,     // for destructors and the interpreter's exit
  never           // throws Error
};

/// While it exists, this thread alone uses the engine, and does not hold the interpreter's lock.
/// Throws Error if this thread has one already: from a callback of the engine.
class EngineLock {
 public:
  explicit EngineLock(Wait wait);
  ~EngineLock();
  /// Whether this thread has the lock.
  static bool is_held();
  EngineLock(const EngineLock&) = delete;
  EngineLock& operator=(const EngineLock&) = delete;

 private:
  std::optional<nb::gil_scoped_release> m_release;
};

/// Runs work() under an EngineLock, or at once if this thread has it: an object may be collected in
/// a callback.
template <class Work>
void locked(const Work& work) {
  if (EngineLock::is_held()) return work();
  const EngineLock lock(Wait::until_free);
  work();
}

/// An object that ends before Kokkos does. A process that was forked after Kokkos had started
/// leaves it alone: memory and threads are the parent's.
template <class T>
class Held {
 public:
  explicit Held(std::shared_ptr<T> object)
      : m_object(std::move(object)),
        m_at_exit([this] { return std::shared_ptr<void>(std::move(m_object)); }) {}
  ~Held() {
    if (!m_object) return;
    if (is_forked_child()) {
      new std::shared_ptr<T>(std::move(m_object));  // never freed
      return;
    }
    locked([&] { m_object.reset(); });
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  /// Null if the object has ended.
  const std::shared_ptr<T>& get() const { return m_object; }
  void end() { m_object.reset(); }

 private:
  std::shared_ptr<T> m_object;
  AtExit m_at_exit;
};

/// The exception of Python that ended a callback on this thread, if any.
std::exception_ptr& failure_of_callback();

/// While it exists, exceptions of callbacks on this thread become AgreedErrors with their text, so
/// that a server of one rank goes on.
class FailuresAsTexts {
 public:
  FailuresAsTexts();
  ~FailuresAsTexts();
  FailuresAsTexts(const FailuresAsTexts&) = delete;
  FailuresAsTexts& operator=(const FailuresAsTexts&) = delete;
};

/// Keeps the exception that is being handled, for in_engine, and throws Error in its place. Needs
/// the interpreter's lock.
[[noreturn]] void fail_callback();

/// Runs work() with the interpreter's lock, in a callback of the engine. An exception of Python
/// ends the engine's call, and in_engine throws it in place of the engine's error.
template <class Work>
auto with_interpreter(const Work& work) {
  const nb::gil_scoped_acquire acquire;
  try {
    return work();
  } catch (...) {
    fail_callback();
  }
}

/// Returns the result of work(), which runs under an EngineLock.
template <class Work>
auto in_engine(const Work& work, Wait wait = Wait::interruptibly) {
  ensure_running();
  std::exception_ptr failure;
  try {
    const EngineLock lock(wait);
    ensure_running();  // another thread may have ended it
    failure_of_callback() = nullptr;
    return work();
  } catch (...) {
    failure = failure_of_callback() ? failure_of_callback() : std::current_exception();
  }
  failure_of_callback() = nullptr;
  std::rethrow_exception(failure);
}

/// Throws, from a callback of the engine, what Python throws at a signal such as Ctrl-C, and
/// SystemExit, which ends a thread silently, once the interpreter ends. Looks at most every 50 ms.
void check_signals();

/// Lets errors of the library become exceptions of kvzap._errors.
void translate_errors();

}  // namespace kvzap::python
