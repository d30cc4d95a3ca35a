// Mean and covariance of queries against kvpress, and against sums in double, on any number of
// ranks.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <kvzap/lab/collect.hpp>
#include <kvzap/model/safetensors.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/watching.hpp"
#include "golden/golden_files.hpp"
#include "source_dir.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;

const fs::path source = test::source_dir();
const fs::path goldens = source / "tests/golden";
const fs::path recall = source / "inputs/models/recall-4m";
const fs::path qwen2 = goldens / "models/qwen2-random";
const fs::path llama = goldens / "models/llama-random";

/// Nothing where there are more ranks than heads.
std::shared_ptr<const Model> load(const fs::path& folder) {
  const Communicator comm = Communicator::world();
  const ModelConfig config = ModelConfig::load(folder);
  if (comm.size() > config.num_key_value_heads) return nullptr;
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), comm.size());
  return std::make_shared<const Model>(
      Model::load(folder, config, DType::f32, partition, comm.rank(), {std::nullopt, {}}));
}

CollectText text_of(std::vector<TokenId> ids) {
  CollectText text;
  text.ids = std::move(ids);
  return text;
}

/// Ids of a text of any length, none of them special.
CollectText made_up(std::int64_t tokens, int seed) {
  std::vector<TokenId> ids;
  for (std::int64_t i = 0; i < tokens; ++i) {
    ids.push_back(static_cast<TokenId>((i * i * 7 + i * seed + seed) % 900));
  }
  return text_of(ids);
}

QueryMoments collect(const std::shared_ptr<const Model>& model,
                     const std::vector<CollectText>& texts, std::int64_t sink = 4) {
  const Communicator comm = Communicator::world();
  return collect_query_moments(model, comm.is_root() ? texts : std::vector<CollectText>{}, sink,
                               comm, nullptr);
}

/// Largest difference of the layers named, means over the deviations of their dimension and
/// covariances over those of both.
double difference(const QueryMoments& moments, const ModelConfig& config,
                  const std::vector<std::int64_t>& layers, const std::vector<float>& mean,
                  const std::vector<float>& covariance) {
  const auto heads = static_cast<std::size_t>(config.num_attention_heads);
  const auto dim = static_cast<std::size_t>(config.head_dim);
  double largest = 0;
  const auto take = [&](double x, double y, double by) {
    const double off = std::abs(x - y) / by;
    if (!(off <= largest)) largest = off;
  };
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t ours = static_cast<std::size_t>(layers[l]) * heads + h;
      const std::size_t theirs = l * heads + h;
      std::vector<double> deviations(dim);
      for (std::size_t d = 0; d < dim; ++d) {
        deviations[d] = std::sqrt(covariance[(theirs * dim + d) * dim + d]);
      }
      for (std::size_t i = 0; i < dim; ++i) {
        take(moments.mean[ours * dim + i], mean[theirs * dim + i], deviations[i]);
        for (std::size_t j = 0; j < dim; ++j) {
          take(moments.covariance[(ours * dim + i) * dim + j],
               covariance[(theirs * dim + i) * dim + j], deviations[i] * deviations[j]);
        }
      }
    }
  }
  return largest;
}

void expect_sizes(const QueryMoments& moments, const ModelConfig& config, bool has_them) {
  const std::int64_t heads = has_them ? config.num_hidden_layers * config.num_attention_heads : 0;
  EXPECT_EQ(moments.mean.size(), static_cast<std::size_t>(heads * config.head_dim));
  EXPECT_EQ(moments.covariance.size(),
            static_cast<std::size_t>(heads * config.head_dim * config.head_dim));
}

// ---- As kvpress does it -------------------------------------------------------------------------

void expect_texts_as_kvpress(const fs::path& folder) {
  const auto model = load(folder);
  if (!model) GTEST_SKIP() << "more ranks than heads";
  const ModelConfig& config = model->config();
  const auto golden = SafetensorsFolder::open(
      goldens / "collect" / (folder.filename().string() + ".queries.safetensors"));
  CollectRules rules;
  rules.min_tokens = 1;
  const CollectTexts texts =
      read_plain_texts(goldens / "collect/texts.jsonl", rules, Tokenizer::load(folder), config);
  ASSERT_EQ(texts.texts.size(), 3u);
  const QueryMoments moments = collect(model, texts.texts);
  EXPECT_EQ(moments.texts, 3);
  EXPECT_EQ(moments.queries, kvzap::golden::tensor<std::int64_t>(golden, "queries").at(0));
  EXPECT_EQ(moments.tokens, moments.queries + 3 * 4);
  EXPECT_FALSE(moments.stopped);
  expect_sizes(moments, config, Communicator::world().is_root());
  if (!Communicator::world().is_root()) return;
  EXPECT_LT(difference(moments, config, kvzap::golden::tensor<std::int64_t>(golden, "layers"),
                       kvzap::golden::tensor<float>(golden, "query_mean"),
                       kvzap::golden::tensor<float>(golden, "query_cov")),
            1e-4);
}

