// Comparisons against what they stand for: of each setting a generator of its own, whose rows and
// tokens have to be the same, whatever else is compared beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/engine/comparison.hpp>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "allocations.hpp"
#include "safetensors_writer.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;

constexpr int compared_layers = 3;
constexpr int compared_heads = 4;
constexpr int compared_words = 97;  // of the vocabulary
constexpr int compared_hidden = 40;
constexpr int compared_dim = 16;

ModelConfig compared_config() {
  ModelConfig config{};
  config.architecture = "LlamaForCausalLM";
  config.hidden_size = compared_hidden;
  config.intermediate_size = 48;
  config.num_hidden_layers = compared_layers;
  config.num_attention_heads = compared_heads * 2;
  config.num_key_value_heads = compared_heads;
  config.head_dim = compared_dim;
  config.vocab_size = compared_words;
  config.max_position_embeddings = 4096;
  config.rms_norm_eps = 1e-6;
  config.rope_theta = 10000;
  return config;
}

std::vector<TokenId> compared_tokens(int count, int seed) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  std::uint32_t state = 17U + static_cast<std::uint32_t>(seed);
  for (TokenId& token : tokens) {
    state = state * 1664525U + 1013904223U;
    token = static_cast<TokenId>((state >> 10) % compared_words);
  }
  return tokens;
}

/// What policies read from files.
class PolicyFiles {
 public:
  explicit PolicyFiles(const Communicator& comm)
      : m_comm(comm),
        m_folder(fs::temp_directory_path() /
                 ("kvzap-comparison-" + std::to_string(comm.size()) + "-" + stamp(comm))) {
    comm.agree_on_root([&] { write(); });
  }
  PolicyFiles(const PolicyFiles&) = delete;
  PolicyFiles& operator=(const PolicyFiles&) = delete;
  ~PolicyFiles() {
    m_comm.barrier();
    std::error_code ignored;
    if (m_comm.is_root()) fs::remove_all(m_folder, ignored);
  }

  std::string surrogate() const { return (m_folder / "surrogate").string(); }
  /// A policy's name with the files that it needs.
  std::string text(const std::string& name) const {
    if (name == "kvzap") return name + ":surrogate=" + surrogate();
    if (name == "qfilter") return name + ":filters=" + (m_folder / "filters.safetensors").string();
    if (name == "fastkvzip") return name + ":gates=" + (m_folder / "gates.safetensors").string();
    if (name == "trim-kv") return name + ":gates=" + (m_folder / "retention.safetensors").string();
    if (name == "duo-attention") {
      return name + ":pattern=" + (m_folder / "pattern").string() + ",head-evict-ratio=0.5";
    }
    return name;
  }

 private:
  static std::string stamp(const Communicator& comm) {
    auto now =
        static_cast<std::int64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    comm.broadcast(&now, sizeof(now), 0);
    return std::to_string(now);
  }

  test::StoredTensor random(const std::vector<std::int64_t>& shape, float scale = 1) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) {
      m_state = m_state * 1664525U + 1013904223U;
      value = scale * (static_cast<float>(m_state >> 8) / 8388608.0F - 1);
    }
    return test::stored_tensor("F32", shape, values);
  }

  void write() {
    fs::create_directories(m_folder / "surrogate");
    fs::create_directories(m_folder / "pattern");
    std::map<std::string, test::StoredTensor> surrogate, gates, retention;
    std::ofstream shares(m_folder / "pattern" / "full_attention_heads.tsv");
    for (int l = 0; l < compared_layers; ++l) {
      const std::string layer = std::to_string(l) + ".";
      surrogate["layers." + layer + "weight"] = random({compared_heads, compared_hidden});
      surrogate["layers." + layer + "bias"] = random({compared_heads});
      gates[layer + "q_proj.weight"] = random({compared_heads * 2 * 8, compared_hidden});
      gates[layer + "q_proj.bias"] = random({compared_heads * 2 * 8});
      gates[layer + "k_proj.weight"] = random({compared_heads * 8, compared_hidden});
      gates[layer + "q_norm.weight"] = random({8});
      gates[layer + "k_norm.weight"] = random({8});
      gates[layer + "k_base"] = random({compared_heads, 1, 3, 8});
      gates[layer + "b"] = random({compared_heads, 1, 2});
      const std::string gate = "model.layers." + layer + "self_attn.retention_gate.";
      retention[gate + "linear1.weight"] = random({7, compared_hidden});
      retention[gate + "linear1.bias"] = random({7});
      retention[gate + "linear2.weight"] = random({compared_heads, 7});
      retention[gate + "bias"] = random({compared_heads});
      for (int h = 0; h < compared_heads; ++h) {
        shares << (h > 0 ? "\t" : "") << 0.1 * ((5 * l + 3 * h) % 7);
      }
      shares << "\n";
    }
    test::write_safetensors(m_folder / "surrogate" / "model.safetensors", surrogate);
    test::write_safetensors(m_folder / "gates.safetensors", gates);
    test::write_safetensors(m_folder / "retention.safetensors", retention);
    test::write_safetensors(
        m_folder / "filters.safetensors",
        {{"q_filters", random({compared_layers, compared_heads, compared_dim})}});
    std::ofstream(m_folder / "surrogate" / "config.json")
        << R"({"hidden_dim": null, "input_dim": )" << compared_hidden << R"(, "n_modules": )"
        << compared_layers << R"(, "output_dim": )" << compared_heads << "}";
    std::ofstream(m_folder / "pattern" / "config.json") << R"({"sink_size": 3, "recent_size": 20})";
  }

  Communicator m_comm;
  fs::path m_folder;
  std::uint32_t m_state = 5;
};

