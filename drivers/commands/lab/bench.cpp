#include "commands/lab/bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <kvzap/engine/synthetic.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <limits>
#include <random>
#include <tuple>

#include "base/stopwatch.hpp"
#include "commands/lab/bench_report.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/policy_setup.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "engine/decoder.hpp"
#include "engine/page_placement.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using base::Clock;

/// Returns the folder's own name, however the path was written.
std::string name_of_model(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::canonical(folder, error);
  return error || path.filename().empty() ? folder : path.filename().string();
}

BenchSystem describe_system(const ModelSetup& setup, int ranks) {
  BenchSystem system;
  system.model = name_of_model(setup.folder);
  system.layers = setup.config.num_hidden_layers;
  system.all_layers = setup.all_layers;
  system.parameters = plan_memory(setup.config, {DType::f32, 0, 0, 1, 1}).weights /
                      static_cast<std::int64_t>(size_of(DType::f32));
  system.machine = describe_machine();
  system.ranks = ranks;
  return system;
}

/// Returns the memory that the largest rank needs for a test. It is the sum of weights, activations
/// of a step, kept rows of all sequences, copies of their rings, and a prompt's keys and values in
/// one layer. With a surrogate the number of kept rows is unknown and omitted.
std::int64_t bytes_of(const BenchTest& test, const BenchOptions& options, const ModelSetup& setup,
                      int window, int ranks) {
  const std::int64_t batch = test.batch;
  const std::int64_t rings =
      std::min<std::int64_t>(batch * window, std::numeric_limits<int>::max());
  const DType dtype = dtype_from_name(options.dtype);
  const MemoryPlan contents =
      plan_memory(setup.config, {dtype, batch * (test.depth + test.tokens),
                                 test.evict_ratio.value_or(0), ranks, static_cast<int>(rings),
                                 test.step_tokens, quantised_bytes(options, setup.config, ranks),
                                 page_format(options.kv_type, options.dtype),
                                 bounded_page_rows(options.read_pages, options.page_rows)});
  const MemoryPlan copies = plan_memory(setup.config, {dtype, rings, 0, ranks, 0});
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    const MemoryPlan::Rank& rank = contents.ranks[r];
    most = std::max(most, rank.weights + rank.activations + rank.attention + rank.dense_layer +
                              (test.evict_ratio ? rank.kv_kept : 0) + copies.ranks[r].kv_full);
  }
  return most;
}

/// Consecutive tests with the same key start from the same contents of the cache.
auto key_of(const BenchTest& test) {
  return std::make_tuple(test.evict_ratio, test.skew, test.depth, test.is_sparse);
}

/// Sequences that have seen `depth` tokens, and the timed work on them.
class Context {
 public:
  using Cache = Decoder::Cache;

  /// With a surrogate, the tokens before the test are prefilled, because their scores need hidden
  /// states. Otherwise rows and scores are random.
  Context(const Model& model, Surrogate* surrogate, const Communicator& comm,
          const BenchOptions& options, int window, const BenchTest& test)
      : m_options(options),
        m_comm(comm),
        m_depth(test.depth),
        m_prefills(surrogate != nullptr),
        m_chunk(test.is_sparse ? options.chunk : std::numeric_limits<std::int64_t>::max()) {
    if (test.evict_ratio && test.is_pruned()) {
      m_random_scorer = std::make_unique<RandomScorer>(model.partition(), comm.rank(),
                                                       *test.evict_ratio, test.skew, options.seed);
    }
    m_scorer = surrogate ? static_cast<Scorer*>(surrogate) : m_random_scorer.get();
    m_judged.score = m_scorer != nullptr;
    m_judged.eviction = {static_cast<float>(options.threshold.value_or(0)), 0, m_scorer != nullptr};
    if (options.prune == "always") m_decode_rule = m_judged;
    m_decoder = std::make_unique<Decoder>(
        model, m_scorer, comm, window, options.page_rows, nullptr,
        DecoderPages{page_format(options.kv_type, options.dtype), read_pages(options.read_pages)});
  }

  BenchResult measure(const BenchTest& test, const std::function<void()>& after_repetition) {
    hold_sequences(test.batch);
    const std::vector<TokenId> ids = random_ids(test.tokens * test.batch, m_options.seed);
    reset_peak_rss();
    BenchResult result;
    result.test = test;
    for (std::int64_t i = m_options.warmup ? -1 : 0; i < m_options.repetitions; ++i) {
      for (const auto& checkpoint : m_checkpoints) {
        m_decoder->cache().restore(checkpoint.sequence, checkpoint);
      }
      const double seconds = timed_repetition(test, ids);
      if (i >= 0) result.seconds.push_back(seconds);
      after_repetition();
    }
    result.peak_rss_bytes = m_comm.all_reduce_sum(peak_rss_bytes());
    m_decoder->cache().trim();
    count_rows(result);
    return result;
  }

