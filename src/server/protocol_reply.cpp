#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <kvzap/server/protocol.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "server/answer_parts.hpp"
#include "server/reply_writers.hpp"
#include "text/marks.hpp"
#include "text/utf8.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// The calls of an answer so far.
struct CallCount {
  int calls = 0;
  bool is_last_whole = false;

  void add(const AnswerPart& part) {
    if (part.kind == AnswerPart::Kind::call) ++calls;
    if (part.kind == AnswerPart::Kind::call_end) is_last_whole = part.is_whole;
  }
};

const char* finish_reason(EndReason reason, const CallCount& count) {
  if (count.is_last_whole) return "tool_calls";
  return reason == EndReason::stop_id || reason == EndReason::cut ? "stop" : "length";
}

/// What a choice says of its cache.
OrderedJson kvzap_of_choice(const Ending& ending, const ServedModel& model) {
  OrderedJson json = kvzap_of(ending);
  if (!ending.kept) return json;
  const KeptTokens& kept = *ending.kept;
  std::vector<std::string> texts;
  if (model.tokenizer) {
    Tokenizer::StreamDecoder decoder(*model.tokenizer, false, true);
    for (const TokenId token : kept.tokens) texts.push_back(decoder.append(token));
    if (!texts.empty()) texts.back() += decoder.finish();
  } else {
    for (const TokenId token : kept.tokens) texts.push_back(std::to_string(token) + " ");
  }
  json["kept"] = {{"texts", std::move(texts)}, {"rows", kept.rows}, {"full", kept.full}};
  return json;
}

OrderedJson usage_of(const TokenCounts& counts) {
  OrderedJson usage;
  usage["prompt_tokens"] = counts.prompt;
  usage["completion_tokens"] = counts.generated;
  usage["total_tokens"] = counts.prompt + counts.generated;
  usage["prompt_tokens_details"] = {{"cached_tokens", counts.cached}};
  if (counts.drafts.drafted > 0) {
    usage["completion_tokens_details"] = {
        {"accepted_prediction_tokens", counts.drafts.accepted},
        {"rejected_prediction_tokens", counts.drafts.drafted - counts.drafts.accepted}};
  }
  return usage;
}

std::string event_of(const OrderedJson& json) { return "data: " + files::json_text(json) + "\n\n"; }

/// The characters that begin in bytes, which may be parts of a character.
std::size_t characters_of(std::string_view bytes) {
  return static_cast<std::size_t>(std::count_if(bytes.begin(), bytes.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xc0U) != 0x80;
  }));
}

