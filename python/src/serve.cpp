// The server of `kvzap serve` in the process of Python.
#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "commands/serve/serve.hpp"
#include "commands/support/check_options.hpp"
#include "commands/support/command_line.hpp"
#include "commands/support/version.hpp"
#include "llm.hpp"
#include "options/arguments.hpp"

namespace kvzap::python {
namespace {

/// Runs `kvzap` with these arguments, of serve, until a signal ends it. Returns the exit status.
int serve(const nb::list& texts, const nb::object& warn) {
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
  return in_engine([&] {
    const FailuresAsTexts texts_of_failures;  // an answer has the error, and the server goes on
    const Communicator comm = Communicator::self();
    driver::read_deck_of_command(line, comm);
    driver::check_options(line, comm);
    return driver::serve(line.serve_options, comm, driver::version, driver::revision);
  });
}

}  // namespace

void bind_serve(nb::module_& module) {
  module.def("_serve", &serve, nb::arg("arguments"), nb::arg("warn"));
}

}  // namespace kvzap::python
