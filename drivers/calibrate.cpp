#include "calibrate.hpp"

namespace kvzap::driver {

void declare(CLI::App& /*app*/, CalibrateOptions& /*options*/) {}

void calibrate(const CalibrateOptions& /*options*/, const Communicator& /*comm*/,
               const std::string& /*version*/) {}

}  // namespace kvzap::driver
