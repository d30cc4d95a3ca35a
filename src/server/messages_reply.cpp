// Replies of Anthropic's /v1/messages.
#include <fmt/format.h>

#include <utility>

#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "server/answer_parts.hpp"
#include "server/json_scanner.hpp"
#include "server/reply_writers.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// The content of an answer, block by block, and its events.
class MessagesWriter final : public ReplyWriter {
 public:
  MessagesWriter(const ApiRequest& request, const ServedModel& model, std::int64_t id)
      : ReplyWriter(request),
        m_model(model.name),
        m_id(id),
        m_prompt_tokens(request.prompt_tokens),
        m_parser(request.format) {}

  std::string body(const std::vector<Whole>& answers) override {
    const Whole& answer = answers.front();
    add(m_parser.append(answer.text));
    add(m_parser.finish());
    OrderedJson message = frame();
    set_end(message, answer.ending);
    message["usage"] = usage_of(answer.ending);
    message["kvzap"] = kvzap_of(answer.ending);
    return files::json_text(message);
  }

  std::string begin(int) override {
    if (std::exchange(m_has_begun, true)) return {};
    OrderedJson message = frame();
    Ending ending;  // no token is known to be in the cache yet
    ending.prompt_tokens = m_prompt_tokens;
    message["usage"] = usage_of(ending);
    write("message_start", {{"message", std::move(message)}});
    return take();
  }

  std::string piece(int, const std::string& text, const std::vector<TokenText>&) override {
    add(m_parser.append(text));
    return take();
  }

  std::string end(int, const Ending& ending) override {
    add(m_parser.finish());
    close();
    OrderedJson delta;
    set_end(delta, ending);
    write("message_delta",
          {{"delta", std::move(delta)}, {"usage", usage_of(ending)}, {"kvzap", kvzap_of(ending)}});
    write("message_stop", OrderedJson::object());
    return take();
  }

  std::string finish(const std::vector<Ending>&) override { return {}; }

  std::string failure(const std::string& what) override {
    return fmt::format("event: error\ndata: {}\n\n", messages_error_body(what, "api_error"));
  }

  std::string sign() override {
    // Clients expect message_start first.
    std::string events = begin(0);
    return events + named_event("ping", {{"type", "ping"}});
  }

 private:
  void write(const char* type, const OrderedJson& fields) {
    OrderedJson json = {{"type", type}};
    json.update(fields);
    m_events += named_event(type, json);
  }

  /// Returns the events since the last call.
  std::string take() { return std::exchange(m_events, {}); }

  OrderedJson frame() const {
    OrderedJson message;
    message["id"] = fmt::format("msg_{}", m_id);
    message["type"] = "message";
    message["role"] = "assistant";
    message["model"] = m_model;
    message["content"] = m_content;
    message["stop_reason"] = nullptr;
    message["stop_sequence"] = nullptr;
    return message;
  }

  void set_end(OrderedJson& json, const Ending& ending) const {
    const bool has_stop = !ending.stop.empty();
    const bool has_ended = ending.reason == EndReason::stop_id || ending.reason == EndReason::cut;
    json["stop_reason"] = m_is_call_whole ? "tool_use"
                          : has_stop      ? "stop_sequence"
                          : has_ended     ? "end_turn"
                                          : "max_tokens";
    json["stop_sequence"] = has_stop ? OrderedJson(ending.stop) : OrderedJson();
  }

  /// Anthropic counts tokens from the cache apart from the others.
  static OrderedJson usage_of(const Ending& ending) {
    return {{"input_tokens", ending.prompt_tokens - ending.cached_tokens},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", ending.cached_tokens},
            {"output_tokens", ending.new_tokens}};
  }

  void add(const AnswerParts& parts) {
    for (const AnswerPart& part : parts) {
      switch (part.kind) {
        case AnswerPart::Kind::thoughts:
          give("thinking", part.text);
          break;
        case AnswerPart::Kind::text:
          give("text", part.text);
          break;
        case AnswerPart::Kind::call:
          begin_call(part.text);
          break;
        case AnswerPart::Kind::arguments:
          m_input += part.text;
          write_delta({{"type", "input_json_delta"}, {"partial_json", part.text}});
          break;
        case AnswerPart::Kind::call_end:
          end_call(part.is_whole);
          break;
      }
    }
  }

  /// Adds text to a block of this type, which is also the name of its field.
  void give(const char* type, const std::string& text) {
    if (m_open != type) {
      OrderedJson block = {{"type", type}, {type, ""}};
      if (std::string_view(type) == "thinking") block["signature"] = "";
      open(type, block);
    }
    m_content.back()[type].get_ref<std::string&>() += text;
    write_delta({{"type", fmt::format("{}_delta", type)}, {type, text}});
  }

  void begin_call(const std::string& name) {
    open("tool_use", {{"type", "tool_use"},
                      {"id", fmt::format("toolu_{}_{}", m_id, m_calls++)},
                      {"name", name},
                      {"input", OrderedJson::object()}});
    m_input.clear();
  }

  /// The input is an object, also that of a call that is cut.
  void end_call(bool is_whole) {
    m_is_call_whole = is_whole;
    auto input = OrderedJson::parse(closed_json(m_input), nullptr, false);
    // A number may be too large.
    if (input.is_object()) m_content.back()["input"] = std::move(input);
    close();
  }

  void open(const char* type, const OrderedJson& block) {
    close();
    m_open = type;
    m_content.push_back(block);
    write("content_block_start", {{"index", m_content.size() - 1}, {"content_block", block}});
  }

  void close() {
    if (std::exchange(m_open, {}).empty()) return;
    write("content_block_stop", {{"index", m_content.size() - 1}});
  }

  void write_delta(const OrderedJson& delta) {
    write("content_block_delta", {{"index", m_content.size() - 1}, {"delta", delta}});
  }

  std::string m_model;
  std::int64_t m_id;
  std::int64_t m_prompt_tokens;
  AnswerParser m_parser;
  OrderedJson m_content = OrderedJson::array();
  std::string m_open;   // type of the last block, while it is open
  std::string m_input;  // of the last call
  int m_calls = 0;
  bool m_is_call_whole = false;  // the last one
  bool m_has_begun = false;
  std::string m_events;
};

}  // namespace

std::string messages_error_body(const std::string& what, const std::string& type) {
  return files::json_text(
      {{"type", "error"}, {"error", {{"type", type}, {"message", files::shown_message(what)}}}});
}

std::unique_ptr<ReplyWriter> make_messages_writer(const ApiRequest& request,
                                                  const ServedModel& model, std::int64_t id) {
  return std::make_unique<MessagesWriter>(request, model, id);
}

}  // namespace kvzap::server
