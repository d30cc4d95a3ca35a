// Pages that move between ranks: rows, attention and memory stay what they are where every row lies
// with the owner of its head. With more ranks than KV heads, ranks share the weights of a head,
// too.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <cmath>
#include <cstdlib>
#include <kvzap/engine/synthetic.hpp>
#include <numeric>
#include <random>

#include "allocations.hpp"
#include "engine/decoder.hpp"
#include "engine/page_placement.hpp"
#include "steps.hpp"

namespace kvzap {
namespace {

using Cache = KVCache;
using Placement = engine::PagePlacement;

constexpr int layers = 2;
constexpr int page_rows = 4;
constexpr std::int64_t no_limit = std::int64_t{1} << 40;

CacheShape shape_of(const HeadPartition& partition, int rank, const PageFormat& format) {
  CacheShape shape;
  for (int l = 0; l < layers; ++l) {
    shape.heads.push_back(static_cast<int>(partition.heads(l, rank).size()));
  }
  shape.head_dim = 8;
  shape.window = 6;
  shape.page_rows = page_rows;
  shape.format = format;
  return shape;
}

/// The same rows twice: in a cache with a placement, and in one whose rows stay.
class TwoCaches {
 public:
  TwoCaches(const HeadPartition& partition, const Communicator& comm, const PageFormat& format)
      : m_partition(partition),
        m_comm(comm),
        moved(DType::f32, shape_of(partition, comm.rank(), format)),
        still(DType::f32, shape_of(partition, comm.rank(), format)),
        placement(m_partition, comm, moved, nullptr) {}

  SequenceId add() {
    const SequenceId id = moved.add_sequence();
    EXPECT_EQ(still.add_sequence(), id);
    return id;
  }
  SequenceId fork(SequenceId source) {
    const SequenceId id = moved.fork(source);
    placement.fork(source, id);
    EXPECT_EQ(still.fork(source), id);
    return id;
  }
  void free(SequenceId id) {
    moved.free_sequence(id);
    placement.free(id);
    still.free_sequence(id);
  }

  // Head h keeps about 1 / (1 + h) of its rows.
  void append(SequenceId id, std::int64_t count, std::uint64_t seed) {
    for (int l = 0; l < layers; ++l) {
      const auto& heads = m_partition.heads(l, m_comm.rank());
      const auto n = static_cast<std::int64_t>(heads.size());
      const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> keys("keys", count, n, 8),
          values("values", count, n, 8);
      const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> scores("scores", n, count);
      const auto k = Kokkos::create_mirror_view(keys), v = Kokkos::create_mirror_view(values);
      const auto s = Kokkos::create_mirror_view(scores);
      for (std::int64_t h = 0; h < n; ++h) {
        std::mt19937_64 random(seed * 1000 + l * 100 + heads[h]);
        const auto uniform = [&] { return static_cast<float>(random() >> 40) * 0x1p-24f; };
        for (std::int64_t i = 0; i < count; ++i) {
          for (int d = 0; d < 8; ++d) k(i, h, d) = uniform() - 0.5f;
          for (int d = 0; d < 8; ++d) v(i, h, d) = uniform() - 0.5f;
          s(h, i) = 1.0f / static_cast<float>(1 + heads[h]) - uniform();
        }
      }
      Kokkos::deep_copy(keys, k);
      Kokkos::deep_copy(values, v);
      Kokkos::deep_copy(scores, s);
      AppendSpan span;
      span.sequence = id;
      span.rows = count;
      span.rule = {0.0f, 2, true};
      span.scored = true;
      for (Cache* cache : {&moved, &still}) {
        cache->append(ExecutionSpace(), {span}, l, keys, values, scores);
      }
    }
  }

  void balance(const std::vector<SequenceId>& ids, double tolerance, std::int64_t bytes) {
    placement.balance(ids, tolerance, bytes);
  }

  // Rows of each rank in a layer.
  std::vector<std::int64_t> loads(const std::vector<SequenceId>& ids, int layer) const {
    std::vector<std::int64_t> loads(m_comm.size(), 0);
    for (const SequenceId id : ids) {
      for (std::size_t h = 0; h < m_partition.heads(layer, m_comm.rank()).size(); ++h) {
        loads[m_comm.rank()] += moved.rows(id, layer, static_cast<int>(h));
      }
      for (int h = 0; m_comm.is_root() && h < m_partition.n_kv_heads(); ++h) {
        for (const auto& run : placement.runs(id, layer, h)) {
          loads[run.rank] += run.pages * page_rows;
        }
      }
    }
    m_comm.all_reduce_sum(loads.data(), loads.size());
    return loads;
  }