using Rows = std::map<std::pair<int, int>, std::vector<std::int64_t>>;

class Comparisons : public ::testing::Test {
 protected:
  Comparisons()
      : comm(Communicator::world()),
        partition(HeadPartition::even(compared_layers, compared_heads, comm.size())),
        model(std::make_shared<const Model>(
            Model::load("", config, DType::f32, partition, comm.rank(), {3}))),
        files(comm) {
    options.pruning.window = 8;
    options.page_rows = 4;
    options.pruning.chunk = 37;
    options.pruning.sink = 2;
  }

  std::shared_ptr<const PolicyChoice> choice(const std::string& text,
                                             std::optional<double> evict_ratio,
                                             std::optional<double> threshold = {}) const {
    Budget budget;
    if (evict_ratio) {
      budget.amount = Budget::Amount::evict_ratio;
      budget.evict_ratio = *evict_ratio;
    }
    const PolicySetup setup{config, partition, DType::f32, {}, comm};
    auto made =
        std::make_shared<PolicyChoice>(make_policy(parse_policy(text), budget, threshold, setup));
    made->repeat.first = {1, 2, 3};
    made->repeat.later = {4, 5, 6, 7};
    made->repeat.suffix = {8};
    made->repeat.prefix = 2;
    return made;
  }
  void add(const std::string& text, std::optional<double> evict_ratio,
           std::optional<double> threshold = {}, PruneMode prune = PruneMode::prefill,
           PrefillMode prefill = PrefillMode::dense) {
    LoadedPruning setting = options;
    setting.policy = choice(text, evict_ratio, threshold);
    setting.pruning.mode = prune;
    setting.pruning.prefill = prefill;
    if (setting.policy->info->needs_question) setting.pruning.moment = PruneMoment::question;
    settings.push_back(setting);
  }
  void add_question(const std::string& text, double evict_ratio) {
    add(text, evict_ratio);
    settings.back().pruning.moment = PruneMoment::question;
  }

  /// A setting of each kind; with `stride`, every so many of them. (Ranks that wait for one another
  /// take long on a busy machine.)
  void add_all(std::size_t stride = 1) {
    settings.emplace_back();
    for (const PolicyInfo& info : policies()) {
      if (info.has_own_budget) {
        add(files.text(info.name), {});
        continue;
      }
      for (const double ratio : {0.4, 0.75}) add(files.text(info.name), ratio);
    }
    for (const double ratio : {0.4, 0.75}) {
      for (const char* text :
           {"snapkv+ada", "knorm+global", "snapkv:window=5+pyramid", "keydiff+rerotate",
            "keydiff+merge+ada", "h2o+critical", "keydiff+critical+ada",
            "streaming-llm+chunk:length=20", "keydiff+chunk:length=25", "keydiff+chunkkv:length=7",
            "snapkv:window=5+kvcrush", "h2o:local=on", "compactor:blending=0.3",
            "kvzip:layerwise=on", "kvzip:chunk=40,sink=6", "kvzip:chunk=40+fit:queries=50",
            "kvcompose+fit"}) {
        add(text, ratio);
      }
      for (const char* text : {"snapkv", "expected-attention", "tova+ada"}) {
        add_question(text, ratio);
      }
    }
    for (const PruneMode prune : {PruneMode::prefill, PruneMode::always}) {
      add(files.text("kvzap"), {}, -0.5, prune);
      add("knorm+dms", {}, -0.55, prune);
    }
    add("simlayerkv:lazy-threshold=0.2,recent=24", {});
    add("snapkv+dms:threshold=0.01", {});
    add("snapkv", 0.5, {}, PruneMode::prefill, PrefillMode::sparse);
    add(files.text("kvzap"), {}, 0, PruneMode::always, PrefillMode::sparse);
    for (const char* text : {"knorm+global", "finch", "finch+rerotate", "finch+ada"}) {
      add(text, 0.5, {}, PruneMode::prefill, PrefillMode::sparse);
    }
    std::vector<LoadedPruning> some;
    for (std::size_t s = 0; s < settings.size(); s += stride) some.push_back(settings[s]);
    settings = some;
  }

