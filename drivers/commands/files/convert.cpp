#include "commands/files/convert.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "console/console.hpp"
#include "console/signals.hpp"
#include "files/quote.hpp"
#include "gguf/model_file.hpp"
#include "model/convert_model.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

bool writes_gguf(const ConvertOptions& o) {
  return std::filesystem::path(o.output).extension() == ".gguf";
}

}  // namespace

void declare(CLI::App& app, ConvertOptions& o) {
  app.add_option("-m,--model", o.model, "Hugging Face folder or GGUF file to read; required")
      ->type_name("MODEL");
  app.add_option("-o,--output", o.output,
                 "new GGUF file (NAME.gguf) if the model is a folder, else new folder; required")
      ->type_name("FILE");
  app.add_flag("-q,--quiet", o.quiet, "print no line at the end");
}

void check_options(const ConvertOptions& o) {
  require(!o.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
  require(!o.output.empty(), "no output: give a new GGUF file or a new folder with -o");
  const bool from_gguf = gguf::is_gguf(o.model);
  require(from_gguf != writes_gguf(o),
          from_gguf
              ? fmt::format("-o {}: expected a folder, because -m is a GGUF file", o.output)
              : fmt::format("-o {}: expected a name that ends in .gguf, because -m is a folder",
                            o.output));
}

void say_warnings(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) {
    say("kvzap: warning: {}\n", files::shown_message(warning));
  }
}

int write_model(const std::string& model, const std::string& output, bool quiet,
                const Communicator& comm, const std::function<void()>& work) {
  return write_unless_stopped(output, comm, [&] {
    work();
    const model::ModelCheck check = model::check_to_run(model);
    say_warnings(check.warnings);
    if (quiet || check.refusal.empty()) return;
    say("kvzap: note: kvzap cannot run this model, other programs may: {}\n",
        files::shown_message(check.refusal));
  });
}

int convert(const ConvertOptions& options, const Communicator& comm) {
  const auto progress = [](std::int64_t, std::int64_t) { stop_here_if_asked(); };
  return write_model(options.model, options.output, options.quiet, comm, [&] {
    if (!writes_gguf(options)) {
      model::write_folder(options.model, options.output, progress);
    } else {
      say_warnings(model::write_gguf(options.model, options.output, progress));
    }
    if (!options.quiet) say("kvzap: wrote {}\n", options.output);
  });
}

}  // namespace kvzap::driver
