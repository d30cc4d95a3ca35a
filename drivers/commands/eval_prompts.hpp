// The prompts of `kvzap eval`: which rows of which files, as token ids.
#pragma once

#include <kvzap/lab/metrics.hpp>
#include <kvzap/lab/tasks.hpp>
#include <kvzap/model/model_config.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/eval.hpp"

namespace kvzap::driver {

/// What a model gets of a prompt.
struct EvalTokens {
  std::vector<TokenId> context;
  std::vector<TokenId> question;      // with what the chat template puts behind it
  std::vector<TokenId> continuation;  // whose likelihood is taken; empty: an answer is generated
  std::int64_t new_tokens = 0;
};

struct EvalPrompt {
  std::string file;
  Task task;         // without its context, which is only needed as tokens
  std::string name;  // of the task in records, see read_eval_prompts
  const MetricInfo* metric = nullptr;
  EvalTokens tokens;

  /// "FILE: line N"
  std::string where() const;
};

struct EvalPrompts {
  std::vector<EvalPrompt> prompts;            // in the order of the files
  std::vector<std::string> left_out;          // what was wrong with them
  std::vector<nlohmann::ordered_json> files;  // {"file", "rows", "hash"}, rows that are used
  std::string templates_hash;                 // of what --prompt-templates says; empty without it
};

/// Reads the tasks, in the order of the files, and makes token ids of them: the chat template's
/// prefix and the context; the question, the template's suffix and the answer's prefix. One process
/// alone. Throws Error, naming file and line, for prompts longer than `limit` (0: none) and other
/// bad rows, unless they are to be left out; and if no prompt is left. Tasks of one name in several
/// files (such as one task at several lengths) are tasks of their own: FILE'S-STEM/TASK. So is one
/// called "all", a name that summaries use.
EvalPrompts read_eval_prompts(const EvalOptions& options, const Tokenizer& tokenizer,
                              const ModelConfig& config, std::int64_t limit);

/// Entries between commas, given in one or several parts.
std::vector<std::string> file_list(const std::vector<std::string>& parts);

}  // namespace kvzap::driver