  std::unique_ptr<Engine> plain_engine(std::size_t kv_limit = 0) const {
    CacheOptions plain = options;
    plain.kv_limit = kv_limit;
    return Engine::create(model, nullptr, plain, comm);
  }
  std::unique_ptr<Generator> generator(const LoadedPruning& setting) const {
    CacheOptions with = options;
    static_cast<LoadedPruning&>(with) = setting;
    return Generator::create(model, setting.policy ? setting.policy->scorer : nullptr, with, comm);
  }

  Rows rows_of(Engine& engine, SequenceId sequence) const {
    Rows rows;
    engine.gather_pages(sequence);
    for (int l = 0; l < compared_layers; ++l) {
      const auto& heads = partition.heads(l, comm.rank());
      for (std::size_t h = 0; h < heads.size(); ++h) {
        rows[{l, heads[h]}] = engine.positions(sequence, l, static_cast<int>(h));
      }
    }
    return rows;
  }
  static std::string label(const LoadedPruning& setting) {
    if (!setting.policy) return "none";
    return setting.policy->name + " " + setting.policy->budget.text() + " " +
           std::string(name_of(setting.mode())) + " " +
           std::string(name_of(setting.pruning.prefill)) +
           (setting.pruning.moment == PruneMoment::question ? " question" : "");
  }

  /// What generators of their own say, with the default options of `options`.
  std::vector<Answer> expected(const ComparisonOptions& how, const std::vector<TokenId>& text) {
    std::vector<Answer> answers;
    for (const LoadedPruning& setting : settings) {
      const auto run = generator(setting);
      run->prefill(context, false);
      AnswerOptions one;
      one.max_new_tokens = how.max_new_tokens;
      one.stop_ids = how.stop_ids;
      one.max_tokens = how.max_tokens;
      one.sampling = how.sampling;
      answers.push_back(run->answer(text, one));
    }
    return answers;
  }
  void expect_same(const std::vector<SettingAnswer>& got, const std::vector<Answer>& wanted) const {
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t s = 0; s < got.size(); ++s) {
      SCOPED_TRACE(label(settings[s]));
      EXPECT_EQ(got[s].tokens.at(0), wanted[s].tokens);
      EXPECT_EQ(got[s].stop_reasons.at(0), wanted[s].stop_reason);
      EXPECT_EQ(got[s].pruned.kept, wanted[s].pruned.kept);
      EXPECT_EQ(got[s].pruned.tokens, wanted[s].pruned.tokens);
      EXPECT_EQ(got[s].pruned.full_bytes, wanted[s].pruned.full_bytes);
      EXPECT_EQ(got[s].pruned.live_bytes, wanted[s].pruned.live_bytes);
      EXPECT_EQ(got[s].pruned.non_finite_scores, wanted[s].pruned.non_finite_scores);
    }
  }

  Communicator comm;
  ModelConfig config = compared_config();
  HeadPartition partition;
  std::shared_ptr<const Model> model;
  PolicyFiles files;
  CacheOptions options;
  std::vector<LoadedPruning> settings;
  std::vector<TokenId> context = compared_tokens(130, 0);
  std::vector<TokenId> question = compared_tokens(9, 1);
  ComparisonOptions how;
};

// One reading of the context leaves each setting the rows that it would have had alone.
TEST_F(Comparisons, PruneTheSameRows) {
  add_all();
  const auto engine = plain_engine();
  for (const PrefillShare share : {PrefillShare::context, PrefillShare::whole}) {
    const bool is_whole = share == PrefillShare::whole;
    std::vector<std::shared_ptr<const PolicyChoice>> shared;
    std::vector<LoadedPruning> members;
    for (const LoadedPruning& setting : settings) {
      if (!setting.policy || prefill_share(setting) != share) continue;
      members.push_back(setting);
      shared.push_back(setting.policy);
    }
    std::vector<TokenId> tokens = context;
    if (is_whole) tokens.insert(tokens.end(), question.begin(), question.end());
    const SequenceId dense = engine->add_sequence();
    const auto asked = static_cast<std::int64_t>(is_whole ? question.size() : 0);
    const auto reading = engine->read(dense, tokens, asked, shared, StepOutput::none);
    for (std::size_t i = 0; i < members.size(); ++i) {
      SCOPED_TRACE(label(members[i]));
      const SequenceId pruned = engine->prune(dense, members[i], reading.scores[i].get());
      const auto alone = generator(members[i]);
      Engine& own = alone->engine();
      const SequenceId sequence = own.add_sequence();
      own.step(StepBatch(sequence, tokens,
                         own.rule(is_whole ? StepPart::whole : StepPart::context, asked),
                         StepOutput::none));
      own.end_context(sequence);
      EXPECT_EQ(rows_of(*engine, pruned), rows_of(own, sequence));
      EXPECT_EQ(engine->tokens(pruned), own.tokens(sequence));
      engine->free_sequence(pruned);
    }
    // The context is as it was, and what no sequence needs is free.
    EXPECT_EQ(engine->report(dense).evict_ratio(), 0);
    engine->free_sequence(dense);
  }
  EXPECT_EQ(engine->report(engine->add_sequence()).live_bytes, 0);
}

