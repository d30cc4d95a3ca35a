// The prompt text around a user's message, taken from the chat template of a Hugging Face model
// folder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// Families of chat templates: ChatML without a system message, ChatML with the default system
/// message of Qwen2 or Qwen2.5, ChatML with Qwen3's switch for thinking, and the headers of Llama
/// 3.
enum class ChatFormat { chatml, qwen2, qwen3, llama3 };

/// The author of a message.
enum class ChatRole { system, user, assistant };
/// Returns "system", "user" or "assistant".
std::string_view name_of(ChatRole role);

/// One message of a conversation.
struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;
};

/// Produces the text that transformers' apply_chat_template makes of messages. There is no Jinja
/// interpreter. The template is evaluated for one user message with the generation prompt and
/// without tools. A template whose branches depend on other input is refused. Other messages are
/// rendered as the published templates of the detected format render them.
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
  /// folder/tokenizer_config.json: a string, or the entry "default" of a list of {name, template}.
  /// Throws Error if there is no template, or if its output is not that of a known ChatFormat.
  static ChatTemplate detect(const std::filesystem::path& folder);

  ChatFormat format() const { return m_format; }

  /// Returns the text around a message. `thinking` affects Qwen3 only. A template that writes
  /// today's date (Llama 3.1 and newer) gets its fallback date, 26 Jul 2024 in the published ones,
  /// so prompts do not change from day to day.
  Parts parts(bool thinking) const;
  /// Returns the text around a message that follows a system message. `system` replaces a default
  /// system message. In Llama 3.1 and newer it follows the dates that begin the template's own
  /// system message.
  Parts parts(bool thinking, std::string_view system) const;

  /// Returns the text that apply_chat_template(messages, add_generation_prompt=...) makes of the
  /// messages. Llama 3's messages are trimmed. Qwen3's answers lose the thoughts of earlier turns.
  /// Encode it without add_special_tokens. Throws Error if there are no messages.
  std::string render(const std::vector<ChatMessage>& messages, bool thinking,
                     bool add_generation_prompt = true) const;

  /// Returns the text between an answer and the user's next message. It begins with one token, the
  /// special token that ends every message.
  std::string between_turns() const;

  /// Returns an exchange without generation prompt. The text between and after the messages is that
  /// of the format's published templates. For Qwen3 this includes the empty block of thoughts that
  /// its template puts before an answer without thoughts. `user` and `assistant` must not begin or
  /// end with white space, because some templates strip it. Encode the text without
  /// add_special_tokens.
  Exchange exchange(std::string_view user, std::string_view assistant) const;

 private:
  std::string beginning(const std::optional<std::string>& system) const;

  ChatFormat m_format = ChatFormat::chatml;
  Parts m_thinking;
  Parts m_no_thinking;
};

}  // namespace kvzap
