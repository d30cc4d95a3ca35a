// Runs the texts from which a policy learns before its first sequence.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// Returns the token ids of the texts in a file. The file has one text per line. If its first line
/// begins with a brace, it has one JSON object per line, and the text is in the field `text`. Blank
/// lines are skipped. Texts get no chat template, but they get the special tokens that the
/// tokenizer adds to any text.
///
/// Rank 0 reads and tokenizes with its `tokenizer` (null on other ranks is allowed) and sends the
/// ids to all ranks. Collective. Throws AgreedError if there is no tokenizer, if the file cannot be
/// read, or if it has no text or a malformed line. A token outside the model's vocabulary is an
/// error, too.
std::vector<std::vector<TokenId>> read_texts(const std::filesystem::path& file,
                                             const Tokenizer* tokenizer, const ModelConfig& config,
                                             const Communicator& comm);

/// Converts a text to token ids.
using TextEncoder = std::function<std::vector<TokenId>(const std::string& text)>;
/// Does the same with the caller's `encode`, which is called on rank 0. `most`: number of texts to
/// read from the beginning of the file; 0: all.
std::vector<std::vector<TokenId>> read_texts(const std::filesystem::path& file,
                                             const TextEncoder& encode, const ModelConfig& config,
                                             const Communicator& comm, std::int64_t most = 0);

/// Runs each text through the model for `choice.learner`, one after the other. Does nothing if
/// the choice has no learner. Call it before the first sequence of an engine with this choice.
/// Keys and values of a text exist for one layer at a time, and the cache is empty afterwards.
/// `progress` receives "texts" and the number of tokens. Collective: all ranks pass the same texts.
/// Throws Error if there is no text or a text is empty, and the errors of Engine::step.
void learn_from_texts(const std::shared_ptr<const Model>& model, const PolicyChoice& choice,
                      const std::vector<std::vector<TokenId>>& texts, const Communicator& comm,
                      const ProgressCallback& progress = {});

}  // namespace kvzap
