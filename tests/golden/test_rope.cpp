// Scaled RoPE against transformers: frequencies, angles at long contexts, and logits of texts that
// grow beyond the original length.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <kvzap/engine/engine.hpp>
#include <kvzap/model/safetensors.hpp>
#include <nlohmann/json.hpp>

#include "engine/step_kernels.hpp"
#include "golden/golden_files.hpp"
#include "unit/temporary_folder.hpp"

namespace kvzap {
namespace {

using nlohmann::json;

const std::filesystem::path rope_dir = golden::golden_dir / "rope";

json read_json(const std::string& name) { return json::parse(std::ifstream(rope_dir / name)); }

ModelConfig load_config(const json& config) {
  const test::TemporaryFolder folder;
  folder.write("config.json", config.dump());
  return ModelConfig::load(folder.path());
}

/// Floats from one to the other; both above 0.
std::int64_t steps_between(float a, float b) {
  std::int32_t i = 0, j = 0;
  std::memcpy(&i, &a, sizeof(i));
  std::memcpy(&j, &b, sizeof(j));
  return std::abs(static_cast<std::int64_t>(i) - j);
}

TEST(GoldenRope, Frequencies) {
  std::int64_t all = 0, different = 0;
  for (const json& item : read_json("frequencies.json")) {
    const ModelConfig config = load_config(item["config"]);
    for (const json& at : item["lengths"]) {
      const auto length = at["length"].get<std::int64_t>();
      const std::string what = fmt::format("{} at {}", item["name"].get<std::string>(), length);
      const auto found = rope_inverse_frequencies(config, length);
      ASSERT_EQ(found.size(), at["frequencies"].size()) << what;
      EXPECT_EQ(config.rope_attention_factor(), at["attention_factor"].get<float>()) << what;
      for (std::size_t i = 0; i < found.size(); ++i) {
        // torch's powers are not always those that are rounded correctly.
        const auto steps = steps_between(found[i], at["frequencies"][i].get<float>());
        EXPECT_LE(steps, 1) << what << ": frequency " << i;
        different += steps != 0;
      }
      all += static_cast<std::int64_t>(found.size());
    }
  }
  RecordProperty("frequencies", static_cast<int>(all));
  RecordProperty("one_step_apart", static_cast<int>(different));
  EXPECT_LE(different, all / 20);
}

// Positions beyond 100000 times frequencies near 1: one step of a frequency turns by 0.01.
TEST(GoldenRope, AnglesOfLongTexts) {
  int n_cases = 0;
  for (const json& item : read_json("frequencies.json")) {
    if (!item.contains("angles")) continue;
    ++n_cases;
    const ModelConfig config = load_config(item["config"]);
    const json& angles = item["angles"];
    const auto position = angles["position"].get<std::int64_t>();
    const auto expected = rope_inverse_frequencies(config, position + 1);
    const auto pairs = static_cast<std::int64_t>(expected.size());
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> frequencies("frequencies", 1,
                                                                              pairs);
    Kokkos::deep_copy(frequencies,
                      Kokkos::View<const float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                          expected.data(), 1, pairs));
    const Kokkos::View<std::int64_t*, MemorySpace> positions("positions", 1);
    Kokkos::deep_copy(positions, position);
    const Kokkos::View<float***, Kokkos::LayoutRight, MemorySpace> found("angles", 1, pairs, 2);
    const ExecutionSpace exec;
    engine::fill_angles(exec, 1, positions, {}, frequencies, config.rope_attention_factor(), found);
    exec.fence();
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, found);
    // Where torch has another float for the frequency the angle is another one.
    const json& same = item["lengths"].back()["frequencies"];
    int n_same = 0;
    for (std::int64_t i = 0; i < pairs; ++i) {
      if (same[i].get<float>() != expected[i]) continue;
      ++n_same;
      EXPECT_NEAR(host(0, i, 0), angles["cosines"][i].get<float>(), 3e-7) << item["name"] << i;
      EXPECT_NEAR(host(0, i, 1), angles["sines"][i].get<float>(), 3e-7) << item["name"] << i;
    }
    EXPECT_GE(n_same, pairs * 9 / 10) << item["name"];
  }
  EXPECT_GE(n_cases, 4);
}

