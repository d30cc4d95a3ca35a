// config.json and generation_config.json of a model folder. One input is both files.
#include <kvzap/model_config.hpp>

#include "harness.hpp"
#include "json_mutator.hpp"

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {"config.json"};

void run_one(std::string_view input) {
  static InputFile file;
  static const InputFolder folder;
  static const bool linked = [] {
    folder.link("config.json", file);
    folder.link("generation_config.json", file);
    return true;
  }();
  static_cast<void>(linked);
  file.assign(input);
  // The second reader gets its turn where the first one refuses the file.
  try {
    require(load_stop_ids(folder.path(), 1000).size() <= 1000, "stop ids are repeated");
  } catch (const Error&) {
  }
  const ModelConfig config = ModelConfig::load(folder.path());
  require(config.head_dim > 0 && config.head_dim % 2 == 0, "head_dim is odd or not positive");
  require(config.num_attention_heads % config.num_key_value_heads == 0, "heads do not divide");
  require(config.longest_context() > 0, "no context at all");
  require(config.rope_attention_factor() > 0, "RoPE's factor is not positive");
  if (config.head_dim > 1024) return;
  for (const std::int64_t length : {std::int64_t{0}, config.longest_context()}) {
    for (const float frequency : rope_inverse_frequencies(config, length)) {
      require(frequency >= 0, "RoPE's frequencies are negative or NaN");
    }
  }
}

}  // namespace kvzap::fuzz

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return kvzap::fuzz::mutate_json_input(data, size, max_size, seed);
}
