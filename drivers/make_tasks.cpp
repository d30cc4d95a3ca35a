#include "make_tasks.hpp"

#include "options.hpp"

namespace kvzap::driver {

void declare(CLI::App& app, MakeTasksOptions& options) {
  app.add_option("-m,--model", options.model, "folder of the model (Hugging Face format)");
  declare_deck(app, options.config, "");
}

void make_tasks(const MakeTasksOptions& /*options*/, const Communicator& /*comm*/,
                const std::string& /*version*/) {
  throw AgreedError("make-tasks: not there yet");
}

}  // namespace kvzap::driver
