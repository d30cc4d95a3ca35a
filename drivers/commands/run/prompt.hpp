// Context and questions of a run, from text or token ids.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/model/model_config.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <optional>
#include <string>
#include <vector>

#include "options/options.hpp"
#include "session/prompt.hpp"
#include "session/recorded.hpp"

namespace kvzap::driver {

/// Completes the options of `kvzap run`: adds the lines of --questions to the questions, and takes
/// standard input as the context if it is a pipe or a file and no other context is given. Rank 0
/// alone reads. Collective. Throws AgreedError.
void take_input(RunOptions& options, const Communicator& comm);

/// A context and the questions about it (at least one, possibly empty): token ids, and the texts of
/// the questions, empty if the question is only the end of the chat template.
struct Prompt {
  std::vector<TokenId> context;
  std::vector<std::string> texts;
  std::vector<std::vector<TokenId>> questions;
};

/// Returns the form of the folder's chat template, or the form without a template if `raw`. Throws
/// Error, which names --raw, as ChatTemplate::detect does.
session::PromptForm prompt_form(const std::string& folder, bool raw, bool thinking = false,
                                const std::optional<std::string>& system = {});
/// Returns the form of the options' prompt.
session::PromptForm prompt_form(const RunOptions& options);

/// Returns the prompt of the options, or of a run that continues `recorded`: its context, followed
/// by the tokens of --append; its questions, unless the options have some. Rank 0 alone reads and
/// tokenizes it; all ranks get its ids. `limit`: largest number of tokens of context and question
/// together; 0: no limit. Collective; throws AgreedError that names the flag.
Prompt share_prompt(const RunOptions& options, const Tokenizer* tokenizer,
                    const ModelConfig& config, std::int64_t limit, const Communicator& comm,
                    const session::Recorded* recorded = nullptr, bool may_be_empty = false);

}  // namespace kvzap::driver
