// Pairs to train surrogates from: a text and its repetition run through the model, and what the
// repetition asked of the text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/chat_template.hpp>
#include <kvzap/engine.hpp>
#include <kvzap/pairs.hpp>
#include <kvzap/tokenizer.hpp>
#include <memory>
#include <string>
#include <vector>

namespace kvzap {

/// Which texts of a file are used, and which of their tokens.
struct CollectRules {
  std::int64_t tokens_per_text = 500;  // at most; all of a text with fewer
  /// Tokens of a text, both included.
  std::int64_t min_tokens = 750;
  std::int64_t max_tokens = 1250;
  std::int64_t per_subset = 500;  // texts of each subset at most, the first ones
  std::int64_t max_texts = 0;     // in all, the first ones; 0: all
  std::uint64_t seed = 0;
};

/// A text in the form in which the model sees it: the user gives the text and asks for it again,
/// the assistant repeats it (NVIDIA/kvpress, kvzap/data.py).
struct CollectText {
  std::vector<TokenId> ids;
  /// Positions in `ids` of the text, and of its repetition.
  std::int64_t text_begin = 0;
  std::int64_t text_end = 0;
  std::int64_t repeat_begin = 0;
  std::int64_t repeat_end = 0;
  /// Of the tokens that are collected, within the text, ascending.
  std::vector<std::int64_t> positions;
};

/// The texts that a file holds and rules choose, and what became of the others.
struct CollectTexts {
  std::vector<CollectText> texts;
  std::vector<PairsPlan::Text> plan;  // of each
  std::int64_t lines = 0;             // with a text in them
  std::int64_t too_short = 0;
  std::int64_t too_long = 0;  // or their repetition would not fit the model's context
  std::int64_t over_subset = 0;
  std::int64_t over_max_texts = 0;
  std::string hash;  // of the file
};

/// A conversation about `text`, which has no white space at its ends. A token belongs to the text
/// or to the repetition where its first character does. Throws Error if the tokenizer does not give
/// the text back, so that its tokens cannot be found in it.
CollectText make_collect_text(std::string_view text, const Tokenizer& tokenizer,
                              const ChatTemplate& chat_template);

/// Reads a file with a JSON object per line, whose field `text` has a text and whose field
/// `subset`, if there is one, names what the text is a sample of. Blank lines are skipped; white
/// space at a text's ends is dropped. Which positions are collected depends on the seed and the
/// line alone. One process alone. Throws Error, naming file and line, for what is no such file; and
/// if no text can be used, with the reasons.
CollectTexts read_collect_texts(const std::filesystem::path& file, const CollectRules& rules,
                                const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                                const ModelConfig& config);

/// What was collected, over all ranks.
struct CollectResult {
  std::int64_t texts = 0;  // in this run
  std::int64_t pairs = 0;
  std::int64_t tokens = 0;             // that went through the model
  std::int64_t non_finite_scores = 0;  // among all of the pairs' layers and heads
  double write_seconds = 0;            // of the slowest rank, bringing pairs to the file
  bool stopped = false;
};

/// Runs texts through the model, from writer.texts() on, and appends their pairs: the hidden states
/// that enter attention at the collected positions, and for each KV head log max over positions of
/// the repetition and query heads of the group of p * |W_O v| / |h| (KVzip+), where p is the
/// probability of full causal attention. Logarithms of 0 are -infinity; both they and NaN are
/// counted and written.
///
/// Rank 0 passes the texts, all ranks whether to stop: `stop` is asked after each text, and one
/// rank that says yes ends all of them. Of a text one layer's keys and values exist at a time.
/// Collective. Throws what Engine::step and PairsWriter::append throw.
template <class Value>
CollectResult collect_pairs(const std::shared_ptr<const Model<Value>>& model,
                            const std::vector<CollectText>& texts, PairsWriter& writer,
                            const Communicator& comm, const std::function<bool()>& stop,
                            const ProgressCallback& progress = {});

}  // namespace kvzap
