#include "eval.hpp"

#include "options.hpp"

namespace kvzap::driver {

void declare(CLI::App& app, EvalOptions& options) {
  app.add_option("-m,--model", options.model, "folder of the model (Hugging Face format)");
  declare_deck(app, options.config, "");
}

int evaluate(const EvalOptions& /*options*/, const Communicator& /*comm*/,
             const std::string& /*version*/) {
  throw AgreedError("eval: not there yet");
}

}  // namespace kvzap::driver
