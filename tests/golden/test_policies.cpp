// Eviction policies against kvpress in float32: same token ids in, same scores, same kept pairs and
// same generated ids out, for every policy, modifier and moment in tests/golden/policies at every
// number of ranks that the model's KV heads allow.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/model/chat_template.hpp>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "golden/compare_runs.hpp"
#include "golden/golden_files.hpp"
#include "policy/mean_attention.hpp"

namespace kvzap {
namespace {

using golden::Difference;
using golden::differences;
using golden::golden_dir;
using golden::ids;
using golden::model_dir;
using golden::Reference;

/// Of the largest score of a layer (KVzip's and KVzip+'s: of each score), and of the largest logit.
constexpr double tolerance = 1e-3;

/// Of scores of heads, which lie between 0 and 1.
constexpr double head_tolerance = 1e-5;

/// Scores that kvpress has set to the largest float: pairs of CriticalKV's first stage.
constexpr float beyond_scores = 1e30f;

/// How many runs of a model may keep other pairs of scores as large, or generate another of two ids
/// that are as likely, so that nothing that follows can be compared. Runs that the index marks as
/// ties are not counted.
constexpr double largest_share_not_compared = 0.05;

/// Keeps all scores that steps hand out: of each layer one entry for each call.
class ScoreRecorder : public StepObserver {
 public:
  struct Call {
    std::int64_t first = 0;
    std::map<int, std::vector<float>> of_head;  // KV head of the model: scores
  };

  ScoreRecorder(int layers, const HeadPartition& partition, int rank)
      : m_partition(partition), m_rank(rank), m_calls(layers) {}

  void scores(SequenceId /*sequence*/, int layer, std::int64_t first,
              const ScoresView& scores) override {
    Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> copy("scores", scores.extent(0),
                                                                 scores.extent(1));
    Kokkos::deep_copy(copy, scores);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, copy);
    Call call;
    call.first = first;
    for (std::size_t h = 0; h < host.extent(0); ++h) {
      auto& target = call.of_head[m_partition.heads(layer, m_rank)[h]];
      for (std::size_t t = 0; t < host.extent(1); ++t) target.push_back(host(h, t));
    }
    m_calls[layer].push_back(std::move(call));
  }

  /// The scores of a head's first `tokens` tokens, of the first call that had them all; null if
  /// there was none.
  const std::vector<float>* find(int layer, int head, std::int64_t tokens) const {
    for (const Call& call : m_calls[layer]) {
      const auto found = call.of_head.find(head);
      if (call.first == 0 && found != call.of_head.end() &&
          static_cast<std::int64_t>(found->second.size()) == tokens) {
        return &found->second;
      }
    }
    return nullptr;
  }

 private:
  const HeadPartition& m_partition;
  int m_rank;
  std::vector<std::vector<Call>> m_calls;  // [layer]
};

/// What one run of the index says, and what it is compared with.
struct PolicyRun {
  std::string what;
  nlohmann::json entry;
  std::optional<Reference<float>> scores;
  std::vector<double> largest;  // [layer] of the scores that are no constants

