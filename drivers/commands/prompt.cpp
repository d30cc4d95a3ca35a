#include "commands/prompt.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <sstream>

#include "base/counted.hpp"
#include "base/quote.hpp"
#include "base/text_file.hpp"
#include "commands/policy_setup.hpp"

namespace kvzap::driver {

session::PromptForm prompt_form(const std::string& folder, bool raw, bool thinking,
                                const std::optional<std::string>& system) {
  if (raw) return {};
  try {
    return session::PromptForm::of_template(ChatTemplate::detect(folder), thinking, system);
  } catch (const Error& error) {
    throw Error(fmt::format("{}; --raw feeds the prompt to the model without a chat template",
                            error.what()));
  }
}

session::PromptForm prompt_form(const RunOptions& options) {
  return prompt_form(options.model, options.raw || options.token_ids, options.thinking == "on",
                     options.system);
}

namespace {

// Larger than any model's context. Reading an endless file, such as /dev/zero, stops here.
constexpr std::uintmax_t most_text = std::uintmax_t{1} << 30;

std::string read_whole(const std::string& file) {
  return file == "-" ? base::read_text(STDIN_FILENO, "standard input", most_text)
                     : base::read_text(file, most_text);
}

std::vector<TokenId> parse_ids(const std::string& text, const std::string& what) {
  std::vector<TokenId> ids;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    std::size_t used = 0;
    long long id = -1;
    try {
      id = std::stoll(word, &used);
    } catch (const std::exception&) {
    }
    if (used != word.size() || id < 0 || id > std::numeric_limits<TokenId>::max()) {
      throw Error(
          fmt::format("{}: {} is not a token id; --token-ids expects ids separated by white space",
                      what, base::in_quotes(word)));
    }
    ids.push_back(static_cast<TokenId>(id));
  }
  return ids;
}

/// Returns the ids of the options' questions, if there are any.
std::vector<std::vector<TokenId>> question_ids(const RunOptions& options,
                                               const session::PromptForm& form,
                                               const Tokenizer* tokenizer) {
  std::vector<std::vector<TokenId>> questions;
  for (const auto& question : options.questions) {
    questions.push_back(options.token_ids ? parse_ids(question, "--question")
                                          : form.question(*tokenizer, question));
  }
  return questions;
}

Prompt make_prompt(const RunOptions& options, const Tokenizer* tokenizer, bool may_be_empty) {
  const std::string text = options.prompt ? *options.prompt : read_whole(options.file);
  const std::string source = options.prompt ? "-p" : "-f " + options.file;
  if (text.empty() && !may_be_empty) throw Error(fmt::format("{}: the prompt is empty", source));
  Prompt prompt;
  const session::PromptForm form = prompt_form(options);
  prompt.questions = question_ids(options, form, tokenizer);
  prompt.context = options.token_ids ? parse_ids(text, source) : form.context(*tokenizer, text);
  if (prompt.questions.empty() && form.parts) {
    prompt.questions.push_back(form.question(*tokenizer, ""));
  }
  if (prompt.context.empty()) throw Error(fmt::format("{}: the prompt has no tokens", source));
  if (prompt.questions.empty()) prompt.questions.emplace_back();
  return prompt;
}

/// Returns the token ids that --append adds to a context.
std::vector<TokenId> appended_ids(const RunOptions& options, const Tokenizer* tokenizer) {
  const std::string source = "--append " + options.append;
  const std::string text = read_whole(options.append);
  // The text belongs to the user's message, like the context before it.
  auto ids = options.token_ids ? parse_ids(text, source) : tokenizer->encode(text);
  if (ids.empty()) throw Error(fmt::format("{}: the file has no tokens", source));
  return ids;
}

void check_prompt(const Prompt& prompt, const ModelConfig& config, std::int64_t limit) {
  session::check_ids(prompt.context, config, "prompt");
  for (const auto& question : prompt.questions) {
    session::check_ids(question, config, "--question");
    const std::int64_t tokens = prompt.context.size() + question.size();
    if (limit > 0 && tokens > limit) {
      throw Error(fmt::format(
          "the prompt has {}; the longest context accepted is {} (-c, or "
          "the model's {} = {}){}",
          base::counted(tokens, "token"), limit, name_of_longest(config), config.longest_context(),
          tokens > config.longest_context() ? hint_for_longer(config, tokens) : ""));
    }
  }
}

/// Sends rank 0's prompt to all ranks.
void share(Prompt& prompt, const Communicator& comm) {
  comm.broadcast(prompt.context, 0);
  std::int64_t questions = prompt.questions.size();
  comm.broadcast(&questions, sizeof(questions), 0);
  prompt.questions.resize(questions);
  for (auto& question : prompt.questions) comm.broadcast(question, 0);
}

}  // namespace

Prompt share_prompt(const RunOptions& options, const Tokenizer* tokenizer,
                    const ModelConfig& config, std::int64_t limit, const Communicator& comm,
                    bool may_be_empty) {
  Prompt prompt;
  comm.agree_on_root([&] {
    prompt = make_prompt(options, tokenizer, may_be_empty);
    check_prompt(prompt, config, limit);
  });
  share(prompt, comm);
  return prompt;
}

Prompt share_longer_prompt(const Prompt& recorded, const RunOptions& options,
                           const Tokenizer* tokenizer, const ModelConfig& config,
                           std::int64_t limit, const Communicator& comm) {
  Prompt prompt = recorded;
  comm.agree_on_root([&] {
    if (!options.questions.empty()) {
      prompt.questions = question_ids(options, prompt_form(options), tokenizer);
    }
    if (!options.append.empty()) {
      const auto more = appended_ids(options, tokenizer);
      prompt.context.insert(prompt.context.end(), more.begin(), more.end());
    }
    check_prompt(prompt, config, limit);
  });
  share(prompt, comm);
  return prompt;
}

}  // namespace kvzap::driver
