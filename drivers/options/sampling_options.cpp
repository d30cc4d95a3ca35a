#include "options/sampling_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <kvzap/engine/prompt_lookup.hpp>
#include <utility>

#include "console/console.hpp"
#include "files/counted.hpp"
#include "options/options.hpp"
#include "session/model_setup.hpp"

namespace kvzap::driver {
namespace {

/// Describes the rules: "repetition_penalty 1.05, 3 suppressed tokens".
std::string text_of_rules(const GenerationConfig& rules, bool with_penalty) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (with_penalty && rules.repetition_penalty != 1) {
    add(fmt::format("repetition_penalty {}", rules.repetition_penalty));
  }
  if (!rules.suppress_tokens.empty()) {
    add(fmt::format("suppress_tokens ({})", files::counted(rules.suppress_tokens.size(), "token")));
  }
  if (!rules.bad_words.empty()) {
    add(fmt::format("bad_words_ids ({})", files::counted(rules.bad_words.size(), "word")));
  }
  return text;
}

}  // namespace

void declare_sampling(CLI::App& app, SamplingOptions& sampling, SamplingFlags& flags,
                      const std::string& group) {
  app.add_option("--temp", sampling.temperature, "sampling temperature; 0 is greedy")
      ->capture_default_str()
      ->group(group);
  declare_filters(app, sampling, group);
  app.add_option("--repeat-penalty", flags.repeat_penalty,
                 "for tokens of the prompt and the answer, divide positive logits by this and "
                 "multiply negative ones, greedy or not; 1: no change; default: repetition_penalty "
                 "of generation_config.json")
      ->group(group);
  app.add_option("--repeat-last-n", sampling.repeat_last_n,
                 "number of latest tokens that the penalties consider; 0: none; -1: all, as in "
                 "transformers (llama.cpp: 64)")
      ->capture_default_str()
      ->group(group);
  app.add_option("--presence-penalty", sampling.presence_penalty,
                 "subtract this from the logits of tokens in the answer; the prompt does not count "
                 "(in llama.cpp it does)")
      ->capture_default_str()
      ->group(group);
  app.add_option("--frequency-penalty", sampling.frequency_penalty,
                 "subtract this from the logit of a token once for each time it is in the answer")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--greedy-plain", flags.greedy_plain,
               "use the model's logits unchanged: of generation_config.json only eos_token_id "
               "counts. Default: repetition_penalty, suppress_tokens and bad_words_ids apply, and "
               "other fields that change answers are errors")
      ->group(group);
}

void declare_lookup(CLI::App& app, std::int64_t& lookup, const std::string& group) {
  app.add_option("--lookup", lookup,
                 "check up to INT guessed tokens with each new one (prompt lookup decoding): what "
                 "followed the same tokens earlier in prompt and answer. Answers stay the same; "
                 "those that quote the prompt come faster. At most 32; 0: no guesses")
      ->capture_default_str()
      ->group(group);
}

void check_lookup(std::int64_t lookup) {
  constexpr std::int64_t most = PromptLookup::most_tokens;
  require(lookup >= 0 && lookup <= most,
          fmt::format("--lookup is {}; expected 0 to {}", lookup, most));
}

const SamplingNames& sampling_flag_names() {
  static const SamplingNames names = [](std::string_view field) {
    if (field == "temperature") return std::string("--temp");
    if (field == "repetition_penalty") return std::string("--repeat-penalty");
    std::string flag = "--" + std::string(field);
    std::replace(flag.begin(), flag.end(), '_', '-');
    return flag;
  };
  return names;
}

void check_sampling(const SamplingOptions& sampling, const SamplingFlags& flags) {
  require(sampling.top_k >= 0,
          fmt::format("--top-k is {}; expected 0 or more; 0: all tokens", sampling.top_k));
  SamplingOptions checked = sampling;
  checked.repetition_penalty = flags.repeat_penalty.value_or(1);
  check(checked, sampling_flag_names());
}

namespace {

bool has_valid_stop_ids(const std::string& folder, std::int64_t vocab_size) {
  try {
    load_stop_ids(folder, vocab_size);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

GenerationConfig rules_of_answers(const std::string& folder, std::int64_t vocab_size,
                                  const SamplingFlags& flags) {
  if (!flags.greedy_plain) {
    try {
      return GenerationConfig::load(folder, vocab_size);
    } catch (const Error& error) {
      if (!has_valid_stop_ids(folder, vocab_size)) throw;  // --greedy-plain would find it, too
      throw Error(
          fmt::format("{} (--greedy-plain ignores all fields but eos_token_id)", error.what()));
    }
  }
  GenerationConfig rules;
  rules.stop_ids = load_stop_ids(folder, vocab_size);
  return rules;
}

SamplingOptions sampling_in_force(SamplingOptions sampling, const SamplingFlags& flags,
                                  const GenerationConfig& rules) {
  sampling = session::with_rules(std::move(sampling), rules);
  sampling.repetition_penalty = flags.repeat_penalty.value_or(sampling.repetition_penalty);
  return sampling;
}

void print_rules(const GenerationConfig& rules, const SamplingFlags& flags, bool talks) {
  for (const auto& warning : rules.warnings) say("kvzap: warning: {}\n", warning);
  const std::string text = text_of_rules(rules, !flags.repeat_penalty);
  if (!talks || text.empty()) return;
  say("kvzap: note: {}: {} in force, as in transformers (--greedy-plain turns this off)\n",
      std::filesystem::path(rules.file).filename().string(), text);
}

std::string rules_left_aside(const std::string& folder, std::int64_t vocab_size) {
  try {
    const GenerationConfig rules = GenerationConfig::load(folder, vocab_size);
    const std::string text = text_of_rules(rules, true);
    return text.empty() ? "" : fmt::format("{}: {} ignored", rules.file, text);
  } catch (const Error& error) {
    return fmt::format("ignored: {}", error.what());
  }
}

nlohmann::ordered_json sampling_json(const SamplingOptions& sampling, const SamplingFlags& flags) {
  nlohmann::ordered_json json = {{"temp", sampling.temperature},
                                 {"top_k", sampling.top_k},
                                 {"top_p", sampling.top_p},
                                 {"min_p", sampling.min_p},
                                 {"repeat_penalty", sampling.repetition_penalty},
                                 {"repeat_last_n", sampling.repeat_last_n},
                                 {"presence_penalty", sampling.presence_penalty},
                                 {"frequency_penalty", sampling.frequency_penalty},
                                 {"greedy_plain", flags.greedy_plain}};
  if (!sampling.suppress_tokens.empty()) json["suppress_tokens"] = sampling.suppress_tokens;
  if (!sampling.bad_words.empty()) json["bad_words_ids"] = sampling.bad_words;
  json["seed"] = sampling.seed;
  return json;
}

}  // namespace kvzap::driver
