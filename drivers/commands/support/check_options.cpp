#include "commands/support/check_options.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <random>

#include "options/usage.hpp"

namespace kvzap::driver {
void check_options(const CommandLine& line, const Communicator& comm) {
  if (line.command().check) agree_on_usage(comm, [&] { line.command().check(line); });
}

std::string draw_seed(const CommandLine& line, const Communicator& comm) {
  CLI::App& command = line.given();
  CLI::Option* const option = command.get_option_no_throw("--seed");
  // The server draws one for each request.
  const bool is_random = option && option->results() == std::vector<std::string>{"-1"} &&
                         command.get_name() != "serve";
  if (!is_random) return "";
  std::uint32_t seed = std::random_device()();
  comm.broadcast(&seed, sizeof(seed), 0);
  option->clear();
  option->add_result(std::to_string(seed));
  option->run_callback();
  return fmt::format("--seed -1 drew {}; --seed {} repeats it", seed, seed);
}

bool is_quiet(const CommandLine& line) {
  const CLI::Option* const quiet = line.given().get_option_no_throw("--quiet");
  return quiet && quiet->count() > 0 && quiet->as<bool>();
}

}  // namespace kvzap::driver
