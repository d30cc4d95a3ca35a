#include "collect.hpp"

namespace kvzap::driver {

void declare(CLI::App& /*app*/, CollectOptions& /*options*/) {}

void collect(const CollectOptions& /*options*/, const Communicator& /*comm*/,
             const std::string& /*version*/) {}

}  // namespace kvzap::driver
