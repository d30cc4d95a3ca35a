#include "kvzap/model/chat_template.hpp"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "gguf/chat_templates.hpp"
#include "gguf/model_file.hpp"
#include "jinja/template.hpp"
#include "jinja/unicode.hpp"
#include "kvzap/core/types.hpp"
#include "text/chat_input.hpp"
#include "text/utf8.hpp"

namespace kvzap {

struct ChatTemplate::Source {
  std::string where;  // file and field
  std::string text;
  jinja::Template source;
  /// The template of chats with tools, if there is another one. Few chats have tools.
  std::optional<gguf::NamedTemplate> tool_use;
  nlohmann::ordered_json special_tokens;
};

namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

[[noreturn]] void fail(const std::string& where, std::string_view expected,
                       std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found {}", where, expected, files::shown(found, 300)));
}

// Templates of published models have at most 40 KB.
constexpr std::size_t max_template_bytes = 128u << 10;

// ---- Files --------------------------------------------------------------------------------------

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const std::string& string_at(const Json& value, const std::string& where) {
  if (!value.is_string()) fail(where, "a string", value.type_name());
  return value.get_ref<const std::string&>();
}

/// Returns the special tokens of tokenizer_config.json, by their names in templates.
OrderedJson special_tokens_of(const Json& config, const std::string& where) {
  OrderedJson tokens = OrderedJson::object();
  for (const char* const name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                                 "cls_token", "mask_token"}) {
    const Json* field = member(config, name);
    if (field == nullptr) continue;
    const std::string place = where + ": " + name;
    if (field->is_object()) {
      field = member(*field, "content");
      if (field == nullptr) fail(place, "a content", "none");
    }
    tokens[name] = string_at(*field, place);
  }
  return tokens;
}

/// Returns tokenizer_config.json. Before it listed all tokens, special_tokens_map.json had the
/// special ones.
Json tokenizer_config_of(const std::filesystem::path& folder) {
  Json config = Json::object();
  if (auto file = gguf::read_model_object(folder, "tokenizer_config.json")) {
    config = std::move(file->content);
  }
  if (config.contains("added_tokens_decoder")) return config;
  if (const auto map = gguf::read_model_object(folder, "special_tokens_map.json")) {
    for (const auto& [name, value] : map->content.items()) config[name] = value;
  }
  return config;
}

std::map<std::string, gguf::NamedTemplate> find_templates(const std::filesystem::path& folder) {
  auto found = gguf::read_chat_templates(folder, max_template_bytes);
  if (found.count("default") == 0) {
    fail(folder.string(), "chat_template.jinja or a chat_template in tokenizer_config.json",
         "neither");
  }
  for (const auto& [name, source] : found) {
    if (!text::is_valid_utf8(source.text)) {
      fail(source.where, "a template in UTF-8", "something else");
    }
  }
  return found;
}

// ---- Messages -----------------------------------------------------------------------------------

/// Returns a message as transformers gives it to a template: without null fields, and with the
/// names that templates read for thoughts.
OrderedJson normalized(const OrderedJson& message) {
  OrderedJson kept = OrderedJson::object();
  for (const auto& [key, value] : message.items()) {
    if (!value.is_null()) kept[key] = value;
  }
  for (const char* const name : {"reasoning_content", "thinking", "reasoning"}) {
    const auto found = kept.find(name);
    if (found == kept.end()) continue;
    OrderedJson result = OrderedJson::object();
    result["thinking"] = *found;
    for (const auto& [key, value] : kept.items()) result[key] = value;
    result["reasoning_content"] = *found;
    return result;
  }
  return kept;
}

OrderedJson message_of(ChatRole role, std::string_view content) {
  OrderedJson message = OrderedJson::object();
  message["role"] = name_of(role);
  message["content"] = content;
  return message;
}

// ---- Marks --------------------------------------------------------------------------------------

// Marks are words, because templates may treat other texts in a special way.
constexpr std::string_view user_mark = "KvzapUserMessage", answer_mark = "KvzapAssistantAnswer";

/// Returns a mark that `text` does not contain.
std::string mark_outside(std::string_view text) {
  std::string mark(user_mark);
  while (text.find(mark) != std::string_view::npos) mark += 'x';
  return mark;
}

/// Returns a long message that shows whether a template cuts or changes messages.
std::string probe_message() {
  std::string probe(user_mark);
  for (int i = 0; i < 100; ++i) {
    probe +=
        fmt::format("\n\n{}. \"Quotes\" and 'quotes', <b> & {{x}} \t \\n, caf\u00e9 \u6570 aZ.", i);
  }
  return probe;
}

constexpr std::string_view expected_once =
    "a template that writes the user's message once and unchanged";

/// Splits a rendered text at a mark.
ChatTemplate::Parts parts_around(const std::string& where, const std::string& text,
                                 std::string_view mark) {
  const std::size_t place = text.find(mark);
  if (place == std::string::npos) fail(where, expected_once, "one that leaves the message out");
  const std::size_t end = place + mark.size();
  if (text.find(mark, end) != std::string::npos) {
    fail(where, expected_once, "one that repeats the message");
  }
  return {text.substr(0, place), text.substr(end), false};
}

}  // namespace

std::string_view name_of(ChatRole role) {
  switch (role) {
    case ChatRole::system:
      return "system";
    case ChatRole::user:
      return "user";
    case ChatRole::assistant:
      return "assistant";
  }
  return "unknown";
}