/// The share of rows that only one of two sequences has.
double differing(const Rows& a, const Rows& b) {
  std::int64_t all = 0;
  std::vector<std::int64_t> rows;
  for (const auto& [head, own] : a) {
    all += static_cast<std::int64_t>(own.size() + b.at(head).size());
    std::set_symmetric_difference(own.begin(), own.end(), b.at(head).begin(), b.at(head).end(),
                                  std::back_inserter(rows));
  }
  return all == 0 ? 0 : static_cast<double>(rows.size()) / static_cast<double>(all);
}

// Parts shorter than the newest queries that a policy reads, too, and with others between them.
TEST_F(Comparisons, ContextsInPartsKeepTheSameRows) {
  add_all(comm.size() == 1 ? 1 : 5);
  add("scissorhands", 0.5);
  settings.back().pruning.decode = {4, 30, {}};
  int taken = 0;
  for (const LoadedPruning& setting : settings) {
    if (!plain_engine()->takes_parts(setting)) continue;
    SCOPED_TRACE(label(setting));
    ++taken;
    const auto run = generator(setting);
    Engine& engine = run->engine();
    std::vector<SequenceId> sequences;
    for (const std::vector<std::size_t>& ends :
         {std::vector<std::size_t>{130}, {50, 61, 62, 130}, {128, 130}}) {
      const SequenceId sequence = sequences.emplace_back(engine.add_sequence());
      for (std::size_t i = 0; i < ends.size(); ++i) {
        const bool is_last = i + 1 == ends.size();
        const std::vector<TokenId> part(context.begin() + (i == 0 ? 0 : ends[i - 1]),
                                        context.begin() + ends[i]);
        engine.step(StepBatch(sequence, part,
                              engine.rule(sequence, is_last ? StepPart::context : StepPart::held),
                              StepOutput::none));
        if (is_last) break;
        EXPECT_EQ(engine.report(sequence).evict_ratio(), 0);
        const SequenceId other = engine.add_sequence();
        engine.step(
            StepBatch(other, question, engine.rule(other, StepPart::context), StepOutput::none));
        engine.free_sequence(other);
      }
      engine.end_context(sequence);
    }
    for (const auto& text : {question, std::vector<TokenId>{5}, {6}, {7}}) {
      StepBatch step;
      for (const SequenceId sequence : sequences) {
        // The sums of longer parts have another order, and some scores nearly tie.
        EXPECT_LT(differing(rows_of(engine, sequence), rows_of(engine, sequences[0])), 0.01);
        EXPECT_EQ(engine.tokens(sequence), engine.tokens(sequences[0]));
        step.add(sequence, text, engine.rule(sequence, StepPart::question), StepOutput::none);
      }
      engine.step(step);
    }
  }
  EXPECT_GT(taken, comm.size() == 1 ? 30 : 5);
}

// One engine, one step, and each sequence is pruned in its own way; forks as what they were forked
// from.
TEST_F(Comparisons, SequencesHaveSettingsOfTheirOwn) {
  settings.emplace_back();
  for (const char* text : {"snapkv", "keydiff+ada", "keydiff+rerotate", "kvzip", "knorm+global"}) {
    add(text, 0.5);
  }
  add(files.text("kvzap"), {}, 0, PruneMode::always);
  const std::shared_ptr<Scorer> scorer = settings.back().policy->scorer;
  add(files.text("kvzap"), {}, -0.5, PruneMode::prefill);  // another object of the same kind
  add("knorm+dms", {}, -0.55, PruneMode::always);
  const auto engine = Engine::create(model, scorer, options, comm);
  StepBatch step;
  std::vector<SequenceId> sequences;
  for (const LoadedPruning& setting : settings) {
    sequences.push_back(engine->add_sequence());
    engine->set_pruning(sequences.back(), setting);
    step.add(sequences.back(), context, engine->rule(sequences.back(), StepPart::context),
             StepOutput::none);
  }
  engine->step(step);
  step.clear();
  for (SequenceId& sequence : sequences) {
    engine->end_context(sequence);
    EXPECT_THROW(engine->set_pruning(sequence, settings[1]), Error);
    const SequenceId copy = engine->fork(sequence);
    engine->free_sequence(sequence);
    sequence = copy;
    step.add(sequence, question, engine->rule(sequence, StepPart::question), StepOutput::argmax);
  }
  const auto results = engine->step(step);
  for (std::size_t s = 0; s < settings.size(); ++s) {
    SCOPED_TRACE(label(settings[s]));
    const auto run = generator(settings[s]);
    run->prefill(context, false);
    AnswerOptions one;
    one.max_new_tokens = 1;
    EXPECT_EQ(run->answer(question, one).tokens.at(0), results[s].argmax);
    EXPECT_EQ(rows_of(*engine, sequences[s]), rows_of(run->engine(), run->sequence()));
  }
}

