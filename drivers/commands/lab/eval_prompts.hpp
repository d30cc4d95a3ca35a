// The prompts of `kvzap eval`: selects rows of files and converts them to token ids.
#pragma once

#include <kvzap/lab/metrics.hpp>
#include <kvzap/lab/tasks.hpp>
#include <kvzap/model/model_config.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/lab/eval.hpp"

namespace kvzap::driver {

/// The tokens of a prompt.
struct EvalTokens {
  std::vector<TokenId> context;
  std::vector<TokenId> question;  // including the chat template's text after it
  // text whose likelihood is measured; empty: an answer is generated
  std::vector<TokenId> continuation;
  std::int64_t new_tokens = 0;
};

struct EvalPrompt {
  std::string file;
  Task task;         // without its context, which is only needed as tokens
  std::string name;  // of the task in records, see read_eval_prompts
  const MetricInfo* metric = nullptr;
  EvalTokens tokens;

  /// Returns "FILE: line N".
  std::string where() const;
};

struct EvalPrompts {
  std::vector<EvalPrompt> prompts;    // in the order of the files
  std::vector<std::string> left_out;  // errors of prompts that were left out
  // {"file", "rows", "hash"} of each file; "rows": number of prompts used
  std::vector<nlohmann::ordered_json> files;
  std::string templates_hash;  // hash of the texts of --prompt-templates; empty without them
};

/// Reads the tasks, in the order of the files, and converts them to token ids. The context follows
/// the chat template's prefix. The question is followed by the template's suffix and the answer's
/// prefix. For one process alone. Throws Error, naming file and line, for prompts longer than
/// `limit` (0: none) and other bad rows, unless they are to be left out. Throws Error if no prompt
/// is left.
///
/// If several files have tasks of one name (such as one task at several lengths), each is a
/// separate task FILE'S-STEM/TASK. So is a task called "all", a name that summaries use.
EvalPrompts read_eval_prompts(const EvalOptions& options, const Tokenizer& tokenizer,
                              const ModelConfig& config, std::int64_t limit);

/// Returns entries that are separated by commas and given in one or several parts.
std::vector<std::string> file_list(const std::vector<std::string>& parts);

}  // namespace kvzap::driver
