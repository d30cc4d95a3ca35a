// OpenAI's protocol: from the body of a request to what the scheduler is asked, and back.
#pragma once

#include <functional>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/scheduler.hpp"

namespace kvzap::server {

/// A request that is answered with status 400; `field`: what of it is wrong, or "".
class BadRequest : public Error {
 public:
  BadRequest(std::string of, const std::string& what) : Error(what), field(std::move(of)) {}
  std::string field;
};

/// What a request asks for under "kvzap".
struct PruneWish {
  std::optional<double> threshold, evict_ratio;
  std::optional<PruneMode> prune;
};

/// What requests are read with.
struct ServedModel {
  std::string name;
  std::int64_t created = 0;  // seconds since 1970
  std::optional<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  bool thinking = false;
  std::vector<TokenId> stop_ids;
  /// Where a request says nothing, but for the seed: without `has_seed` each has another one.
  SamplingOptions sampling;
  bool has_seed = false;
  /// Of prompt and answer together; 0: no limit.
  std::int64_t max_tokens = 0;
  std::int64_t max_choices = 16;
  /// What a wish comes to. Throws BadRequest for one that the server was not started for.
  std::function<Setting(const PruneWish&)> setting_of;
};

/// A request to /v1/chat/completions or /v1/completions.
struct ApiRequest {
  bool is_chat = false;
  GenerationRequest generation;
  std::vector<std::string> stop;
  bool streams = false;
  bool includes_usage = false;  // in a stream
  bool has_logprobs = false;
  bool echoes = false;
  std::string prompt_text;  // to be echoed
};

/// Reads a body. Fields that change nothing here are passed over; those that ask for something that
/// there is not (tools, logit_bias, …) are errors. Throws BadRequest.
ApiRequest parse_request(std::string_view body, bool is_chat, const ServedModel& model);

/// Replies to /tokenize and /detokenize. Throw BadRequest.
nlohmann::ordered_json tokenize(std::string_view body, const ServedModel& model);
nlohmann::ordered_json detokenize(std::string_view body, const ServedModel& model);

/// The stretches of a rendered conversation: each message of the user is a context, judged at its
/// end, what stands between it and the answer a question; what the assistant said counts as
/// generated. Of a message that has several parts the last is a question too. Throws BadRequest.
std::vector<Segment> segments_of(const std::vector<ChatMessage>& messages,
                                 const std::vector<std::vector<std::string>>& parts, bool thinking,
                                 const ServedModel& model);

/// {"error": {…}} as OpenAI's. `type`: "invalid_request_error", "server_error", …
std::string error_body(const std::string& what, const std::string& type,
                       const std::string& field = {});

/// The text of an answer as its tokens come, up to the first of the texts that end it.
class AnswerText {
 public:
  AnswerText(const Tokenizer& tokenizer, std::vector<std::string> stop)
      : m_decoder(tokenizer), m_stop(std::move(stop)) {}
  /// What can be said with this token. Text that may begin one of `stop` is held back.
  std::string append(TokenId token);
  /// What was held back.
  std::string finish();
  /// Whether a text of `stop` has come.
  bool has_stopped() const { return m_has_stopped; }

 private:
  std::string release(bool all);

  Tokenizer::StreamDecoder m_decoder;
  std::vector<std::string> m_stop;
  std::string m_held;
  bool m_has_stopped = false;
};

/// A token with what it is likely to be, for people.
struct TokenText {
  TokenId token = -1;
  float logprob = 0;
  std::vector<std::pair<TokenId, float>> top;
};

/// Writes replies to one request.
class ReplyWriter {
 public:
  ReplyWriter(const ApiRequest& request, const ServedModel& model, std::int64_t id,
              std::int64_t created);

  /// An answer that has ended.
  struct Whole {
    std::string text;
    std::vector<TokenText> tokens;
    Ending ending;
  };
  /// The body of a reply that is not streamed; one answer for each choice.
  std::string body(const std::vector<Whole>& answers) const;

  /// Events of a stream, each "data: …\n\n".
  std::string begin(int choice) const;
  std::string piece(int choice, const std::string& text, const std::vector<TokenText>& tokens);
  std::string end(int choice, const Ending& ending) const;
  std::string usage(const std::vector<Ending>& endings) const;
  static std::string done() { return "data: [DONE]\n\n"; }

 private:
  nlohmann::ordered_json frame(bool is_chunk) const;
  nlohmann::ordered_json choice_of(int choice) const;
  nlohmann::ordered_json usage_of(const std::vector<Ending>& endings) const;
  nlohmann::ordered_json logprobs_of(const std::vector<TokenText>& tokens,
                                     std::size_t offset) const;
  std::string text_of(TokenId token) const;

  bool m_is_chat;
  bool m_has_logprobs;
  const ServedModel& m_model;
  std::string m_id;
  std::int64_t m_created;
  std::string m_echo;
  std::vector<std::size_t> m_offsets;  // bytes of text so far, of each choice
};

/// What a page, or a person, reads of a pruned sequence.
nlohmann::ordered_json kvzap_of(const Ending& ending);

/// /metrics, in Prometheus' text format.
std::string metrics_text(const SchedulerCounts& counts, const ServedModel& model);

}  // namespace kvzap::server
