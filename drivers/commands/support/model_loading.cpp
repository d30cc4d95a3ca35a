#include "commands/support/model_loading.hpp"

#include <fmt/format.h>

#include "gguf/model_file.hpp"
#include "model/find_model.hpp"

namespace kvzap::driver {

namespace fs = std::filesystem;

namespace {

/// Returns whether a folder has weights in a format of pytorch.
bool has_pickle(const fs::path& model) {
  std::error_code failed;
  for (fs::directory_iterator entry(model, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const fs::path extension = entry->path().extension();
    if (extension == ".bin" || extension == ".pt" || extension == ".pth") return true;
  }
  return false;
}

}  // namespace

void check_parts(const fs::path& model, bool needs_weights, bool needs_tokenizer) {
  const bool lacks_tokenizer = needs_tokenizer && !gguf::has_model_file(model, "tokenizer.json");
  if (needs_weights && session::weight_files(model).empty()) {
    if (has_pickle(model)) {
      throw Error(fmt::format(
          "{0}: its weights are a pickle (*.bin, *.pt), which kvzap does not read, as it could run "
          "code: AutoModelForCausalLM.from_pretrained(\"{0}\").save_pretrained(DIR) of "
          "transformers "
          "makes safetensors",
          model.string()));
    }
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