TEST(QueryMoments, OfTextsAreThoseOfKvpressForRecall) { expect_texts_as_kvpress(recall); }
TEST(QueryMoments, OfTextsAreThoseOfKvpressForQwen2) { expect_texts_as_kvpress(qwen2); }

// The files that expected-attention's goldens are made with.
void expect_file_of_policy(const fs::path& folder) {
  const auto model = load(folder);
  if (!model) GTEST_SKIP() << "more ranks than heads";
  const ModelConfig& config = model->config();
  const std::string name = folder.filename().string();
  const auto text = SafetensorsFolder::open(goldens / (name + ".case1.safetensors"));
  const auto golden =
      SafetensorsFolder::open(goldens / "policies" / (name + ".statistics.safetensors"));
  const TensorInfo* const ids = text.find("context_ids");
  ASSERT_NE(ids, nullptr);
  std::vector<TokenId> context;
  if (ids->bytes == static_cast<std::size_t>(ids->shape.at(0)) * sizeof(std::int64_t)) {
    for (const std::int64_t id : kvzap::golden::tensor<std::int64_t>(text, "context_ids")) {
      context.push_back(static_cast<TokenId>(id));
    }
  } else {
    context = kvzap::golden::tensor<std::int32_t>(text, "context_ids");
  }
  const QueryMoments moments = collect(model, {text_of(context)});
  if (!Communicator::world().is_root()) return;
  std::vector<std::int64_t> layers;
  for (std::int64_t l = 0; l < config.num_hidden_layers; ++l) layers.push_back(l);
  EXPECT_LT(difference(moments, config, layers, kvzap::golden::tensor<float>(golden, "query_mean"),
                       kvzap::golden::tensor<float>(golden, "query_cov")),
            2e-4);
}

TEST(QueryMoments, OfAPromptAreThoseOfKvpressForRecall) { expect_file_of_policy(recall); }
TEST(QueryMoments, OfAPromptAreThoseOfKvpressForQwen2) { expect_file_of_policy(qwen2); }
TEST(QueryMoments, OfAPromptAreThoseOfKvpressForLlama) { expect_file_of_policy(llama); }

// ---- Against sums in double ---------------------------------------------------------------------

/// Queries of a layer on this rank, turned back: (query head, token, head_dim).
using Turned = std::vector<std::vector<std::vector<double>>>;

/// Keeps the queries of one layer.
class KeepQueries final : public Policy {
 public:
  KeepQueries(int layer, std::int64_t sink, Turned& kept)
      : m_layer(layer), m_sink(sink), m_kept(kept) {}
  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    return needs;
  }
  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    if (layer.layer() != m_layer) return;
    layer.exec().fence();
    const auto rates =
        Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), layer.inverse_frequencies());
    // (A strided view cannot always be copied to the host.)
    const auto from = block.queries;
    const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> packed(
        "packed", from.extent(0), from.extent(1), from.extent(2));
    Kokkos::deep_copy(packed, from);
    const auto queries = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), packed);
    const std::size_t half = queries.extent(2) / 2;
    m_kept.resize(queries.extent(1));
    for (std::size_t h = 0; h < queries.extent(1); ++h) {
      for (std::int64_t t = 0; t < block.count; ++t) {
        if (block.first + t < m_sink) continue;
        std::vector<double> turned(2 * half);
        for (std::size_t d = 0; d < half; ++d) {
          // As the model computes it.
          const float angle = static_cast<float>(block.first + t) * rates(d);
          const double c = std::cos(static_cast<double>(angle));
          const double s = std::sin(static_cast<double>(angle));
          turned[d] = c * queries(t, h, d) + s * queries(t, h, d + half);
          turned[d + half] = c * queries(t, h, d + half) - s * queries(t, h, d);
        }
        m_kept[h].push_back(turned);
      }
    }
  }
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    engine::keep_first_row(layer.exec(), scores);
  }

 private:
  int m_layer;
  std::int64_t m_sink;
  Turned& m_kept;
};