TEST_F(Comparisons, AnswerAsGeneratorsOfTheirOwn) {
  add_all(comm.size() == 1 ? 1 : 5);
  how.max_new_tokens = 6;
  const auto wanted = expected(how, question);
  std::set<std::vector<TokenId>> different;
  for (const Answer& answer : wanted) different.insert(answer.tokens);
  EXPECT_GT(different.size(), comm.size() == 1 ? 8U : 2U);  // or nothing would be compared
  const auto without = expected(how, {});
  const std::vector<TokenId> other = compared_tokens(14, 3);
  for (const std::int64_t batch : {0, 3, 1}) {
    Comparison comparison(plain_engine(), settings, batch);
    // A context before, another question before: nothing of them stays.
    comparison.prefill(compared_tokens(21, 2));
    comparison.prefill(context);
    if (batch == 0) {
      comparison.answer(other, how);
      expect_same(comparison.answer({}, how), without);
    }
    const auto answers = comparison.answer(question, how);
    expect_same(answers, wanted);
    for (const SettingAnswer& answer : answers) {
      EXPECT_GT(answer.prefill_seconds, 0);
      EXPECT_GT(answer.decode_seconds, 0);
    }
  }
  // In another order.
  std::reverse(settings.begin(), settings.end());
  Comparison reversed(plain_engine(), settings, 7);
  reversed.prefill(context);
  auto answers = reversed.answer(question, how);
  std::reverse(answers.begin(), answers.end());
  std::reverse(settings.begin(), settings.end());
  expect_same(answers, wanted);
}

// Contexts of which nothing has left the ring, and questions that are longer than it.
// Settings that cut while they answer read the context by themselves, beside settings that share
// it.
TEST_F(Comparisons, CutWhileTheyAnswer) {
  how.max_new_tokens = 30;
  add("snapkv", 0.5);
  for (const char* text : {"h2o", "r-kv:window=4", "tova+ada", "scissorhands"}) {
    for (const PrefillMode prefill : {PrefillMode::dense, PrefillMode::sparse}) {
      add(text, 0.5, {}, PruneMode::prefill, prefill);
      settings.back().pruning.decode = {4, 30, {}};
    }
  }
  Comparison comparison(plain_engine(), settings);
  comparison.prefill(context);
  const auto answers = comparison.answer(question, how);
  expect_same(answers, expected(how, question));
  for (std::size_t s = 1; s < answers.size(); ++s) {
    for (const auto& layer : answers[s].cache.kept) {
      for (const auto rows : layer) EXPECT_LT(rows, 30 + 4 + 8) << label(settings[s]);
    }
  }
  settings.back().pruning.moment = PruneMoment::question;
  EXPECT_THROW(Comparison(plain_engine(), settings), Error);
}

TEST_F(Comparisons, AnswerAboutShortContexts) {
  settings.emplace_back();
  for (const char* text :
       {"snapkv", "keydiff+ada", "knorm+global", "keydiff+rerotate", "h2o", "knorm+merge"}) {
    add(text, 0.75);
  }
  // Of which nothing goes.
  const auto all_stays = std::make_shared<PolicyChoice>(*choice("keydiff+rerotate", 0.5));
  all_stays->budget.amount = Budget::Amount::keep_tokens;
  all_stays->budget.keep_tokens = 20;
  settings.push_back(options);
  settings.back().policy = all_stays;
  settings.push_back(settings.back());
  settings.back().pruning.prefill = PrefillMode::sparse;
  add_question("tova", 0.5);
  for (const char* text : {"finch", "finch+rerotate"}) {
    add(text, 0.5, {}, PruneMode::prefill, PrefillMode::sparse);
  }
  for (const PruneMode prune : {PruneMode::prefill, PruneMode::always}) {
    add(files.text("kvzap"), {}, -0.5, prune);
    add("knorm+dms", {}, -0.55, prune);
  }
  how.max_new_tokens = 4;
  options.pruning.chunk = 5;
  for (const int tokens : {1, 8, 9, 17}) {
    SCOPED_TRACE(tokens);
    context = compared_tokens(tokens, 0);
    Comparison comparison(plain_engine(), settings);
    comparison.prefill(context);
    for (const int asked : {0, 30}) {
      SCOPED_TRACE(asked);
      question = compared_tokens(asked, 1);
      expect_same(comparison.answer(question, how), expected(how, question));
    }
  }
}

/// Scores by position alone, some of which are no numbers.
class OddScores final : public Policy {
 public:
  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto host = Kokkos::create_mirror_view(scores);
    for (int h = 0; h < layer.heads(); ++h) {
      const auto positions =
          Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, layer.positions(h));
      for (std::int64_t row = 0; row < layer.rows(h); ++row) {
        const std::int64_t position = positions(row);
        const auto score = static_cast<float>((37 * position + layer.extents().heads[h]) % 101);
        const bool is_odd = position % 7 == 3 || position % 11 == 5;
        host(h, row) = !is_odd             ? score
                       : position % 7 == 3 ? std::numeric_limits<float>::quiet_NaN()
                                           : -std::numeric_limits<float>::infinity();
      }
    }
    Kokkos::deep_copy(scores, host);
  }
};