  /// "evict-ratio 0.3", "threshold -7.5" or "own".
  std::string amount() const { return entry["amount"].get<std::string>(); }
  double number() const { return std::stod(amount().substr(amount().find(' ') + 1)); }
  bool has_threshold() const { return amount().rfind("threshold ", 0) == 0; }
  bool has_ratio() const { return amount().rfind("evict-ratio ", 0) == 0; }
  bool is_tie() const { return entry.value("tie", false); }
  bool rerotated() const { return entry.value("rerotated", false); }
  bool repeats_context() const { return entry["policy"].get<std::string>().rfind("kvzip", 0) == 0; }
  /// LagKV's scores are ranks within a partition of 128, over 128: two rows whose values are as
  /// good as equal may have each other's, as sums are rounded otherwise on other ranks.
  bool scores_by_rank() const { return entry["policy"].get<std::string>().rfind("lagkv", 0) == 0; }
  /// The inverse by which leverage divides makes the rounding of keys larger.
  double score_tolerance() const {
    return (entry["policy"].get<std::string>().rfind("leverage", 0) == 0 ? 2 : 1) * tolerance;
  }
  bool after_question() const { return entry.value("prune_after", "context") == "question"; }
};

/// As --policy has it, with the names of files in full.
std::string policy_text(const nlohmann::json& entry) {
  std::string folder;
  for (const char c : (golden_dir / "policies").string()) {
    if (c == ',' || c == '+') folder += '\\';
    folder += c;
  }
  std::string text = entry["policy"];
  const std::string mark = "{folder}";
  for (auto at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) {
    text.replace(at, mark.size(), folder);
    at += folder.size();
  }
  return text;
}

/// Null, after a failure, if the policy cannot be made.
std::shared_ptr<const PolicyChoice> make_choice(const PolicyRun& run, const PolicySetup& setup) {
  Budget budget;
  if (run.has_ratio()) {
    budget.amount = Budget::Amount::evict_ratio;
    budget.evict_ratio = run.number();
  }
  std::optional<double> threshold;
  if (run.has_threshold()) threshold = run.number();
  try {
    PolicyChoice choice =
        make_policy(parse_policy(policy_text(run.entry)), budget, threshold, setup);
    if (choice.info->repeats_context) {
      const ChatTemplate::Parts parts = ChatTemplate::detect(setup.model).parts(false);
      const std::int64_t chunk = choice.repeat.chunk;
      choice.repeat = make_repeat_prompt(Tokenizer::load(setup.model), parts.prefix, parts.suffix);
      choice.repeat.chunk = chunk;
    }
    return std::make_shared<const PolicyChoice>(std::move(choice));
  } catch (const Error& error) {
    ADD_FAILURE() << run.what << ": " << error.what();
    return nullptr;
  }
}

void compare_scores(const PolicyRun& run, const ScoreRecorder& recorder,
                    const HeadPartition& partition, int rank) {
  if (!run.scores) return;
  const std::int64_t tokens = run.scores->tokens;
  for (int l = 0; l < static_cast<int>(run.largest.size()); ++l) {
    for (int head : partition.heads(l, rank)) {
      const std::vector<float>* ours = recorder.find(l, head, tokens);
      if (!ours) {
        ADD_FAILURE() << run.what << ": no scores of layer " << l << " head " << head;
        return;
      }
      const float* expected = run.scores->row(l, head);
      double worst = 0;
      std::int64_t where = -1;
      int swapped = 0;
      double moved = 0;  // by all that have swapped: as many up as down
      for (std::int64_t p = 0; p < tokens; ++p) {
        // Constants above the scores, "the largest of all plus 1", are measured by themselves, and
        // "the largest number there is" has to be above the scores.
        const double size = run.repeats_context()
                                ? std::fabs(expected[p])
                                : std::max<double>(run.largest[l], std::fabs(expected[p]));
        double off = std::fabs(static_cast<double>((*ours)[p]) - expected[p]);
        if (off > 0) off /= size;
        if (expected[p] > beyond_scores && (*ours)[p] >= run.largest[l]) off = 0;
        // Two neighbours that have swapped their ranks, one step each.
        const double step = static_cast<double>((*ours)[p]) - expected[p];
        if (run.scores_by_rank() && off > tolerance && swapped < 2 &&
            std::fabs(step) <= 1.0 / 128) {
          ++swapped;
          moved += step;
          continue;
        }
        if (!(off <= worst)) {  // also if it is no number
          worst = off;
          where = p;
        }
      }
      EXPECT_LE(std::fabs(moved), tolerance) << run.what << ": layer " << l << " head " << head
                                             << ": rows have ranks that no swap explains";
      EXPECT_LE(worst, run.score_tolerance())
          << run.what << ": layer " << l << " head " << head << ": score of position " << where
          << " is " << (where < 0 ? 0 : (*ours)[where]) << ", should be "
          << (where < 0 ? 0 : expected[where]);
    }
  }
}

/// All ranks' differences, so that those of a pool that reaches over ranks can be weighed.
std::vector<Difference> gathered(const std::vector<Difference>& own, const Communicator& comm,
                                 int layers, int heads, std::int64_t tokens) {
  std::vector<std::int64_t> flags(static_cast<std::size_t>(layers) * heads * tokens, 0);
  for (const Difference& d : own) {
    flags[(d.layer * heads + d.head) * tokens + d.position] = d.kept ? 1 : 2;
  }
  comm.all_reduce_sum(flags.data(), flags.size());
  std::vector<Difference> all;
  for (int l = 0; l < layers; ++l) {
    for (int h = 0; h < heads; ++h) {
      for (std::int64_t p = 0; p < tokens; ++p) {
        const auto flag = flags[(l * heads + h) * tokens + p];
        if (flag != 0) all.push_back({l, h, p, flag == 1});
      }
    }
  }
  return all;
}

/// Differences are allowed between pairs whose scores tie: with a threshold, those at it; with a
/// budget, as many that only we keep as such that only the reference keeps in each pool, each with
/// one of the other kind that scores as much.
void expect_ties(const PolicyRun& run, const std::vector<Difference>& all) {
  if (all.empty()) return;
  const auto where = [&](const Difference& d) {
    return fmt::format("{}: {} pairs differ; layer {} head {} position {} should be {}", run.what,
                       all.size(), d.layer, d.head, d.position, d.kept ? "evicted" : "kept");
  };
  if (!run.scores) {
    ADD_FAILURE() << where(all[0]);
    return;
  }
  const auto score = [&](const Difference& d) -> double {
    return run.scores->row(d.layer, d.head)[d.position];
  };
  const std::string policy = run.entry["policy"];
  const bool is_layerwise = policy.find("layerwise=on") != std::string::npos;
  const bool by_layer = is_layerwise || policy.find("+ada") != std::string::npos;
  const bool by_model =
      !is_layerwise && (policy.rfind("fastkvzip", 0) == 0 || run.repeats_context());
  std::map<std::pair<int, int>, std::vector<Difference>> pools;
  for (const Difference& d : all) {
    pools[{by_model ? 0 : d.layer, by_model || by_layer ? 0 : d.head}].push_back(d);
  }
  for (const auto& [pool, members] : pools) {
    std::int64_t balance = 0;
    for (const Difference& d : members) {
      balance += d.kept ? 1 : -1;
      double closest = std::numeric_limits<double>::infinity();
      if (run.has_threshold()) closest = std::fabs(score(d) - run.number());
      for (const Difference& other : members) {
        if (other.kept != d.kept) closest = std::min(closest, std::fabs(score(d) - score(other)));
      }
      if (!(closest < 2 * tolerance * run.largest[d.layer])) {
        ADD_FAILURE() << where(d) << "; its score is " << score(d)
                      << ", and the nearest that would do " << closest << " away";
        return;
      }
    }
    if (!run.has_threshold() && balance != 0) {
      ADD_FAILURE() << where(members[0]) << "; we keep " << balance << " more in its pool";
      return;
    }
  }
}

/// Rows that move up to close their gaps say no more where they came from: their number and their
/// new positions can be compared.
void compare_rerotated(const PolicyRun& run, Generator& generator, const HeadPartition& partition,
                       int rank, const Reference<std::uint8_t>& expected, int layers,
                       std::int64_t added) {
  generator.gather_pages();
  for (int l = 0; l < layers; ++l) {
    const auto& heads = partition.heads(l, rank);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::uint8_t* kept = expected.row(l, heads[h]);
      std::vector<std::int64_t> consecutive(std::count(kept, kept + expected.tokens, 1) + added);
      std::iota(consecutive.begin(), consecutive.end(), 0);
      if (generator.positions(l, static_cast<int>(h)) != consecutive) {
        ADD_FAILURE() << run.what << ": layer " << l << " head " << heads[h]
                      << " should have rows 0 to " << consecutive.size() - 1;
        return;
      }
    }
  }
}

