// The server of `kvzap serve` in the process of Python.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "commands/serve/serve.hpp"
#include "commands/support/check_options.hpp"
#include "commands/support/command_line.hpp"
#include "commands/support/version.hpp"
#include "llm.hpp"
#include "options/arguments.hpp"
#include "options/policy_options.hpp"

namespace kvzap::python {
namespace {

/// Runs `kvzap` with these arguments, of serve, until a signal ends it. Returns the exit status.
/// `own`: the ScorePolicy of requests that name none, or None. `functions`: names of all functions.
/// Raises ValueError for a prefix store beside them.
int serve(const nb::list& texts, const nb::object& own, const nb::object& warn,
          const std::string& functions) {
  std::vector<std::string> arguments;
  for (const nb::handle& text : texts) {
    arguments.push_back(as<std::string>(text, "serve", "a text"));
  }
  driver::CommandLine line;
  const driver::Reading reading = driver::read_arguments(line, arguments);
  if (reading.ends) {
    throw Error(reading.error.empty() ? "help and version are no options of serve" : reading.error);
  }
  for (const std::string& note : reading.notes) warn(note);
  const ScorePolicy* const policy = own.is_none() ? nullptr : &nb::cast<const ScorePolicy&>(own);
  return in_engine([&] {
    const FailuresAsTexts texts_of_failures;  // an answer has the error, and the server goes on
    const Communicator comm = Communicator::self();
    driver::read_deck_of_command(line, comm);
    if (!functions.empty() && !line.serve_options.prefix_store.empty()) {  // of an option or deck
      throw std::invalid_argument(
          "serve: prefix_store has states of policies by their names, and functions change; "
          "expected no prefix_store beside " +
          functions);
    }
    if (policy != nullptr) {  // beside the flags, and instead of a deck's policy, as --policy is
      Pruning& pruning = line.serve_options.pruning;
      line.serve_options.pruning_texts.policy.clear();
      driver::resolve_pruning(line.serve_options);
      pruning = Pruning::parse(policy->pruning.text(), pruning);
      pruning.policy = PolicyText(named(*policy, "python:" + policy->name));
    }
    driver::check_options(line, comm);
    return driver::serve(line.serve_options, comm, driver::version, driver::revision);
  });
}

}  // namespace

void bind_serve(nb::module_& module) {
  module.def("_serve", &serve, nb::arg("arguments"), nb::arg("own").none(), nb::arg("warn"),
             nb::arg("functions"));
}

}  // namespace kvzap::python
