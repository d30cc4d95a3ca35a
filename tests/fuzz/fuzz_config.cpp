// config.json and generation_config.json of a model folder. One input is both files.
#include <kvzap/model/model_config.hpp>
#include <string>
#include <vector>

#include "harness.hpp"
#include "json_mutator.hpp"

namespace kvzap::fuzz {

const std::initializer_list<std::string_view> named_in_messages = {"config.json"};

namespace {

void check_warnings(const std::vector<std::string>& warnings) {
  require(warnings.size() < 1000, "warnings without end");
  for (const std::string& warning : warnings) {
    require(warning.size() <= 1024, "a long warning");
    for (const char c : warning) {
      require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7F,
              "a control character in a warning");
    }
  }
}

void check_generation(const GenerationConfig& config, std::int64_t vocab_size) {
  check_warnings(config.warnings);
  require(config.repetition_penalty > 0 && config.repetition_penalty <= 1e6,
          "a penalty out of range");
  const auto check_token = [&](TokenId token) {
    require(token >= 0 && token < vocab_size, "a token out of range");
  };
  for (const TokenId token : config.suppress_tokens) check_token(token);
  for (const auto& word : config.bad_words) {
    require(!word.empty(), "a bad word without tokens");
    for (const TokenId token : word) check_token(token);
  }
}

}  // namespace

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
  // Each reader gets its turn where another one refuses the file.
  constexpr std::int64_t vocab_size = 1000;
  try {
    require(load_stop_ids(folder.path(), vocab_size).size() <= 1000, "stop ids are repeated");
  } catch (const Error&) {
  }
  std::string refusal;
  try {
    check_generation(GenerationConfig::load(folder.path(), vocab_size), vocab_size);
  } catch (const Error& error) {
    refusal = error.what();
  }
  const ModelConfig config = ModelConfig::load(folder.path());
  check_warnings(config.warnings);
  require(config.head_dim > 0 && config.head_dim % 2 == 0, "head_dim is odd or not positive");
  require(config.num_attention_heads % config.num_key_value_heads == 0, "heads do not divide");
  require(config.longest_context() > 0, "no context at all");
  require(config.rope_attention_factor() > 0, "RoPE's factor is not positive");
  if (config.head_dim <= 1024) {
    for (const std::int64_t length : {std::int64_t{0}, config.longest_context()}) {
      for (const float frequency : rope_inverse_frequencies(config, length)) {
        require(frequency >= 0, "RoPE's frequencies are negative or NaN");
      }
    }
  }
  // A message is looked at like any other.
  if (!refusal.empty()) throw Error(refusal);
}

}  // namespace kvzap::fuzz

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return kvzap::fuzz::mutate_json_input(data, size, max_size, seed);
}
