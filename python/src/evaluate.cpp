// Evaluations of `kvzap eval` in the process of Python.
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "commands/lab/eval.hpp"
#include "commands/support/check_options.hpp"
#include "commands/support/command_line.hpp"
#include "commands/support/version.hpp"
#include "llm.hpp"
#include "options/arguments.hpp"

namespace kvzap::python {
namespace {

driver::EvalHost host_of(const nb::dict& own, const nb::object& progress, const nb::object& warn) {
  driver::EvalHost host;
  for (const auto& [key, entry] : own) {
    const auto name = nb::cast<std::string>(key);
    const auto pair = nb::cast<nb::tuple>(entry);
    host.policies.emplace(name, named(nb::cast<const ScorePolicy&>(pair[0]), name));
    host.hashes.emplace(name, nb::cast<std::string>(pair[1]));
  }
  host.progress = [call = held(progress)](std::string_view what, std::int64_t done,
                                          std::int64_t total) {
    check_signals();
    with_interpreter([&] {
      if (!call->is_none()) (*call)(std::string(what), done, total);
    });
  };
  host.warn = [call = held(warn)](const std::string& text) {
    with_interpreter([&] { (*call)(text); });
  };
  return host;
}

/// Runs `kvzap` with these arguments, of eval. `own`: name in the arguments -> (ScorePolicy, hash).
void evaluate(const nb::list& texts, const nb::dict& own, const nb::object& progress,
              const nb::object& warn) {
  const driver::EvalHost host = host_of(own, progress, warn);
  std::vector<std::string> arguments;
  for (const nb::handle& text : texts) {
    arguments.push_back(as<std::string>(text, "evaluate", "a text"));
  }
  driver::CommandLine line;
  const driver::Reading reading = driver::read_arguments(line, arguments);
  if (reading.ends) {
    throw Error(reading.error.empty() ? "help and version are no options of evaluate"
                                      : reading.error);
  }
  for (const std::string& note : reading.notes) host.warn(note);
  in_engine([&] {
    const Communicator comm = Communicator::self();
    driver::read_deck_of_command(line, comm);
    driver::check_options(line.eval_options, host.policies);
    const std::string drawn = driver::draw_seed(line, comm);
    if (!drawn.empty()) host.warn(drawn);
    driver::evaluate(line.eval_options, comm, driver::version, &host);
  });
}

}  // namespace

void bind_evaluate(nb::module_& module) {
  module.def("_evaluate", &evaluate, nb::arg("arguments"), nb::arg("own"),
             nb::arg("progress").none(), nb::arg("warn"));
}

}  // namespace kvzap::python