/// Whether ids differ for logits that are as large; expects them not to differ otherwise. `logits`
/// are there on rank 0 alone.
bool compare_ids(const PolicyRun& run, const std::vector<TokenId>& expected,
                 const std::vector<TokenId>& ids, const std::vector<std::vector<float>>& logits,
                 const Communicator& comm) {
  std::int64_t tied = 0;
  if (comm.is_root()) {
    const auto [ours, reference] =
        std::mismatch(ids.begin(), ids.end(), expected.begin(), expected.end());
    const std::size_t step = ours - ids.begin();
    if (ours != ids.end() && reference != expected.end()) {
      const std::vector<float>& row = logits[step];
      float largest = 0;
      for (float logit : row) largest = std::max(largest, std::fabs(logit));
      tied = row[*ours] - row[*reference] < tolerance * largest;
      EXPECT_TRUE(tied) << run.what << ": step " << step << " gives " << *ours << ", should be "
                        << *reference;
    } else {
      EXPECT_EQ(ids.size(), expected.size()) << run.what;
    }
  }
  return comm.all_reduce_max(tied) != 0;
}

struct Variant {
  int page_rows;
  bool balanced;
  int window;  // of the ring: budgets may take rows out of it
};

constexpr Variant variants[] = {
    {64, false, 128}, {16, false, 16}, {16, true, 1024}, {64, true, 48}};
