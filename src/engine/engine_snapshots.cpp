// Writes sequences to files and reads them back.
#include <fmt/format.h>

#include <array>

#include "engine/engine_parts.hpp"
#include "engine/fork_writing.hpp"

namespace kvzap {

using cache::agree_on_memory;
using engine::SequencePruning;
using engine::SequenceState;

std::unique_ptr<SnapshotWriting> Engine::begin_snapshot(const std::filesystem::path& file,
                                                        SnapshotInfo info,
                                                        const SnapshotOptions& options,
                                                        SequenceId sequence,
                                                        const Checkpoint* context) {
  auto& cache = m_parts->decoder.cache();
  const auto state = describe(sequence, context, info);
  const SequenceId copy = on_all_ranks([&](std::optional<SequenceId>& made) {
    made = cache.fork(sequence);
    m_parts->decoder.placement().fork(sequence, *made);
  });
  const auto free_copy = [this, copy] {
    m_parts->decoder.cache().free_sequence(copy);
    m_parts->decoder.placement().free(copy);
  };
  try {
    gather_pages(copy);
    return std::make_unique<engine::ForkWriting>(
        kvzap::begin_snapshot(file, cache, copy, m_parts->model->partition(), communicator(), info,
                              options, state.get()),
        state, free_copy);
  } catch (...) {
    free_copy();
    throw;
  }
}

std::vector<std::string> Engine::write_snapshot(const std::filesystem::path& file,
                                                SnapshotInfo info, const SnapshotOptions& options,
                                                SequenceId sequence, const Checkpoint* context) {
  if (m_parts->decoder.placement().has_pages_away(sequence)) {
    const auto writing = begin_snapshot(file, std::move(info), options, sequence, context);
    writing->finish();
    return writing->notes();
  }
  const auto state = describe(sequence, context, info);
  const auto writing =
      kvzap::begin_snapshot(file, m_parts->decoder.cache(), sequence, m_parts->model->partition(),
                            communicator(), info, options, state.get());
  writing->finish();
  return writing->notes();
}

Engine::Resumed Engine::resume(const SnapshotReader& reader, const LoadedPruning* own) {
  auto pruning = m_parts->standard;
  if (own) {
    agree_on_memory(communicator(), [&] {
      check(*own);
      pruning = pruning_of(*own);
    });
  }
  auto loaded =
      load_snapshot(reader, m_parts->decoder.cache(), m_parts->model->partition(), communicator());
  Resumed resumed;
  resumed.sequence = loaded.sequence;
  try {
    agree_on_memory(communicator(), [&] {
      m_parts->states[loaded.sequence] = read_state(reader, "", loaded.recent_queries, pruning);
      if (!loaded.context) return;
      std::unique_ptr<Checkpoint> context(new Checkpoint);
      const auto cache_state = std::make_shared<CacheState>(std::move(*loaded.context));
      context->m_state->cache_state = cache_state;
      // Without cuts during decoding, no newer queries are stored after the context, so both states
      // have the same ones.
      context->m_state->state =
          read_state(reader, "context_", loaded.recent_queries, pruning).copy({});
      m_parts->pins[loaded.sequence].push_back(cache_state);
      resumed.context = std::move(context);
    });
  } catch (...) {
    free_sequence(loaded.sequence);
    throw;
  }
  return resumed;
}

void Engine::check_more_context(SequenceId sequence, std::int64_t count) const {
  const SequenceState& state = m_parts->states.at(sequence);
  if (!state.pruning->uses_policy) return;
  const PolicyChoice& choice = *state.pruning->policy;
  const auto refuse = [&](const std::string& what) {
    throw Error(fmt::format("policy {}: nothing can be added to a context that it has pruned: {}",
                            choice.name, what));
  };
  if (choice.info->repeats_context) refuse("it has the model run the context again as a whole");
  if (!choice.info->scores_again || choice.info->has_own_budget) {
    refuse("it cannot score again after each chunk");
  }
  if (choice.rerotate) refuse("it has closed up the positions");
  if (!choice.why_once.empty()) refuse(choice.why_once);
  if (state.steps > 0 && state.pruning->pruning.decode.every == 0 &&
      state.pruning->chooses_rows() && state.policy->needs().every_step) {
    refuse("it scores in every step, and did not in those of the answer; decode_every lets it");
  }
  if (state.recent && !state.recent->lasts() && count < state.recent->capacity()) {
    refuse(
        fmt::format("it scores by the {} newest tokens, of which {} are new; only prefill sparse "
                    "keeps earlier ones",
                    state.recent->capacity(), count));
  }
}

std::shared_ptr<const Engine::CacheState> Engine::describe(SequenceId sequence,
                                                           const Checkpoint* context,
                                                           SnapshotInfo& info) {
  const auto* const taken = context ? context->m_state.get() : nullptr;
  const SequenceState& state = m_parts->states.at(sequence);
  const SequencePruning& pruning = *state.pruning;
  std::array<std::int64_t, 2> non_finite = {state.non_finite, taken ? taken->state.non_finite : 0};
  agree_on_memory(communicator(), [&] {
    if (taken && taken->cache_state->sequence != sequence) {
      throw Error(fmt::format("the context is not a state of sequence {}", sequence));
    }
    if (state.is_in_parts) {
      throw Error(fmt::format("the last part of the context of sequence {} is missing", sequence));
    }
    if (state.sums && !state.sums->empty()) {
      throw Error(fmt::format(
          "policy {} sums the attention of answers, for which a snapshot has no place: write it "
          "before the first question, or choose another policy",
          pruning.policy->name));
    }
    if (state.recent && state.recent->lasts()) info.recent_queries = state.recent->to_host();
  });
  communicator().all_reduce_sum(non_finite.data(), non_finite.size());
  const auto note = [&](const std::string& prefix, const SequenceState& of,
                        std::int64_t of_all_ranks) {
    info.state[prefix + "steps"] = of.steps;
    info.state[prefix + "closed_up"] = of.removed_tokens;
    info.state[prefix + "cut_non_finite"] = of_all_ranks;
    info.state[prefix + "to_repeat"] = static_cast<std::int64_t>(of.context.size());
  };
  note("", state, non_finite[0]);
  if (taken) note("context_", taken->state, non_finite[1]);
  info.prune = name_of(pruning.mode());
  info.further["prefill"] = std::string(name_of(pruning.pruning.prefill));
  if (pruning.prunes()) {
    info.sink = pruning.pruning.sink;
    const bool has_budget = pruning.uses_policy && pruning.chooses_rows();
    if (!has_budget) info.threshold = rule(sequence, StepPart::context, 0).eviction.threshold;
    if (pruning.uses_policy) {
      info.further["policy"] = pruning.policy->name;
      if (has_budget) info.further["budget"] = pruning.policy->budget.text();
    } else {
      info.further["surrogate"] = m_parts->scorer->kind();
    }
  }
  return taken ? with_pages_away(taken->cache_state) : nullptr;
}

// The checkpoint of a sequence whose pages have all come back. None has moved since it was taken.
auto Engine::with_pages_away(const std::shared_ptr<const CacheState>& taken) const
    -> std::shared_ptr<const CacheState> {
  const auto& placement = m_parts->decoder.placement();
  if (!placement.has_pages_away(taken->sequence)) return taken;
  auto whole = std::make_shared<CacheState>();
  whole->sequence = taken->sequence;
  whole->id = taken->id;
  whole->tokens = taken->tokens;
  whole->ring_first = taken->ring_first;
  whole->retained = taken->retained;
  whole->rings = taken->rings;
  whole->states = taken->states;
  whole->counts = taken->counts;
  const std::vector<std::int64_t> away = rows_away(taken->sequence);
  for (std::size_t h = 0; h < away.size(); ++h) whole->retained[h] += away[h];
  return whole;
}

SequenceState Engine::read_state(const SnapshotReader& reader, const std::string& prefix,
                                 const std::vector<SnapshotQueries>& recent,
                                 const std::shared_ptr<const SequencePruning>& pruning) {
  const SnapshotInfo& info = reader.header().info;
  const auto refuse = [&](const std::string& what) {
    throw Error(fmt::format("snapshot {}: {}", reader.file().string(), what));
  };
  const auto number = [&](const char* name) {
    const auto found = info.state.find(prefix + name);
    const std::int64_t value = found == info.state.end() ? 0 : found->second;
    if (value < 0) refuse(fmt::format("/state: {}{} is {}", prefix, name, value));
    return value;
  };
  SequenceState state = new_state(pruning);
  state.steps = number("steps");
  state.removed_tokens = number("closed_up");
  state.non_finite = communicator().is_root() ? number("cut_non_finite") : 0;
  const std::int64_t to_repeat = number("to_repeat");
  if (to_repeat > static_cast<std::int64_t>(info.token_ids.size())) {
    refuse(fmt::format("the policy has yet to repeat {} tokens, and there are {} token_ids",
                       to_repeat, info.token_ids.size()));
  }
  state.context.assign(info.token_ids.begin(), info.token_ids.begin() + to_repeat);
  if (!state.recent || !state.recent->lasts()) return state;
  const std::string& policy = pruning->policy->name;
  if (recent.empty()) {
    refuse(
        fmt::format("it has no newest queries, by which policy {} scores: it was written "
                    "under another one",
                    policy));
  }
  try {
    state.recent->from_host(recent);
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& error) {
    refuse(error.what());
  }
  return state;
}

}  // namespace kvzap
