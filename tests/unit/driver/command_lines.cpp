#include "unit/driver/command_lines.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "commands/support/check_options.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/setup.hpp"
#include "files/quote.hpp"
#include "options/bench_options.hpp"
#include "options/usage.hpp"

namespace kvzap::test {
namespace {

/// The checks of options that need the model's config.
void check_run(const driver::RunOptions& options) {
  const auto setup =
      driver::set_up_model(options.model, options.layers, options.placement, 1, options.rope);
  driver::context_limit(options.max_context, setup.config, options.random_weights.has_value());
}

void check_bench(const driver::BenchOptions& options) {
  driver::set_up_model(options.model, options.layers, "", 1, options.rope);
}

}  // namespace

Outcome read(driver::CommandLine& line, const std::vector<std::string>& arguments) {
  const driver::Reading reading = driver::read_arguments(line, arguments);
  if (reading.ends)
    return {reading.status, files::shown_message(reading.error), reading.out, reading.notes};
  const Communicator comm = Communicator::self();
  std::string seed;
  try {
    driver::read_deck_of_command(line, comm);
    driver::check_options(line, comm);
    seed = driver::draw_seed(line, comm);
    driver::agree_on_usage(comm, [&] {
      if (line.given().get_name() == "run" && line.run_options.resume.empty())
        check_run(line.run_options);
      if (line.given().get_name() == "bench") check_bench(line.bench_options);
    });
  } catch (const driver::AgreedUsageError& error) {
    return {2, files::shown_message(error.what()), "", {}};
  } catch (const Error& error) {
    return {1, files::shown_message(error.what()), "", {}};
  }
  Outcome outcome;
  outcome.notes = reading.notes;
  if (!seed.empty()) outcome.notes.push_back(seed);
  return outcome;
}

Outcome read(const std::vector<std::string>& arguments) {
  driver::CommandLine line;
  return read(line, arguments);
}

void expect_errors(const std::vector<std::string>& command, const std::vector<BadLine>& lines) {
  for (const BadLine& bad : lines) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(bad.flags, " ")));
    std::vector<std::string> arguments = command;
    arguments.insert(arguments.end(), bad.flags.begin(), bad.flags.end());
    const Outcome outcome = read(arguments);
    EXPECT_EQ(outcome.status, bad.status);
    for (const std::string& part : bad.parts) {
      EXPECT_NE(outcome.error.find(part), std::string::npos)
          << "'" << part << "' is not in: " << outcome.error;
    }
    EXPECT_EQ(outcome.error.find('\n'), std::string::npos);
    EXPECT_EQ(outcome.out, "");
  }
}

}  // namespace kvzap::test
