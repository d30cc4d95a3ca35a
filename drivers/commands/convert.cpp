#include "commands/convert.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "console/console.hpp"
#include "gguf/model_file.hpp"
#include "model/convert_model.hpp"
#include "options/options.hpp"

namespace kvzap::driver {

void declare(CLI::App& app, ConvertOptions& o) {
  app.add_option("-m,--model", o.model, "Hugging Face folder or GGUF file to read; required")
      ->type_name("MODEL");
  app.add_option("-o,--output", o.output,
                 "new GGUF file (NAME.gguf) if the model is a folder, else new folder; required")
      ->type_name("MODEL");
  app.add_flag("-q,--quiet", o.quiet, "print no line at the end");
}

void convert(const ConvertOptions& options, const Communicator& comm) {
  comm.agree_on_root([&] {
    require(!options.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
    require(!options.output.empty(), "no output: give a new GGUF file or a new folder with -o");
    const bool from_gguf = gguf::is_gguf(options.model);
    const bool to_gguf = std::filesystem::path(options.output).extension() == ".gguf";
    require(from_gguf != to_gguf,
            from_gguf
                ? fmt::format("-o {}: expected a folder, because -m is a GGUF file", options.output)
                : fmt::format("-o {}: expected a name that ends in .gguf, because -m is a "
                              "folder",
                              options.output));
    if (to_gguf) {
      model::write_gguf(options.model, options.output);
    } else {
      model::write_folder(options.model, options.output);
    }
    if (!options.quiet) say("kvzap: wrote {}\n", options.output);
  });
}

}  // namespace kvzap::driver