std::string ChatTemplate::Parts::prompt(std::string_view user_text) const {
  if (trim_content) user_text = jinja::stripped(user_text);
  return prefix + std::string(user_text) + suffix;
}

std::string ChatTemplate::Parts::context(std::string_view user_text) const {
  // A template that trims its message trims the beginning of the context. It does not trim the end
  // of the context, where the message continues, as in kvpress: a mark stands for the rest of the
  // message.
  const Parts before{prefix, "", trim_content};
  std::string context = before.prompt(std::string(user_text) + "|");
  context.pop_back();
  return context;
}

ChatTemplate ChatTemplate::detect(const std::filesystem::path& folder) {
  const auto templates = find_templates(folder);
  const gguf::NamedTemplate& found = templates.at("default");
  const auto tool_use = templates.find("tool_use");
  const std::string config_name = gguf::name_of_model_file(folder, "tokenizer_config.json");
  ChatTemplate result;
  result.m_source = std::make_shared<const Source>(
      Source{found.where, found.text, jinja::Template(found.text, found.where),
             tool_use == templates.end() ? std::nullopt : std::optional(tool_use->second),
             special_tokens_of(tokenizer_config_of(folder), config_name)});
  const std::string probe = probe_message();
  const std::string padded = "\n \t" + std::string(user_mark) + " \n ";
  for (const bool thinking : {true, false}) {
    const auto rendered = [&](const std::string& text) {
      return result.render({{ChatRole::user, text}}, thinking);
    };
    Parts parts = parts_around(found.where, rendered(std::string(user_mark)), user_mark);
    const std::string around = rendered(padded);
    parts.trim_content = around != parts.prompt(padded);
    const bool is_unchanged =
        around == parts.prompt(padded) && rendered(probe) == parts.prompt(probe);
    if (!is_unchanged) fail(found.where, expected_once, "one that changes the message");
    (thinking ? result.m_thinking : result.m_no_thinking) = std::move(parts);
  }
  return result;
}

ChatTemplate::Parts ChatTemplate::parts(bool thinking) const {
  return thinking ? m_thinking : m_no_thinking;
}

ChatTemplate::Parts ChatTemplate::parts(bool thinking, std::string_view system) const {
  const std::string mark = mark_outside(system);
  const std::string text =
      render({{ChatRole::system, std::string(system)}, {ChatRole::user, mark}}, thinking);
  Parts result = parts_around(m_source->where, text, mark);
  result.trim_content = parts(thinking).trim_content;
  return result;
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages, bool thinking,
                                 bool add_generation_prompt) const {
  text::ChatInput input;
  for (const auto& [role, content] : messages) input.messages.push_back(message_of(role, content));
  input.thinking = thinking;
  input.add_generation_prompt = add_generation_prompt;
  return render(input);
}

std::string ChatTemplate::render(const text::ChatInput& input) const {
  if (input.messages.empty()) throw Error("a chat template needs at least one message");
  OrderedJson variables = m_source->special_tokens;
  variables["messages"] = OrderedJson::array();
  for (const OrderedJson& message : input.messages) {
    if (!message.is_object()) {
      throw Error(
          fmt::format("a message of a chat: expected an object, found {}", message.type_name()));
    }
    variables["messages"].push_back(normalized(message));
  }
  variables["tools"] = input.tools;
  variables["documents"] = input.documents;
  variables["add_generation_prompt"] = input.add_generation_prompt;
  // Qwen3 and others read the first name, DeepSeek and Granite the second.
  variables["enable_thinking"] = input.thinking;
  variables["thinking"] = input.thinking;
  for (const auto& [name, value] : input.variables.items()) variables[name] = value;
  if (m_source->tool_use && !input.tools.is_null()) {
    const auto& [text, where] = *m_source->tool_use;
    return jinja::Template(text, where).render(variables);
  }
  return m_source->source.render(variables);
}

std::string_view ChatTemplate::source(bool with_tools) const {
  return with_tools && m_source->tool_use ? m_source->tool_use->text : m_source->text;
}

std::string ChatTemplate::between_turns() const {
  const std::string next = std::string(user_mark) + "x";
  const std::string text = render({{ChatRole::user, std::string(user_mark)},
                                   {ChatRole::assistant, std::string(answer_mark)},
                                   {ChatRole::user, next}},
                                  false);
  const std::size_t answer = text.find(answer_mark);
  const std::size_t begin = answer == std::string::npos ? answer : answer + answer_mark.size();
  const std::size_t end = begin == std::string::npos ? begin : text.find(next, begin);
  if (end == std::string::npos) {
    fail(m_source->where, "a template for several turns", "one that leaves a message out");
  }
  return text.substr(begin, end - begin);
}

ChatTemplate::Exchange ChatTemplate::exchange(std::string_view user,
                                              std::string_view assistant) const {
  const std::string text = render(
      {{ChatRole::user, std::string(user_mark)}, {ChatRole::assistant, std::string(answer_mark)}},
      false, false);
  const Parts around = parts_around(m_source->where, text, user_mark);
  const std::size_t answer = around.suffix.find(answer_mark);
  if (answer == std::string::npos) {
    fail(m_source->where, "a template that writes an answer after the user's message",
         "one that leaves it out");
  }
  Exchange result;
  result.text = around.prefix;
  result.user = result.text.size();
  result.text += user;
  result.text += std::string_view(around.suffix).substr(0, answer);
  result.assistant = result.text.size();
  result.text += assistant;
  result.text += std::string_view(around.suffix).substr(answer + answer_mark.size());
  return result;
}

}  // namespace kvzap