// What is no number stays, and is counted as it is without a comparison, whoever has marked sinks
// in the same scores before.
TEST_F(Comparisons, CountScoresThatAreNoNumbers) {
  PolicyInfo info = *choice("knorm", 0.5)->info;
  info.judges_tokens = true;
  const auto add_odd = [&](std::optional<double> ratio, Budget::Pool pool, PruneMode prune) {
    const auto odd = std::make_shared<PolicyChoice>();
    odd->name = "odd";
    odd->info = &info;
    odd->make = [] { return std::make_unique<OddScores>(); };
    odd->budget.amount = ratio ? Budget::Amount::evict_ratio : Budget::Amount::none;
    odd->budget.evict_ratio = ratio.value_or(0);
    odd->budget.pool = pool;
    odd->threshold = 50;
    settings.push_back(options);
    settings.back().policy = odd;
    settings.back().pruning.mode = prune;
  };
  for (const auto pool : {Budget::Pool::head, Budget::Pool::layer, Budget::Pool::model}) {
    for (const double ratio : {0.3, 0.9}) add_odd(ratio, pool, PruneMode::prefill);
  }
  add_odd({}, Budget::Pool::head, PruneMode::prefill);
  add_odd({}, Budget::Pool::head, PruneMode::always);
  how.max_new_tokens = 12;
  for (const std::int64_t sink : {0, 9}) {
    SCOPED_TRACE(sink);
    options.pruning.sink = sink;
    Comparison comparison(plain_engine(), settings);
    comparison.prefill(context);
    const auto answers = comparison.answer(question, how);
    expect_same(answers, expected(how, question));
    for (const SettingAnswer& answer : answers) EXPECT_GT(answer.pruned.non_finite_scores, 0);
  }
}

// A repeated context costs those that ask for it, however many do; the reading costs all.
TEST_F(Comparisons, TakeTheTimeOfTheReadingFromNoOne) {
  settings.emplace_back();
  add("knorm", 0.5);
  for (const char* text : {"kvzip", "kvzip:layerwise=on", "kvzip:sink=5", "kvzip:sink=6"}) {
    add(text, 0.5);
  }
  how.max_new_tokens = 1;
  Comparison comparison(plain_engine(), settings);
  comparison.prefill(context);
  const auto answers = comparison.answer(question, how);
  const auto reading = [&](std::size_t setting) {
    const SettingAnswer& answer = answers.at(setting);
    return answer.prefill_seconds - answer.pruned.score_seconds - answer.pruned.prune_seconds;
  };
  EXPECT_GT(reading(0), 1e-6);
  for (std::size_t s = 1; s < settings.size(); ++s) EXPECT_NEAR(reading(s), reading(0), 1e-9);
}

// Sequences leave when they are done, each for its own reason.
TEST_F(Comparisons, StopWhereGeneratorsStop) {
  settings.emplace_back();
  for (const double ratio : {0.3, 0.6, 0.8}) add("snapkv", ratio);
  add("keydiff+rerotate", 0.5);  // has more positions left
  how.max_new_tokens = 20;
  how.max_tokens = static_cast<std::int64_t>(context.size() + question.size()) + 8;
  how.stop_ids = {expected(how, question)[2].tokens.at(4), compared_words - 1};
  Comparison comparison(plain_engine(), settings);
  comparison.prefill(context);
  expect_same(comparison.answer(question, how), expected(how, question));
  how.max_new_tokens = 0;
  expect_same(comparison.answer(question, how), expected(how, question));
}

TEST_F(Comparisons, DrawSeveralTries) {
  settings.emplace_back();
  add("snapkv", 0.5);
  add_question("snapkv", 0.5);
  how.max_new_tokens = 5;
  how.sampling.temperature = 1.5;
  how.sampling.seed = 11;
  how.tries = 3;
  std::vector<std::vector<Answer>> wanted;
  for (int t = 0; t < how.tries; ++t) {
    ComparisonOptions one = how;
    one.sampling.seed += static_cast<std::uint64_t>(t);
    wanted.push_back(expected(one, question));
  }
  for (const std::int64_t batch : {0, 2, 1}) {
    Comparison comparison(plain_engine(), settings, batch);
    comparison.prefill(context);
    const auto got = comparison.answer(question, how);
    for (std::size_t s = 0; s < settings.size(); ++s) {
      SCOPED_TRACE(label(settings[s]));
      ASSERT_EQ(got[s].tokens.size(), 3U);
      EXPECT_EQ(got[s].pruned.kept, wanted[0][s].pruned.kept);
      for (std::size_t t = 0; t < 3; ++t) EXPECT_EQ(got[s].tokens[t], wanted[t][s].tokens);
    }
  }
  how.sampling.temperature = 0;
  Comparison greedy(plain_engine(), settings);
  greedy.prefill(context);
  const auto same = greedy.answer(question, how);
  EXPECT_EQ(same[1].tokens, std::vector<std::vector<TokenId>>(3, same[1].tokens[0]));
}

