// The prompt text around a user's message, from the chat template of a Hugging Face model folder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvzap {

/// Families of chat templates: ChatML without a system text, with Qwen2's or Qwen2.5's default
/// system text, with Qwen3's switch for thinking, and Llama 3's headers.
enum class ChatFormat { chatml, qwen2, qwen3, llama3 };

/// Who says something in a conversation.
enum class ChatRole { system, user, assistant };
/// "system", "user" or "assistant".
std::string_view name_of(ChatRole role);

/// One turn of a conversation.
struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;
};

/// What transformers' apply_chat_template makes of messages. There is no Jinja interpreter: the
/// template is followed as far as one user message with the generation prompt and no tools decide
/// its branches, and refused if that leaves anything open. What it makes of other messages is what
/// its format's published templates make of them.
class ChatTemplate {
 public:
  /// What the template puts around a message.
  struct Parts {
    std::string prefix;
    std::string suffix;
    /// The template strips white space from both ends of the message (Llama 3 does), which
    /// prompt() then does too.
    bool trim_content = false;

    /// prefix, then the message (trimmed if trim_content), then suffix. Encode it without
    /// add_special_tokens: where the template wants a beginning-of-text token, prefix has it.
    std::string prompt(std::string_view user_text) const;

    /// The beginning of prompt() for a message that goes on behind user_text, as a context does
    /// before its question: prefix, then the text, trimmed at its beginning alone if trim_content.
    std::string context(std::string_view user_text) const;
  };

  /// A user's message and the assistant's answer, as the template writes them, and where they are
  /// in the text, in bytes.
  struct Exchange {
    std::string text;
    std::size_t user = 0;
    std::size_t assistant = 0;
  };

  /// Reads folder/chat_template.jinja, or else chat_template in folder/tokenizer_config.json: a
  /// string, or a list of {name, template} of which "default" is taken. Throws Error, which names
  /// the option --raw, if there is no template or one whose output is not known to be one of
  /// ChatFormat's.
  static ChatTemplate detect(const std::filesystem::path& folder);

  ChatFormat format() const { return m_format; }

  /// `thinking` matters to Qwen3 only. A template that writes today's date (Llama 3.1 and newer)
  /// gets the date it falls back to, 26 Jul 2024 in the published ones, so that prompts stay the
  /// same from day to day.
  Parts parts(bool thinking) const;
  /// The same with a system message before the user's. It takes the place of a default one, or
  /// follows it where the template puts it there (Llama 3.1 and newer, behind the dates).
  Parts parts(bool thinking, std::string_view system) const;

  /// Messages, text to text, as apply_chat_template(messages, add_generation_prompt=...) has them:
  /// Llama 3's are trimmed; Qwen3's answers lose the thoughts of earlier turns. Encode it without
  /// add_special_tokens. Throws Error for no messages.
  std::string render(const std::vector<ChatMessage>& messages, bool thinking,
                     bool add_generation_prompt = true) const;

  /// What stands between an answer and the next message of the user. It begins with one token, the
  /// special one that ends every message.
  std::string between_turns() const;

  /// An exchange without generation prompt. What stands between and behind the messages is that of
  /// the format's published templates (Qwen3: with the empty block of thoughts that its template
  /// puts before an answer without any). `user` and `assistant` must have no white space at their
  /// ends, which some templates strip. Encode it without add_special_tokens.
  Exchange exchange(std::string_view user, std::string_view assistant) const;

 private:
  std::string beginning(const std::optional<std::string>& system) const;

  ChatFormat m_format = ChatFormat::chatml;
  Parts m_thinking;
  Parts m_no_thinking;
};

}  // namespace kvzap
