#include "commands/model_loading.hpp"

#include <fmt/format.h>

namespace kvzap::driver {

namespace fs = std::filesystem;

void check_parts(const fs::path& folder, bool needs_weights, bool needs_tokenizer) {
  std::error_code ignored;
  const fs::path tokenizer = folder / "tokenizer.json";
  const bool lacks_tokenizer = needs_tokenizer && !fs::exists(tokenizer, ignored);
  if (needs_weights && session::weight_files(folder).empty()) {
    throw Error(fmt::format(
        "{}: no *.safetensors file: download the whole checkpoint, or use random weights "
        "(--random-weights SEED) to try a model's shape{}",
        folder.string(),
        lacks_tokenizer ? " with token ids (--token-ids), because there is no tokenizer.json"
                        : ""));
  }
  if (lacks_tokenizer) {
    throw Error(fmt::format(
        "{}: expected a tokenizer, found no readable file; without one, prompts are token "
        "ids (--token-ids)",
        tokenizer.string()));
  }
}

}  // namespace kvzap::driver
