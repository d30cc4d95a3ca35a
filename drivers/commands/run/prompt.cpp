#include "commands/run/prompt.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <utility>

#include "commands/support/policy_setup.hpp"
#include "console/launcher.hpp"
#include "files/counted.hpp"
#include "files/plain_text.hpp"
#include "files/quote.hpp"
#include "parallel/message.hpp"

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
  if (options.system) files::require_utf8(*options.system, "--system");
  files::require_utf8(options.separator, "--separator");
  session::PromptForm form = prompt_form(options.model, options.raw || options.token_ids,
                                         options.thinking == "on", options.system);
  form.separator = options.separator;
  return form;
}

namespace {

/// Returns whether standard input is a file or a pipe of a shell, and not empty. Waits for the
/// first byte of a pipe. mpirun's pipe to its first rank may lead to a terminal, where nobody would
/// know that the program waits.
bool has_piped_input(const Communicator& comm) {
  if (comm.size() > 1 || launched_ranks() > 0) return false;
  struct stat status = {};
  if (::fstat(STDIN_FILENO, &status) != 0) return false;
  if (S_ISREG(status.st_mode)) return status.st_size > 0;
  if (!S_ISFIFO(status.st_mode) && !S_ISSOCK(status.st_mode)) return false;
  pollfd input = {STDIN_FILENO, POLLIN, 0};
  while (::poll(&input, 1, -1) < 0 && errno == EINTR) continue;
  return (input.revents & POLLIN) != 0;
}

/// Returns the lines of --questions that have text, without white space around them.
std::vector<std::string> read_questions(const std::string& file) {
  std::istringstream lines(files::read_plain_text(file, "--questions"));
  std::vector<std::string> questions;
  for (std::string line; std::getline(lines, line);) {
    constexpr const char* space = " \t\v\f";
    const std::size_t begin = line.find_first_not_of(space);
    if (begin == std::string::npos) continue;
    questions.push_back(line.substr(begin, line.find_last_not_of(space) + 1 - begin));
  }
  if (questions.empty()) {
    throw Error(fmt::format("--questions {}: expected a question in each line, found none", file));
  }
  return questions;
}

/// Returns the context of -p or -f. A separator stands between two files without white space there.
std::string read_context(const RunOptions& options) {
  if (options.prompt) {
    files::require_utf8(*options.prompt, "-p");
    return *options.prompt;
  }
  std::string text;
  const std::string separator = options.token_ids ? " " : options.separator;
  for (const std::string& file : options.files) {
    const std::string next = files::read_plain_text(file, "-f");
    text.append(session::separator_between(text, next, separator)).append(next);
  }
  return text;
}

/// Throws UsageError for text of the command line, Error for text of a file.
[[noreturn]] void refuse(const std::string& source, const std::string& what) {
  const std::string message = fmt::format("{}: {}", source, what);
  if (source == "-p" || source == "--question") throw UsageError(message);
  throw Error(message);
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
      refuse(what, fmt::format("{} is not a token id; --token-ids expects ids separated by white "
                               "space",
                               files::in_quotes(word)));
    }
    ids.push_back(static_cast<TokenId>(id));
  }
  return ids;
}

/// Returns the ids of the options' questions about a context. Without any, returns the end of the
/// chat template, or no ids.
std::vector<std::vector<TokenId>> question_ids(const RunOptions& options,
                                               const session::PromptForm& form,
                                               const Tokenizer* tokenizer,
                                               const std::vector<TokenId>& context) {
  std::vector<std::vector<TokenId>> questions;
  for (const auto& question : options.questions) {
    if (options.token_ids) {
      questions.push_back(parse_ids(question, "--question"));
      continue;
    }
    files::require_utf8(question, "--question");
    questions.push_back(form.question(*tokenizer, form.separated(*tokenizer, context, question)));
  }
  if (questions.empty()) {
    questions.push_back(form.parts ? form.question(*tokenizer, "") : std::vector<TokenId>());
  }
  return questions;
}

std::string source_of_context(const RunOptions& options) {
  return options.prompt ? "-p" : fmt::format("-f {}", fmt::join(options.files, " -f "));
}