 private:
  std::vector<TokenId> random_ids(std::int64_t count, std::uint64_t seed) const {
    std::mt19937_64 numbers(seed);
    const auto vocabulary = static_cast<std::uint64_t>(m_decoder->model().config().vocab_size);
    std::vector<TokenId> ids(count);
    for (TokenId& id : ids) id = static_cast<TokenId>(numbers() % vocabulary);
    return ids;
  }

  void prefill(SequenceId sequence, const std::vector<TokenId>& ids) {
    const std::int64_t count = ids.size();
    for (std::int64_t begin = 0; begin < count;) {
      const std::int64_t end = begin + std::min(m_chunk, count - begin);
      m_decoder->step(StepBatch(sequence, {ids.begin() + begin, ids.begin() + end}, m_judged,
                                end == count ? StepOutput::logits : StepOutput::none),
                      [](std::string_view, std::int64_t, std::int64_t) { stop_here_if_asked(); });
      begin = end;
    }
  }

  /// Each sequence has its own rows. Shared rows would be read from memory only once for all of
  /// them.
  void hold_sequences(int count) {
    auto& cache = m_decoder->cache();
    while (static_cast<int>(m_checkpoints.size()) > count) {
      cache.free_sequence(m_checkpoints.back().sequence);
      m_decoder->placement().free(m_checkpoints.back().sequence);
      m_checkpoints.pop_back();
    }
    for (const auto& checkpoint : m_checkpoints) cache.restore(checkpoint.sequence, checkpoint);
    while (static_cast<int>(m_checkpoints.size()) < count) {
      const SequenceId sequence = cache.add_sequence();
      const std::uint64_t seed = m_options.seed + m_checkpoints.size() + 1;
      if (m_depth > 0 && m_prefills) {
        prefill(sequence, random_ids(m_depth, seed));
      } else if (m_depth > 0) {
        fill_random(cache, sequence, m_depth, m_scorer,
                    m_decoder->model().config().attention_inputs(), m_judged.eviction, seed);
      }
      if (m_options.balance > 0) {
        m_decoder->placement().balance({sequence}, m_options.balance,
                                       std::numeric_limits<std::int64_t>::max());
      }
      m_checkpoints.push_back(cache.checkpoint(sequence));
    }
    cache.trim();
    m_decoder->placement().trim();
  }

  double timed_repetition(const BenchTest& test, const std::vector<TokenId>& ids) {
    Kokkos::fence();
    m_comm.all_reduce_sum(std::int64_t{0});  // all begin at once
    const Traffic before = Communicator::traffic();
    const auto start = Clock::now();
    if (test.kind == BenchTest::Kind::prefill) {
      prefill(m_checkpoints.front().sequence, ids);
    } else {
      StepBatch batch;
      for (auto id = ids.begin(); id != ids.end();) {
        batch.clear();
        for (const auto& checkpoint : m_checkpoints) {
          batch.add(checkpoint.sequence, {*id++}, m_decode_rule, StepOutput::argmax);
        }
        m_decoder->step(batch);
      }
    }
    Kokkos::fence();
    const auto nanoseconds =
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    const Traffic after = Communicator::traffic();
    m_traffic = {after.calls - before.calls, after.bytes - before.bytes,
                 after.seconds - before.seconds};
    return 1e-9 * static_cast<double>(m_comm.all_reduce_max(nanoseconds));
  }

  void count_rows(BenchResult& result) const {
    const Cache& cache = m_decoder->cache();
    std::int64_t kept = 0, full = 0;
    for (const auto& checkpoint : m_checkpoints) {
      const auto& heads = cache.shape().heads;
      for (int l = 0; l < static_cast<int>(heads.size()); ++l) {
        if (!cache.shape().has_pages(l)) continue;
        full += heads[l] * cache.tokens(checkpoint.sequence, l);
        for (int h = 0; h < heads[l]; ++h) kept += cache.rows(checkpoint.sequence, l, h);
      }
    }
    CacheBytes bytes = cache.bytes();
    const auto& placement = m_decoder->placement();
    if (m_comm.is_root()) {
      for (const auto& checkpoint : m_checkpoints) {
        kept += placement.rows_away(checkpoint.sequence);
      }
    }
    bytes.live += placement.remote_bytes().live;
    bytes.allocated += placement.remote_bytes().allocated;
    result.kept_rows = m_comm.all_reduce_sum(kept);
    result.full_rows = m_comm.all_reduce_sum(full);
    result.kv_live_bytes = m_comm.all_reduce_sum(static_cast<std::int64_t>(bytes.live));
    result.kv_allocated_bytes = m_comm.all_reduce_sum(static_cast<std::int64_t>(bytes.allocated));
    const BenchTest& test = result.test;
    const double steps =
        test.kind == BenchTest::Kind::prefill ? 1.0 : static_cast<double>(test.tokens);
    result.calls = static_cast<double>(m_traffic.calls) / steps;
    result.call_bytes =
        static_cast<double>(m_comm.all_reduce_sum(m_traffic.bytes)) / steps / m_comm.size();
    // Of the rank that waited least: the others waited for it.
    double least = -m_traffic.seconds;
    m_comm.all_reduce_max(&least, 1);
    result.call_seconds = -least / steps;
  }

