// A model from Python, and the sessions that run on it.
#pragma once

#include <nanobind/nanobind.h>

#include <kvzap/engine/session.hpp>
#include <memory>
#include <string>

#include "runtime.hpp"

namespace kvzap::python {

/// A Session that ends before Kokkos does. Its functions throw Error afterwards.
class HeldSession {
 public:
  /// `what`: the user's name of it, for errors.
  explicit HeldSession(Session session, const char* what = "session")
      : m_held(std::make_shared<Session>(std::move(session))), m_what(what) {}

  /// Throws Error if the session is closed.
  Session& operator*() const {
    if (is_closed()) throw Error(std::string("the ") + m_what + " is closed");
    return *m_held.get();
  }
  void close() { m_held.end(); }
  bool is_closed() const { return m_held.get() == nullptr; }

  double read_seconds = 0, answer_seconds = 0;  // of the last ones

 private:
  Held<Session> m_held;
  const char* m_what;
};

/// A policy that is a function of Python.
struct ScorePolicy {
  std::shared_ptr<const PolicyInfo> info;
  Pruning pruning;
  std::string name;       // for evaluations
  bool is_named = false;  // by the user
  std::shared_ptr<nb::object> function;
  std::int64_t recent = 0;
};

/// Returns the policy with the name that the program shows.
std::shared_ptr<const PolicyInfo> named(const ScorePolicy& policy, const std::string& name);
/// Returns the pruning that an argument of Python names: a Pruning, its text, None, or a
/// ScorePolicy, which goes into the options.
Pruning pruning_of(const nb::object& pruning, SessionOptions& options);
/// Returns the argument `threads`. Throws Error unless it is 0 to 4096.
int threads_of(const nb::object& given);
/// Returns the fields of kvzap.Report that belong to a cache.
nb::dict report_fields(const CacheReport& cache);

void bind_pruning(nb::module_& module);
void bind_policy(nb::module_& module);
void bind_llm(nb::module_& module);
void bind_external_cache(nb::module_& module);
void bind_evaluate(nb::module_& module);
void bind_serve(nb::module_& module);

}  // namespace kvzap::python
