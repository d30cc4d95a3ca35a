#include <fmt/format.h>

#include <kvzap/engine/learn_from_texts.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/watching.hpp"
#include "files/json_field.hpp"
#include "files/line_reader.hpp"
#include "parallel/message.hpp"

namespace kvzap {
namespace {

// The text in a line of a file of JSON objects.
std::string text_of(const files::LineReader& reader) {
  const nlohmann::json row =
      reader.object("expected an object with a field \"text\", as in the first line");
  return files::JsonField(row, reader.where()).member("text").string();
}

// The token ids of each text in the file; with `most` above 0, of at most so many texts.
std::vector<std::vector<TokenId>> tokenize(const std::filesystem::path& file,
                                           const TextEncoder& encode, const ModelConfig& config,
                                           std::int64_t most) {
  files::LineReader reader(file, "a file of texts");
  std::vector<std::vector<TokenId>> texts;
  bool is_json = false;
  while ((most <= 0 || static_cast<std::int64_t>(texts.size()) < most) && reader.next_text()) {
    reader.require_text();
    std::string line = reader.line();
    if (line.back() == '\r') line.pop_back();
    const std::string where = reader.where();
    if (texts.empty()) is_json = line[line.find_first_not_of(" \t\v\f\r")] == '{';
    std::vector<TokenId> ids = encode(is_json ? text_of(reader) : line);
    if (ids.empty()) throw Error(fmt::format("{}: the text has no tokens", where));
    for (const TokenId id : ids) {
      if (id >= config.vocab_size) {
        throw Error(fmt::format("{}: token id {} is not in the vocabulary; expected less than {}",
                                where, id, config.vocab_size));
      }
    }
    texts.push_back(std::move(ids));
  }
  if (texts.empty()) {
    throw Error(fmt::format("{}: there is no text in it; expected one per line", file.string()));
  }
  return texts;
}

}  // namespace

std::vector<std::vector<TokenId>> read_texts(const std::filesystem::path& file,
                                             const Tokenizer* tokenizer, const ModelConfig& config,
                                             const Communicator& comm) {
  const auto encode = [&](const std::string& text) {
    if (!tokenizer) {
      throw Error(fmt::format("{}: these texts need the model's tokenizer, and there is none",
                              file.string()));
    }
    return tokenizer->encode(text, true);
  };
  return read_texts(file, encode, config, comm);
}

std::vector<std::vector<TokenId>> read_texts(const std::filesystem::path& file,
                                             const TextEncoder& encode, const ModelConfig& config,
                                             const Communicator& comm, std::int64_t most) {
  std::vector<std::vector<TokenId>> texts;
  comm.agree_on_root([&] { texts = tokenize(file, encode, config, most); });
  parallel::broadcast(comm, 0, texts);
  return texts;
}

void learn_from_texts(const std::shared_ptr<const Model>& model, const PolicyChoice& choice,
                      const std::vector<std::vector<TokenId>>& texts, const Communicator& comm,
                      const ProgressCallback& progress) {
  const std::shared_ptr<TextLearner> learner = choice.learner;
  if (!learner) return;
  if (texts.empty()) throw Error(fmt::format("policy {}: there are no texts", choice.name));
  std::int64_t tokens = 0;
  for (const auto& text : texts) {
    if (text.empty()) throw Error(fmt::format("policy {}: a text has no tokens", choice.name));
    tokens += static_cast<std::int64_t>(text.size());
  }

  const CacheOptions options =
      engine::watching_options(choice.name, [learner] { return learner->watch(); });
  std::unique_ptr<Engine> engine;
  comm.agree([&] { engine = Engine::create(model, nullptr, options, comm); });

  learner->begin();
  std::int64_t before = 0;
  for (const auto& text : texts) {
    const auto count = static_cast<std::int64_t>(text.size());
    const auto of_text = [&](std::string_view /*what*/, std::int64_t done, std::int64_t total) {
      if (progress) progress("texts", before + count * done / total, tokens);
    };
    const SequenceId sequence = engine->add_sequence();
    engine->step(StepBatch(sequence, text, engine->rule(StepPart::context), StepOutput::none),
                 of_text);
    engine->free_sequence(sequence);
    before += count;
  }
  learner->finish(comm);
}

}  // namespace kvzap
