// OpenAI's and Anthropic's protocols: convert request bodies to generation requests, and answers to
// reply bodies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <kvzap/server/request.hpp>
#include <kvzap/server/request_policies.hpp>
#include <kvzap/server/response_store.hpp>
#include <kvzap/server/scheduler.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvzap::server {

class AnswerGrammars;
struct AnswerFormat;
struct EmbeddingForm;
struct ResponseRequest;

/// Thrown for a wrong request, which the server answers with status 400. `field`: the invalid
/// field, or ""; `code`: OpenAI's name of the error, or "".
class BadRequest : public Error {
 public:
  BadRequest(std::string of, const std::string& what, std::string code_of = {})
      : Error(what), field(std::move(of)), code(std::move(code_of)) {}
  std::string field, code;
};

/// The `code` of a BadRequest that is answered with status 404.
inline constexpr const char* model_not_found = "model_not_found";

/// The model as the protocol describes it, and the values of fields that a request omits.
struct ServedModel {
  std::string name;
  std::int64_t created = 0;  // seconds since 1970
  std::optional<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  bool thinking = false;
  /// Ids of tokens are less than this; 0: not known.
  std::int64_t vocabulary = 0;
  std::vector<TokenId> stop_ids;
  SamplingOptions sampling;
  /// Whether requests without a seed use the seed of `sampling`. If not, each gets a random seed.
  bool has_seed = false;
  /// Tokens of prompt and answer together; 0: no limit.
  std::int64_t max_tokens = 0;
  /// See longest_token. With max_tokens it bounds the bytes of a prompt before the tokenizer works
  /// on it; 0: no limit.
  std::size_t longest_token = 0;
  /// Limits on the answers to one prompt, and on the prompts of a request.
  std::int64_t max_choices = 16;
  std::int64_t max_prompts = 128;
  /// See RequestPolicies::pruning_of.
  std::function<Pruning(const PruneWish&)> pruning_of;
  /// See RequestPolicies::page_format_of.
  std::function<PageFormat(const PruneWish&)> page_format_of;
  /// Grammars of answers; null: requests cannot have them.
  std::shared_ptr<AnswerGrammars> grammars;
  /// Responses of /v1/responses; null: none is stored.
  std::shared_ptr<ResponseStore> responses;
  /// The server's own policy, as its --policy; empty: it prunes nothing.
  std::string policy;
  /// The fields of "kvzap" with which a request may change the amount of this policy.
  std::vector<std::string> amounts;
  /// Of the vectors of texts, which have `hidden_size` numbers; 0: not known.
  Pooling pooling = Pooling::last;
  std::int64_t hidden_size = 0;
  /// Limit on the texts of a request for vectors.
  std::int64_t max_inputs = 1024;
};

/// Returns the bytes of the longest text that a single token stands for.
std::size_t longest_token(const Tokenizer& tokenizer);

/// Returns an empty store of grammars for ServedModel. `vocabulary`: the number of the model's
/// logits; `end_ids`: tokens that end answers.
std::shared_ptr<AnswerGrammars> answer_grammars(const Tokenizer& tokenizer, std::int64_t vocabulary,
                                                const std::vector<TokenId>& end_ids);

/// Endpoints that answer prompts: /v1/completions, /v1/chat/completions, /v1/responses, and
/// Anthropic's /v1/messages; and those that compute vectors of texts: /v1/embeddings, /v1/score and
/// /v1/rerank.
enum class Endpoint { completions, chat, responses, messages, embeddings, score, rerank };

/// Whether an endpoint computes vectors of texts.
inline bool embeds(Endpoint endpoint) {
  return endpoint == Endpoint::embeddings || endpoint == Endpoint::score ||
         endpoint == Endpoint::rerank;
}

/// A request to an endpoint that answers prompts. Its answers are numbered by prompt: first
/// the `choices` answers to the first prompt, then those to the second one.
struct ApiRequest {
  Endpoint endpoint = Endpoint::completions;
  /// One for each prompt.
  std::vector<GenerationRequest> generations;
  int prompts = 1;
  std::int64_t prompt_tokens = 0;  // of all prompts
  /// Number of answers to each prompt.
  int choices = 1;
  std::vector<std::string> stop;
  bool streams = false;
  bool includes_usage = false;  // at the end of a stream
  bool has_logprobs = false;
  bool echoes = false;
  std::vector<std::string> prompt_texts;  // for `echoes`
  /// The parts that answers may have beside text; null: text alone.
  std::shared_ptr<const AnswerFormat> format;
  /// For Endpoint::responses.
  std::shared_ptr<const ResponseRequest> response;
  bool reports_progress = false;  // of prompts, in a stream
  /// Makes the grammar of answers; see complete. Null: it is made, or they are any text.
  std::function<std::shared_ptr<const TokenGrammar>()> make_grammar;
  /// What becomes of the prompts' vectors, for endpoints that compute them.
  std::shared_ptr<const EmbeddingForm> embedding;

  /// Whether the prompt is a conversation.
  bool is_chat() const { return endpoint != Endpoint::completions && !embeds(endpoint); }
  /// Number of answers to all prompts.
  int answers() const { return prompts * choices; }
};

/// Reads a request body. Ignores fields that have no effect here. Throws BadRequest for invalid
/// fields and for features that are not supported. All endpoints with conversations have the reader
/// of /v1/chat/completions; the others are brought into its form. The model must outlive the
/// request.
ApiRequest parse_request(std::string_view body, Endpoint endpoint, const ServedModel& model);

