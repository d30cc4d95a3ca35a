// The cost of scoring: KVzap's surrogates on one layer of Qwen3-8B, beside that layer's prefill and
// decode. Weights are random. The vocabulary is small, so that embedding and output head take
// little time. A layer scored and unscored, and the scorer alone, are timed in turn.
#include <fmt/format.h>

#include <kvzap/engine/surrogate.hpp>
#include <optional>

#include "common.hpp"
#include "engine.hpp"

namespace kvzap::perf {
namespace {

constexpr std::int64_t vocabulary = 1024;

/// One layer and both surrogates for it.
struct Fixture {
  explicit Fixture(const std::filesystem::path& folder) : engine(folder, 1, vocabulary) {
    const TemporaryFolder files;
    const ModelConfig& config = engine.model().config();
    world().agree_on_root([&] {
      write_surrogate(files.path() / "linear", config, 0);
      write_surrogate(files.path() / "mlp", config, config.hidden_size / 8);
    });
    for (const char* kind : {"linear", "mlp"}) {
      surrogates.push_back(Surrogate::load(files.path() / kind, config, engine.partition(),
                                           world().rank(), DTypeOf<Engine::Value>::value, world()));
    }
    // Rank 0 removes the files after all ranks have read them.
    world_barrier();
  }

  Engine engine;
  std::vector<Surrogate> surrogates;
};

/// Requests scores as the decoder does, block by block.
class Scoring {
 public:
  Scoring(Surrogate& surrogate, const Engine& engine, std::int64_t tokens)
      : m_surrogate(surrogate),
        m_tokens(tokens),
        m_hidden("kvzap::perf::hidden", std::min(block, tokens),
                 engine.model().config().hidden_size),
        m_positions("kvzap::perf::positions", m_hidden.extent(0)),
        m_scores("kvzap::perf::scores", engine.partition().heads(0, world().rank()).size(),
                 std::min(block, tokens)) {
    Kokkos::deep_copy(m_hidden, 0.5f);
  }
  void run() {
    const ExecutionSpace exec;
    for (std::int64_t first = 0; first < m_tokens; first += block) {
      m_surrogate.score(exec, 0, m_positions, m_hidden, m_scores);
    }
  }

 private:
  static constexpr std::int64_t block = 512;
  Surrogate& m_surrogate;
  std::int64_t m_tokens;
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> m_hidden;  // (token, hidden_size)
  Kokkos::View<std::int64_t*, MemorySpace> m_positions;              // (token)
  Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> m_scores;  // (head, token)
};

/// Times three variants in turn: the layer without scores, scoring alone (the time of the
/// benchmark), and the layer with scores. So changes of the machine's speed affect all of them, and
/// each finds the caches as a layer leaves them.
void run(benchmark::State& state, Fixture& fixture, Surrogate& surrogate, std::int64_t context,
         std::int64_t tokens) {
  const auto plain = fixture.engine.decoder();
  const auto scored = fixture.engine.decoder(&surrogate);
  const auto ids = fixture.engine.tokens(tokens);
  Scoring scoring(surrogate, fixture.engine, tokens);
  // Nothing is evicted, so the two layers differ only in the scores.
  const StepRule with_scores{true, EvictionRule::keep_all()};
  const auto filled = [&](Engine::Decoder& decoder) {
    const SequenceId sequence = decoder.cache().add_sequence();
    if (context > 0) {
      fill_random(decoder.cache(), sequence, context, nullptr,
                  fixture.engine.model().config().hidden_size, EvictionRule::keep_all(), 0);
    }
    return sequence;
  };
  const bool is_decode = tokens == 1;
  // Of all tokens: a last layer computes no others than the outputs need.
  const StepOutput output = StepOutput::all_hidden;
  const int times = is_decode ? 20 : 1;  // a step of decoding is short
  SequenceId plain_sequence = filled(*plain);
  SequenceId scored_sequence = filled(*scored);
  double sums[3] = {};
  for (auto _ : state) {
    if (!is_decode) {
      plain->cache().free_sequence(plain_sequence);
      scored->cache().free_sequence(scored_sequence);
      plain_sequence = filled(*plain);
      scored_sequence = filled(*scored);
    }
    double seconds[3] = {};
    const auto timed = [&](int i, const auto& work) {
      const double begin = now();
      work();
      Kokkos::fence();
      seconds[i] += now() - begin;
    };
    world_barrier();
    for (int i = 0; i < times; ++i) {
      timed(0, [&] { plain->step(StepBatch(plain_sequence, ids, {}, output)); });
      timed(1, [&] { scoring.run(); });
      timed(2, [&] { scored->step(StepBatch(scored_sequence, ids, with_scores, output)); });
    }
    for (int i = 0; i < 3; ++i) {
      seconds[i] = max_over_ranks(seconds[i]) / times;
      sums[i] += seconds[i];
    }
    state.SetIterationTime(seconds[1]);
  }
  const double count = static_cast<double>(state.iterations());
  state.counters["layer_ms"] = 1e3 * sums[0] / count;
  state.counters["scored_layer_ms"] = 1e3 * sums[2] / count;
  state.counters["share_of_layer"] = sums[1] / sums[0];
  state.counters["added_to_layer"] = sums[2] / sums[0] - 1;
}

}  // namespace

void register_benchmarks(const Options& options) {
  const auto shared = std::make_shared<std::optional<Fixture>>();
  const std::string name = options.quick ? "Qwen3-0.6B" : "Qwen3-8B";
  const std::filesystem::path folder = model_folder(options, name);
  const std::int64_t context = options.quick ? 1024 : 4096;
  const char* const kinds[] = {"linear", "mlp"};
  for (int i = 0; i < 2; ++i) {
    const auto fixture = [=]() -> Fixture& {
      if (!*shared) shared->emplace(folder);
      return **shared;
    };
    add(fmt::format("score/prefill/{}/{}/tokens:{}", name, kinds[i], context), 1, 5,
        [=](benchmark::State& state) {
          run(state, fixture(), fixture().surrogates[i], 0, context);
        });
    add(fmt::format("score/decode/{}/{}/context:{}", name, kinds[i], context), 5, 5,
        [=](benchmark::State& state) {
          run(state, fixture(), fixture().surrogates[i], context, 1);
        });
  }
}

}  // namespace kvzap::perf
