#include "runtime.hpp"

#include <unistd.h>

#include <Kokkos_Core.hpp>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/pruning.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace kvzap::python {
namespace {

std::timed_mutex& engine_mutex() {
  static std::timed_mutex mutex;
  return mutex;
}
std::atomic<std::thread::id> owner;  // of the mutex

std::mutex registry;
std::set<AtExit*>& at_exit() {
  static std::set<AtExit*> all;
  return all;
}

std::atomic<bool> has_ended{false};
std::thread::id ender;  // the thread that ended it; set before has_ended
#if KVZAP_HAVE_MPI
bool starts_mpi = false;
#endif
pid_t process = 0;  // that started Kokkos; 0: none

constexpr std::chrono::milliseconds signal_period(50);

nb::object error_class(const char* name) {
  return nb::module_::import_("kvzap._errors").attr(name);
}

void set_error(const char* name, const char* what) {
  PyErr_SetObject(error_class(name).ptr(), nb::str(what).ptr());
}

void set_pruning_error(const PruningError& error) {
  nb::list fields;
  for (const PruningField field : error.fault().fields) fields.append(std::string(name_of(field)));
  const nb::object exception = error_class("PruningError")(
      error.what(), std::string(name_of(error.fault().code)), nb::tuple(fields));
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
}

/// Raises SystemExit, which ends a thread silently. The thread of the exit itself, in a later
/// handler of it, gets an Error.
[[noreturn]] void refuse_after_end() {
  if (std::this_thread::get_id() == ender) throw Error("kvzap has ended with the interpreter");
  const nb::gil_scoped_acquire acquire;
  PyErr_SetNone(PyExc_SystemExit);
  throw nb::python_error();
}

}  // namespace

void ensure_running() {
  if (has_ended) refuse_after_end();
  if (process == 0) {
    int no_arguments = 0;
#if KVZAP_HAVE_MPI
    int is_there = 0;
    MPI_Initialized(&is_there);
    if (is_there == 0) {
      int provided = 0;
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
      starts_mpi = true;
    }
#endif
    if (!Kokkos::is_initialized()) Kokkos::initialize(no_arguments, nullptr);
    process = getpid();
  }
  if (is_forked_child()) {
    throw Error(
        "kvzap runs in the parent of this process, whose threads a fork does not copy: start "
        "processes with multiprocessing's method spawn");
  }
}

bool is_forked_child() { return process != 0 && process != getpid(); }

AtExit::AtExit(std::function<std::shared_ptr<void>()> take) : m_take(std::move(take)) {
  const std::lock_guard<std::mutex> guard(registry);
  at_exit().insert(this);
}
AtExit::~AtExit() {
  if (is_forked_child()) return;
  const std::lock_guard<std::mutex> guard(registry);
  at_exit().erase(this);
}

void end_running() {
  if (has_ended || process != getpid()) return;
  ender = std::this_thread::get_id();
  has_ended = true;
  const EngineLock lock(Wait::until_free);
  std::vector<std::shared_ptr<void>> objects;
  {
    const std::lock_guard<std::mutex> guard(registry);
    for (AtExit* const one : at_exit()) objects.push_back(one->m_take());
  }
  objects.clear();  // may free objects of Python, and with them others of AtExit
  if (Kokkos::is_initialized()) Kokkos::finalize();
#if KVZAP_HAVE_MPI
  if (starts_mpi) MPI_Finalize();
#endif
}

bool EngineLock::is_held() { return owner == std::this_thread::get_id(); }

EngineLock::EngineLock(Wait wait) {
  if (is_held()) {
    throw Error("kvzap is called from one of its own callbacks");
  }
  m_release.emplace();
  if (wait == Wait::until_free) {
    engine_mutex().lock();
  } else if (wait == Wait::never) {
    if (!engine_mutex().try_lock()) throw Error("another thread uses kvzap");
  } else {
    while (!engine_mutex().try_lock_for(signal_period)) check_signals();
  }
  owner = std::this_thread::get_id();
}
EngineLock::~EngineLock() {
  owner = std::thread::id();
  // First: end_running must not go on before this thread has the interpreter's lock, which a thread
  // that asks for it during the interpreter's finalization never gets.
  m_release.reset();
  engine_mutex().unlock();
}

void require_unicode(const nb::handle& object, const char* name) {
  if (!PyUnicode_Check(object.ptr())) return;
  const Py_ssize_t length = PyUnicode_GetLength(object.ptr());
  for (Py_ssize_t i = 0; i < length; ++i) {
    const Py_UCS4 code = PyUnicode_ReadChar(object.ptr(), i);
    if (code < 0xd800 || code > 0xdfff) continue;
    char number[8];
    std::snprintf(number, sizeof(number), "U+%04X", static_cast<unsigned>(code));
    throw nb::value_error(
        (std::string(name) + ": character " + std::to_string(i) + " is the surrogate " + number +
         "; expected text that UTF-8 can encode. Bytes that were not UTF-8 have become surrogates: "
         "open the file with its own encoding, or with errors=\"replace\"")
            .c_str());
  }
}

void require_index(const char* name, std::int64_t value, std::int64_t count) {
  if (value >= 0 && value < count) return;
  throw nb::index_error((std::string(name) + " is " + std::to_string(value) + "; expected 0 to " +
                         std::to_string(count - 1))
                            .c_str());
}

std::shared_ptr<nb::object> held(const nb::object& object) {
  return {new nb::object(object), [](nb::object* owned) {
            const nb::gil_scoped_acquire acquire;
            delete owned;
          }};
}

std::exception_ptr& failure_of_callback() {
  static thread_local std::exception_ptr failure;
  return failure;
}

namespace {
thread_local bool are_failures_texts = false;

/// Returns the type and text of an exception as UTF-8. Lone surrogates are escaped, and a text that
/// str() cannot make is left out.
std::string text_of_exception(const nb::python_error& error) {
  const std::string type = nb::type_name(error.type()).c_str();
  const nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
  const nb::object bytes =
      nb::steal(text.is_valid() ? PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace")
                                : nullptr);
  if (!bytes.is_valid()) {
    PyErr_Clear();
    return type;
  }
  const std::string utf8 = PyBytes_AsString(bytes.ptr());
  return utf8.empty() ? type : type + ": " + utf8;
}

/// Returns the text of the exception that is being handled, whatever its type.
std::string text_of_failure() {
  try {
    throw;
  } catch (const nb::python_error& error) {
    return text_of_exception(error);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace

FailuresAsTexts::FailuresAsTexts() { are_failures_texts = true; }
FailuresAsTexts::~FailuresAsTexts() { are_failures_texts = false; }

void fail_callback() {
  if (!are_failures_texts) {
    failure_of_callback() = std::current_exception();
    throw Error("a callback has failed");
  }
  throw AgreedError(text_of_failure());  // of the only rank
}

void check_signals() {
  using Clock = std::chrono::steady_clock;
  static thread_local Clock::time_point last;
  const auto now = Clock::now();
  if (now - last < signal_period) return;
  last = now;
  with_interpreter([] {
    if (has_ended) refuse_after_end();
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  });
}

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const PruningError& e) {
      set_pruning_error(e);
    } catch (const AgreedOutOfMemory& e) {
      set_error("OutOfMemory", e.what());
    } catch (const Error& e) {
      set_error("Error", e.what());
    }
  });
}

}  // namespace kvzap::python
