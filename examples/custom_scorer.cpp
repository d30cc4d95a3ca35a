// A scorer of one's own, used without a change to kvzap. It evicts pairs of tokens that resemble
// the token before them, in prefill of a whole model.
#include <Kokkos_Core.hpp>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <kvzap/engine/generate.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <memory>
#if KVZAP_HAVE_MPI
#include <mpi.h>
#endif

namespace {

/// Scores a pair by how new its token's hidden state is: 1 - cosine similarity with the state of
/// the token before, the same for all KV heads.
class Novelty final : public kvzap::Scorer {
 public:
  void score(const kvzap::ExecutionSpace& exec, int /*layer*/, const PositionView& positions,
             const InputView& hidden, const ScoreView& scores) override {
    const auto heads = scores.extent(0);
    const auto width = hidden.extent(1);
    Kokkos::parallel_for(
        "novelty::score", Kokkos::RangePolicy<kvzap::ExecutionSpace>(exec, 0, hidden.extent(0)),
        KOKKOS_LAMBDA(std::int64_t token) {
          float novelty =
              1;  // the first token of a block, or of a sequence's part, has none before it
          if (token > 0 && positions(token) == positions(token - 1) + 1) {
            float dot = 0, mine = 0, theirs = 0;
            for (std::size_t i = 0; i < width; ++i) {
              dot += hidden(token, i) * hidden(token - 1, i);
              mine += hidden(token, i) * hidden(token, i);
              theirs += hidden(token - 1, i) * hidden(token - 1, i);
            }
            novelty = 1 - dot / sqrtf(mine * theirs);
          }
          for (std::size_t head = 0; head < heads; ++head) scores(head, token) = novelty;
        });
  }
  std::string kind() const override { return "novelty"; }
};

int run() {
  const std::string inputs = KVZAP_INPUTS;
  const std::string folder = inputs + "/models/recall-4m";
  const auto comm = kvzap::Communicator::world();
  const auto config = kvzap::ModelConfig::load(folder);
  const auto partition =
      kvzap::HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                                 static_cast<int>(config.num_key_value_heads), comm.size());
  const auto model = std::make_shared<const kvzap::Model>(
      kvzap::Model::load(folder, config, kvzap::DType::f32, partition, comm.rank()));

  std::ifstream file(inputs + "/demo-context.txt");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto tokens = kvzap::Tokenizer::load(folder).encode(text);

  kvzap::CacheOptions options;
  options.pruning.mode = kvzap::PruneMode::prefill;
  options.pruning.amount.threshold = 0.6f;
  options.pruning.window = 64;
  const auto generator =
      kvzap::Generator::create(model, std::make_shared<Novelty>(), options, comm);
  generator->prefill(tokens, /*reusable*/ false);

  const auto report = generator->report();
  bool good = report.tokens == static_cast<std::int64_t>(tokens.size());
  for (std::size_t layer = 0; layer < report.kept.size(); ++layer) {
    const double ratio = report.evict_ratio(static_cast<int>(layer));
    if (comm.is_root()) std::printf("layer %zu: %4.1f %% evicted\n", layer, 100 * ratio);
    // All heads have the same scores, so they keep the same number of rows.
    for (const auto rows : report.kept[layer]) good = good && rows == report.kept[layer][0];
  }
  good = good && report.evict_ratio() > 0.05 && report.evict_ratio() < 0.95 &&
         report.live_bytes < report.full_bytes;
  if (comm.is_root()) {
    std::printf("%zu tokens: %lld bytes of keys and values instead of %lld, %s\n", tokens.size(),
                static_cast<long long>(report.live_bytes),
                static_cast<long long>(report.full_bytes), good ? "right" : "WRONG");
  }
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
#if KVZAP_HAVE_MPI
  MPI_Init(&argc, &argv);
#endif
  int status = 1;
  {
    Kokkos::ScopeGuard kokkos(argc, argv);
    try {
      status = run();
    } catch (const kvzap::Error& error) {
      std::fprintf(stderr, "custom_scorer: %s\n", error.what());
      kvzap::Communicator::world().abort(1);
    }
  }
#if KVZAP_HAVE_MPI
  MPI_Finalize();
#endif
  return status;
}
