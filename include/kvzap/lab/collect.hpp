// What texts that run through a model tell of it: pairs to train surrogates from, which are what a
// text's repetition asked of the text, and statistics of queries.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/lab/pairs.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <map>
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
  std::int64_t per_subset =
      500;                     // texts of each subset at most, the first ones; those of none: all
  std::int64_t max_texts = 0;  // in all, the first ones; 0: all
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

/// The same of texts that are run as they are: with white space at their ends, without a
/// conversation, behind the tokens that the tokenizer puts in front (which rules count too). Their
/// `positions` are empty.
CollectTexts read_plain_texts(const std::filesystem::path& file, const CollectRules& rules,
                              const Tokenizer& tokenizer, const ModelConfig& config);

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

/// What the queries of a model are like before RoPE; where a model has a norm of queries, after it.
struct QueryMoments {
  /// On rank 0, empty elsewhere: mean (layer, query head, head_dim) and covariance (layer, query
  /// head, head_dim, head_dim), over queries - 1.
  std::vector<float> mean;
  std::vector<float> covariance;
  std::int64_t queries = 0;  // of each head
  std::int64_t texts = 0;
  std::int64_t tokens = 0;  // that went through the model
  bool stopped = false;     // before the last text: there is no mean and no covariance
};

/// Runs texts through the model and gathers mean and covariance of the queries of all their tokens
/// but each text's first `sink`, whose queries are unlike others (kvpress' ExpectedAttentionStats:
/// tokens count alike, whichever text they are of). Within a text sums are taken in float around
/// the mean of its first block (policy::QueryStatistics), over texts in double, as Chan, Golub and
/// LeVeque (1983) combine moments. Memory beside a prefill: 8 bytes for each (layer, query head of
/// the rank, head_dim, head_dim), on rank 0 at the end 4 more for those of all ranks.
///
/// Rank 0 passes the texts, all ranks whether to stop, as with collect_pairs. Collective. Throws
/// AgreedError if fewer than two queries would count, and for queries that are no finite numbers;
/// and what Engine::step throws.
template <class Value>
QueryMoments collect_query_moments(const std::shared_ptr<const Model<Value>>& model,
                                   const std::vector<CollectText>& texts, std::int64_t sink,
                                   const Communicator& comm, const std::function<bool()>& stop,
                                   const ProgressCallback& progress = {});

/// Writes them as the tensors query_mean and query_cov of a safetensors file, F32, which policy
/// expected-attention reads (`statistics`). A file of that name is replaced once the new one is
/// whole. One process alone. Throws Error, naming the file.
void write_query_moments(const std::filesystem::path& file, const QueryMoments& moments,
                         const ModelConfig& config,
                         const std::map<std::string, std::string>& metadata);

}  // namespace kvzap