/// Makes the grammar of a request's answers, which can take a second, if parse_request has left
/// that to be done. Throws BadRequest.
void complete(ApiRequest& request);

/// Returns the reply body to a request to /v1/messages/count_tokens. Throws BadRequest.
std::string count_tokens(std::string_view body, const ServedModel& model);
/// Returns the reply body to a request to /tokenize. Throws BadRequest.
std::string tokenize(std::string_view body, const ServedModel& model);
/// Returns the reply body to a request to /detokenize. Throws BadRequest.
std::string detokenize(std::string_view body, const ServedModel& model);

/// Returns the body of an error reply of OpenAI's protocol: {"error": {…}}. `type`:
/// "invalid_request_error", "server_error", …; `code`: OpenAI's name of the error, or "".
std::string error_body(const std::string& what, const std::string& type,
                       const std::string& field = {}, const std::string& code = {});
/// Returns the body of an error reply of Anthropic's protocol: {"type": "error", "error": {…}}.
std::string messages_error_body(const std::string& what, const std::string& type);

/// The text of an answer, token by token, up to the first stop text.
class AnswerText {
 public:
  AnswerText(const Tokenizer& tokenizer, std::vector<std::string> stop);
  /// The text of an answer to `request`.
  AnswerText(const Tokenizer& tokenizer, const ApiRequest& request);
  AnswerText(AnswerText&&) noexcept;
  AnswerText& operator=(AnswerText&&) noexcept;
  ~AnswerText();
  /// Adds a token and returns new text. Holds back text that may begin a stop text.
  std::string append(TokenId token);
  /// Returns the text held back.
  std::string finish();
  /// Whether a stop text was found.
  bool has_stopped() const { return !found().empty(); }
  /// The stop text that was found; empty: none.
  const std::string& found() const;

 private:
  struct UntilStop;

  Tokenizer::StreamDecoder m_decoder;
  std::unique_ptr<UntilStop> m_until_stop;
};

/// A token with its log probability and those of the likeliest tokens.
struct TokenText {
  TokenId token = -1;
  float logprob = 0;  // NaN: none, as that of a prompt's first token
  std::vector<std::pair<TokenId, float>> top;
};

/// The tokens of a request.
struct TokenCounts {
  std::int64_t prompt = 0;  // of all prompts
  std::int64_t cached = 0;  // prompt tokens that were in the cache from an earlier request
  std::int64_t generated = 0;
  DraftCounts drafts;
};

/// Writes the reply to one request: either `body`, or the events of a stream. The model must
/// outlive it.
class ReplyWriter {
 public:
  /// Makes the writer of the request's endpoint. `id`: the id of the scheduler's ticket for the
  /// first prompt. `created`: seconds since 1970.
  static std::unique_ptr<ReplyWriter> make(const ApiRequest& request, const ServedModel& model,
                                           std::int64_t id, std::int64_t created);
  ReplyWriter(const ReplyWriter&) = delete;
  ReplyWriter& operator=(const ReplyWriter&) = delete;
  virtual ~ReplyWriter() = default;

  /// An answer that has ended.
  struct Whole {
    std::string text;
    std::vector<TokenText> tokens;
    Ending ending;
    std::vector<float> embedding = {};  // of the prompt, if the request asks for it
  };
  /// Returns the body of a reply that is not streamed, with all answers.
  virtual std::string body(const std::vector<Whole>& answers) = 0;

  /// Returns the first events of a choice in a stream.
  virtual std::string begin(int choice) = 0;
  /// Returns events with new text of a choice. `tokens`: for log probabilities.
  virtual std::string piece(int choice, const std::string& text,
                            const std::vector<TokenText>& tokens) = 0;
  /// Returns an event with the progress of a choice's prompt, as llama.cpp's server sends it; none
  /// in protocols without one.
  virtual std::string progress(int /*choice*/, const PromptProgress& /*progress*/) { return {}; }
  /// Returns the last events of a choice.
  virtual std::string end(int choice, const Ending& ending) = 0;
  /// Returns the last events of a stream. `endings`: of all answers.
  virtual std::string finish(const std::vector<Ending>& endings) = 0;
  /// Returns the last events of a stream that fails by the server's fault.
  virtual std::string failure(const std::string& what) = 0;
  /// Returns what keeps a silent stream open.
  virtual std::string sign() { return ": in progress\n\n"; }

  /// Returns the token counts of all answers. A prompt's tokens count once for all its answers.
  TokenCounts count(const std::vector<Ending>& endings) const;

 protected:
  explicit ReplyWriter(const ApiRequest& request) : m_choices(request.choices) {}

 private:
  int m_choices;  // of each prompt
};

/// Returns the body of /v1/models.
std::string models_body(const ServedModel& model);
/// Returns the body of /v1/models/NAME.
std::string model_body(const ServedModel& model);
/// Returns the body of the reply to a deleted response.
std::string deleted_body(const std::string& id);
/// Returns the body of /kvzap/status. `kv_memory`: bytes over all ranks; none: no limit.
std::string status_body(const ServedModel& model, const Scheduler& scheduler,
                        std::optional<std::int64_t> kv_memory);
/// Returns the scheduler's part of /metrics, in Prometheus' text format.
std::string metrics_text(const SchedulerCounts& counts, const ServedModel& model);

}  // namespace kvzap::server
