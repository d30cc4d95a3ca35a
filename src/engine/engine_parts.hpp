// What an engine consists of, for the sources that define it: engine.cpp (sequences, reports),
// engine_steps.cpp, engine_cuts.cpp, engine_reading.cpp and engine_snapshots.cpp.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <map>
#include <numeric>
#include <optional>

#include "base/stopwatch.hpp"
#include "cache/agree_on_memory.hpp"
#include "engine/check_pruning.hpp"
#include "engine/decoder.hpp"
#include "engine/page_placement.hpp"
#include "engine/row_scores.hpp"
#include "engine/sequence_state.hpp"

namespace kvzap {

struct Engine::Parts {
  Parts(std::shared_ptr<const Model> of, std::shared_ptr<Scorer> by, const CacheOptions& options,
        const Communicator& comm)
      : model(std::move(of)),
        scorer(std::move(by)),
        decoder(*model, scorer.get(), comm, options.pruning.window, options.page_rows, &meter,
                {options.page_format, options.read_pages}) {}

  MemoryMeter meter;
  std::shared_ptr<const Model> model;
  std::shared_ptr<Scorer> scorer;
  Decoder decoder;
  std::shared_ptr<const engine::SequencePruning> standard;  // of sequences without their own
  std::map<SequenceId, engine::SequenceState> states;
  StepBatch batch;  // of the current step
  StepObserver* observer = nullptr;
  double evict_seconds = 0;
  double repeat_seconds = 0;  // model time in steps that repeat contexts
  std::map<SequenceId, std::vector<std::weak_ptr<CacheState>>> pins;  // live checkpoints
  std::int64_t until_balance = 0;                                     // steps
  bool keeps_pages = false;  // with their owners: memory was short, and no sequence has gone since
};

struct Engine::Checkpoint::State {
  std::shared_ptr<const CacheState> cache_state;  // shared with a snapshot that is being written
  engine::SequenceState state;
};

/// Makes a new sequence on every rank or, after an error, on none. `make` must set it first.
template <class Make>
SequenceId Engine::on_all_ranks(const Make& make) {
  std::optional<SequenceId> made;
  try {
    cache::agree_on_memory(communicator(), [&] { make(made); });
  } catch (...) {
    if (made) free_sequence(*made);
    throw;
  }
  return *made;
}

/// Runs a part of the decoder's step of `batch`. If it fails, the policies of the step begin anew:
/// in the middle of a layer one may have partial sums. Between steps it holds nothing.
template <class Work>
void Engine::or_begin_anew(const Work& work) {
  try {
    work();
  } catch (...) {
    begin_policies_anew();
    throw;
  }
}

}  // namespace kvzap
