// How many rows each token still has: those of all heads, on whatever rank they lie.
#include <gtest/gtest.h>

#include <kvzap/engine/engine.hpp>
#include <random>

namespace kvzap {
namespace {

constexpr int counted_layers = 3, counted_heads = 4;

ModelConfig counted_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = 40;
  config.intermediate_size = 48;
  config.num_hidden_layers = counted_layers;
  config.num_attention_heads = 2 * counted_heads;
  config.num_key_value_heads = counted_heads;
  config.head_dim = 16;
  config.vocab_size = 97;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

/// Scores by position; the first heads keep most rows, so pages move to the ranks of others.
class PositionScorer final : public Scorer {
 public:
  PositionScorer(const HeadPartition& partition, int rank) : m_partition(partition), m_rank(rank) {}
  void score(const ExecutionSpace& exec, int layer, const PositionView& positions, const InputView&,
             const ScoreView& scores) override {
    exec.fence();
    const auto places = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), positions);
    const auto& heads = m_partition.heads(layer, m_rank);
    Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> host("scores", heads.size(),
                                                                       places.extent(0));
    for (std::size_t h = 0; h < heads.size(); ++h) {
      for (std::size_t t = 0; t < places.extent(0); ++t) {
        std::mt19937 random(static_cast<unsigned>((places(t) * 31 + layer) * 31 + heads[h]));
        host(h, t) = static_cast<float>(random() % 100) - (heads[h] < 2 ? 5.0F : 80.0F);
      }
    }
    Kokkos::deep_copy(exec, scores, Kokkos::create_mirror_view_and_copy(MemorySpace(), host));
    exec.fence();
  }
  std::string kind() const override { return "position"; }

 private:
  HeadPartition m_partition;
  int m_rank;
};

TEST(TokenRows, AreThoseOfAllHeadsWhereverTheyLie) {
  const Communicator comm = Communicator::world();
  const HeadPartition partition = HeadPartition::even(counted_layers, counted_heads, comm.size());
  const auto model = std::make_shared<const Model>(
      Model::load("", counted_config(), DType::f32, partition, comm.rank(), {3}));
  CacheOptions options;
  options.pruning.window = 8;
  options.pruning.mode = PruneMode::always;
  options.pruning.amount.threshold = 0;
  options.page_rows = 4;
  const auto engine = Engine::create(
      model, std::make_shared<PositionScorer>(partition, comm.rank()), options, comm);
  const SequenceId sequence = engine->add_sequence();
  EXPECT_TRUE(engine->token_rows(sequence).rows.empty());
  EXPECT_EQ(engine->token_rows(sequence).full, counted_layers * counted_heads);

  constexpr int tokens = 300;
  StepBatch batch;
  batch.add(sequence, std::vector<TokenId>(tokens, 5), engine->rule(sequence, StepPart::context),
            StepOutput::none);
  engine->step(batch);
  for (int t = 0; t < 20; ++t) {
    batch.clear();
    batch.add(sequence, {7}, engine->rule(sequence, StepPart::generated), StepOutput::none);
    engine->step(batch);
  }
  const TokenRows found = engine->token_rows(sequence);
  const CacheReport report = engine->report(sequence);
  if (comm.size() == 2) {
    EXPECT_GT(report.moved_pages, 0);
  }
  EXPECT_EQ(found.full, counted_layers * counted_heads);
  ASSERT_EQ(found.rows.size(), tokens + 20U);
  std::int64_t sum = 0;
  for (const std::int64_t rows : found.rows) sum += rows;
  EXPECT_EQ(sum, report.rows());
  EXPECT_LT(sum, report.full_rows());
  for (int t = 0; t < options.pruning.window; ++t) {
    EXPECT_EQ(found.rows[tokens + 19 - t], found.full);
  }
  EXPECT_EQ(engine->token_rows(engine->fork(sequence)).rows, found.rows);

  engine->gather_pages(sequence);
  std::vector<std::int64_t> expected(tokens + 20, 0);
  for (int l = 0; l < counted_layers; ++l) {
    const int heads = static_cast<int>(partition.heads(l, comm.rank()).size());
    for (int h = 0; h < heads; ++h) {
      for (const std::int64_t position : engine->positions(sequence, l, h)) ++expected[position];
    }
  }
  comm.all_reduce_sum(expected.data(), expected.size());
  EXPECT_EQ(found.rows, expected);
  EXPECT_EQ(engine->token_rows(sequence).rows, expected);
}

}  // namespace
}  // namespace kvzap