/// The name of a token in lists of completions: its text, or the bytes of a part of a character as
/// in OpenAI's lists.
std::string completion_name(const std::string& bytes) {
  if (text::is_valid_utf8(bytes)) return bytes;
  std::string name = "bytes:";
  for (const char byte : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return name;
}

// JSON has no infinities.
double json_number(float logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

}  // namespace

OrderedJson kvzap_of(const Ending& ending) {
  OrderedJson json;
  json["evict_ratio"] = ending.evict_ratio;
  json["kv_bytes"] = ending.kv_bytes;
  json["full_kv_bytes"] = ending.full_kv_bytes;
  return json;
}

std::string named_event(const std::string& name, const OrderedJson& json) {
  return "event: " + name + "\n" + event_of(json);
}

std::string error_body(const std::string& what, const std::string& type, const std::string& field,
                       const std::string& code) {
  OrderedJson error;
  error["message"] = files::shown_message(what);
  error["type"] = type;
  error["param"] = field.empty() ? OrderedJson() : OrderedJson(field);
  error["code"] = code.empty() ? OrderedJson() : OrderedJson(code);
  return files::json_text({{"error", error}});
}

struct AnswerText::UntilStop : text::TextUntilMark {
  using TextUntilMark::TextUntilMark;
};

AnswerText::AnswerText(const Tokenizer& tokenizer, std::vector<std::string> stop)
    : m_decoder(tokenizer), m_until_stop(std::make_unique<UntilStop>(std::move(stop))) {}
AnswerText::AnswerText(const Tokenizer& tokenizer, const ApiRequest& request)
    // A completion goes on with the prompt's text, so the space of its first token counts.
    : m_decoder(tokenizer, !request.format || !request.format->needs_special_tokens(),
                !request.is_chat()),
      m_until_stop(std::make_unique<UntilStop>(request.stop)) {}
AnswerText::AnswerText(AnswerText&&) noexcept = default;
AnswerText& AnswerText::operator=(AnswerText&&) noexcept = default;
AnswerText::~AnswerText() = default;

std::string AnswerText::append(TokenId token) {
  return has_stopped() ? std::string() : m_until_stop->append(m_decoder.append(token));
}

std::string AnswerText::finish() {
  if (has_stopped()) return {};
  std::string text = m_until_stop->append(m_decoder.finish());
  return text + m_until_stop->finish();
}

const std::string& AnswerText::found() const { return m_until_stop->found(); }

TokenCounts ReplyWriter::count(const std::vector<Ending>& endings) const {
  TokenCounts counts;
  for (std::size_t i = 0; i < endings.size(); ++i) {
    counts.generated += endings[i].new_tokens;
    counts.drafts.drafted += endings[i].drafts.drafted;
    counts.drafts.accepted += endings[i].drafts.accepted;
    if (i % static_cast<std::size_t>(m_choices) != 0) continue;
    counts.prompt += endings[i].prompt_tokens;
    counts.cached += endings[i].cached_tokens;
  }
  return counts;
}

namespace {

/// Of /v1/chat/completions and /v1/completions.
class CompletionWriter final : public ReplyWriter {
 public:
  CompletionWriter(const ApiRequest& request, const ServedModel& model, std::int64_t id,
                   std::int64_t created)
      : ReplyWriter(request),
        m_is_chat(request.is_chat()),
        m_has_logprobs(request.has_logprobs),
        m_includes_usage(request.includes_usage),
        m_model(model),
        m_id(fmt::format("{}-{}", m_is_chat ? "chatcmpl" : "cmpl", id)),
        m_created(created),
        m_choices(request.choices),
        m_echoes(request.echoes
                     ? request.prompt_texts
                     : std::vector<std::string>(static_cast<std::size_t>(request.prompts))),
        m_offsets(static_cast<std::size_t>(request.answers()), 0),
        m_format(request.format),
        m_calls(m_offsets.size()) {
    for (std::size_t i = 0; i < m_offsets.size(); ++i) m_parsers.emplace_back(request.format);
    // With log probabilities the prompt's tokens are in the list.
    for (std::size_t i = 0; i < m_offsets.size() && !m_has_logprobs; ++i) {
      m_offsets[i] = characters_of(m_echoes[i / static_cast<std::size_t>(m_choices)]);
    }
  }

  std::string body(const std::vector<Whole>& answers) override;
  std::string begin(int choice) override;
  std::string piece(int choice, const std::string& text,
                    const std::vector<TokenText>& tokens) override;
  std::string progress(int choice, const PromptProgress& progress) override;
  std::string end(int choice, const Ending& ending) override;
  std::string finish(const std::vector<Ending>& endings) override;
  std::string failure(const std::string& what) override {
    return "data: " + error_body(what, "server_error") + "\n\n" + done;
  }

 private:
  struct Parts;

  static constexpr const char* done = "data: [DONE]\n\n";

  bool m_is_chat;
  bool m_has_logprobs;
  bool m_includes_usage;
  const ServedModel& m_model;
  std::string m_id;
  std::int64_t m_created;
  int m_choices;                       // of each prompt
  std::vector<std::string> m_echoes;   // of each prompt
  std::vector<std::size_t> m_offsets;  // characters of tokens so far, of each answer
  std::shared_ptr<const AnswerFormat> m_format;
  std::vector<AnswerParser> m_parsers;  // of each answer in a stream
  std::vector<CallCount> m_calls;       // of each answer in a stream
};

/// The parts that replies and events have in common.
struct CompletionWriter::Parts {
  const CompletionWriter& of;

  OrderedJson frame(bool is_chunk) const {
    OrderedJson frame;
    frame["id"] = of.m_id;
    frame["object"] = !of.m_is_chat ? "text_completion"
                      : is_chunk    ? "chat.completion.chunk"
                                    : "chat.completion";
    frame["created"] = of.m_created;
    frame["model"] = of.m_model.name;
    frame["choices"] = OrderedJson::array();
    return frame;
  }

  /// The echo of an answer's prompt; empty without echo.
  const std::string& echo(int answer) const {
    return of.m_echoes[static_cast<std::size_t>(answer / of.m_choices)];
  }

  std::string bytes_of(TokenId token) const {
    const auto& tokenizer = of.m_model.tokenizer;
    return tokenizer ? tokenizer->token_bytes(token) : std::to_string(token);
  }

  OrderedJson logprobs(const std::vector<TokenText>& tokens, std::size_t offset) const {
    if (!of.m_has_logprobs) return {};
    return of.m_is_chat ? chat_logprobs(tokens) : completion_logprobs(tokens, offset);
  }

  OrderedJson chat_logprobs(const std::vector<TokenText>& tokens) const {
    const auto entry = [&](TokenId token, float logprob) {
      const std::string bytes = bytes_of(token);
      std::string text;  // with U+FFFD for parts of a character
      text::append_lossy(text, bytes, true);
      OrderedJson one;
      one["token"] = text;
      one["logprob"] = json_number(logprob);
      one["bytes"] = std::vector<int>();
      for (const char byte : bytes) one["bytes"].push_back(static_cast<unsigned char>(byte));
      return one;
    };
    OrderedJson json;
    json["content"] = OrderedJson::array();
    for (const TokenText& token : tokens) {
      OrderedJson one = entry(token.token, token.logprob);
      one["top_logprobs"] = OrderedJson::array();
      for (const auto& [id, logprob] : token.top) {
        one["top_logprobs"].push_back(entry(id, logprob));
      }
      json["content"].push_back(std::move(one));
    }
    return json;
  }

  OrderedJson completion_logprobs(const std::vector<TokenText>& tokens, std::size_t offset) const {
    OrderedJson json;
    json["tokens"] = OrderedJson::array();
    json["token_logprobs"] = OrderedJson::array();
    json["top_logprobs"] = OrderedJson::array();
    json["text_offset"] = OrderedJson::array();
    for (const TokenText& token : tokens) {
      const std::string bytes = bytes_of(token.token);
      json["tokens"].push_back(completion_name(bytes));
      const bool has_none = std::isnan(token.logprob);
      json["token_logprobs"].push_back(has_none ? OrderedJson()
                                                : OrderedJson(json_number(token.logprob)));
      OrderedJson top = OrderedJson::object();
      // The likeliest of several tokens with the same text.
      for (const auto& [id, logprob] : token.top) {
        top.emplace(completion_name(bytes_of(id)), json_number(logprob));
      }
      json["top_logprobs"].push_back(has_none ? OrderedJson() : std::move(top));
      json["text_offset"].push_back(offset);
      offset += characters_of(bytes);
    }
    return json;
  }

  /// The message of a whole answer.
  OrderedJson message(const std::string& text, int choice, CallCount& count) const {
    AnswerParser parser(of.m_format);
    std::string thoughts, said;
    OrderedJson calls = OrderedJson::array();
    const auto take = [&](const AnswerParts& parts) {
      for (const AnswerPart& part : parts) {
        count.add(part);
        switch (part.kind) {
          case AnswerPart::Kind::thoughts:
            thoughts += part.text;
            break;
          case AnswerPart::Kind::text:
            said += part.text;
            break;
          case AnswerPart::Kind::call:
            calls.push_back(call_json(part.text, choice, count.calls - 1));
            break;
          case AnswerPart::Kind::arguments:
            calls.back()["function"]["arguments"].get_ref<std::string&>() += part.text;
            break;
          case AnswerPart::Kind::call_end:
            break;
        }
      }
    };
    take(parser.append(text));
    take(parser.finish());
    OrderedJson message;
    message["role"] = "assistant";
    message["content"] = said.empty() && !calls.empty() ? OrderedJson() : OrderedJson(said);
    if (!thoughts.empty()) message["reasoning_content"] = thoughts;
    if (!calls.empty()) message["tool_calls"] = std::move(calls);
    return message;
  }

  /// A call of a tool, still without arguments.
  OrderedJson call_json(const std::string& name, int choice, int number) const {
    OrderedJson json;
    json["id"] = fmt::format("call-{}-{}-{}", of.m_id, choice, number);
    json["type"] = "function";
    json["function"] = {{"name", name}, {"arguments", ""}};
    return json;
  }

  /// The events with new parts of a choice, the first one with the log probabilities.
  std::string events(int choice, const AnswerParts& found, OrderedJson logprobs,
                     CallCount& count) const {
    std::string text;
    const auto add = [&](OrderedJson delta) {
      text += event(choice, std::move(delta), "", std::exchange(logprobs, {}), nullptr);
    };
    const auto add_call = [&](OrderedJson fields) {
      OrderedJson call = {{"index", count.calls - 1}};
      call.update(fields);
      add({{"tool_calls", OrderedJson::array({std::move(call)})}});
    };
    for (const AnswerPart& part : found) {
      count.add(part);
      switch (part.kind) {
        case AnswerPart::Kind::thoughts:
          add({{"reasoning_content", part.text}});
          break;
        case AnswerPart::Kind::text:
          add({{"content", part.text}});
          break;
        case AnswerPart::Kind::call:
          add_call(call_json(part.text, choice, count.calls - 1));
          break;
        case AnswerPart::Kind::arguments:
          add_call({{"function", {{"arguments", part.text}}}});
          break;
        case AnswerPart::Kind::call_end:
          break;
      }
    }
    if (!logprobs.is_null()) add({{"content", ""}});
    return text;
  }

  /// An event of one choice. `chat`: the changes to a chat message; `text`: those to a completion.
  std::string event(int choice, OrderedJson chat, const std::string& text, OrderedJson logprobs,
                    const Ending* ending) const {
    return event_of(chunk(choice, std::move(chat), text, std::move(logprobs), ending));
  }

  /// The content of such an event.
  OrderedJson chunk(int choice, OrderedJson chat, const std::string& text, OrderedJson logprobs,
                    const Ending* ending) const {
    OrderedJson json = frame(true);
    OrderedJson one;
    one["index"] = choice;
    if (of.m_is_chat) {
      one["delta"] = std::move(chat);
    } else {
      one["text"] = text;
    }
    one["logprobs"] = std::move(logprobs);
    const CallCount& count = of.m_calls[static_cast<std::size_t>(choice)];
    one["finish_reason"] =
        ending ? OrderedJson(finish_reason(ending->reason, count)) : OrderedJson();
    if (ending) one["kvzap"] = kvzap_of_choice(*ending, of.m_model);
    json["choices"].push_back(std::move(one));
    return json;
  }
};

std::string CompletionWriter::body(const std::vector<Whole>& answers) {
  const Parts parts{*this};
  OrderedJson json = parts.frame(false);
  std::vector<Ending> endings;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const Whole& answer = answers[i];
    OrderedJson choice;
    const std::string& echo = parts.echo(static_cast<int>(i));
    choice["index"] = static_cast<int>(i);
    CallCount count;
    if (m_is_chat) {
      choice["message"] = parts.message(answer.text, static_cast<int>(i), count);
    } else {
      choice["text"] = echo + answer.text;
    }
    choice["logprobs"] = parts.logprobs(answer.tokens, m_offsets[i]);
    choice["finish_reason"] = finish_reason(answer.ending.reason, count);
    choice["kvzap"] = kvzap_of_choice(answer.ending, m_model);
    json["choices"].push_back(std::move(choice));
    endings.push_back(answer.ending);
  }
  json["usage"] = usage_of(count(endings));
  if (!answers.empty()) json["kvzap"] = kvzap_of(answers.front().ending);
  return files::json_text(json);
}

std::string CompletionWriter::begin(int choice) {
  const Parts parts{*this};
  const std::string& echo = parts.echo(choice);
  if (!m_is_chat && echo.empty()) return {};
  return parts.event(choice, {{"role", "assistant"}, {"content", ""}}, echo, {}, nullptr);
}

std::string CompletionWriter::piece(int choice, const std::string& text,
                                    const std::vector<TokenText>& tokens) {
  const Parts parts{*this};
  std::size_t& offset = m_offsets[static_cast<std::size_t>(choice)];
  OrderedJson logprobs = parts.logprobs(tokens, offset);
  for (const TokenText& token : tokens) offset += characters_of(parts.bytes_of(token.token));
  if (!m_format) {
    return parts.event(choice, {{"content", text}}, text, std::move(logprobs), nullptr);
  }
  const auto place = static_cast<std::size_t>(choice);
  return parts.events(choice, m_parsers[place].append(text), std::move(logprobs), m_calls[place]);
}

std::string CompletionWriter::progress(int choice, const PromptProgress& progress) {
  OrderedJson json = Parts{*this}.chunk(choice, OrderedJson::object(), "", {}, nullptr);
  json["prompt_progress"] = {{"total", progress.total},
                             {"cache", progress.cached},
                             {"processed", progress.processed},
                             {"time_ms", std::llround(progress.seconds * 1e3)}};
  return event_of(json);
}

std::string CompletionWriter::end(int choice, const Ending& ending) {
  const Parts parts{*this};
  const auto place = static_cast<std::size_t>(choice);
  std::string rest;
  if (m_format) rest = parts.events(choice, m_parsers[place].finish(), {}, m_calls[place]);
  return rest + parts.event(choice, OrderedJson::object(), "", {}, &ending);
}

std::string CompletionWriter::finish(const std::vector<Ending>& endings) {
  if (!m_includes_usage) return done;
  OrderedJson json = Parts{*this}.frame(true);
  json["usage"] = usage_of(count(endings));
  if (!endings.empty()) json["kvzap"] = kvzap_of(endings.front());
  return event_of(json) + done;
}

}  // namespace

std::unique_ptr<ReplyWriter> ReplyWriter::make(const ApiRequest& request, const ServedModel& model,
                                               std::int64_t id, std::int64_t created) {
  switch (request.endpoint) {
    case Endpoint::responses:
      return make_response_writer(request, model, id, created);
    case Endpoint::messages:
      return make_messages_writer(request, model, id);
    case Endpoint::embeddings:
    case Endpoint::score:
    case Endpoint::rerank:
      return make_embedding_writer(request, model, id, created);
    case Endpoint::chat:
    case Endpoint::completions:
      break;
  }
  return std::make_unique<CompletionWriter>(request, model, id, created);
}

}  // namespace kvzap::server
