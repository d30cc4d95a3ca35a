// A model that reads a text with a pruned KV cache and answers questions about it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/model.hpp>
#include <kvzap/model/model_config.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap {

/// How a Session runs its model.
struct SessionOptions {
  /// Type of weights and cache.
  DType dtype = DType::bf16;
  /// How pages store keys and values that have left the window.
  PageFormat page_format = {};
  /// See CacheOptions::read_pages. Files of `save` record it.
  ReadPages read_pages = {};
  WeightStorage weights = WeightStorage::as_stored;
  /// Use only this many of the first layers, for trials; absent: all.
  std::optional<std::int64_t> layers;
  /// Generate random weights from this seed.
  std::optional<std::uint64_t> random_weights;
  /// Replaces the RoPE scaling of config.json: "none", or "linear", "dynamic" or "yarn" by the
  /// factor rope_scale; empty: that of config.json.
  std::string rope_scaling;
  double rope_scale = 1;
  /// A policy of the caller's own, in place of the one that the Pruning names; null: none. `save`
  /// records its name alone.
  std::shared_ptr<const PolicyInfo> policy;
  /// Threads of this rank; 0: the number of its cores.
  int threads = 0;
  /// Most tokens of context, question and answer together; 0: the model's longest context.
  std::int64_t max_context = 0;
  /// Wrap text in the model's chat template.
  bool chat_template = true;
  /// Let a Qwen3 model think before it answers.
  bool thinking = false;
  /// System message of the chat template; absent: the template's default.
  std::optional<std::string> system;
  /// With a chat template, separates the context from a question after it, unless white space does
  /// already: at the context's end or the question's beginning.
  std::string separator = "\n\n";
  /// How answers are drawn. repetition_penalty, suppress_tokens and bad_words always come from the
  /// model's generation_config.json.
  SamplingOptions sampling;
  /// The most guessed tokens that a step checks: AnswerOptions::lookup.
  std::int64_t lookup = 0;
  /// Called with "load", "prefill", "question" or "repeat", the steps done and those in total. An
  /// exception that it throws ends the call; a reading then leaves no context.
  ProgressCallback progress;
};

/// How one question is answered.
struct AskOptions {
  std::int64_t max_new_tokens = 128;
  /// How this answer is drawn; absent: by SessionOptions::sampling. The same rules of
  /// generation_config.json apply. Every rank gives the same.
  std::optional<SamplingOptions> sampling;
  /// Called on rank 0 with each piece of the answer's text. Return false to stop the answer.
  std::function<bool(std::string_view)> on_text;
};

/// State of a Session's cache, over all ranks.
struct SessionReport {
  std::int64_t context_tokens = 0;
  CacheReport cache;
  /// Tokens of the last answer, and why it ended; absent before an answer, and after one that
  /// `on_text` has stopped.
  std::int64_t answer_tokens = 0;
  std::optional<StopReason> stop_reason;
  /// Returns whether the last answer was cut: it ran into AskOptions::max_new_tokens or the longest
  /// context.
  bool is_cut() const { return stop_reason.value_or(StopReason::stop_id) != StopReason::stop_id; }
  /// One line: tokens, evict ratio and bytes, and whether the last answer was cut.
  std::string text() const;
};

/// A model, its cache and a context: read once, then ask any number of questions about it.
///
///     kvzap::Session session(folder, Pruning::kvzap(surrogate).threshold(-4), communicator);
///     session.read(text);
///     std::string answer = session.ask("What was decided?");
///
/// Each answer starts from the context alone. A pruning after the question (PruneMoment::question)
/// reads the context with each question: the cache is empty until the first answer. All ranks make
/// the same calls in the same order, and every call but `answer` is collective. Texts, messages and
/// ids of rank 0 count; the other ranks may pass empty ones. Kokkos (and MPI, in a build with it)
/// must be initialized before the first Session and finalized after the last. Every error is an
/// Error with the same text on all ranks.
class Session {
 public:
  /// Loads the model and the files that the pruning needs. Throws AgreedError if the folder, the
  /// pruning or an option is not valid.
  Session(const std::filesystem::path& folder, const Pruning& pruning,
          const Communicator& communicator, const SessionOptions& options = {});
  ~Session();
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;

