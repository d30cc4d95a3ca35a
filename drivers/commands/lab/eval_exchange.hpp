// Messages between the ranks of `kvzap eval`: prompts and answers.
#pragma once

#include <cstdint>
#include <kvzap/engine/comparison.hpp>
#include <vector>

#include "commands/lab/eval_prompts.hpp"
#include "parallel/message.hpp"

namespace kvzap {

template <class Visit>
void list_fields(CacheReport& report, Visit& visit) {
  visit("tokens", report.tokens);
  visit("kept", report.kept);
  visit("full_bytes", report.full_bytes);
  visit("live_bytes", report.live_bytes);
}

/// Without the engine's stop reasons and seconds.
template <class Visit>
void list_fields(SettingAnswer& answer, Visit& visit) {
  visit("tokens", answer.tokens);
  visit("pruned", answer.pruned);
  visit("cache", answer.cache);
  visit("log_probabilities", answer.log_probabilities);
  visit("prefill_seconds", answer.prefill_seconds);
  visit("decode_seconds", answer.decode_seconds);
}

}  // namespace kvzap

namespace kvzap::driver {

/// The next prompt of one rank, or of all ranks together.
struct EvalJob {
  std::int64_t prompt = -1;  // number of the prompt; -1: none
  std::int64_t file = 0;     // index of the task file
  std::int64_t line = 0;     // in that file
  /// If false, the prompt has the context of the previous job.
  bool has_new_context = false;
  EvalTokens tokens;
};

/// The rank that answers another question about the same context has the context already.
template <class Visit>
void list_fields(EvalJob& job, Visit& visit) {
  visit("prompt", job.prompt);
  visit("file", job.file);
  visit("line", job.line);
  visit("has_new_context", job.has_new_context);
  if (job.has_new_context) visit("context", job.tokens.context);
  visit("question", job.tokens.question);
  visit("continuation", job.tokens.continuation);
  visit("new_tokens", job.tokens.new_tokens);
}

}  // namespace kvzap::driver
