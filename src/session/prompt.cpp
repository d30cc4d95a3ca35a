#include "session/prompt.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <kvzap/engine/learn_from_texts.hpp>

#include "parallel/message.hpp"
#include "text/utf8.hpp"

namespace kvzap::session {
namespace {

/// Returns the number of special tokens that the tokenizer has put before `part` in `ids`.
std::int64_t tokens_before(const std::vector<TokenId>& part, const std::vector<TokenId>& ids) {
  return std::search(ids.begin(), ids.end(), part.begin(), part.end()) - ids.begin();
}

bool begins_with(const std::vector<TokenId>& ids, const std::vector<TokenId>& begin) {
  return ids.size() >= begin.size() && std::equal(begin.begin(), begin.end(), ids.begin());
}

RepeatPrompt repeat_prompt(const std::string& folder, PromptSource source,
                           const Tokenizer& tokenizer, const std::vector<TokenId>& context) {
  if (source == PromptSource::chat_template) {
    const auto parts = ChatTemplate::detect(folder).parts(false);
    return make_repeat_prompt(tokenizer, parts.prefix, parts.suffix);
  }
  if (source == PromptSource::token_ids) {
    try {
      const auto parts = ChatTemplate::detect(folder).parts(false);
      if (!parts.prefix.empty() && begins_with(context, tokenizer.encode(parts.prefix))) {
        return make_repeat_prompt(tokenizer, parts.prefix, parts.suffix);
      }
    } catch (const Error&) {
      // No template, or an unknown one: the ids are plain text.
    }
  }
  RepeatPrompt prompt = make_repeat_prompt(tokenizer, "", "\n");
  const std::vector<TokenId> marked = tokenizer.encode("a", true);
  const std::int64_t special = tokens_before(tokenizer.encode("a"), marked);
  if (context.empty() || begins_with(context, {marked.begin(), marked.begin() + special})) {
    prompt.prefix = special;
  }
  return prompt;
}

/// Returns the tokenizer, or loads the folder's if there is none. `purpose`: begins the message of
/// an error.
const Tokenizer& tokenizer_of(const Tokenizer* tokenizer, std::optional<Tokenizer>& own,
                              const std::string& folder, const std::string& purpose) {
  if (tokenizer) return *tokenizer;
  try {
    own = Tokenizer::load(folder);
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", purpose, error.what()));
  }
  return *own;
}

}  // namespace

std::string_view separator_between(std::string_view before, std::string_view after,
                                   std::string_view separator) {
  if (before.empty() || after.empty()) return "";
  const bool is_apart = text::is_white_space(text::last_character(before).first) ||
                        text::is_white_space(text::first_character(after).first);
  return is_apart ? "" : separator;
}

PromptForm PromptForm::of_template(const ChatTemplate& chat_template, bool thinking,
                                   const std::optional<std::string>& system) {
  PromptForm form;
  form.parts = system ? chat_template.parts(thinking, *system) : chat_template.parts(thinking);
  return form;
}

std::vector<TokenId> PromptForm::context(const Tokenizer& tokenizer,
                                         const std::string& text) const {
  return parts ? tokenizer.encode(parts->context(text)) : tokenizer.encode(text, true);
}

std::string PromptForm::separated(const Tokenizer& tokenizer, const std::vector<TokenId>& context,
                                  const std::string& question) const {
  if (!parts || context == tokenizer.encode(parts->context(""))) return question;
  // Ids, because a resumed run has no text. The last of them end with the last character.
  constexpr std::ptrdiff_t tail = 16;
  const auto begin =
      context.end() - std::min<std::ptrdiff_t>(tail, context.end() - context.begin());
  const std::string text = tokenizer.decode({begin, context.end()});
  return std::string(separator_between(text, question, separator)) + question;
}

std::vector<TokenId> PromptForm::question(const Tokenizer& tokenizer, const std::string& text,
                                          const std::string& answer) const {
  return tokenizer.encode(text + (parts ? parts->suffix : "") + answer);
}

std::optional<RepeatPrompt> share_repeat_prompt(const Pruning& pruning, const ModelSetup& setup,
                                                PromptSource source, const Tokenizer* tokenizer,
                                                const std::vector<TokenId>& context,
                                                const Communicator& comm,
                                                const PruningNames& names) {
  const PolicyInfo* const info = pruning.prunes() ? pruning.info() : nullptr;
  if (!info || !info->repeats_context || info->repeats_without_words) return {};
  RepeatPrompt repeat;
  comm.agree_on_root([&] {
    const std::string policy = fmt::format("{} {}", names(PruningField::policy), info->name);
    std::optional<Tokenizer> own;
    const Tokenizer& encoder =
        tokenizer_of(tokenizer, own, setup.folder,
                     policy +
                         ": the model is asked to repeat the context in words, which needs its "
                         "tokenizer");
    repeat = repeat_prompt(setup.folder, source, encoder, context);
    for (const auto* ids : {&repeat.first, &repeat.later, &repeat.suffix}) {
      check_ids(*ids, setup.config, policy + ": the prompt that repeats the context");
    }
    if (!context.empty()) repeat_steps(context, repeat);  // throws if there is nothing to repeat
  });
  parallel::broadcast(comm, 0, repeat.first, repeat.later, repeat.suffix, repeat.prefix);
  return repeat;
}

std::vector<std::vector<TokenId>> read_policy_texts(const PolicyChoice* policy,
                                                    const ModelSetup& setup,
                                                    const Tokenizer* tokenizer,
                                                    const Communicator& comm) {
  if (!policy || !policy->learner) return {};
  const std::filesystem::path file = policy->learner->texts();
  std::optional<Tokenizer> own;
  comm.agree_on_root([&] {
    tokenizer = &tokenizer_of(tokenizer, own, setup.folder,
                              file.string() + ": these texts need the model's tokenizer");
  });
  return read_texts(file, tokenizer, setup.config, comm);
}

void check_ids(const std::vector<TokenId>& ids, const ModelConfig& config,
               const std::string& source) {
  for (const TokenId id : ids) {
    if (id >= 0 && id < config.vocab_size) continue;
    throw Error(fmt::format("{}: token id {} is not in the vocabulary; expected less than {}",
                            source, id, config.vocab_size));
  }
}

}  // namespace kvzap::session