TEST(QueryMoments, OfLongAndShortTextsAreThoseOfSumsInDouble) {
  const Communicator comm = Communicator::world();
  const auto model = load(recall);
  if (!model) GTEST_SKIP() << "more ranks than heads";
  const ModelConfig& config = model->config();
  // Several blocks; shorter than the sink; the sink alone; one query.
  const std::vector<CollectText> texts = {made_up(5, 1), made_up(1500, 2), made_up(3, 3),
                                          made_up(7, 4), made_up(8, 5),    made_up(90, 6)};
  const std::int64_t sink = 7;
  const QueryMoments moments = collect(model, texts, sink);
  EXPECT_EQ(moments.queries, 1493 + 1 + 83);
  EXPECT_EQ(moments.texts, 6);
  EXPECT_EQ(moments.tokens, 5 + 1500 + 3 + 7 + 8 + 90);

  const int layer = 2;
  Turned kept;
  const auto engine =
      Engine::create(model, nullptr,
                     engine::watching_options(
                         "keep", [&] { return std::make_unique<KeepQueries>(layer, sink, kept); }),
                     comm);
  for (const CollectText& text : texts) {
    const SequenceId sequence = engine->add_sequence();
    engine->step(StepBatch(sequence, text.ids, engine->rule(StepPart::context), StepOutput::none));
    engine->free_sequence(sequence);
  }
  const auto dim = static_cast<std::size_t>(config.head_dim);
  std::vector<float> means, covariances;
  for (const auto& queries : kept) {
    ASSERT_EQ(queries.size(), static_cast<std::size_t>(moments.queries));
    std::vector<double> mean(dim);
    for (const auto& query : queries) {
      for (std::size_t d = 0; d < dim; ++d) mean[d] += query[d] / queries.size();
    }
    for (const double x : mean) means.push_back(static_cast<float>(x));
    for (std::size_t i = 0; i < dim; ++i) {
      for (std::size_t j = 0; j < dim; ++j) {
        double sum = 0;
        for (const auto& query : queries) sum += (query[i] - mean[i]) * (query[j] - mean[j]);
        covariances.push_back(static_cast<float>(sum / (queries.size() - 1)));
      }
    }
  }
  // An even partition gives rank r the r-th of as many parts: heads are in order.
  const std::vector<float> all_means = comm.gather(means.data(), means.size(), 0);
  const std::vector<float> all_covariances = comm.gather(covariances.data(), covariances.size(), 0);
  if (!comm.is_root()) return;
  const double off = difference(moments, config, {layer}, all_means, all_covariances);
  RecordProperty("difference", std::to_string(off));
  EXPECT_LT(off, 2e-5);
}

TEST(QueryMoments, DoNotDependOnTheOrderOfTexts) {
  const auto model = load(recall);
  if (!model) GTEST_SKIP() << "more ranks than heads";
  const QueryMoments there = collect(model, {made_up(40, 1), made_up(300, 2), made_up(9, 3)});
  const QueryMoments back = collect(model, {made_up(9, 3), made_up(300, 2), made_up(40, 1)});
  EXPECT_EQ(there.queries, back.queries);
  if (!Communicator::world().is_root()) return;
  std::vector<std::int64_t> layers;
  for (std::int64_t l = 0; l < model->config().num_hidden_layers; ++l) layers.push_back(l);
  EXPECT_LT(difference(there, model->config(), layers, back.mean, back.covariance), 1e-6);
}

TEST(QueryMoments, StopAfterAText) {
  const Communicator comm = Communicator::world();
  const auto model = load(recall);
  if (!model) GTEST_SKIP() << "more ranks than heads";
  const std::vector<CollectText> texts = {made_up(20, 1), made_up(20, 2)};
  int asked = 0;
  const QueryMoments moments = collect_query_moments(model, texts, 4, comm, [&] {
    ++asked;
    return comm.rank() + 1 == comm.size();  // the last rank alone
  });
  EXPECT_TRUE(moments.stopped);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(moments.texts, 1);
  expect_sizes(moments, model->config(), false);
  // Too late: all texts have been.
  const QueryMoments whole =
      collect_query_moments(model, {made_up(20, 1)}, 4, comm, [] { return true; });
  EXPECT_FALSE(whole.stopped);
  expect_sizes(whole, model->config(), comm.is_root());
}

TEST(QueryMoments, NeedTwoQueries) {
  const auto model = load(recall);
  if (!model) GTEST_SKIP() << "more ranks than heads";
  try {
    collect(model, {made_up(5, 1), made_up(4, 1)});
    FAIL();
  } catch (const AgreedError& error) {
    EXPECT_NE(std::string(error.what()).find("1 tokens after the first 4"), std::string::npos)
        << error.what();
  }
}

TEST(QueryMoments, AreWrittenAndReplaced) {
  if (!Communicator::world().is_root()) return;
  std::string pattern = (fs::temp_directory_path() / "kvzap-XXXXXX").string();
  const fs::path folder = ::mkdtemp(pattern.data());
  ModelConfig config;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 3;
  config.head_dim = 4;
  QueryMoments moments;
  for (int i = 0; i < 2 * 3 * 4; ++i) moments.mean.push_back(static_cast<float>(i));
  for (int i = 0; i < 2 * 3 * 4 * 4; ++i) moments.covariance.push_back(static_cast<float>(-i));
  for (int i = 0; i < 2; ++i) {
    write_query_moments(folder / "a.safetensors", moments, config, {{"model", "m"}});
    const auto file = SafetensorsFolder::open(folder / "a.safetensors");
    EXPECT_EQ(file.at("query_mean", {2, 3, 4}).dtype, DType::f32);
    EXPECT_EQ(file.at("query_cov", {2, 3, 4, 4}).dtype, DType::f32);
    EXPECT_EQ(kvzap::golden::tensor<float>(file, "query_mean"), moments.mean);
    EXPECT_EQ(kvzap::golden::tensor<float>(file, "query_cov"), moments.covariance);
    moments.mean[3] = 7;
  }
  EXPECT_THROW(write_query_moments(folder / "none/a", moments, config, {}), Error);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace kvzap
