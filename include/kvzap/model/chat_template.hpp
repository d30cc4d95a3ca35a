// The prompt text around a user's message, taken from the chat template of a Hugging Face model
// folder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

namespace text {
struct ChatInput;
}

/// The author of a message.
enum class ChatRole { system, user, assistant };
/// Returns "system", "user" or "assistant".
std::string_view name_of(ChatRole role);

/// One message of a conversation.
struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;
};

/// Produces the text that transformers' apply_chat_template makes of messages: an interpreter
/// renders the folder's Jinja template. Several threads may use one object.
///
/// Where a text is processed before the text after it is known, the template's own text is found
/// by rendering marks in place of the messages.
class ChatTemplate {
 public:
  /// The text that the template puts around a message.
  struct Parts {
    std::string prefix;
    std::string suffix;
    /// The template strips white space from both ends of the message, as Llama 3's does. prompt()
    /// then does so too.
    bool trim_content = false;

    /// Returns prefix, the message (trimmed if trim_content) and suffix. Encode it without
    /// add_special_tokens: prefix contains the beginning-of-text token if the template writes one.
    std::string prompt(std::string_view user_text) const;

    /// Returns the beginning of prompt() for a message that continues after user_text, such as a
    /// context that precedes its question: prefix and the text. If trim_content, only the beginning
    /// of the text is trimmed.
    std::string context(std::string_view user_text) const;
  };

  /// A user's message and the assistant's answer as the template writes them, and their offsets in
  /// the text, in bytes.
  struct Exchange {
    std::string text;
    std::size_t user = 0;
    std::size_t assistant = 0;
  };

  /// Reads the template from folder/chat_template.jinja, or else from chat_template in
  /// folder/tokenizer_config.json: a string, or the entry "default" of a list of {name, template};
  /// or else from folder/chat_template.json. Chats with tools take the entry "tool_use" or
  /// folder/additional_chat_templates/tool_use.jinja, if there is one; errors in it appear then.
  /// The special tokens of tokenizer_config.json are variables of the template.
  ///
  /// Throws Error if there is no template, if it is not valid, or if it does not write a user's
  /// message once and unchanged (white space at its ends excepted): then no text can be processed
  /// before the text after it.
  static ChatTemplate detect(const std::filesystem::path& folder);

  /// Returns the text around a message. `thinking` is the template's variable enable_thinking (and
  /// thinking); many templates ignore it. Templates that ask for today's date get 26 July 2024, the
  /// fallback of Llama 3's, so prompts do not change from day to day.
  Parts parts(bool thinking) const;
  /// Returns the text around a message that follows a system message. Throws Error if the template
  /// refuses system messages.
  Parts parts(bool thinking, std::string_view system) const;

  /// Returns the text that apply_chat_template(messages, add_generation_prompt=...) makes of the
  /// messages. Encode it without add_special_tokens. Throws Error if there are no messages, and if
  /// the template refuses them.
  std::string render(const std::vector<ChatMessage>& messages, bool thinking,
                     bool add_generation_prompt = true) const;
  /// Returns the text of messages with tools, tool calls and other fields. As transformers does, it
  /// drops fields of a message that are null, and copies reasoning_content, thinking or reasoning
  /// to the names that templates read.
  std::string render(const text::ChatInput& input) const;

  /// Returns the source of the template, or of that for chats with tools if there is another one.
  std::string_view source(bool with_tools) const;

  /// Returns the text between an answer and the user's next message. In most templates it begins
  /// with the special token that ends every message. Throws Error if the template does not write
  /// both messages in this order.
  std::string between_turns() const;

  /// Returns an exchange without generation prompt. It includes text of the template before an
  /// answer without thoughts, such as Qwen3's empty block of thoughts. `user` and `assistant` must
  /// not begin or end with white space, because some templates strip it. Encode the text without
  /// add_special_tokens. Throws Error if the template does not write both messages in this order.
  Exchange exchange(std::string_view user, std::string_view assistant) const;

 private:
  struct Source;

  std::shared_ptr<const Source> m_source;
  Parts m_thinking;
  Parts m_no_thinking;
};

}  // namespace kvzap
