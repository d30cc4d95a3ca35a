// Replies of OpenAI's /v1/responses.
#include <fmt/format.h>

#include <random>
#include <utility>

#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "server/answer_parts.hpp"
#include "server/chat_form.hpp"
#include "server/json_scanner.hpp"
#include "server/reply_writers.hpp"

namespace kvzap::server {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// An id that clients cannot guess, because whoever knows it can read the response.
std::string random_id() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

/// Kinds of items with text: their part, its event, and their field in a chat's message.
struct TextItem {
  const char *type, *prefix, *part, *event, *field;
};
constexpr TextItem thoughts_item = {"reasoning", "rs", "reasoning_text", "response.reasoning_text",
                                    "reasoning_content"};
constexpr TextItem text_item = {"message", "msg", "output_text", "response.output_text", "content"};

/// The items of an answer, and their events.
class ResponseWriter final : public ReplyWriter {
 public:
  ResponseWriter(const ApiRequest& request, const ServedModel& model, std::int64_t id,
                 std::int64_t created)
      : ReplyWriter(request),
        m_request(request.response),
        m_model(model),
        m_key(fmt::format("{}_{}", id, random_id())),
        m_created(created),
        m_parser(request.format) {}

  std::string body(const std::vector<Whole>& answers) override {
    add(m_parser.append(answers.front().text));
    add(m_parser.finish());
    close();
    return files::json_text(complete(answers.front().ending));
  }

  std::string begin(int) override {
    const OrderedJson response = frame("in_progress");
    write("response.created", {{"response", response}});
    write("response.in_progress", {{"response", response}});
    return take();
  }

  std::string piece(int, const std::string& text, const std::vector<TokenText>&) override {
    add(m_parser.append(text));
    return take();
  }

  std::string end(int, const Ending& ending) override {
    add(m_parser.finish());
    close();
    const OrderedJson response = complete(ending);
    write("response." + response.at("status").get<std::string>(), {{"response", response}});
    return take();
  }

  std::string finish(const std::vector<Ending>&) override { return {}; }

  std::string failure(const std::string& what) override {
    OrderedJson response = frame("failed");
    response["error"] = {{"code", "server_error"}, {"message", files::shown_message(what)}};
    write("response.failed", {{"response", response}});
    return take();
  }

 private:
  void write(const std::string& type, const OrderedJson& fields) {
    OrderedJson json = {{"type", type}, {"sequence_number", m_number++}};
    json.update(fields);
    m_events += named_event(type, json);
  }

  /// Returns the events since the last call.
  std::string take() { return std::exchange(m_events, {}); }

  OrderedJson frame(const char* status) const {
    OrderedJson response;
    response["id"] = "resp_" + m_key;
    response["object"] = "response";
    response["created_at"] = m_created;
    response["status"] = status;
    response["error"] = nullptr;
    response["incomplete_details"] = nullptr;
    response["model"] = m_model.name;
    response["output"] = m_output;
    response.update(m_request->fields);
    response["usage"] = nullptr;
    return response;
  }

  /// The whole response, which is stored if the request wants it.
  OrderedJson complete(const Ending& ending) {
    const bool is_whole = ending.reason == EndReason::stop_id || ending.reason == EndReason::cut;
    OrderedJson response = frame(is_whole ? "completed" : "incomplete");
    if (!is_whole) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    OrderedJson usage;
    usage["input_tokens"] = ending.prompt_tokens;
    usage["input_tokens_details"] = {{"cached_tokens", ending.cached_tokens}};
    usage["output_tokens"] = ending.new_tokens;
    usage["output_tokens_details"] = {{"reasoning_tokens", 0}};
    usage["total_tokens"] = ending.prompt_tokens + ending.new_tokens;
    response["usage"] = std::move(usage);
    response["kvzap"] = kvzap_of(ending);
    if (m_request->is_stored) {
      std::string messages = m_request->messages;  // a JSON array
      messages.back() = messages == "[]" ? ' ' : ',';
      m_model.responses->put("resp_" + m_key, {files::json_text(response),
                                               messages + files::json_text(m_message) + "]"});
    }
    return response;
  }

  void add(const AnswerParts& parts) {
    for (const AnswerPart& part : parts) {
      switch (part.kind) {
        case AnswerPart::Kind::thoughts:
          give(thoughts_item, part.text);
          break;
        case AnswerPart::Kind::text:
          give(text_item, part.text);
          break;
        case AnswerPart::Kind::call:
          begin_call(part.text);
          break;
        case AnswerPart::Kind::arguments:
          m_text += part.text;
          write_item("response.function_call_arguments.delta", {{"delta", part.text}});
          break;
        case AnswerPart::Kind::call_end:
          end_call(part.is_whole);
          break;
      }
    }
  }