constexpr int n_variants = 4;

struct Placed {
  HeadPartition partition;
  std::shared_ptr<const Model> model;
};

CacheOptions cache_options(const PolicyRun& run, const Variant& variant,
                           std::shared_ptr<const PolicyChoice> choice) {
  CacheOptions options;
  options.page_rows = variant.page_rows;
  options.pruning.mode = PruneMode::prefill;
  options.pruning.window = variant.window;
  if (run.has_threshold()) {
    options.pruning.amount.threshold = run.number();
    options.pruning.window = run.entry["window"];
    if (run.entry["prune"] == "always") options.pruning.mode = PruneMode::always;
  }
  options.policy = std::move(choice);
  options.pruning.moment = run.after_question() ? PruneMoment::question : PruneMoment::context;
  if (run.entry.contains("prefill_chunk")) {
    options.pruning.prefill = PrefillMode::sparse;
    options.pruning.chunk = run.entry["prefill_chunk"];
  }
  Pruning::DecodeCuts& cuts = options.pruning.decode;
  cuts.every = run.entry.value("decode_every", std::int64_t{0});
  if (run.entry.contains("decode_keep")) cuts.keep = run.entry["decode_keep"];
  if (run.entry.contains("decode_evict_ratio")) cuts.evict_ratio = run.entry["decode_evict_ratio"];
  return options;
}

/// One case of the index.
struct Case {
  int layers = 0;
  int heads = 0;
  std::vector<TokenId> context, question, stop_ids;
  std::int64_t max_new_tokens = 0;
  const SafetensorsFolder& file;
};

/// How far a run could be compared.
struct Outcome {
  bool compared = false;     // with what it generates
  bool other_pairs = false;  // kept, of scores as large
  bool other_id = false;     // of logits as large
};

/// Runs the texts from which the policy learns.
void learn(const PolicyRun& run, const Placed& placed, const PolicyChoice& choice,
           const std::string& model_name, const Communicator& comm) {
  const Tokenizer tokenizer = Tokenizer::load(model_dir(model_name));
  const auto texts = read_texts(choice.learner->texts(), &tokenizer, placed.model->config(), comm);
  learn_from_texts(placed.model, choice, texts, comm);
  const auto expected = run.entry["head_scores"].get<std::vector<std::vector<double>>>();
  const auto scores = dynamic_cast<const policy::MeanAttention&>(*choice.learner).scores();
  ASSERT_EQ(scores.size(), expected.size()) << run.what;
  for (std::size_t l = 0; l < expected.size(); ++l) {
    ASSERT_EQ(scores[l].size(), expected[l].size()) << run.what;
    for (std::size_t h = 0; h < expected[l].size(); ++h) {
      EXPECT_NEAR(scores[l][h], expected[l][h], head_tolerance)
          << run.what << ": layer " << l << " head " << h;
    }
  }
}

Outcome compare(const PolicyRun& run, const Case& texts, const Placed& placed,
                const Variant& variant, const ModelConfig& config, const std::string& model_name,
                const Communicator& comm) {
  const HeadPartition& partition = placed.partition;
  const auto choice =
      make_choice(run, {config, partition, DType::f32, model_dir(model_name), comm});
  if (!choice) return {};
  if (choice->learner) learn(run, placed, *choice, model_name, comm);
  const auto generator =
      Generator::create(placed.model, choice->scorer, cache_options(run, variant, choice), comm);
  ScoreRecorder recorder(texts.layers, partition, comm.rank());
  generator->set_observer(&recorder);
  generator->prefill(texts.context, false);

  Outcome outcome;
  const auto differing = [&](const Reference<std::uint8_t>& expected) {
    return gathered(differences(*generator, partition, comm.rank(), expected, texts.layers), comm,
                    texts.layers, texts.heads, expected.tokens);
  };
  const auto compare_kept = [&](std::int64_t added) {
    const Reference<std::uint8_t> kept(texts.file, run.entry["kept"], texts.layers, texts.heads);
    if (run.rerotated()) {
      compare_rerotated(run, *generator, partition, comm.rank(), kept, texts.layers, added);
      return;
    }
    const auto pairs = differing(kept);
    outcome.other_pairs = !pairs.empty();
    if (comm.is_root()) expect_ties(run, pairs);
  };
  if (!run.after_question()) compare_kept(0);

  std::vector<std::vector<float>> logits;
  AnswerOptions options;
  options.max_new_tokens = texts.max_new_tokens;
  options.stop_ids = texts.stop_ids;
  options.on_logits = [&](const std::vector<float>& row) { logits.push_back(row); };
  const Answer answer = generator->answer(texts.question, options);
  // The last generated token does not go through the model.
  if (run.after_question()) compare_kept(static_cast<std::int64_t>(answer.tokens.size()) - 1);
  compare_scores(run, recorder, partition, comm.rank());

  // What follows from another choice among equal scores is not comparable.
  if (outcome.other_pairs || (run.is_tie() && run.entry.contains("decode_every"))) return outcome;
  outcome.compared = true;
  outcome.other_id =
      compare_ids(run, ids(texts.file, run.entry["generated"]), answer.tokens, logits, comm);
  if (!outcome.other_id && run.entry.contains("kept_at_end")) {
    const Reference<std::uint8_t> at_end(texts.file, run.entry["kept_at_end"], texts.layers,
                                         texts.heads);
    const auto pairs = differing(at_end);
    EXPECT_EQ(answer.cache.tokens, at_end.tokens) << run.what;
    EXPECT_TRUE(pairs.empty()) << run.what << ": " << pairs.size() << " pairs differ at the end";
  }
  return outcome;
}