  // Counts rows where they are, then brings back a fork's pages and compares them.
  void expect_equal(SequenceId id) {
    for (int l = 0; l < layers; ++l) {
      const auto& heads = m_partition.heads(l, m_comm.rank());
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const int local = static_cast<int>(h);
        EXPECT_EQ(moved.rows(id, l, local) + placement.rows_away(id, l, heads[h]),
                  still.rows(id, l, local));
      }
    }
    const SequenceId copy = fork(id);
    placement.recall(copy);
    EXPECT_FALSE(placement.has_pages_away(copy));
    for (int l = 0; l < layers; ++l) {
      for (int h = 0; h < moved.shape().heads[l]; ++h) {
        const auto a = moved.host_rows(copy, l, h), b = still.host_rows(copy, l, h);
        EXPECT_EQ(a.positions, b.positions);
        EXPECT_EQ(a.keys, b.keys);
        EXPECT_EQ(a.values, b.values);
        // A ring row without a score has NaN.
        ASSERT_EQ(a.scores.size(), b.scores.size());
        for (std::size_t i = 0; i < a.scores.size(); ++i) {
          EXPECT_TRUE(a.scores[i] == b.scores[i] ||
                      (std::isnan(a.scores[i]) && std::isnan(b.scores[i])));
        }
      }
    }
    free(copy);
  }

 private:
  HeadPartition m_partition;
  Communicator m_comm;