/// A sequence that goes through the steps of a plan.
struct Walker {
  std::string name;
  SequenceId sequence;
  std::vector<std::int64_t> counts;
  std::vector<float> expected;  // (step, vocabulary)
  std::size_t done = 0;
  std::int64_t tokens = 0;
};

class GoldenRopeLogits : public testing::Test {
 protected:
  void check(const std::string& what, Walker& walker, const StepResult& result) {
    if (Communicator::world().is_root()) {
      const std::size_t vocabulary = result.logits.size();
      float worst = 0;
      for (std::size_t v = 0; v < vocabulary; ++v) {
        worst = std::max(
            worst, std::fabs(result.logits[v] - walker.expected[walker.done * vocabulary + v]));
      }
      EXPECT_LT(worst, 1e-3) << what << " " << walker.name << " step " << walker.done;
    }
    walker.tokens += walker.counts[walker.done++];
  }

  std::vector<TokenId> next(const Walker& walker) const {
    const auto begin = m_ids.begin() + walker.tokens;
    return {begin, begin + walker.counts[walker.done]};
  }

  std::vector<TokenId> m_ids;
};

TEST_F(GoldenRopeLogits, OfTextsThatGrowBeyondTheOriginalLength) {
  const Communicator comm = Communicator::world();
  const json description = read_json("logits.json");
  m_ids = description["ids"].get<std::vector<TokenId>>();
  const auto file = SafetensorsFolder::open(rope_dir / "logits.safetensors");
  for (const auto& entry : description["cases"].items()) {
    const std::string& name = entry.key();
    const ModelConfig config = load_config(entry.value());
    if (comm.size() > config.num_key_value_heads) return;
    const auto partition =
        HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                            static_cast<int>(config.num_key_value_heads), comm.size());
    const auto model = std::make_shared<const Model>(
        Model::load(rope_dir / "model", config, DType::f32, partition, comm.rank()));
    CacheOptions options;
    options.page_rows = 8;
    options.pruning.window = 4;
    const auto engine = Engine::create(model, nullptr, options, comm);
    const auto walkers = [&] {
      std::vector<Walker> made;
      for (const auto& [plan, counts] : description["plans"].items()) {
        made.push_back({plan, engine->add_sequence(), counts.get<std::vector<std::int64_t>>(),
                        golden::tensor<float>(file, name + "." + plan)});
      }
      return made;
    };
    const auto step = [&](Walker& walker) {
      const auto results =
          engine->step(StepBatch(walker.sequence, next(walker), StepRule(), StepOutput::logits));
      check(name, walker, results.front());
    };

    // Each alone, and from a state of before the text was long once more: by a fork of it, and by
    // going back.
    for (Walker& walker : walkers()) {
      step(walker);
      const auto before = engine->checkpoint(walker.sequence);
      Walker fork = walker;
      fork.name += " of a fork";
      fork.sequence = engine->fork(walker.sequence);
      Walker again = walker;
      again.name += " once more";
      while (walker.done < walker.counts.size()) step(walker);
      while (fork.done < fork.counts.size()) step(fork);
      engine->restore(again.sequence, *before);
      while (again.done < again.counts.size()) step(again);
      engine->free_sequence(walker.sequence);
      engine->free_sequence(fork.sequence);
    }

    // All in the same steps, where some are long and some are not.
    auto together = walkers();
    for (bool any = true; any;) {
      StepBatch batch;
      std::vector<Walker*> stepped;
      for (Walker& walker : together) {
        if (walker.done == walker.counts.size()) continue;
        batch.add(walker.sequence, next(walker), StepRule(), StepOutput::logits);
        stepped.push_back(&walker);
      }
      any = !stepped.empty();
      if (!any) break;
      const auto results = engine->step(batch);
      for (std::size_t s = 0; s < stepped.size(); ++s) {
        check(name + " together", *stepped[s], results[s]);
      }
    }
  }
}

}  // namespace
}  // namespace kvzap
