// Runs the texts from which a policy learns before it scores anything.
#pragma once

#include <filesystem>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// Token ids of the texts in a file: one text per line, or, if its first line begins with a brace,
/// a JSON object per line whose field `text` has the text. Blank lines are skipped. Ids are those
/// of the plain text, without chat template, with the special tokens that the tokenizer puts around
/// any text.
///
/// Rank 0 reads and tokenizes, with its `tokenizer` (that of other ranks may be null), and all
/// ranks get the ids. Collective. Throws AgreedError if there is no tokenizer, the file cannot be
/// read, has no text or a line of another form, or a token is not in the model's vocabulary.
std::vector<std::vector<TokenId>> read_texts(const std::filesystem::path& file,
                                             const Tokenizer* tokenizer, const ModelConfig& config,
                                             const Communicator& comm);

/// What makes token ids of a text.
using TextEncoder = std::function<std::vector<TokenId>(const std::string& text)>;
/// The same with ids of the caller's making, on rank 0. `most`: only so many texts from the
/// beginning of the file; 0: all.
std::vector<std::vector<TokenId>> read_texts(const std::filesystem::path& file,
                                             const TextEncoder& encode, const ModelConfig& config,
                                             const Communicator& comm, std::int64_t most = 0);

/// Runs each text through the model, one after the other, as `choice.calibration` wants to see it;
/// does nothing if the choice has none. To be called before the first sequence of an engine that
/// has the choice as its policy. Of a text one layer's keys and values exist at a time, and nothing
/// of it stays. Collective: all ranks pass the same texts. Throws Error if there are none or one of
/// them is empty, and what Engine::step throws. `progress` gets "texts" and tokens.
template <class Value>
void calibrate(const std::shared_ptr<const Model<Value>>& model, const PolicyChoice& choice,
               const std::vector<std::vector<TokenId>>& texts, const Communicator& comm,
               const ProgressCallback& progress = {});

}  // namespace kvzap