// Penalties know the context, the question, wherever it is run, and what has been answered.
TEST_F(Comparisons, PenalizeWhatThereIs) {
  settings.emplace_back();
  add("snapkv", 0.5);
  add_question("snapkv", 0.5);
  const auto plain = expected(how, question);
  how.sampling.repetition_penalty = 1.5;
  how.sampling.frequency_penalty = 0.5;
  how.sampling.suppress_tokens = {plain[0].tokens[0]};
  how.sampling.bad_words = {{question.back(), plain[1].tokens[0]}};
  const auto wanted = expected(how, question);
  EXPECT_NE(wanted[0].tokens, plain[0].tokens);
  Comparison comparison(plain_engine(), settings);
  comparison.prefill(context);
  expect_same(comparison.answer(question, how), wanted);
}

// The likelihood of given tokens is that of single steps' logits, however many run together.
TEST_F(Comparisons, WeighContinuations) {
  add_all(comm.size() == 1 ? 1 : 5);
  how.continuation = compared_tokens(70, 5);
  std::set<double> different;
  Comparison comparison(plain_engine(), settings);
  comparison.prefill(context);
  const auto got = comparison.answer(question, how);
  for (std::size_t s = 0; s < settings.size(); ++s) {
    SCOPED_TRACE(label(settings[s]));
    EXPECT_EQ(got[s].tokens.at(0), how.continuation);
    std::vector<double> wanted;
    const auto run = generator(settings[s]);
    run->prefill(context, false);
    AnswerOptions first;
    first.max_new_tokens = 1;
    const auto weigh = [&](const std::vector<float>& logits) {
      if (logits.empty()) return;
      double sum = 0;
      for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
      wanted.push_back(logits[static_cast<std::size_t>(how.continuation[wanted.size()])] -
                       std::log(sum));
    };
    first.on_logits = weigh;
    run->answer(question, first);
    Engine& engine = run->engine();
    for (std::size_t i = 0; i + 1 < how.continuation.size(); ++i) {
      weigh(engine
                .step(StepBatch(run->sequence(), {how.continuation[i]},
                                engine.rule(StepPart::generated), StepOutput::logits))
                .front()
                .logits);
    }
    ASSERT_EQ(got[s].log_probabilities.size(), how.continuation.size());
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_NEAR(got[s].log_probabilities[i], wanted[i], 2e-6) << i;
    }
    different.insert(std::round(got[s].log_probabilities[4] * 1e4));
  }
  EXPECT_GT(different.size(), settings.size() / 2);  // or nothing would be compared
}

// As many at a time as there is room for.
TEST_F(Comparisons, WavesShrinkWithoutMemory) {
  settings.emplace_back();
  for (const double ratio : {0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}) add("snapkv", ratio);
  how.max_new_tokens = 6;
  const auto wanted = expected(how, question);
  const auto bytes = [&](std::int64_t sequences) {
    // Rings, and pages of all rows.
    const std::int64_t heads = partition.heads(0, comm.rank()).size() * compared_layers;
    const auto row = static_cast<std::int64_t>(page_row_bytes(compared_dim, sizeof(float)));
    return static_cast<std::size_t>(sequences * heads * 160 * row);
  };
  Comparison roomy(plain_engine(bytes(4)), settings);
  roomy.prefill(context);
  expect_same(roomy.answer(question, how), wanted);
  Comparison tight(plain_engine(bytes(1)), settings);
  tight.prefill(context);
  EXPECT_THROW(tight.answer(question, how), AgreedOutOfMemory);
  // It can go on.
  tight.prefill(compared_tokens(30, 2));
  EXPECT_EQ(tight.answer({}, how).size(), settings.size());
}

// Wherever memory runs out: what is at hand can be asked again, or nothing is left of it.
TEST_F(Comparisons, LeaveNothingBehindWithoutMemory) {
  if (comm.size() > 1) GTEST_SKIP() << "allocations fail on one rank alone";
  settings.emplace_back();
  for (const char* text : {"snapkv", "keydiff+ada", "keydiff+rerotate", "kvzip"}) add(text, 0.5);
  add("knorm+dms", {}, -0.55, PruneMode::always);
  add_question("tova", 0.5);
  how.max_new_tokens = 3;
  const auto wanted = expected(how, question);
  Comparison comparison(plain_engine(), settings);
  Engine& engine = comparison.engine();
  const auto live = [&] {
    const SequenceId probe = engine.add_sequence();
    const std::int64_t bytes = engine.report(probe).live_bytes;
    engine.free_sequence(probe);
    return bytes;
  };
  std::int64_t failures = 0;
  for (std::int64_t n = 0;; n += 29) {
    bool has_context = false, has_answers = false;
    try {
      const test::FailingAllocation failing(n);
      comparison.prefill(context);
      has_context = true;
      comparison.answer(question, how);
      has_answers = true;
    } catch (const std::exception&) {
      ++failures;
    }
    const std::int64_t row = 2 * compared_dim * static_cast<std::int64_t>(sizeof(float));
    ASSERT_EQ(live(), !has_context ? 0
                                   : static_cast<std::int64_t>(context.size()) * compared_layers *
                                         compared_heads * row)
        << n;
    if (!has_context) comparison.prefill(context);
    if (n % 5 == 0) expect_same(comparison.answer(question, how), wanted);
    if (has_answers && n > 2000) break;
    ASSERT_LT(n, 100000);
  }
  EXPECT_GT(failures, 30);
}

