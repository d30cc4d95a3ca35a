#include "commands/model_loading.hpp"

#include <fmt/format.h>

#include "gguf/model_file.hpp"
#include "model/find_model.hpp"

namespace kvzap::driver {

namespace fs = std::filesystem;

void check_parts(const fs::path& model, bool needs_weights, bool needs_tokenizer) {
  const bool lacks_tokenizer = needs_tokenizer && !gguf::has_model_file(model, "tokenizer.json");
  if (needs_weights && session::weight_files(model).empty()) {
    throw Error(fmt::format(
        "{}: no *.safetensors file: download the whole checkpoint, or use random weights "
        "(--random-weights SEED) to try a model's shape{}{}",
        model.string(),
        lacks_tokenizer ? " with token ids (--token-ids), because there is no tokenizer.json" : "",
        model::download_hint(model)));
  }
  if (lacks_tokenizer) {
    throw Error(fmt::format(
        "{}: expected a tokenizer, found no readable file; without one, prompts are token "
        "ids (--token-ids)",
        gguf::name_of_model_file(model, "tokenizer.json")));
  }
}

}  // namespace kvzap::driver
