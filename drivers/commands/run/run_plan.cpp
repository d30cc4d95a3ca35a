#include "commands/run/run_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>

#include "commands/run/prompt.hpp"
#include "commands/run/report.hpp"
#include "commands/support/model_loading.hpp"
#include "files/json_file.hpp"
#include "parallel/message.hpp"

namespace kvzap::driver {
namespace {

/// Returns the bytes that ranks_on_node ranks need. The result is exact if these are all ranks,
/// otherwise an upper bound.
std::int64_t needed_on_node(const MemoryPlan& plan, bool is_full_at_first, int ranks_on_node) {
  if (static_cast<int>(plan.ranks.size()) == ranks_on_node) {
    return needed_bytes(plan, is_full_at_first);
  }
  std::int64_t most = 0;
  for (const auto& rank : plan.ranks) {
    most = std::max(most, needed_bytes(rank, is_full_at_first));
  }
  std::int64_t all = 0;
  return __builtin_mul_overflow(most, ranks_on_node, &all)
             ? std::numeric_limits<std::int64_t>::max()
             : all;
}

/// Compares the plan with the memory of the nodes. Collective. `plan_for` plans for a number of
/// ranks.
void compare_with_nodes(PlanReport& report, const Communicator& comm,
                        const std::function<MemoryPlan(int)>& plan_for) {
  const bool is_full = report.eviction.is_full_at_first;
  const auto all =
      parallel::all_gather(comm, std::pair(report.ranks_on_node, available_bytes_of_node()));
  double nodes = 0;
  std::int64_t least_left = std::numeric_limits<std::int64_t>::max();
  for (const auto& [ranks, available] : all) {
    nodes += 1.0 / ranks;
    const std::int64_t needed = needed_on_node(report.plan, is_full, ranks);
    if (available - needed >= least_left) continue;
    least_left = available - needed;
    report.ranks_on_node = ranks;
    report.needed_on_node = needed;
    report.available_on_node = available;
  }
  report.nodes = static_cast<int>(std::lround(nodes));
  if (!report.is_known() || report.fits()) return;
  comm.agree_on_root([&] {
    const int most = report.most_ranks / report.ranks_on_node;
    for (int n = report.nodes + 1; n <= most && report.nodes_that_fit == 0; ++n) {
      const MemoryPlan plan = plan_for(n * report.ranks_on_node);
      if (needed_on_node(plan, is_full, report.ranks_on_node) <= report.available_on_node) {
        report.nodes_that_fit = n;
      }
    }
  });
}

}  // namespace

std::int64_t least_bytes(const MemoryPlan& plan, bool pruned) {
  std::int64_t most = 0;
  for (const auto& rank : plan.ranks) {
    most =
        std::max(most, rank.weights + rank.activations + rank.attention +
                           (pruned ? rank.dense_layer
                                   : std::min(rank.kv_full, rank.kv_unpruned + rank.dense_layer)));
  }
  return most;
}

MemoryPlan plan_of(const EngineOptions& options, const ModelConfig& config, std::int64_t tokens,
                   int ranks, const PlannedEviction& eviction) {
  return plan_memory(
      config, {dtype_from_name(options.dtype), tokens, eviction.ratio, ranks, eviction.window,
               options.pruning.prefill == PrefillMode::sparse ? options.pruning.chunk : 0,
               quantised_bytes(options, config, ranks), page_format(options.kv_type, options.dtype),
               bounded_page_rows(options.read_pages, options.page_rows)});
}

std::int64_t pruned_tokens(const Prompt& prompt, const Pruning& pruning) {
  std::size_t longest = 0;
  for (const auto& question : prompt.questions) longest = std::max(longest, question.size());
  const bool waits = pruning.moment == PruneMoment::question;
  return static_cast<std::int64_t>(prompt.context.size() + (waits ? longest : 0));
}

std::string resolved_kv_type(const EngineOptions& options, const ModelConfig& config,
                             std::int64_t tokens) {
  if (options.kv_type != kv_type_auto) return options.kv_type;
  const DType dtype = dtype_from_name(options.dtype);
  return name_of(choose_page_format(config, dtype, *options.pruning.amount.kv_bytes, tokens),
                 dtype);
}

void dry_run(RunOptions options, const ModelSetup& setup, const Tokenizer* tokenizer,
             std::int64_t limit, const Communicator& comm) {
  const ModelConfig& config = setup.config;
  std::int64_t tokens = options.max_context.value_or(0), pruned = tokens;
  if (tokens == 0 && (options.prompt || !options.files.empty())) {
    const Prompt prompt = share_prompt(options, tokenizer, config, limit, comm);
    pruned = pruned_tokens(prompt, options.pruning);
    for (const auto& question : prompt.questions) {
      tokens = std::max<std::int64_t>(tokens,
                                      prompt.context.size() + question.size() + options.new_tokens);
    }
  }
  if (limit > 0) tokens = std::min(tokens, limit);  // an answer ends there
  if (tokens == 0) tokens = config.longest_context();
  options.kv_type = resolved_kv_type(options, config, pruned == 0 ? tokens : pruned);
  const DType dtype = dtype_from_name(options.dtype);
  const ModelConfig whole = setup.whole_config();
  const PolicySetup policy_setup{whole, setup.partition_of_all_layers, dtype, options.model,
                                 comm,  setup.config.num_hidden_layers};
  PlanReport report;
  report.tokens = tokens;
  // More were not tried.
  constexpr int ranks_per_head = 8;
  report.most_ranks = ranks_per_head * static_cast<int>(config.num_key_value_heads);
  report.ranks_on_node = comm.ranks_on_node();
  comm.agree([&] {
    report.eviction = planned_eviction(options, policy_setup, config, tokens);
    report.plan = plan_of(options, config, tokens, comm.size(), report.eviction);
  });
  compare_with_nodes(report, comm, [&](int ranks) {
    return plan_of(options, config, tokens, ranks, report.eviction);
  });
  comm.agree_on_root([&] {
    if (options.json != "-") {
      const std::string text = to_text(report, config, dtype);
      std::fwrite(text.data(), 1, text.size(), stdout);
      const Pruning& pruning = options.pruning;
      const std::int64_t repeated =
          pruning.prunes() ? pruning.spec(flag_names()).repeat_chunk() : 0;
      if (repeated > 0) {
        fmt::print(
            "note: full at first; while the context is repeated, rows of up to {} more "
            "tokens{} exist\n",
            std::min(tokens, repeated),
            pruning.info()->repeats_without_words ? "" : " and of the prompt");
      }
    }
    if (!options.json.empty()) {
      write_whole(options.json, files::json_lines(to_json(report, options)));
    }
    flush_stdout();
  });
}

}  // namespace kvzap::driver
