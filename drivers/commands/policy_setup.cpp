#include "commands/policy_setup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/model/chat_template.hpp>

#include "console/console.hpp"
#include "options/policy_options.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {
namespace {

/// Returns the index at which `part` begins in `ids`: the number of special tokens that the
/// tokenizer adds before it.
std::int64_t tokens_before(const std::vector<TokenId>& part, const std::vector<TokenId>& ids) {
  return std::search(ids.begin(), ids.end(), part.begin(), part.end()) - ids.begin();
}

bool begins_with(const std::vector<TokenId>& ids, const std::vector<TokenId>& begin) {
  return ids.size() >= begin.size() && std::equal(begin.begin(), begin.end(), ids.begin());
}

/// Returns how to ask the model to repeat the context. With a chat template, the request is a
/// user's message. Without one, it follows a line break. Ids that begin like the template are
/// assumed to come from it. Special tokens that the tokenizer adds before any text are never
/// repeated.
RepeatPrompt repeat_prompt(const EngineOptions& options, const Tokenizer& tokenizer,
                           const std::vector<TokenId>& context) {
  if (!options.raw && !options.token_ids) {
    const auto parts = ChatTemplate::detect(options.model).parts(false);
    return make_repeat_prompt(tokenizer, parts.prefix, parts.suffix);
  }
  if (options.token_ids) {
    try {
      const auto parts = ChatTemplate::detect(options.model).parts(false);
      if (!parts.prefix.empty() && begins_with(context, tokenizer.encode(parts.prefix))) {
        return make_repeat_prompt(tokenizer, parts.prefix, parts.suffix);
      }
    } catch (const Error&) {
      // No chat template, or none that is known: the ids are plain text.
    }
  }
  RepeatPrompt prompt = make_repeat_prompt(tokenizer, "", "\n");
  const std::vector<TokenId> marked = tokenizer.encode("a", true);
  const std::int64_t special = tokens_before(tokenizer.encode("a"), marked);
  if (begins_with(context, {marked.begin(), marked.begin() + special})) prompt.prefix = special;
  return prompt;
}

}  // namespace

std::optional<RepeatPrompt> share_repeat_prompt(
    const EngineOptions& options, const std::optional<PolicySpec>& spec, const Tokenizer* tokenizer,
    const std::vector<TokenId>& context, const ModelConfig& config, const Communicator& comm) {
  if (!spec || !spec->info->repeats_context || !options.pruning.prunes()) return {};
  RepeatPrompt repeat;
  comm.agree_on_root([&] {
    std::optional<Tokenizer> own;
    if (!tokenizer) {
      try {
        own = Tokenizer::load(options.model);
      } catch (const Error& error) {
        throw Error(
            fmt::format("--policy {}: the model is asked to repeat the context in words, "
                        "which needs its tokenizer: {}",
                        spec->info->name, error.what()));
      }
    }
    repeat = repeat_prompt(options, own ? *own : *tokenizer, context);
    for (const auto* ids : {&repeat.first, &repeat.later, &repeat.suffix}) {
      for (const TokenId id : *ids) {
        if (id < config.vocab_size) continue;
        throw Error(
            fmt::format("--policy {}: token id {} of the prompt that repeats the context "
                        "is not in the vocabulary; expected less than {}",
                        spec->info->name, id, config.vocab_size));
      }
    }
    repeat_steps(context, repeat);  // throws if there is nothing to repeat
  });
  comm.broadcast(repeat.first, 0);
  comm.broadcast(repeat.later, 0);
  comm.broadcast(repeat.suffix, 0);
  comm.broadcast(&repeat.prefix, sizeof(repeat.prefix), 0);
  return repeat;
}

Texts load_policy_texts(const EngineOptions& options, const PolicyChoice* choice,
                        const Tokenizer* tokenizer, const ModelConfig& config,
                        const Communicator& comm) {
  if (!choice || !choice->calibration) return {};
  const std::filesystem::path file = choice->calibration->texts();
  std::optional<Tokenizer> own;
  comm.agree_on_root([&] {
    if (tokenizer) return;  // otherwise the prompt is token ids
    try {
      own = Tokenizer::load(options.model);
    } catch (const Error& error) {
      throw Error(fmt::format("{}: these texts need the model's tokenizer: {}", file.string(),
                              error.what()));
    }
  });
  Texts texts = read_texts(file, own ? &*own : tokenizer, config, comm);
  if (options.quiet || !comm.is_root()) return texts;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (static_cast<std::int64_t>(texts[i].size()) <= config.longest_context()) continue;
    say("kvzap: warning: {}: text {} has {} tokens, more than the model's {} = {}\n", file.string(),
        i + 1, texts[i].size(), name_of_longest(config), config.longest_context());
  }
  return texts;
}

LoadedPruning load_policy(const EngineOptions& options, const std::optional<RepeatPrompt>& repeat,
                          const ModelSetup& setup, const Communicator& comm) {
  return detail::load_policy(options.pruning, setup, dtype_from_name(options.dtype), comm, repeat,
                             {}, flag_names());
}

std::optional<LookedUpThreshold> resolve_threshold(EngineOptions& options, bool talks,
                                                   const Communicator& comm) {
  std::optional<bool> chat_template;
  if (!options.token_ids) chat_template = !options.raw;
  auto found = kvzap::resolve_threshold(options.pruning, comm, chat_template, flag_names());
  if (!found || !talks) return found;
  for (const auto& warning : found->warnings) say("kvzap: warning: {}\n", warning);
  return found;
}

}  // namespace kvzap::driver
