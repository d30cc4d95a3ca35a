// Further families of models against transformers and kvpress in float32: same token ids in, same
// logits, same generated ids, same evicted pairs and same pairs kept by policies out, for every
// folder of tests/golden/families, at every number of ranks that the model's KV heads allow.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <kvzap/config.hpp>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <nlohmann/json.hpp>

#include "golden/compare_runs.hpp"
#include "golden/golden_files.hpp"

namespace kvzap {
namespace {

using golden::ids;
using golden::Reference;
using golden::tensor;

const std::filesystem::path families_dir = golden::golden_dir / "families";

/// Names of the folders.
std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(families_dir)) {
    if (std::filesystem::exists(entry.path() / "golden.json")) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// A model as one placement of heads deals it to this rank.
struct Placed {
  std::string name;
  HeadPartition partition;
  std::shared_ptr<const Model> model;
};

class FamilyGoldens : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    m_folder = families_dir / GetParam();
    m_golden = nlohmann::json::parse(std::ifstream(m_folder / "golden.json"));
    m_config = ModelConfig::load(m_folder);
    m_heads = static_cast<int>(m_config.num_key_value_heads);
    m_layers = static_cast<int>(m_config.num_hidden_layers);
    m_prompt = m_golden["prompt"].get<std::vector<TokenId>>();
    m_new_tokens = m_golden["new_tokens"];
    const auto add = [&](const char* name, HeadPartition partition) {
      auto model = std::make_shared<const Model>(
          Model::load(m_folder, m_config, DType::f32, partition, m_comm.rank()));
      m_placed.push_back({name, std::move(partition), std::move(model)});
    };
    const HeadPartition even = HeadPartition::even(m_layers, m_heads, m_comm.size());
    for (int l = 0; l < m_layers && even.deals_projections(); ++l) {
      if (m_config.layer(l).kv_heads_factor > 1) {
        GTEST_SKIP() << "more ranks than KV heads of full layers, which is refused";
      }
    }
    add("even", even);
    auto rows = golden::uneven_rows(m_layers, m_heads);
    for (int l = 0; l < m_layers; ++l) rows[l] = rows[m_config.rows_of(l)];
    add("balanced", HeadPartition::balanced(rows, m_comm.size()));
  }

  /// The placement of the index-th run; over the numbers of ranks, every run has both.
  const Placed& placed(int index) const {
    return m_placed[(index + (m_comm.size() + 1) / 2) % m_placed.size()];
  }

  SafetensorsFolder open_tensors() const {
    return SafetensorsFolder::open(m_folder / "golden.safetensors");
  }

  std::string describe(const std::string& run, const Placed& at) const {
    return fmt::format("{} {} {}", GetParam(), run, at.name);
  }

  /// A mask of kept pairs, from one of evicted pairs.
  Reference<std::uint8_t> kept_but(const SafetensorsFolder& file, const std::string& name) const {
    Reference<std::uint8_t> mask(file, name, m_layers, m_heads);
    for (std::uint8_t& value : mask.values) value = value == 0 ? 1 : 0;
    return mask;
  }

  void expect_kept(Generator& generator, const Placed& at, const Reference<std::uint8_t>& expected,
                   const std::string& what) const {
    auto found = golden::differences(generator, at.partition, m_comm.rank(), expected, m_layers);
    // Layers with windows or chunks keep what they see; the reference prunes none of them.
    found.erase(std::remove_if(found.begin(), found.end(),
                               [&](const auto& pair) { return !m_config.is_full(pair.layer); }),
                found.end());
    if (found.empty()) return;
    ADD_FAILURE() << what << ": " << found.size() << " pairs differ; layer " << found[0].layer
                  << " head " << found[0].head << " position " << found[0].position << " should be "
                  << (found[0].kept ? "evicted" : "kept");
  }

  Answer answer(Generator& generator, std::vector<std::vector<float>>* logits) const {
    AnswerOptions options;
    options.max_new_tokens = m_new_tokens;
    if (logits) {
      options.on_logits = [=](const std::vector<float>& row) { logits->push_back(row); };
    }
    return generator.answer({}, options);
  }

  void expect_answer(const SafetensorsFolder& file, const std::string& run,
                     const std::vector<TokenId>& generated,
                     const std::vector<std::vector<float>>& logits, const std::string& what) const {
    bool tied = false;
    golden::compare_generation(ids(file, run + ".generated"), tensor<float>(file, run + ".logits"),
                               generated, logits, m_comm.is_root(), what, tied);
    EXPECT_FALSE(tied) << what << ": another id of nearly the same logit";
  }

  void run_in_chunks(const Placed& at, std::int64_t chunk, const SafetensorsFolder& file) const;
  void run_pruned(const Placed& at, const std::string& run, const SafetensorsFolder& file) const;
  void run_policy(const Placed& at, const nlohmann::json& entry,
                  const SafetensorsFolder& file) const;

  const Communicator m_comm = Communicator::world();
  std::filesystem::path m_folder;
  nlohmann::json m_golden;
  ModelConfig m_config;
  int m_heads = 0;
  int m_layers = 0;
  std::vector<TokenId> m_prompt;
  std::int64_t m_new_tokens = 0;
  std::vector<Placed> m_placed;
};