std::vector<TokenId> context_ids(const RunOptions& options, const std::string& text,
                                 const session::PromptForm& form, const Tokenizer* tokenizer) {
  const std::string source = source_of_context(options);
  auto ids = options.token_ids ? parse_ids(text, source) : form.context(*tokenizer, text);
  if (ids.empty()) refuse(source, "the prompt has no tokens");
  return ids;
}

/// Returns the token ids that --append adds to a context.
std::vector<TokenId> appended_ids(const RunOptions& options, const Tokenizer* tokenizer) {
  const std::string source = "--append " + options.append;
  const std::string text = files::read_plain_text(options.append, "--append");
  // The text belongs to the user's message, like the context before it.
  auto ids = options.token_ids ? parse_ids(text, source) : tokenizer->encode(text);
  if (ids.empty()) throw Error(fmt::format("{}: the file has no tokens", source));
  return ids;
}

void check_prompt(const Prompt& prompt, const RunOptions& options, const ModelConfig& config,
                  std::int64_t limit) {
  const auto check_context = [&] { session::check_ids(prompt.context, config, "prompt"); };
  options.prompt ? as_usage(check_context) : check_context();
  for (const auto& question : prompt.questions) {
    as_usage([&] { session::check_ids(question, config, "--question"); });
    const std::int64_t tokens = prompt.context.size() + question.size();
    if (limit > 0 && tokens > limit) {
      throw Error(fmt::format(
          "the prompt has {}; the longest context accepted is {} (-c, or "
          "the model's {} = {}){}",
          files::counted(tokens, "token"), limit, name_of_longest(config), config.longest_context(),
          tokens > config.longest_context() ? hint_for_longer(config, tokens) : ""));
    }
  }
}

}  // namespace

void take_input(RunOptions& options, const Communicator& comm) {
  const bool has_context =
      options.prompt || !options.files.empty() || !options.resume.empty() || options.dry_run;
  agree_on_usage(comm, [&] {
    const auto inputs = std::count(options.files.begin(), options.files.end(), "-") +
                        (options.append == "-" ? 1 : 0) + (options.questions_file == "-" ? 1 : 0);
    require(inputs <= 1, "standard input (-) is given more than once: it can be read once");
    const bool separates = options.token_ids ? false : !options.raw || options.files.size() > 1;
    require(separates || !options.resume.empty() || options.separator == session::blank_line,
            fmt::format("--separator has no effect with {}: without a chat template, a question "
                        "follows the context directly",
                        options.token_ids ? "--token-ids" : "--raw and one text"));
  });
  comm.agree_on_root([&] {
    const bool reads_input = options.questions_file == "-" || options.append == "-";
    if (!has_context && !reads_input && has_piped_input(comm)) options.files.emplace_back("-");
    if (options.questions_file.empty()) return;
    for (std::string& question : read_questions(options.questions_file)) {
      options.questions.push_back(std::move(question));
    }
  });
  parallel::broadcast(comm, 0, options.files, options.questions);
}

Prompt share_prompt(const RunOptions& options, const Tokenizer* tokenizer,
                    const ModelConfig& config, std::int64_t limit, const Communicator& comm,
                    const session::Recorded* recorded, bool may_be_empty) {
  Prompt prompt;
  agree_on_usage_of_root(comm, [&] {
    if (recorded) prompt = {recorded->context(), recorded->state.texts, recorded->state.questions};
    const std::string text = recorded ? "" : read_context(options);
    if (!recorded && text.empty() && !may_be_empty) {
      refuse(source_of_context(options), "the prompt is empty");
    }
    const bool has_questions = options.questions.empty() && !prompt.questions.empty();
    const session::PromptForm form =
        recorded && has_questions ? session::PromptForm() : prompt_form(options);
    if (!recorded) prompt.context = context_ids(options, text, form, tokenizer);
    if (!options.append.empty()) {
      const auto more = appended_ids(options, tokenizer);
      prompt.context.insert(prompt.context.end(), more.begin(), more.end());
    }
    if (!has_questions) {
      prompt.questions = question_ids(options, form, tokenizer, prompt.context);
      prompt.texts = options.questions;
      prompt.texts.resize(prompt.questions.size());
    }
    check_prompt(prompt, options, config, limit);
  });
  parallel::broadcast(comm, 0, prompt.context, prompt.texts, prompt.questions);
  return prompt;
}

}  // namespace kvzap::driver
