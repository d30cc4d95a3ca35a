// The cost of eviction policies beside the dense prefill that they prune: scoring, choosing and
// storing rows, and additional memory. Uses some layers of a model with random weights, because all
// layers have the same cost.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "common.hpp"
#include "engine.hpp"
#include "safetensors_writer.hpp"

namespace kvzap::perf {
namespace {

constexpr int n_layers = 2;
constexpr std::int64_t vocabulary = 1024;
constexpr std::int64_t decode_steps = 128;  // with a cut after each half

struct Case {
  std::string label;
  std::string spec;
  PruneMoment after = PruneMoment::context;
};

/// Files of random numbers that some policies need.
struct Files {
  TemporaryFolder folder;

  explicit Files(const ModelConfig& config) {
    world().agree_on_root([&] {
      write_surrogate(path("linear"), config, 0);
      write_surrogate(path("mlp"), config, config.hidden_size / 8);
      test::write_safetensors(
          path("filters.safetensors"),
          {{"q_filters", random({n_layers, config.num_key_value_heads, config.head_dim})}});
      std::map<std::string, test::StoredTensor> gates, retention;
      const std::int64_t kv = config.num_key_value_heads, q = config.num_attention_heads;
      constexpr std::int64_t width = 16, sink = 16, units = 512;
      for (int l = 0; l < n_layers; ++l) {
        const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
          gates[fmt::format("{}.{}", l, name)] = random(shape);
        };
        add("q_proj.weight", {q * width, config.hidden_size});
        add("q_proj.bias", {q * width});
        add("k_proj.weight", {kv * width, config.hidden_size});
        add("q_norm.weight", {width});
        add("k_norm.weight", {width});
        add("k_base", {kv, 1, sink, width});
        add("b", {kv, 1, q / kv});
        const std::string gate = fmt::format("model.layers.{}.self_attn.retention_gate.", l);
        retention[gate + "linear1.weight"] = random({units, config.hidden_size});
        retention[gate + "linear1.bias"] = random({units});
        retention[gate + "linear2.weight"] = random({kv, units});
        retention[gate + "bias"] = random({kv});
      }
      test::write_safetensors(path("gates.safetensors"), gates);
      test::write_safetensors(path("retention.safetensors"), retention);
      write_pattern(config);
    });
    world_barrier();
  }
  ~Files() { world_barrier(); }
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  std::filesystem::path path(const std::string& name) const { return folder.path() / name; }

 private:
  std::minstd_rand m_draw;

  // Every other head streams,.
  void write_pattern(const ModelConfig& config) const {
    std::ofstream(path("config.json")) << R"({"sink_size": 128, "recent_size": 256})";
    std::ofstream shares(path("full_attention_heads.tsv"));
    for (int l = 0; l < n_layers; ++l) {
      for (int h = 0; h < config.num_key_value_heads; ++h) {
        shares << h % 2 << (h + 1 < config.num_key_value_heads ? '\t' : '\n');
      }
    }
  }

  test::StoredTensor random(const std::vector<std::int64_t>& shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(m_draw() & 0xffff) / 65536 - 0.5f;
    return test::stored_tensor("F32", shape, values);
  }
};

/// Returns the peak bytes of this process since reset_peak, or 0 if the system does not report it.
double peak_bytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    double kilobytes = 0;
    if (std::sscanf(line.c_str(), "VmHWM: %lf kB", &kilobytes) == 1) return 1024 * kilobytes;
  }
  return 0;
}
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Cost {
  double seconds = 0, scoring = 0, pruning = 0, peak = 0;
  double allocated_over_live = 0, evict_ratio = 0;
  double decode_seconds = 0;  // of a step, cuts included
};

class Bench {
 public:
  explicit Bench(const std::filesystem::path& folder) {
    ModelConfig config = ModelConfig::load(folder);
    config.num_hidden_layers = n_layers;
    config.vocab_size = std::min(config.vocab_size, vocabulary);
    m_partition =
        HeadPartition::even(n_layers, static_cast<int>(config.num_key_value_heads), world().size());
    m_model = std::make_shared<const Model>(
        Model::load(folder, config, DType::bf16, m_partition, world().rank(), {0}));
    m_files = std::make_unique<Files>(config);
    m_folder = folder;
  }