  const BenchOptions& m_options;
  Communicator m_comm;
  std::int64_t m_depth;
  bool m_prefills;
  std::int64_t m_chunk;
  std::unique_ptr<RandomScorer> m_random_scorer;
  Scorer* m_scorer = nullptr;  // absent: nothing is evicted
  StepRule m_judged;
  StepRule m_decode_rule;
  std::unique_ptr<Decoder> m_decoder;
  std::vector<Cache::Checkpoint> m_checkpoints;
  Traffic m_traffic;  // of the last repetition
};

/// Runs all tests. Returns the signal that ended it, or 0.
int measure_all(const BenchOptions& options, const ModelSetup& setup, int window,
                const std::vector<BenchTest>& tests, BenchSystem& system,
                const Communicator& comm) {
  const SignalWatch watch;
  const DType dtype = dtype_from_name(options.dtype);
  Progress bar(comm.is_root() && !options.quiet, options.progress);
  // Loads the surrogate first. It is small, and an error in it should appear before minutes of
  // loading.
  std::shared_ptr<Surrogate> surrogate;
  std::optional<Model> model;
  std::unique_ptr<BenchTable> table;  // set once its beginning is printed
  const auto print = [&](const std::string& text) {
    comm.agree_on_root([&] {
      bar.clear();
      std::fwrite(text.data(), 1, text.size(), stdout);
      flush_stdout();
    });
  };
  const auto measure = [&] {
    comm.agree([&] {
      if (options.surrogate.empty()) return;
      surrogate = load_surrogate(options.surrogate, setup, dtype, comm);
      system.surrogate_kind = surrogate->kind();
    });
    comm.agree([&] {
      model.emplace(Model::load(setup.folder, setup.config, dtype, setup.partition, comm.rank(),
                                {options.random_weights, weight_storage_from_name(options.weights),
                                 [&](std::string_view what, std::int64_t done, std::int64_t total) {
                                   bar.update(what, done, total);
                                   stop_here_if_asked();
                                 }}));
    });
    system.weight_bytes = comm.all_reduce_sum(static_cast<std::int64_t>(model->bytes()));
    table = BenchTable::create(options, system, tests);
    print(table->header());
    const std::int64_t repetitions = options.repetitions + (options.warmup ? 1 : 0);
    const std::int64_t steps = repetitions * static_cast<std::int64_t>(tests.size());
    std::int64_t done = 0;
    std::unique_ptr<Context> context;
    for (std::size_t i = 0; i < tests.size(); ++i) {
      if (!context || key_of(tests[i]) != key_of(tests[i - 1])) {
        context.reset();  // frees its memory before the next one allocates
        context =
            std::make_unique<Context>(*model, surrogate.get(), comm, options, window, tests[i]);
      }
      print(table->row(context->measure(tests[i], [&] {
        bar.update("bench", ++done, steps);
        stop_if_asked(comm);
      })));
    }
  };
  int signal = 0;
  try {
    measure();
  } catch (const Interrupted& interrupted) {
    signal = interrupted.signal;
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    signal = static_cast<int>(comm.all_reduce_max(std::int64_t{caught_signal}));
  }
  bar.clear();
  if (table) print(table->footer());
  if (signal != 0 && comm.is_root() && !options.quiet) {
    say("kvzap: stopped by signal {}: the remaining tests are not measured\n", signal);
  }
  return signal;
}

}  // namespace

int bench(const BenchOptions& given, const Communicator& comm, const std::string& version,
          const std::string& revision) {
  BenchOptions options = given;
  std::vector<BenchTest> tests;
  std::optional<ModelSetup> setup;
  BenchSystem system;
  const int ranks_on_node = comm.ranks_on_node();
  use_threads(options.threads, comm, comm.is_root() && !options.quiet);
  agree_on_usage(comm, [&] { tests = tests_of(options); });
  Pruning pruning = pruning_of(options);
  resolve_window(pruning, comm, !options.quiet && comm.is_root());
  int window = options.window = pruning.window;
  agree_on_usage(comm, [&] {
    setup = set_up_model(options.model, options.layers, "", comm.size(), options.rope);
    if (!options.random_weights && session::weight_files(options.model).empty()) {
      options.random_weights = 0;
    }
    system = describe_system(*setup, comm.size());
    system.version = version;
    system.revision = revision;
    std::int64_t longest = 0;
    for (const auto& test : tests) longest = std::max(longest, test.depth + test.tokens);
    window = ring_rows(options.window, longest);
    for (const auto& test : tests) {
      check_memory(
          bytes_of(test, options, *setup, window, comm.size()), ranks_on_node,
          fmt::format("{} at depth {} with batch {}", test.name(), test.depth, test.batch));
    }
  });
  if (comm.is_root()) print_notes(*setup, !options.quiet);
  if (comm.is_root() && !options.quiet) {
    if (!given.random_weights && options.random_weights) {
      say("kvzap: note: {} has no *.safetensors; the weights are random\n", options.model);
    }
  }
  const int signal = measure_all(options, *setup, window, tests, system, comm);
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace kvzap::driver
