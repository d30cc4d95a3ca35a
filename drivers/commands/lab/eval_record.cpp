#include "commands/lab/eval_record.hpp"

#include <algorithm>
#include <cmath>

namespace kvzap::driver {
namespace {

/// Returns the cache after the context, as `kvzap run` reports it: without the question's rows, all
/// of which are kept.
CacheReport without_question(CacheReport report, std::int64_t question, std::int64_t window) {
  const std::int64_t pair = report.full_bytes / std::max<std::int64_t>(1, report.full_rows());
  // Rows of the window are wide; the others may be quantised.
  const auto wide_rows = [&] {
    std::int64_t rows = 0;
    for (const auto& layer : report.kept) {
      for (const std::int64_t kept : layer) rows += std::min(kept, window);
    }
    return rows;
  };
  const std::int64_t others = report.rows() - wide_rows();
  const std::int64_t other_pair =
      others > 0 ? (report.live_bytes - wide_rows() * pair) / others : pair;
  report.tokens -= question;
  for (int l = 0; l < static_cast<int>(report.kept.size()); ++l) {
    for (std::int64_t& kept : report.kept[l]) {
      kept = report.is_pruned(l) ? kept - question : std::min(kept, report.tokens);
    }
  }
  report.full_bytes = report.full_rows() * pair;
  report.live_bytes = wide_rows() * pair + (report.rows() - wide_rows()) * other_pair;
  return report;
}

}  // namespace

eval::EvalRecord record_of(const EvalPrompt& prompt, const eval::EvalSetting& setting,
                           const SettingAnswer& answer, const Tokenizer& tokenizer) {
  eval::EvalRecord record;
  record.task_file = prompt.file;
  record.line = prompt.task.line;
  record.id = prompt.task.id;
  record.task = prompt.name;
  record.metric = prompt.metric->name;
  record.setting = setting.label;
  record.policy = setting.is_none() ? "none" : setting.pruning.policy.text();
  record.expected = prompt.task.answers;
  record.context_tokens = static_cast<std::int64_t>(prompt.tokens.context.size());
  record.question_tokens = static_cast<std::int64_t>(prompt.tokens.question.size());
  // Generated tokens are judged, too, so the rows are final only at the end.
  const Pruning& pruning = setting.pruning;
  const CacheReport pruned =
      pruning.mode == PruneMode::always || pruning.decode.every > 0 ? answer.cache
      : pruning.moment == PruneMoment::context
          ? without_question(answer.pruned, record.question_tokens, pruning.window)
          : answer.pruned;
  record.evict_ratio = pruned.evict_ratio();
  record.kept_rows = pruned.kept;
  record.cache_tokens = pruned.tokens;
  record.kv_bytes = pruned.live_bytes;
  record.full_kv_bytes = pruned.full_bytes;
  record.kv_bytes_at_end = answer.cache.live_bytes;
  record.full_kv_bytes_at_end = answer.cache.full_bytes;
  record.prefill_seconds = answer.prefill_seconds;
  record.decode_seconds = answer.decode_seconds;
  if (prompt.metric->is_perplexity) {
    double nll = 0;
    for (const double value : answer.log_probabilities) nll -= value;
    record.generated_tokens = static_cast<std::int64_t>(answer.log_probabilities.size());
    const double perplexity = std::exp(nll / static_cast<double>(answer.log_probabilities.size()));
    if (std::isfinite(nll)) record.nll = nll;
    if (std::isfinite(perplexity)) record.perplexity = perplexity;
  } else {
    double sum = 0;
    for (const auto& tokens : answer.tokens) {
      record.generated_tokens += static_cast<std::int64_t>(tokens.size());
      record.answers.push_back(tokenizer.decode(tokens));
      record.scores.push_back(prompt.metric->score(prompt.task, record.answers.back()));
      sum += record.scores.back();
    }
    record.score = sum / static_cast<double>(record.scores.size());
  }
  return record;
}

}  // namespace kvzap::driver