 public:
  Cache moved, still;
  Placement placement;
};

class PagePlacement : public ::testing::TestWithParam<int> {};

TEST_P(PagePlacement, BalancesRanks) {
  const Communicator comm = Communicator::world();
  const auto partition = HeadPartition::even(layers, GetParam(), comm.size());
  TwoCaches caches(partition, comm, {});
  const SequenceId a = caches.add(), b = caches.add();
  caches.append(a, 700, 1);
  caches.append(b, 300, 2);
  caches.balance({a, b}, 0.02, no_limit);
  for (int l = 0; l < layers; ++l) {
    const auto loads = caches.loads({a, b}, l);
    const double mean =
        std::accumulate(loads.begin(), loads.end(), 0.0) / static_cast<double>(loads.size());
    EXPECT_LE(*std::max_element(loads.begin(), loads.end()), 1.02 * mean + page_rows) << l;
  }
  EXPECT_EQ(caches.placement.pages_moved() > 0, comm.size() > 1);
  caches.expect_equal(a);
  caches.expect_equal(b);
  // Nothing is left to do, and bytes bound what a call does.
  const std::int64_t moved = caches.placement.pages_moved();
  caches.balance({a, b}, 0.02, no_limit);
  EXPECT_EQ(caches.placement.pages_moved(), moved);
  caches.append(a, 400, 3);
  caches.balance({a, b}, 0.02, 1);
  EXPECT_LE(caches.placement.pages_moved(), moved + 1);
}

TEST_P(PagePlacement, RandomOperationsKeepRows) {
  const Communicator comm = Communicator::world();
  const auto partition = HeadPartition::even(layers, GetParam(), comm.size());
  const char* const wanted = std::getenv("KVZAP_PLACEMENT_OPERATIONS");
  const long operations = wanted ? std::atol(wanted) : 150;
  for (const PageFormat& format : {PageFormat{}, PageFormat{RowType::q8, RowType::q4}}) {
    TwoCaches caches(partition, comm, format);
    std::mt19937_64 random(7);  // the same on all ranks
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    std::vector<SequenceId> ids = {caches.add()};
    for (long i = 0; i < operations; ++i) {
      const std::size_t at = below(ids.size());
      const std::size_t what = below(100);
      if (what < 40) {
        caches.append(ids[at], 1 + static_cast<std::int64_t>(below(below(4) == 0 ? 200 : 12)),
                      random());
      } else if (what < 70) {
        std::vector<SequenceId> some = ids;
        if (below(2) == 0) some = {ids[at]};
        caches.balance(some, 0.01 * static_cast<double>(below(30)),
                       below(2) == 0 ? no_limit : 3000);
      } else if (what < 78) {
        caches.placement.recall(ids[at]);
      } else if (what < 86 && ids.size() < 6) {
        ids.push_back(below(2) == 0 ? caches.fork(ids[at]) : caches.add());
      } else if (what < 91 && ids.size() > 1) {
        caches.free(ids[at]);
        ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (what < 96) {
        caches.expect_equal(ids[at]);
      }
      if (HasFailure()) {
        ADD_FAILURE() << "operation " << i;
        return;
      }
    }
    for (const SequenceId id : ids) caches.expect_equal(id);
    for (const SequenceId id : ids) caches.free(id);
    EXPECT_EQ(caches.moved.pool().pages_in_use(), 0U);
    EXPECT_EQ(caches.placement.remote_bytes().live, 0U);
    EXPECT_TRUE(caches.placement.is_plain());
  }
}

// Without memory on the receiver nothing moves, on any rank; a recall says so.
TEST_P(PagePlacement, StopsWithoutMemory) {
  const Communicator comm = Communicator::world();
  const auto partition = HeadPartition::even(layers, GetParam(), comm.size());
  TwoCaches caches(partition, comm, {});
  const SequenceId a = caches.add();
  caches.append(a, 500, 1);
  caches.placement.set_limit(1);
  caches.balance({a}, 0.01, no_limit);
  EXPECT_EQ(caches.placement.pages_moved(), 0);
  EXPECT_TRUE(caches.placement.is_plain());
  caches.placement.set_limit(0);
  caches.balance({a}, 0.01, no_limit);
  caches.expect_equal(a);
  if (caches.placement.has_pages_away(a)) {
    const SequenceId copy = caches.fork(a);
    caches.placement.set_limit(1);
    EXPECT_THROW(caches.placement.recall(copy), AgreedOutOfMemory);
    caches.placement.set_limit(0);
    caches.expect_equal(copy);
  }
  caches.expect_equal(a);
}

// The same of each allocation on each rank, alone, before the ranks agree on a move.
TEST_P(PagePlacement, AnyRankMayLackMemory) {
  const Communicator comm = Communicator::world();
  if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto partition = HeadPartition::even(layers, GetParam(), comm.size());
  TwoCaches caches(partition, comm, {});
  const SequenceId a = caches.add();
  caches.append(a, 500, 1);
  int owner = 0;
  while (partition.heads(0, owner).empty()) ++owner;
  const int head = partition.heads(0, owner).front();
  const int other = owner == 0 ? 1 : 0;
  // There and back, and there again: the second time the receiver has pages of the sequence.
  using Move = Placement::Move;
  const Move moves[] = {{a, 0, head, owner, other, 2, 3},
                        {a, 0, head, owner, other, 0, 1},
                        {a, 0, head, other, owner, 0, 1},
                        {a, 0, head, other, owner, 2, 3}};
  for (const Move& move : moves) {
    for (int rank = 0; rank < comm.size(); ++rank) {
      const std::int64_t before = caches.placement.pages_moved();
      for (std::int64_t n = 0;; ++n) {
        bool has_failed = false, has_moved = false;
        {
          const test::FailingAllocation failing(comm.rank() == rank ? n : -1);
          has_moved = caches.placement.carry_out(move);
          has_failed = comm.rank() == rank && test::news_until_failure == 0;
        }
        if (comm.all_reduce_max(has_failed ? 1 : 0) == 0) {
          ASSERT_TRUE(has_moved);
          break;
        }
        ASSERT_FALSE(has_moved) << "allocation " << n << " of rank " << rank;
        ASSERT_EQ(caches.placement.pages_moved(), before);
        caches.expect_equal(a);
        if (HasFailure()) return;
      }
      caches.expect_equal(a);
      // Back to where it was, for the next rank.
      if (rank + 1 == comm.size()) break;
      Move back = move;
      std::swap(back.from, back.to);
      ASSERT_TRUE(caches.placement.carry_out(back));
    }
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(KvHeads, PagePlacement, ::testing::Values(1, 3, 5));

struct ModelShape {
  const char* name;
  int kv_heads, group, head_dim;
  QkNorm qk_norm;
};
void PrintTo(const ModelShape& shape, std::ostream* stream) { *stream << shape.name; }

class PlacedDecoder : public ::testing::TestWithParam<ModelShape> {};

ModelConfig config_of(const ModelShape& shape) {
  ModelConfig config{};
  config.architecture = shape.qk_norm == QkNorm::row ? "Olmo2ForCausalLM" : "Qwen3ForCausalLM";
  if (shape.qk_norm == QkNorm::none) config.architecture = "LlamaForCausalLM";
  config.hidden_size = 48;
  config.intermediate_size = 80;
  config.num_hidden_layers = layers;
  config.num_attention_heads = shape.kv_heads * shape.group;
  config.num_key_value_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.vocab_size = 101;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  config.tie_word_embeddings = true;
  config.qk_norm = shape.qk_norm;
  return config;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(a[i]));
    worst = std::max<double>(worst, std::fabs(a[i] - b.at(i)));
  }
  return worst / largest;
}

// Prefill in chunks and decode of two sequences, with moves in between, against one rank that has
// all rows.
TEST_P(PlacedDecoder, GivesWhatOneRankGives) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = config_of(GetParam());
  const int heads = GetParam().kv_heads;
  const auto model_of = [&](int ranks, int rank) {
    return Model::load("", config, DType::f32, HeadPartition::even(layers, heads, ranks), rank,
                       {5});
  };
  for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::flash_prefill,
                                   AttentionPath::panels, AttentionPath::portable}) {
    const auto shared_model = model_of(comm.size(), comm.rank());
    const auto whole_model = model_of(1, 0);
    RandomScorer shared_scorer(shared_model.partition(), comm.rank(), 0.6, 6, 3);
    RandomScorer whole_scorer(whole_model.partition(), 0, 0.6, 6, 3);
    Decoder shared(shared_model, &shared_scorer, comm, 8, page_rows);
    Decoder whole(whole_model, &whole_scorer, Communicator::self(), 8, page_rows);
    shared.set_attention_path(path);
    StepRule rule;
    rule.score = true;
    rule.eviction = {0.0f, 2, true};
    std::mt19937 random(11);
    const auto some = [&](int count) {
      std::vector<TokenId> tokens;
      for (int i = 0; i < count; ++i) tokens.push_back(static_cast<TokenId>(random() % 101));
      return tokens;
    };
    std::vector<SequenceId> ids;
    for (int i = 0; i < 2; ++i) {
      ids.push_back(shared.cache().add_sequence());
      ASSERT_EQ(whole.cache().add_sequence(), ids.back());
    }
    const auto compare = [&](const StepBatch& batch) {
      const auto a = shared.step(batch), b = whole.step(batch);
      for (std::size_t i = 0; comm.is_root() && i < a.size(); ++i) {
        EXPECT_LT(distance(b[i].logits, a[i].logits), 2e-5);
      }
    };
    for (const int count : {90, 60}) {
      compare(StepBatch(ids[0], some(count), rule, StepOutput::logits));
      shared.placement().balance({ids[0]}, 0.02, no_limit);
    }
    StepBatch mixed(ids[0], some(7), rule, StepOutput::logits);
    mixed.add(ids[1], some(70), rule, StepOutput::logits);
    compare(mixed);
    for (int step = 0; step < 12; ++step) {
      if (step % 4 == 1) shared.placement().balance(ids, 0.02, 4000);
      compare(test::single_tokens(ids, some(2), rule, StepOutput::logits));
    }
    EXPECT_EQ(shared.placement().pages_moved() > 0, comm.size() > 1);
    shared.placement().recall(ids[0]);
    for (int l = 0; l < layers; ++l) {
      const auto& own = shared_model.partition().heads(l, comm.rank());
      for (std::size_t h = 0; h < own.size(); ++h) {
        EXPECT_EQ(shared.cache().positions(ids[0], l, static_cast<int>(h)),
                  whole.cache().positions(ids[0], l, own[h]));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PlacedDecoder,
                         ::testing::Values(ModelShape{"heads1", 1, 4, 32, QkNorm::none},
                                           ModelShape{"heads2norms", 2, 3, 80, QkNorm::head},
                                           ModelShape{"heads2rows", 2, 2, 20, QkNorm::row},
                                           ModelShape{"heads3", 3, 1, 16, QkNorm::head},
                                           ModelShape{"heads5", 5, 2, 24, QkNorm::none}));

}  // namespace
}  // namespace kvzap