class PolicyGoldens : public ::testing::TestWithParam<std::string> {};

TEST_P(PolicyGoldens, EveryRun) {
  const std::string name = GetParam();
  const Communicator comm = Communicator::world();
  const ModelConfig config = ModelConfig::load(model_dir(name));
  const int heads = static_cast<int>(config.num_key_value_heads);
  const int layers = static_cast<int>(config.num_hidden_layers);
  std::vector<Placed> placed;  // evenly, balanced
  for (const auto& partition :
       {HeadPartition::even(layers, heads, comm.size()),
        HeadPartition::balanced(golden::uneven_rows(layers, heads), comm.size())}) {
    placed.push_back(
        {partition, std::make_shared<const Model>(
                        Model::load(model_dir(name), config, DType::f32, partition, comm.rank()))});
  }

  int n_runs = 0, n_ties = 0, n_other_pairs = 0, n_other_ids = 0;
  int index = 0;
  const auto folder = golden_dir / "policies";
  for (const auto& item : nlohmann::json::parse(std::ifstream(folder / (name + ".json")))) {
    const auto ids_file = SafetensorsFolder::open(golden_dir / item["texts"].get<std::string>());
    const auto file = SafetensorsFolder::open(folder / item["file"].get<std::string>());
    const Case texts{layers,
                     heads,
                     ids(ids_file, "context_ids"),
                     ids(ids_file, "question_ids"),
                     load_stop_ids(model_dir(name), config.vocab_size),
                     item["max_new_tokens"].get<std::int64_t>(),
                     file};
    for (const auto& entry : item["runs"]) {
      const Variant& variant = variants[(index++ + comm.size()) % n_variants];
      PolicyRun run;
      run.entry = entry;
      run.what = fmt::format("{} case {} {} window {} pages of {}", name, item["case"].get<int>(),
                             entry["name"].get<std::string>(), variant.window, variant.page_rows);
      if (entry.contains("scores")) {
        run.scores.emplace(file, entry["scores"].get<std::string>(), layers, heads);
        run.largest = entry["largest"].get<std::vector<double>>();
      }
      Outcome outcome;
      try {
        outcome = compare(run, texts, placed[variant.balanced], variant, config, name, comm);
      } catch (const Error& error) {
        ADD_FAILURE() << run.what << ": " << error.what();
      }
      ++n_runs;
      n_ties += run.is_tie() && !outcome.compared;
      n_other_pairs += !run.is_tie() && !outcome.compared;
      n_other_ids += outcome.other_id;
    }
  }
  RecordProperty("runs", n_runs);
  RecordProperty("ties", n_ties);
  RecordProperty("not_compared_after_choice", n_other_pairs);
  RecordProperty("not_compared_to_the_end", n_other_ids);
  if (comm.is_root()) {
    std::printf(
        "%s: %d runs; ids not compared of %d marked as ties, and of %d others; not "
        "compared to the end of %d, for logits as large\n",
        name.c_str(), n_runs, n_ties, n_other_pairs, n_other_ids);
  }
  EXPECT_LE(n_other_pairs + n_other_ids, largest_share_not_compared * n_runs);
}

INSTANTIATE_TEST_SUITE_P(Models, PolicyGoldens,
                         ::testing::Values("recall-4m", "llama-random", "qwen2-random"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace kvzap