  const Files& files() const { return *m_files; }

  /// `decodes`: generates decode_steps tokens, with cuts.
  Cost run(const std::string& spec, PruneMoment after, std::int64_t tokens,
           bool decodes = false) const {
    CacheOptions options;
    if (decodes) {
      options.pruning.decode.every = decode_steps / 2;
      options.pruning.decode.keep = tokens / 2;
    }
    options.pruning.mode = spec.empty() ? PruneMode::none : PruneMode::prefill;
    options.pruning.moment = after;
    if (!spec.empty()) {
      Budget budget;
      const PolicySpec parsed = parse_policy(spec);
      if (!parsed.info->has_own_budget) {
        budget.amount = Budget::Amount::evict_ratio;
        budget.evict_ratio = 0.5;
      }
      const PolicySetup setup{m_model->config(), m_partition, DType::bf16, m_folder, world()};
      PolicyChoice choice = make_policy(parsed, budget, std::nullopt, setup);
      // The number of tokens that Qwen3's tokenizer and template produce.
      choice.repeat.first.assign(7, 1);
      choice.repeat.later.assign(12, 1);
      choice.repeat.suffix.assign(9, 1);
      choice.repeat.prefix = 3;
      options.policy = std::make_shared<const PolicyChoice>(std::move(choice));
    }
    const auto engine = ::kvzap::Engine::create(m_model, nullptr, options, world());
    const SequenceId sequence = engine->add_sequence();
    std::vector<TokenId> ids(tokens);
    for (std::int64_t i = 0; i < tokens; ++i) ids[i] = static_cast<TokenId>(i * 7 % 1000);
    reset_peak();
    const double held = peak_bytes();
    world_barrier();
    const double start = now();
    const bool whole = after == PruneMoment::question;
    // Of all tokens: a last layer computes no others than the outputs need.
    engine->step(StepBatch(
        sequence, ids, engine->rule(whole ? StepPart::whole : StepPart::context, whole ? 64 : 0),
        StepOutput::all_hidden));
    if (options.policy && options.policy->info->repeats_context) engine->end_context(sequence);
    Cost cost;
    cost.seconds = max_over_ranks(now() - start);
    cost.peak = sum_over_ranks(peak_bytes() - held);
    engine->trim();
    const CacheReport report = engine->report(sequence);
    cost.scoring = report.score_seconds;
    cost.pruning = report.prune_seconds;
    cost.allocated_over_live = static_cast<double>(report.allocated_bytes) / report.live_bytes;
    cost.evict_ratio = report.evict_ratio();
    if (!decodes) return cost;
    world_barrier();
    const double begin = now();
    for (std::int64_t i = 0; i < decode_steps; ++i) {
      engine->step(
          StepBatch(sequence, {ids[i]}, engine->rule(StepPart::generated), StepOutput::argmax));
    }
    cost.decode_seconds = max_over_ranks(now() - begin) / decode_steps;
    return cost;
  }

 private:
  std::filesystem::path m_folder;
  HeadPartition m_partition = HeadPartition::even(1, 1, 1);
  std::shared_ptr<const Model> m_model;
  std::unique_ptr<Files> m_files;
};

// Runs a dense prefill directly before, so that both run with the machine in the same state.
void measure(benchmark::State& state, const Bench& bench, const Case& which, std::int64_t tokens) {
  std::vector<Cost> dense, pruned;
  for (auto _ : state) {
    dense.push_back(bench.run("", PruneMoment::context, tokens));
    pruned.push_back(bench.run(which.spec, which.after, tokens));
    state.SetIterationTime(pruned.back().seconds);
  }
  const auto median = [](const std::vector<Cost>& costs, auto part) {
    std::vector<double> values;
    for (const Cost& cost : costs) values.push_back(part(cost));
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
  };
  const auto seconds = [](const Cost& cost) { return cost.seconds; };
  const double base = median(dense, seconds);
  const double scoring = median(pruned, [](const Cost& cost) { return cost.scoring; });
  const double pruning = median(pruned, [](const Cost& cost) { return cost.pruning; });
  const auto peak = [](const Cost& cost) { return cost.peak; };
  state.counters["score_ms_per_1k"] = 1e6 * scoring / tokens / n_layers;
  state.counters["prune_ms_per_1k"] = 1e6 * pruning / tokens / n_layers;
  state.counters["score_share"] = scoring / base;
  state.counters["prune_share"] = pruning / base;
  state.counters["over_dense"] = median(pruned, seconds) / base;
  state.counters["allocated_over_live"] = pruned.back().allocated_over_live;
  state.counters["evict_ratio"] = pruned.back().evict_ratio;
  state.counters["extra_MB"] = 1e-6 * (median(pruned, peak) - median(dense, peak));
}

