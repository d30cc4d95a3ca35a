#include "kvzap/model/chat_template.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/json_file.hpp"
#include "base/quote.hpp"
#include "gguf/model_file.hpp"
#include "kvzap/core/types.hpp"
#include "text/jinja.hpp"
#include "text/template_evaluator.hpp"
#include "text/utf8.hpp"

namespace kvzap {
namespace {

using Json = nlohmann::json;
using text::jinja::ends_with;
using text::jinja::Node;
using text::jinja::Part;
using text::jinja::quote_literal;
using text::jinja::starts_with;
using text::jinja::trimmed;

[[noreturn]] void fail(const std::string& where, std::string_view expected,
                       std::string_view found) {
  throw Error(fmt::format("{}: expected {}, found {}", where, expected, base::shown(found, 300)));
}

// Templates of published models have at most 20 KB.
constexpr std::size_t max_template_bytes = 128u << 10;

ChatTemplate::Parts parts_of(const std::string& where, const std::vector<Node>& nodes,
                             const std::optional<std::string>& bos_token, bool thinking) {
  std::string problem;
  const auto pieces = text::jinja::evaluate(nodes, bos_token, thinking, problem);
  if (!pieces) fail(where, "a chat template of a known kind", problem);
  ChatTemplate::Parts parts;
  bool content_seen = false;
  for (const Part& piece : *pieces) {
    if (piece.kind == Part::literal) {
      (content_seen ? parts.suffix : parts.prefix) += piece.text;
    } else if (content_seen) {
      fail(where, "a chat template of a known kind", "one that repeats the message");
    } else {
      content_seen = true;
      parts.trim_content = piece.kind == Part::trimmed_content;
    }
  }
  if (!content_seen) {
    fail(where, "a chat template of a known kind", "one that leaves the message out");
  }
  return parts;
}

ChatFormat format_of(const std::string& where, const ChatTemplate::Parts& thinking,
                     const ChatTemplate::Parts& no_thinking) {
  constexpr std::string_view chatml_prefix = "<|im_start|>user\n";
  constexpr std::string_view chatml_suffix = "<|im_end|>\n<|im_start|>assistant\n";
  constexpr std::string_view llama_prefix = "<|start_header_id|>user<|end_header_id|>\n\n";
  constexpr std::string_view llama_suffix =
      "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
  if (ends_with(no_thinking.prefix, chatml_prefix) &&
      starts_with(no_thinking.suffix, chatml_suffix)) {
    if (no_thinking.suffix != thinking.suffix) return ChatFormat::qwen3;
    return no_thinking.prefix == chatml_prefix ? ChatFormat::chatml : ChatFormat::qwen2;
  }
  if (ends_with(no_thinking.prefix, llama_prefix) && no_thinking.suffix == llama_suffix) {
    return ChatFormat::llama3;
  }
  fail(where, "a ChatML, Qwen or Llama 3 template",
       fmt::format("one that puts {} before the message and {} behind it",
                   quote_literal(no_thinking.prefix), quote_literal(no_thinking.suffix)));
}

// ---- Files --------------------------------------------------------------------------------------

// Returns nothing if the file does not exist.
std::optional<std::string> read_file(const std::filesystem::path& path, std::size_t max_bytes) {
  if (!std::filesystem::is_regular_file(path)) return std::nullopt;
  return base::read_text_file(path, max_bytes);
}

// Jinja reads \r\n and \r as \n.
std::string with_plain_newlines(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_pair = text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n';
    if (!is_pair) result += text[i] == '\r' ? '\n' : text[i];
  }
  return result;
}

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const std::string& string_at(const Json& value, const std::string& where) {
  if (!value.is_string()) fail(where, "a string", value.type_name());
  return value.get_ref<const std::string&>();
}

// Returns the template of tokenizer_config.json, if it has one.
std::optional<std::string> configured_template(const Json& config, const std::string& where) {
  const Json* const field = member(config, "chat_template");
  if (field == nullptr) return std::nullopt;
  if (!field->is_array()) return string_at(*field, where);
  for (const Json& entry : *field) {
    if (!entry.is_object()) fail(where, "objects with a name and a template", entry.type_name());
    const Json* const name = member(entry, "name");
    const Json* const text = member(entry, "template");
    if (name == nullptr || text == nullptr) {
      fail(where, "objects with a name and a template", "an object without");
    }
    if (*name == "default") return string_at(*text, where + "[default]");
  }
  fail(where, "a template named \"default\"", "none");
}

// ---- Conversations ------------------------------------------------------------------------------

std::string opening_of(ChatFormat format, ChatRole role) {
  return format == ChatFormat::llama3
             ? fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n", name_of(role))
             : fmt::format("<|im_start|>{}\n", name_of(role));
}

std::string_view end_of_message(ChatFormat format) {
  return format == ChatFormat::llama3 ? "<|eot_id|>" : "<|im_end|>\n";
}

std::string without_newlines(std::string_view text, bool at_begin, bool at_end) {
  while (at_begin && starts_with(text, "\n")) text.remove_prefix(1);
  while (at_end && ends_with(text, "\n")) text.remove_suffix(1);
  return std::string(text);
}

// The parts of an assistant's message in Qwen3's template.
struct QwenAnswer {
  std::string thoughts;
  std::string text;
};

QwenAnswer qwen_answer(std::string_view content) {
  constexpr std::string_view begin = "<think>", end = "</think>";
  const std::size_t first = content.find(end);
  if (first == std::string_view::npos) return {"", std::string(content)};
  const std::string before = without_newlines(content.substr(0, first), false, true);
  const std::size_t opened = before.rfind(begin);
  const std::string_view thoughts =
      std::string_view(before).substr(opened == std::string::npos ? 0 : opened + begin.size());
  return {without_newlines(thoughts, true, true),
          without_newlines(content.substr(content.rfind(end) + end.size()), true, false)};
}

// Whether a user message is the response of a tool; Qwen3's template does not count it as a
// question.
bool is_tool_response(std::string_view content) {
  return starts_with(content, "<tool_response>") && ends_with(content, "</tool_response>");
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
  if (trim_content) user_text = trimmed(user_text);
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
  const std::filesystem::path template_path = folder / "chat_template.jinja";
  const std::string config_name = gguf::name_of_model_file(folder, "tokenizer_config.json");

  Json config = Json::object();
  if (gguf::has_model_file(folder, "tokenizer_config.json")) {
    if (auto file = gguf::read_model_object(folder, "tokenizer_config.json")) {
      config = std::move(file->content);
    }
  }

  std::string where = template_path.string();
  std::optional<std::string> source = read_file(template_path, max_template_bytes);
  if (!source) {
    where = config_name + ": chat_template";
    source = configured_template(config, where);
  }
  if (!source)
    fail(folder.string(), "chat_template.jinja or a chat_template in tokenizer_config.json",
         "neither");

  std::optional<std::string> bos_token;
  if (const Json* field = member(config, "bos_token")) {
    const std::string bos_where = config_name + ": bos_token";
    if (field->is_object()) {
      const Json* const content = member(*field, "content");
      if (content == nullptr) fail(bos_where, "a content", "none");
      field = content;
    }
    bos_token = string_at(*field, bos_where);
  }

  if (source->size() > max_template_bytes) {
    fail(where, fmt::format("a template of at most {} bytes", max_template_bytes),
         fmt::format("one of {}", source->size()));
  }
  if (!text::is_valid_utf8(*source)) fail(where, "a template in UTF-8", "something else");

  const auto nodes = text::jinja::parse(with_plain_newlines(*source));
  if (!nodes) fail(where, "a Jinja template", "an unclosed tag or literal");
  ChatTemplate result;
  result.m_thinking = parts_of(where, *nodes, bos_token, true);
  result.m_no_thinking = parts_of(where, *nodes, bos_token, false);
  result.m_format = format_of(where, result.m_thinking, result.m_no_thinking);
  return result;
}

ChatTemplate::Parts ChatTemplate::parts(bool thinking) const {
  return thinking ? m_thinking : m_no_thinking;
}

ChatTemplate::Parts ChatTemplate::parts(bool thinking, std::string_view system) const {
  Parts result = parts(thinking);
  result.prefix = beginning(std::string(system)) + opening_of(m_format, ChatRole::user);
  return result;
}

// Returns the text before the first message that is not a system message.
std::string ChatTemplate::beginning(const std::optional<std::string>& system) const {
  const std::string user = opening_of(m_format, ChatRole::user);
  std::string result = m_no_thinking.prefix.substr(0, m_no_thinking.prefix.size() - user.size());
  if (!system) return result;
  const std::string opening = opening_of(m_format, ChatRole::system);
  const std::string_view end = end_of_message(m_format);
  const std::string text(m_no_thinking.trim_content ? trimmed(*system) : *system);
  const std::size_t own = result.find(opening);
  if (m_format == ChatFormat::llama3 && own != std::string::npos && ends_with(result, end)) {
    // Behind the dates that begin the template's own system message.
    return result.insert(result.size() - end.size(), text);
  }
  if (own != std::string::npos) result.resize(own);
  return result + opening + text + std::string(end);
}

std::string ChatTemplate::between_turns() const {
  return std::string(end_of_message(m_format)) + opening_of(m_format, ChatRole::user);
}

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages, bool thinking,
                                 bool add_generation_prompt) const {
  if (messages.empty()) throw Error("a chat template needs at least one message");
  const bool has_system = messages.front().role == ChatRole::system;
  std::string result = has_system ? beginning(messages.front().content) : beginning(std::nullopt);
  // Qwen3 keeps thoughts in answers that follow the last question.
  std::size_t last_question = messages.size() - 1;
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role != ChatRole::user || is_tool_response(messages[i].content)) continue;
    last_question = i;
    break;
  }
  for (std::size_t i = has_system ? 1 : 0; i < messages.size(); ++i) {
    const auto& [role, content] = messages[i];
    result += opening_of(m_format, role);
    if (m_format == ChatFormat::qwen3 && role == ChatRole::assistant) {
      const QwenAnswer answer = qwen_answer(content);
      const bool has_block =
          i > last_question && (i + 1 == messages.size() || !answer.thoughts.empty());
      if (has_block) result += fmt::format("<think>\n{}\n</think>\n\n", answer.thoughts);
      result += has_block ? without_newlines(answer.text, true, false) : answer.text;
    } else if (m_no_thinking.trim_content) {
      result += trimmed(content);
    } else {
      result += content;
    }
    result += end_of_message(m_format);
  }
  if (!add_generation_prompt) return result;
  const std::string& suffix = parts(thinking).suffix;
  return result + suffix.substr(end_of_message(m_format).size());
}

ChatTemplate::Exchange ChatTemplate::exchange(std::string_view user,
                                              std::string_view assistant) const {
  std::string between = "<|im_end|>\n<|im_start|>assistant\n";
  std::string end = "<|im_end|>\n";
  if (m_format == ChatFormat::qwen3) {
    between += "<think>\n\n</think>\n\n";
  } else if (m_format == ChatFormat::llama3) {
    between = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
    end = "<|eot_id|>";
  }
  Exchange result;
  result.text = m_no_thinking.prefix;
  result.user = result.text.size();
  result.text += user;
  result.text += between;
  result.assistant = result.text.size();
  result.text += assistant;
  result.text += end;
  return result;
}

}  // namespace kvzap
