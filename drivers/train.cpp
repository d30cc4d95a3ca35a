#include "train.hpp"

namespace kvzap::driver {

void declare(CLI::App& /*app*/, TrainOptions& /*options*/) {}

void train(const TrainOptions& /*options*/, const Communicator& /*comm*/,
           const std::string& /*version*/) {}

}  // namespace kvzap::driver