// Decode steps with cuts, and those of the policy without its modifier directly before.
void measure_decode(benchmark::State& state, const Bench& bench, const std::string& spec,
                    std::int64_t tokens) {
  std::vector<double> plain, changed;
  for (auto _ : state) {
    for (auto* const seconds : {&plain, &changed}) {
      const std::string policy = seconds == &plain ? spec.substr(0, spec.find('+')) : spec;
      seconds->push_back(bench.run(policy, PruneMoment::context, tokens, true).decode_seconds);
    }
    state.SetIterationTime(changed.back());
  }
  for (auto* const seconds : {&plain, &changed}) std::sort(seconds->begin(), seconds->end());
  const double median = changed[changed.size() / 2], base = plain[plain.size() / 2];
  state.counters["plain_us"] = 1e6 * base;
  state.counters["over_plain"] = median / base;
}

}  // namespace

void register_benchmarks(const Options& options) {
  const auto bench = std::make_shared<Bench>(model_folder(options, options.config));
  const auto file = [&](const char* name) { return bench->files().path(name).string(); };
  std::vector<Case> cases;
  for (const char* name : {"knorm",
                           "random",
                           "streaming-llm",
                           "keydiff",
                           "lagkv",
                           "cur",
                           "leverage",
                           "compactor",
                           "cap",
                           "snapkv",
                           "tova",
                           "pyramidkv",
                           "scissorhands",
                           "r-kv",
                           "r-kv:mass=0.9",
                           "lazy-eviction",
                           "tri-attention",
                           "dropkv",
                           "expected-attention",
                           "non-causal",
                           "simlayerkv",
                           "h2o",
                           "kvzip",
                           "kvzip-plus",
                           "kvcompose"}) {
    cases.push_back({name, name});
  }
  cases.push_back({"finch", "finch", PruneMoment::question});
  cases.push_back({"qfilter", "qfilter:filters=" + file("filters.safetensors")});
  cases.push_back({"kvzap-linear", "kvzap:surrogate=" + file("linear")});
  cases.push_back({"kvzap-mlp", "kvzap:surrogate=" + file("mlp")});
  cases.push_back({"duo-attention", "duo-attention:head-evict-ratio=0.5,pattern=" +
                                        file("full_attention_heads.tsv")});
  cases.push_back({"fastkvzip", "fastkvzip:gates=" + file("gates.safetensors")});
  cases.push_back({"trim-kv", "trim-kv:gates=" + file("retention.safetensors")});
  cases.push_back({"snapkv+ada", "snapkv+ada"});
  cases.push_back({"snapkv+global", "snapkv+global"});
  cases.push_back({"snapkv+critical", "snapkv+critical"});
  cases.push_back({"snapkv+chunkkv", "snapkv+chunkkv"});
  cases.push_back({"snapkv+kvcrush", "snapkv+kvcrush"});
  cases.push_back({"snapkv+merge", "snapkv+merge"});
  cases.push_back({"kvzip+fit", "kvzip+fit"});
  const std::vector<std::int64_t> lengths =
      options.quick ? std::vector<std::int64_t>{1024} : std::vector<std::int64_t>{4096, 16384};
  for (const std::int64_t tokens : lengths) {
    for (const Case& which : cases) {
      add(fmt::format("policies/{}/{}", which.label, tokens), 1, options.quick ? 1 : 3,
          [=](benchmark::State& state) { measure(state, *bench, which, tokens); });
    }
    for (const char* spec : {"tova+merge", "tova+cam", "h2o+cam"}) {
      add(fmt::format("policies/{}/decode/{}", spec, tokens), 1, options.quick ? 1 : 5,
          [=](benchmark::State& state) { measure_decode(state, *bench, spec, tokens); });
    }
  }
}

}  // namespace kvzap::perf