  void give(const TextItem& kind, const std::string& text) {
    if (m_open != &kind) open(kind);
    m_text += text;
    write_part(fmt::format("{}.delta", kind.event), {{"delta", text}});
  }

  void open(const TextItem& kind) {
    close();
    m_open = &kind;
    OrderedJson item = new_item(kind.type, kind.prefix);
    if (m_open == &text_item) {
      item["role"] = "assistant";
    } else {
      item["summary"] = OrderedJson::array();
    }
    item["content"] = OrderedJson::array();
    add_item(item);
    write_part("response.content_part.added", {{"part", part()}});
  }

  void close() {
    if (!m_open) return;
    write_part(fmt::format("{}.done", m_open->event), {{"text", m_text}});
    write_part("response.content_part.done", {{"part", part()}});
    m_output.back()["content"].push_back(part());
    OrderedJson& field = m_message[m_open->field];
    field = field.is_string() ? field.get<std::string>() + m_text : m_text;
    m_text.clear();
    m_open = nullptr;
    end_item("completed");
  }

  void begin_call(const std::string& name) {
    close();
    OrderedJson item = new_item("function_call", "fc");
    item["call_id"] = fmt::format("call_{}_{}", m_key, m_output.size());
    item["name"] = name;
    item["arguments"] = "";
    add_item(item);
  }

  void end_call(bool is_whole) {
    const std::string arguments = std::exchange(m_text, {});
    OrderedJson& item = m_output.back();
    item["arguments"] = arguments;
    write_item("response.function_call_arguments.done",
               {{"name", item["name"]}, {"arguments", arguments}});
    // A conversation that goes on needs an object, also of a call that is cut.
    OrderedJson said =
        function_json({{"name", item["name"]}, {"arguments", closed_json(arguments)}});
    said["id"] = item["call_id"];
    m_message["tool_calls"].push_back(std::move(said));
    end_item(is_whole ? "completed" : "incomplete");
  }

  OrderedJson new_item(const char* type, const char* prefix) const {
    return {{"id", fmt::format("{}_{}_{}", prefix, m_key, m_output.size())},
            {"type", type},
            {"status", "in_progress"}};
  }

  void add_item(const OrderedJson& item) {
    m_output.push_back(item);
    write("response.output_item.added", {{"output_index", m_output.size() - 1}, {"item", item}});
  }

  void end_item(const char* status) {
    m_output.back()["status"] = status;
    write("response.output_item.done",
          {{"output_index", m_output.size() - 1}, {"item", m_output.back()}});
  }

  /// The part of the open item, with its text so far.
  OrderedJson part() const {
    OrderedJson json = {{"type", m_open->part}, {"text", m_text}};
    if (m_open == &text_item) {
      json["annotations"] = OrderedJson::array();
      json["logprobs"] = OrderedJson::array();
    }
    return json;
  }

  /// Writes an event of the last item.
  void write_item(const std::string& type, const OrderedJson& fields) {
    OrderedJson json = {{"item_id", m_output.back().at("id")},
                        {"output_index", m_output.size() - 1}};
    json.update(fields);
    write(type, json);
  }

  /// Writes an event of the part of the open item.
  void write_part(const std::string& type, const OrderedJson& fields) {
    OrderedJson json = {{"content_index", 0}};
    json.update(fields);
    const bool has_logprobs = m_open == &text_item && !json.contains("part");
    if (has_logprobs) json["logprobs"] = OrderedJson::array();
    write_item(type, json);
  }

  std::shared_ptr<const ResponseRequest> m_request;
  const ServedModel& m_model;
  std::string m_key;  // of all ids
  std::int64_t m_created;
  AnswerParser m_parser;
  OrderedJson m_output = OrderedJson::array();
  OrderedJson m_message = {{"role", "assistant"}, {"content", ""}};  // as chats have it
  const TextItem* m_open = nullptr;  // kind of the last item, while it is open
  std::string m_text;                // of the open item, or arguments of the open call
  int m_number = 0;                  // of the next event
  std::string m_events;
};

}  // namespace

std::unique_ptr<ReplyWriter> make_response_writer(const ApiRequest& request,
                                                  const ServedModel& model, std::int64_t id,
                                                  std::int64_t created) {
  return std::make_unique<ResponseWriter>(request, model, id, created);
}

}  // namespace kvzap::server
