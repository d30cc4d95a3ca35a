#include "commands/lab/eval_prompts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "commands/run/prompt.hpp"
#include "files/counted.hpp"
#include "files/fnv.hpp"

namespace kvzap::driver {
namespace {

/// Converts rows to token ids.
class Encoder {
 public:
  Encoder(const EvalOptions& options, const Tokenizer& tokenizer, const ModelConfig& config,
          std::int64_t limit)
      : m_options(options),
        m_tokenizer(tokenizer),
        m_config(config),
        m_limit(limit),
        m_form(prompt_form(options.model, options.raw, options.thinking == "on")) {}

  /// Throws Error for a row that does not fit this model.
  EvalTokens operator()(const Task& task, const MetricInfo& metric) const {
    EvalTokens tokens;
    tokens.context = m_form.context(m_tokenizer, task.context);
    tokens.question = m_form.question(m_tokenizer, task.question, task.answer_prefix);
    if (metric.is_perplexity) {
      tokens.continuation = m_tokenizer.encode(task.answers.front());
      if (tokens.continuation.empty()) throw Error("answer: the continuation has no tokens");
    } else {
      tokens.new_tokens = m_options.new_tokens.value_or(task.max_new_tokens);
    }
    if (tokens.context.empty()) {
      // Without a template there may be no text before the question. The context must then supply
      // the first token.
      if (tokens.question.empty()) throw Error("context and question: have no tokens");
      tokens.context.push_back(tokens.question.front());
      tokens.question.erase(tokens.question.begin());
    }
    check(tokens);
    return tokens;
  }

 private:
  void check(const EvalTokens& tokens) const {
    for (const auto* ids : {&tokens.context, &tokens.question, &tokens.continuation}) {
      for (const TokenId id : *ids) {
        if (id < m_config.vocab_size) continue;
        throw Error(fmt::format("token id {} is not in the vocabulary; expected less than {}", id,
                                m_config.vocab_size));
      }
    }
    const auto length = static_cast<std::int64_t>(tokens.context.size() + tokens.question.size() +
                                                  tokens.continuation.size());
    if (m_limit > 0 && length > m_limit) {
      throw Error(
          fmt::format("the prompt has {}; the longest accepted is {} (-c, or the model's "
                      "{} = {})",
                      files::counted(length, "token"), m_limit, name_of_longest(m_config),
                      m_config.longest_context()));
    }
  }

  const EvalOptions& m_options;
  const Tokenizer& m_tokenizer;
  const ModelConfig& m_config;
  std::int64_t m_limit;
  session::PromptForm m_form;
};

void name_tasks(std::vector<EvalPrompt>& prompts) {
  std::map<std::string, std::set<std::string>> files_of_task, files_of_stem;
  const auto stem = [](const std::string& file) {
    return std::filesystem::path(file).stem().string();
  };
  for (const EvalPrompt& prompt : prompts) {
    files_of_task[prompt.task.task].insert(prompt.file);
    files_of_stem[stem(prompt.file)].insert(prompt.file);
  }
  for (EvalPrompt& prompt : prompts) {
    prompt.name = prompt.task.task;
    // The summary uses this name for all tasks together.
    const bool is_taken = prompt.name == "all";
    if (!is_taken && files_of_task[prompt.name].size() == 1) continue;
    const std::string name = stem(prompt.file);
    prompt.name = (files_of_stem[name].size() == 1 ? name : prompt.file) + "/" + prompt.name;
  }
}

}  // namespace

std::string EvalPrompt::where() const { return fmt::format("{}: line {}", file, task.line); }

std::vector<std::string> file_list(const std::vector<std::string>& parts) {
  std::vector<std::string> files;
  for (const std::string& part : parts) {
    for (std::size_t begin = 0; begin <= part.size();) {
      const std::size_t end = std::min(part.find(',', begin), part.size());
      if (end > begin) files.push_back(part.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return files;
}

EvalPrompts read_eval_prompts(const EvalOptions& options, const Tokenizer& tokenizer,
                              const ModelConfig& config, std::int64_t limit) {
  PromptTemplates templates;
  if (!options.prompt_templates.empty()) {
    templates = read_prompt_templates(options.prompt_templates);
  }
  const Encoder encode(options, tokenizer, config, limit);
  EvalPrompts made;
  if (!templates.empty()) {
    made.templates_hash = fmt::format("{:016x}", files::fnv1a(nlohmann::json(templates).dump()));
  }
  std::map<std::string, std::int64_t> of_task;  // number of prompts by task of the file
  const auto is_enough = [&] {
    return options.max_prompts &&
           static_cast<std::int64_t>(made.prompts.size()) >= *options.max_prompts;
  };
  for (const std::string& file : file_list(options.tasks)) {
    TaskFile rows = read_tasks(file, options.keep_going, templates);
    made.left_out.insert(made.left_out.end(), rows.skipped.begin(), rows.skipped.end());
    std::int64_t used = 0;
    of_task.clear();
    for (Task& task : rows.tasks) {
      if (is_enough()) break;
      if (options.per_task && of_task[task.task] >= *options.per_task) continue;
      EvalPrompt prompt;
      prompt.file = file;
      try {
        prompt.metric = &metric_of(task);
        prompt.tokens = encode(task, *prompt.metric);
      } catch (const Error& error) {
        const std::string message = fmt::format("{}: line {}: {}", file, task.line, error.what());
        if (!options.keep_going) throw Error(message + "; --keep-going leaves such prompts out");
        made.left_out.push_back(message);
        continue;
      }
      prompt.task = std::move(task);
      prompt.task.context = std::string();
      ++of_task[prompt.task.task];
      ++used;
      made.prompts.push_back(std::move(prompt));
    }
    made.files.push_back(nlohmann::ordered_json{
        {"file", file}, {"rows", used}, {"hash", fmt::format("{:016x}", rows.hash)}});
  }
  if (made.prompts.empty()) {
    throw Error(made.left_out.empty()
                    ? std::string("no prompts: --tasks has none")
                    : fmt::format("no prompts are left: {} were left out, the first: {}",
                                  made.left_out.size(), made.left_out.front()));
  }
  name_tasks(made.prompts);
  return made;
}

}  // namespace kvzap::driver