// What is no reading of all rows of a sequence prunes nothing.
TEST_F(Comparisons, NeedScoresOfAllRows) {
  add("knorm", 0.5);
  add("expected-attention", 0.5);
  const auto engine = plain_engine();
  const SequenceId sequence = engine->add_sequence();
  const auto reading = engine->read(sequence, context, 0, {settings[0].policy}, StepOutput::none);
  EXPECT_THROW(engine->prune(sequence, settings[0], nullptr), Error);
  ContextScores few = *reading.scores[0];
  few.layers.pop_back();
  EXPECT_THROW(engine->prune(sequence, settings[0], &few), Error);
  engine->step(StepBatch(sequence, question, StepRule(), StepOutput::none));
  EXPECT_THROW(engine->prune(sequence, settings[0], reading.scores[0].get()), Error);
  // A reading does not leave what later cuts need.
  const SequenceId other = engine->add_sequence();
  const auto read = engine->read(other, context, 0, {settings[0].policy}, StepOutput::none);
  LoadedPruning cutting = settings[0];
  cutting.pruning.decode.every = 4;
  cutting.pruning.decode.keep = 20;
  EXPECT_THROW(engine->prune(other, cutting, read.scores[0].get()), Error);
  EXPECT_NO_THROW(engine->prune(other, settings[0], read.scores[0].get()));
  // Where frequencies depend on the length, no policy turns by them.
  ModelConfig grows = config;
  grows.rope_scaling = rope_scaling_by_factor(config, RopeType::dynamic, 2);
  model = std::make_shared<const Model>(
      Model::load("", grows, DType::f32, partition, comm.rank(), {3}));
  const auto turning = plain_engine();
  const auto read_by = [&](const std::shared_ptr<const PolicyChoice>& policy) {
    const SequenceId one = turning->add_sequence();
    turning->read(one, context, 0, {policy}, StepOutput::none);
  };
  EXPECT_NO_THROW(read_by(settings[0].policy));
  try {
    read_by(settings[1].policy);
    FAIL() << "frequencies of one length";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("dynamic"), std::string::npos) << error.what();
  }
}

TEST_F(Comparisons, RefuseWhatEnginesRefuse) {
  const auto refused = [&] {
    try {
      Comparison(plain_engine(), settings);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused(), "");
  add("snapkv", 0.5, {}, PruneMode::always);
  EXPECT_NE(refused().find("snapkv"), std::string::npos) << refused();
  settings.clear();
  add("finch", 0.5);
  EXPECT_EQ(refused(), "");
  settings[0].pruning.moment = PruneMoment::context;
  EXPECT_NE(refused().find("finch"), std::string::npos) << refused();
  settings.clear();
  // By a budget and by a threshold alike: a generator would run the question with the context.
  for (const std::optional<double> ratio : {std::optional<double>(0.5), std::optional<double>()}) {
    add(files.text("kvzap"), ratio, ratio ? std::optional<double>() : std::optional<double>(0),
        PruneMode::prefill, PrefillMode::sparse);
    settings.back().pruning.moment = PruneMoment::question;
    EXPECT_NE(refused().find("prefill dense"), std::string::npos) << refused();
    settings.clear();
  }
  settings.emplace_back();
  CacheOptions pruning = options;
  pruning.pruning.mode = PruneMode::prefill;
  pruning.policy = choice("knorm", 0.5);
  EXPECT_THROW(Comparison(Engine::create(model, nullptr, pruning, comm), settings), Error);
  Comparison comparison(plain_engine(), settings);
  EXPECT_THROW(comparison.answer(question, how), Error);
  EXPECT_THROW(comparison.prefill({}), Error);
  // What a context is too short for, and for whom.
  settings.clear();
  for (const char* text : {"snapkv", "kvzip"}) add(text, 0.5);
  Comparison repeating(plain_engine(), settings);
  try {
    repeating.prefill({1, 2});
    FAIL() << "nothing was repeated";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("kvzip: there is nothing"), std::string::npos)
        << error.what();
  }
  const auto small = std::make_shared<PolicyChoice>(*choice("keydiff+chunkkv:length=7", 0.5));
  small->budget.amount = Budget::Amount::keep_tokens;
  small->budget.keep_tokens = 3;
  settings.back().policy = small;
  Comparison too_small(plain_engine(), settings);
  try {
    too_small.prefill(context);
    FAIL() << "fewer rows than stay together";
  } catch (const AgreedError& error) {
    EXPECT_NE(std::string(error.what()).find("chunkkv:length=7: the budget"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace kvzap
