// The prompt text around a user's message, from the chat template of a Hugging Face model folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace kvzap {

/// Families of chat templates: ChatML without a system text, with Qwen2's or Qwen2.5's default
/// system text, with Qwen3's switch for thinking, and Llama 3's headers.
enum class ChatFormat { chatml, qwen2, qwen3, llama3 };

/// What transformers' apply_chat_template makes of one user message, with the generation prompt
/// appended. There is no Jinja interpreter: the template is followed as far as one user message and
/// no tools decide its branches, and refused if that leaves anything open.
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

 private:
  ChatFormat m_format = ChatFormat::chatml;
  Parts m_thinking;
  Parts m_no_thinking;
};

}  // namespace kvzap