void FamilyGoldens::run_in_chunks(const Placed& at, std::int64_t chunk,
                                  const SafetensorsFolder& file) const {
  const std::string what = describe(fmt::format("full, chunks of {}", chunk), at);
  CacheOptions options;
  options.page_rows = 16;
  const auto engine = Engine::create(at.model, nullptr, options, m_comm);
  const SequenceId sequence = engine->add_sequence();
  const auto tokens = static_cast<std::int64_t>(m_prompt.size());
  std::vector<std::vector<float>> logits;
  std::vector<TokenId> generated;
  const auto step = [&](const std::vector<TokenId>& span, StepOutput output) {
    const auto results = engine->step(StepBatch(sequence, span, StepRule(), output));
    if (output == StepOutput::none) return;
    // Every rank needs the id, and rank 0 has the logits.
    logits.push_back(results.front().logits);
    TokenId best = 0;
    if (m_comm.is_root()) {
      const auto& row = logits.back();
      best = static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin());
    }
    m_comm.broadcast(&best, sizeof(best), 0);
    generated.push_back(best);
  };
  for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, tokens);
    step({m_prompt.begin() + begin, m_prompt.begin() + end},
         end == tokens ? StepOutput::logits : StepOutput::none);
  }
  while (static_cast<std::int64_t>(generated.size()) < m_new_tokens) {
    step({generated.back()}, StepOutput::logits);
  }
  expect_answer(file, "full", generated, logits, what);
}

void FamilyGoldens::run_pruned(const Placed& at, const std::string& run,
                               const SafetensorsFolder& file) const {
  const std::string what = describe(run, at);
  CacheOptions options;
  options.page_rows = 16;
  options.pruning.amount.threshold = m_golden["threshold"];
  options.pruning.window = m_golden["window"];
  const bool always = file.find(run + ".evicted_at_end") != nullptr;
  options.pruning.mode = always ? PruneMode::always : PruneMode::prefill;
  const auto surrogate = std::make_shared<Surrogate>(Surrogate::load(
      m_folder / "kvzap-linear", m_config, at.partition, m_comm.rank(), DType::f32, m_comm));
  const auto generator = Generator::create(at.model, surrogate, options, m_comm);
  generator->prefill(m_prompt, false);
  const auto after_prefill = kept_but(file, run + ".evicted_after_prefill");
  expect_kept(*generator, at, after_prefill, what + " after the prompt");
  EXPECT_NEAR(generator->report().evict_ratio(),
              m_golden["runs"][run]["evict_ratio_after_prefill"].get<double>(), 1e-12)
      << what;
  std::vector<std::vector<float>> logits;
  const Answer result = answer(*generator, &logits);
  expect_answer(file, run, result.tokens, logits, what);
  const auto at_end = always ? kept_but(file, run + ".evicted_at_end") : after_prefill;
  expect_kept(*generator, at, at_end, what + " at the end");
}

void FamilyGoldens::run_policy(const Placed& at, const nlohmann::json& entry,
                               const SafetensorsFolder& file) const {
  const std::string policy = entry["policy"];
  const std::string what = describe(policy, at);
  Budget budget;
  budget.amount = Budget::Amount::evict_ratio;
  budget.evict_ratio = entry["evict_ratio"];
  const auto choice = std::make_shared<const PolicyChoice>(
      make_policy(parse_policy(policy), budget, std::nullopt,
                  {m_config, at.partition, DType::f32, m_folder, m_comm}));
  CacheOptions options;
  options.page_rows = 16;
  options.pruning.mode = PruneMode::prefill;
  options.pruning.window = m_golden["window"];
  options.policy = choice;
  const auto generator = Generator::create(at.model, choice->scorer, options, m_comm);
  generator->prefill(m_prompt, false);
  const Reference<std::uint8_t> kept(file, policy + ".kept", m_layers, m_heads);
  expect_kept(*generator, at, kept, what);
  EXPECT_EQ(answer(*generator, nullptr).tokens, ids(file, policy + ".generated")) << what;
}

TEST_P(FamilyGoldens, FullCache) {
  const auto file = open_tensors();
  const auto whole = static_cast<std::int64_t>(m_prompt.size());
  int index = 0;
  for (const std::int64_t chunk : {whole, std::int64_t{7}, std::int64_t{64}}) {
    run_in_chunks(placed(index++), chunk, file);
  }
}

TEST_P(FamilyGoldens, PrunedRuns) {
  const auto file = open_tensors();
  int index = 0;
  for (const auto& [run, ratios] : m_golden["runs"].items()) {
    if (run != "full") run_pruned(placed(index++), run, file);
  }
}

TEST_P(FamilyGoldens, Policies) {
  const auto file = open_tensors();
  int index = 0;
  for (const auto& entry : m_golden["policies"]) run_policy(placed(index++), entry, file);
}

INSTANTIATE_TEST_SUITE_P(Models, FamilyGoldens, ::testing::ValuesIn(family_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kvzap
