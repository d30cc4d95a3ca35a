// Collects data from texts that run through a model. These are training pairs of surrogates, scored
// by the attention of a text's repetition to the text, and statistics of queries.
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

/// Rules that select texts from a file, and tokens from each text.
struct CollectRules {
  std::int64_t tokens_per_text = 500;  // at most
  /// Length of a text in tokens, both ends included.
  std::int64_t min_tokens = 750;
  std::int64_t max_tokens = 1250;
  std::int64_t per_subset = 500;  // first texts of each subset; texts without a subset: all
  std::int64_t max_texts = 0;     // first texts in total; 0: all
  std::uint64_t seed = 0;
};

/// A text as a conversation: the user gives the text and asks for it again, the assistant repeats
/// it (NVIDIA/kvpress, kvzap/data.py).
struct CollectText {
  std::vector<TokenId> ids;
  /// Positions in `ids` of the text, and of its repetition.
  std::int64_t text_begin = 0;
  std::int64_t text_end = 0;
  std::int64_t repeat_begin = 0;
  std::int64_t repeat_end = 0;
  /// Positions of the collected tokens within the text, ascending.
  std::vector<std::int64_t> positions;
};

/// The texts chosen from a file, and counts of the others.
struct CollectTexts {
  std::vector<CollectText> texts;
  std::vector<PairsPlan::Text> plan;  // for each text
  std::int64_t lines = 0;             // lines with a text
  std::int64_t too_short = 0;
  // texts that are too long, or too long for the model's context with the repetition
  std::int64_t too_long = 0;
  std::int64_t over_subset = 0;
  std::int64_t over_max_texts = 0;
  std::string hash;  // of the file
};

/// Makes the conversation about `text`, which must have no white space at its ends. A token belongs
/// to the text or to the repetition if its first character does. Throws Error if decoding the
/// tokens does not reproduce the text, because their places in it are then unknown.
CollectText make_collect_text(std::string_view text, const Tokenizer& tokenizer,
                              const ChatTemplate& chat_template);

/// Reads a file with one JSON object per line: the field `text` has the text, the optional field
/// `subset` names its source. Skips blank lines and removes white space at a text's ends. The
/// collected positions depend only on the seed and the line. Reads on this process; no
/// communication. Throws Error, naming file and line, for any other content. Throws Error with the
/// reasons if no text is usable.
CollectTexts read_collect_texts(const std::filesystem::path& file, const CollectRules& rules,
                                const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                                const ModelConfig& config);

/// Reads texts to run without a conversation, including white space at their ends. Their ids begin
/// with the tokens that the tokenizer adds in front, which count towards the rules. Their
/// `positions` are empty.
CollectTexts read_plain_texts(const std::filesystem::path& file, const CollectRules& rules,
                              const Tokenizer& tokenizer, const ModelConfig& config);

/// Result of collect_pairs, over all ranks.
struct CollectResult {
  std::int64_t texts = 0;  // in this run
  std::int64_t pairs = 0;
  std::int64_t tokens = 0;             // run through the model
  std::int64_t non_finite_scores = 0;  // over all layers and heads
  double write_seconds = 0;            // of the slowest rank
  bool stopped = false;
};

/// Runs texts through the model, from text writer.texts() on, and appends their pairs. A pair has
/// the hidden state that enters attention at a collected position, and the KVzip+ score of each KV
/// head. The score is log max of p * |W_O v| / |h| over the repetition's positions and the group's
/// query heads, with p the probability of full causal attention. -infinity, for log 0, and NaN are
/// counted and written.
///
/// Rank 0 passes the texts. Every rank passes `stop`, which is called after each text and ends all
/// ranks if one returns true. The keys and values of one layer exist at a time. Collective. Throws
/// the errors of Engine::step and PairsWriter::append.
CollectResult collect_pairs(const std::shared_ptr<const Model>& model,
                            const std::vector<CollectText>& texts, PairsWriter& writer,
                            const Communicator& comm, const std::function<bool()>& stop,
                            const ProgressCallback& progress = {});

/// Statistics of a model's queries before RoPE, and after the norm of queries if the model has one.
struct QueryMoments {
  /// On rank 0, empty elsewhere: mean (layer, query head, head_dim) and covariance (layer, query
  /// head, head_dim, head_dim), over queries - 1.
  std::vector<float> mean;
  std::vector<float> covariance;
  std::int64_t queries = 0;  // of each head
  std::int64_t texts = 0;
  std::int64_t tokens = 0;  // run through the model
  bool stopped = false;     // stopped before the last text: mean and covariance are absent
};

/// Runs texts through the model and computes mean and covariance of the queries of all tokens but
/// the first `sink` of each text, whose queries are outliers. All tokens count equally, as in
/// kvpress' ExpectedAttentionStats. Sums are in float within a text, around the mean of its first
/// block (policy::QueryStatistics), and in double over texts (Chan, Golub and LeVeque 1983). Memory
/// beside a prefill: 8 bytes per (layer, query head of the rank, head_dim, head_dim). On rank 0 the
/// end needs 4 more bytes per element for all ranks.
///
/// Rank 0 passes the texts, and every rank `stop`, as for collect_pairs. Collective. Throws
/// AgreedError for fewer than two queries and for queries that are not finite, and the errors of
/// Engine::step.
QueryMoments collect_query_moments(const std::shared_ptr<const Model>& model,
                                   const std::vector<CollectText>& texts, std::int64_t sink,
                                   const Communicator& comm, const std::function<bool()>& stop,
                                   const ProgressCallback& progress = {});

/// Writes the tensors query_mean and query_cov (F32) to a safetensors file, which policy
/// expected-attention reads (`statistics`). Replaces an existing file once the new one is complete.
/// Writes on this process; no communication. Throws Error, naming the file.
void write_query_moments(const std::filesystem::path& file, const QueryMoments& moments,
                         const ModelConfig& config,
                         const std::map<std::string, std::string>& metadata);

}  // namespace kvzap