  /// Returns a session without a context. The two share model, pruning and options, and have caches
  /// of their own. Throws AgreedError without memory.
  Session another() const;

  /// Reads text as the beginning of the user's message. A further call adds text to the message.
  /// Throws AgreedError for an empty text, too many tokens, or a pruning that allows no more
  /// context.
  void read(const std::string& text);
  void read(const char* text) { read(std::string(text)); }
  /// Reads a conversation. Its last message must be the user's, and `ask` continues it. Only
  /// allowed as the first reading of a session with a chat template.
  void read(const std::vector<ChatMessage>& messages);
  /// Reads token ids unchanged. With a policy that lets the model repeat the context (kvzip), they
  /// must begin as the chat template does.
  void read(const std::vector<TokenId>& ids);

  /// Asks a question, possibly an empty one, and returns the answer's text on rank 0 (empty text
  /// elsewhere). With a chat template the question ends the user's message. Throws AgreedError
  /// before the first `read`, for too many tokens, and if `on_text` throws.
  std::string ask(const std::string& question, const AskOptions& options = {});
  /// Returns the tokens of the last answer, the same on all ranks. After a stop by `on_text`,
  /// returns the tokens up to the stop.
  const std::vector<TokenId>& answer() const;

  /// Returns the ids of a context and of a question after it, as `read` and `ask` make them. Rank
  /// 0's texts count; collective. Throws AgreedError for too many tokens.
  std::pair<std::vector<TokenId>, std::vector<TokenId>> prompt(const std::string& context,
                                                               const std::string& question) const;
  /// Returns the ids of a text without a template, and the text of ids. Rank 0 alone has a
  /// tokenizer: elsewhere they are empty. Throws Error for an id outside the vocabulary.
  std::vector<TokenId> encode(const std::string& text) const;
  std::string decode(const std::vector<TokenId>& ids) const;

  /// Returns a grammar for SamplingOptions::grammar, made by `make` on rank 0; null elsewhere.
  /// Collective. Throws AgreedError with the message of what `make` throws.
  using MakeGrammar = std::function<std::shared_ptr<const TokenGrammar>(
      std::shared_ptr<const TokenGrammar::Vocabulary>)>;
  std::shared_ptr<const TokenGrammar> grammar(const MakeGrammar& make);

  const ModelConfig& config() const;
  const Pruning& pruning() const;
  const SessionOptions& options() const;
  /// Most tokens of context, question and answer.
  std::int64_t max_context() const;
  /// An answer ends with one of these ids.
  const std::vector<TokenId>& stop_ids() const;
  /// The context and the last answer as the engine has them, for analyses.
  Generator& generator();

  /// Reports the context before the first answer, and the last answer's sequence afterwards.
  SessionReport report();

  /// Writes context, cache, and the last question with its answer to an HDF5 file, from which
  /// `kvzap run` and `kvzap chat` continue, too. Throws AgreedError before the first `read` and if
  /// the file cannot be written.
  void save(const std::filesystem::path& file);
  /// Replaces the context by that of a file of `save`, `kvzap run` or `kvzap chat`, on any number
  /// of ranks, and runs the rest of a context that has not run completely. Throws AgreedError, and
  /// changes nothing, for another file, for one of another pruning, dtype or chat template, and if
  /// model, tokenizer or surrogate have changed.
  void load(const std::filesystem::path& file);
  /// Continues from such a file with a model of its own, on any number of ranks. Pruning, dtype,
  /// weights (also random ones), layers, RoPE scaling, chat template, thinking and system message
  /// come from the file, everything else from `options`. `folder`: the model's present folder;
  /// empty: the recorded one. Throws AgreedError for another file, or if model, tokenizer or
  /// surrogate have changed.
  static Session resume(const std::filesystem::path& file, const Communicator& communicator,
                        SessionOptions options = {}, const std::filesystem::path& folder = {});

 private:
  struct Shared;
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> m_impl;
};

}  // namespace kvzap
