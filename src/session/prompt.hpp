// Token ids of a context and of questions about it, and the prompt that repeats a context.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/repeat_prompt.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/model_config.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "session/model_setup.hpp"

namespace kvzap::session {

/// The usual separator: a blank line.
inline constexpr std::string_view blank_line = "\n\n";

/// Returns the text that separates two parts of a message: `separator`, or "" if a part is empty or
/// white space ends the first or begins the second.
std::string_view separator_between(std::string_view before, std::string_view after,
                                   std::string_view separator);

/// A context and the question after it, as the parts of one message of the user.
struct PromptForm {
  /// Text of the chat template around the message. Absent: there is no template.
  std::optional<ChatTemplate::Parts> parts;
  /// Separates context and question in the template's message; see separated.
  std::string separator = std::string(blank_line);

  /// Returns the form of a chat template. `system`: its system message, if not the template's own.
  static PromptForm of_template(const ChatTemplate& chat_template, bool thinking,
                                const std::optional<std::string>& system = {});

  /// Returns the ids of a text that begins the message, and of everything before it.
  std::vector<TokenId> context(const Tokenizer& tokenizer, const std::string& text) const;
  /// Returns the question, after the separator if the context needs one: both have text, and there
  /// is a template, but no white space between them. `context`: all ids before the question.
  std::string separated(const Tokenizer& tokenizer, const std::vector<TokenId>& context,
                        const std::string& question) const;
  /// Returns the ids of a text, possibly an empty one, that ends the message, and of the template's
  /// text after it. `answer`: text that begins the answer.
  std::vector<TokenId> question(const Tokenizer& tokenizer, const std::string& text,
                                const std::string& answer = "") const;
};

/// The source of a context's ids.
enum class PromptSource { chat_template, text, token_ids };

/// Returns the prompt that asks the model to repeat the context, if the pruning's policy needs one.
/// It is a user's message within the folder's chat template, or, without a template, text after a
/// line break.
///
/// Ids that begin as the template does are assumed to come from it. Special tokens that the
/// tokenizer adds before any text are never repeated. An empty context means that the context is
/// not known yet. Rank 0 has the context and the tokenizer; it loads the tokenizer if that is null.
/// Collective. Throws AgreedError if there is no tokenizer or nothing to repeat.
std::optional<RepeatPrompt> share_repeat_prompt(const Pruning& pruning, const ModelSetup& setup,
                                                PromptSource source, const Tokenizer* tokenizer,
                                                const std::vector<TokenId>& context,
                                                const Communicator& comm,
                                                const PruningNames& names = plain_names());

/// Returns the texts from which the policy learns; none for other policies and without a policy.
/// Rank 0 has the tokenizer; it loads the folder's if that is null. Collective. Throws AgreedError
/// as read_texts does.
std::vector<std::vector<TokenId>> read_policy_texts(const PolicyChoice* policy,
                                                    const ModelSetup& setup,
                                                    const Tokenizer* tokenizer,
                                                    const Communicator& comm);

/// Throws Error, which names `source`, for an id outside the model's vocabulary.
void check_ids(const std::vector<TokenId>& ids, const ModelConfig& config,
               const std::string& source);

}  // namespace kvzap::session
