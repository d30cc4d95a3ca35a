// Whole steps of a model with random weights: decode at given depths of the cache, prefill, growth
// with the context, many sequences, loading. The cache has random contents from a seed.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <kvzap/engine/sampler.hpp>
#include <kvzap/engine/surrogate.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include "common.hpp"
#include "engine.hpp"
#include "model/read_weights.hpp"

namespace kvzap::perf {
namespace {

constexpr std::int64_t chunk_tokens = 2048;  // of sparse prefill

/// How a cache was pruned.
struct Variant {
  const char* name;
  double evict_ratio;
  double skew;
};
constexpr Variant full{"full", 0, 1};
constexpr Variant evicted{"evict75", 0.75, 1};
constexpr Variant skewed{"evict75_skew16", 0.75, 16};

/// The only model and the only cache at a time. Both are made when a benchmark first needs them.
class Stage {
 public:
  const Engine& engine(const std::filesystem::path& folder, std::int64_t layers,
                       std::int64_t vocabulary = 0,
                       WeightStorage storage = WeightStorage::as_stored) {
    const auto key = std::make_tuple(folder, layers, vocabulary, storage);
    if (!m_engine || key != m_engine_key) {
      clear();
      m_engine = std::make_unique<Engine>(folder, layers, vocabulary, storage);
      m_engine_key = key;
    }
    return *m_engine;
  }

  /// Returns an empty decoder whose scorer evicts as `variant` says.
  Engine::Decoder& decoder(const Variant& variant) {
    m_checkpoint.reset();
    m_decoder.reset();
    m_scorer = std::make_unique<RandomScorer>(m_engine->partition(), world().rank(),
                                              variant.evict_ratio, variant.skew, 1);
    m_decoder = m_engine->decoder(m_scorer.get());
    m_variant = variant.name;
    return *m_decoder;
  }

  /// Returns a sequence that has seen `tokens` tokens and was pruned by `variant`. Extends the
  /// sequence of the last call if that is shorter.
  std::pair<Engine::Decoder*, SequenceId> filled(const Variant& variant, std::int64_t tokens) {
    if (!m_checkpoint || m_variant != variant.name || m_depth > tokens) {
      decoder(variant);
      m_sequence = m_decoder->cache().add_sequence();
      m_depth = 0;
    } else {
      m_decoder->cache().restore(m_sequence, *m_checkpoint);
    }
    if (!m_checkpoint || m_depth < tokens) {
      fill(m_sequence, tokens - m_depth, variant);
      m_depth = tokens;
      m_checkpoint = m_decoder->cache().checkpoint(m_sequence);
    }
    return {m_decoder.get(), m_sequence};
  }

  void fill(SequenceId sequence, std::int64_t tokens, const Variant& variant) {
    const bool is_judged = variant.evict_ratio > 0;
    fill_random(m_decoder->cache(), sequence, tokens, is_judged ? m_scorer.get() : nullptr,
                m_engine->model().config().hidden_size, EvictionRule{0, 0, is_judged}, 2);
  }

  /// Returns a decoder that scores by an MLP, and `sequences` sequences that have seen `tokens`
  /// tokens and were pruned by `variant`.
  std::pair<Engine::Decoder*, std::vector<SequenceId>> served(const Variant& variant, int sequences,
                                                              std::int64_t tokens) {
    m_checkpoint.reset();
    m_decoder.reset();
    m_scorer = std::make_unique<RandomScorer>(m_engine->partition(), world().rank(),
                                              variant.evict_ratio, variant.skew, 1);
    const TemporaryFolder files;
    const ModelConfig& config = m_engine->model().config();
    world().agree_on_root(
        [&] { write_surrogate(files.path() / "mlp", config, config.hidden_size / 8); });
    m_surrogate = std::make_unique<Surrogate>(
        Surrogate::load(files.path() / "mlp", config, m_engine->partition(), world().rank(),
                        DTypeOf<Engine::Value>::value, world()));
    world_barrier();  // rank 0 removes the files after all ranks have read them
    m_decoder = m_engine->decoder(m_surrogate.get());
    std::vector<SequenceId> ids;
    for (int i = 0; i < sequences; ++i) {
      ids.push_back(m_decoder->cache().add_sequence());
      if (tokens > 0) fill(ids.back(), tokens, variant);
    }
    return {m_decoder.get(), ids};
  }

  void clear() {
    m_checkpoint.reset();
    m_decoder.reset();
    m_surrogate.reset();
    m_scorer.reset();
    m_engine.reset();
  }

 private:
  std::unique_ptr<Engine> m_engine;
  std::tuple<std::filesystem::path, std::int64_t, std::int64_t, WeightStorage> m_engine_key;
  std::unique_ptr<RandomScorer> m_scorer;
  std::unique_ptr<Surrogate> m_surrogate;
  std::unique_ptr<Engine::Decoder> m_decoder;
  std::optional<Engine::Decoder::Cache::Checkpoint> m_checkpoint;
  std::string m_variant;
  SequenceId m_sequence = 0;
  std::int64_t m_depth = 0;
};

void report_kv(benchmark::State& state, const KVBytes& kv) {
  state.counters["kv_live_MB"] = 1e-6 * kv.live;
  state.counters["kv_allocated_over_live"] = kv.allocated / kv.live;
}

/// Runs one token after another. The limit is reading all weights and the whole cache once.
void run_decode(benchmark::State& state, Stage& stage, const Variant& variant,
                std::int64_t context) {
  const auto [decoder, sequence] = stage.filled(variant, context);
  const KVBytes kv = kv_bytes(*decoder);
  const StepBatch batch(sequence, {1}, {}, StepOutput::argmax);
  const auto step = [&, decoder = decoder] { decoder->step(batch); };
  step();
  const Yardstick limit(Limit::read);
  const double seconds = time_iterations(state, step);
  const double weights = weight_bytes_of_step(decoder->model());
  report_bytes(state, seconds, weights + kv.live, limit);
  report_kv(state, kv);
  state.counters["weights_MB"] = 1e-6 * weights;
  state.counters["rank_imbalance"] = kv.live_of_largest_rank * world().size() / kv.live;
}

/// Floating-point operations of the linear maps of a layer for one token.
double layer_flops(const ModelConfig& config) {
  const double q = static_cast<double>(config.num_attention_heads * config.head_dim);
  const double kv = static_cast<double>(config.num_key_value_heads * config.head_dim);
  return 2 * static_cast<double>(config.hidden_size) *
         (2 * q + 2 * kv + 3 * static_cast<double>(config.intermediate_size));
}

/// Floating-point operations of a causal prefill: linear maps of all layers, and attention. Unless
/// all outputs are asked for, the last layer has attention of the last block alone, and o and the
/// feed-forward part of the last token.
double prefill_flops(const ModelConfig& config, double tokens, bool is_whole) {
  constexpr double block = 512;
  const double q = static_cast<double>(config.num_attention_heads * config.head_dim);
  const auto attention = [=](double rows) { return 4 * q * rows * (rows + 1) / 2; };
  const double layer = layer_flops(config) * tokens + attention(tokens);
  const double all = layer * static_cast<double>(config.num_hidden_layers);
  if (is_whole) return all;
  const double maps = 2 * static_cast<double>(config.hidden_size) *
                      (q + 3 * static_cast<double>(config.intermediate_size));
  return all - maps * (tokens - 1) - attention(std::max(0.0, tokens - block));
}

void run_prefill(benchmark::State& state, Stage& stage, const Engine& engine, bool is_sparse,
                 std::int64_t tokens) {
  Engine::Decoder& decoder = stage.decoder(is_sparse ? evicted : full);
  const auto ids = engine.tokens(tokens);
  SequenceId sequence = decoder.cache().add_sequence();
  const auto empty = [&] {
    decoder.cache().free_sequence(sequence);
    sequence = decoder.cache().add_sequence();
  };
  // One layer alone stands for those before the last.
  const bool is_whole = engine.model().config().num_hidden_layers == 1;
  const auto prefill = [&] {
    if (!is_sparse) {
      const StepOutput output = is_whole ? StepOutput::all_hidden : StepOutput::logits;
      decoder.step(StepBatch(sequence, ids, {}, output));
      return;
    }
    const StepRule rule{true, EvictionRule{0, 0, true}};
    for (std::int64_t first = 0; first < tokens; first += chunk_tokens) {
      const std::int64_t end = std::min(first + chunk_tokens, tokens);
      decoder.step(StepBatch(sequence, {ids.begin() + first, ids.begin() + end}, rule,
                             end == tokens ? StepOutput::logits : StepOutput::none));
    }
  };
  const Yardstick limit(Limit::gemm_bf16);
  const double seconds = time_iterations(state, prefill, empty);
  state.counters["tokens/s"] = static_cast<double>(tokens) / seconds;
  if (!is_sparse) {
    report_flops(state, seconds,
                 prefill_flops(engine.model().config(), static_cast<double>(tokens), is_whole),
                 limit);
  }
  const KVBytes kv = kv_bytes(decoder);
  report_kv(state, kv);
}

/// `sequences` sequences decode one token each in one step. The limit is reading all weights and
/// rows once, or all arithmetic, whichever takes longer: products at the rate of bf16, those of
/// quantised weights at that of bytes.
void run_batch(benchmark::State& state, Stage& stage, const Engine& engine, bool by_bytes,
               const Variant& variant, std::int64_t sequences, std::int64_t context) {
  Engine::Decoder& decoder = stage.decoder(variant);
  std::vector<SequenceId> ids;
  for (std::int64_t i = 0; i < sequences; ++i) {
    ids.push_back(decoder.cache().add_sequence());
    stage.fill(ids.back(), context, variant);
  }
  const KVBytes kv = kv_bytes(decoder);
  StepBatch batch;
  for (const SequenceId id : ids) batch.add(id, {1}, {}, StepOutput::argmax);
  const auto step = [&] { decoder.step(batch); };
  step();
  const Yardstick read(Limit::read), gemm(Limit::gemm_bf16), bytes(Limit::byte_dots);
  const double seconds = time_iterations(state, step);
  const ModelConfig& config = engine.model().config();
  const double linear =
      static_cast<double>(sequences) *
      (layer_flops(config) * static_cast<double>(config.num_hidden_layers) +
       2 * static_cast<double>(config.hidden_size) * static_cast<double>(config.vocab_size));
  const double group = static_cast<double>(config.num_attention_heads / config.num_key_value_heads);
  const double attention = 2 * group * kv.live / sizeof(Engine::Value);
  const double reading = (weight_bytes_of_step(engine.model()) + kv.live) / read.rate();
  const double arithmetic =
      linear / (by_bytes ? bytes.rate() : gemm.rate()) + attention / gemm.rate();
  state.counters["tokens/s"] = static_cast<double>(sequences) / seconds;
  state.counters["reading_ms"] = 1e3 * reading;
  state.counters["arithmetic_ms"] = 1e3 * arithmetic;
  state.counters["share"] = std::max(reading, arithmetic) / seconds;
  report_kv(state, kv);
}

/// The work of a server: `sequences` sequences decode one token each in one step, scored by an MLP
/// and judged.
void run_served(benchmark::State& state, Stage& stage, int sequences, std::int64_t context) {
  const auto [decoder, ids] = stage.served(evicted, sequences, context);
  const StepRule rule{true, EvictionRule{0, 0, true}};
  StepBatch batch;
  for (const SequenceId id : ids) batch.add(id, {1}, rule, StepOutput::argmax);
  const auto step = [&, decoder = decoder] { decoder->step(batch); };
  step();
  const double seconds = time_iterations(state, step);
  state.counters["tokens/s"] = static_cast<double>(sequences) / seconds;
  report_kv(state, kv_bytes(*decoder));
}

/// A chunk of a prompt and sequences that decode, in one step, compared with the two in separate
/// steps. The limit of a mixed step is the chunk alone, and the products of the decoding rows,
/// measured as a step of the same number of sequences with short contexts.
void run_mixed(benchmark::State& state, Stage& stage, int sequences, std::int64_t chunk,
               std::int64_t context) {
  auto [decoder, ids] = stage.served(evicted, sequences + 1, context);
  const StepRule rule{true, EvictionRule{0, 0, true}};
  const SequenceId prompt = ids.back();
  ids.pop_back();
  std::vector<SequenceId> fresh;
  StepBatch decoding, products, prefilling, mixed;
  for (const SequenceId id : ids) {
    fresh.push_back(decoder->cache().add_sequence());
    decoding.add(id, {1}, rule, StepOutput::argmax);
    products.add(fresh.back(), {1}, rule, StepOutput::argmax);
    mixed.add(id, {1}, rule, StepOutput::argmax);
  }
  const std::vector<TokenId> tokens(chunk, 2);
  prefilling.add(prompt, tokens, rule, StepOutput::none);
  mixed.add(prompt, tokens, rule, StepOutput::none);
  const auto checkpoint = decoder->cache().checkpoint(prompt);
  double sums[4] = {};
  for (auto _ : state) {
    double seconds[4] = {};
    int i = 0;
    for (const StepBatch* batch : {&mixed, &prefilling, &decoding, &products}) {
      decoder->cache().restore(prompt, checkpoint);
      world_barrier();
      const double begin = now();
      decoder->step(*batch);
      seconds[i++] = now() - begin;
    }
    for (int k = 0; k < 4; ++k) {
      seconds[k] = max_over_ranks(seconds[k]);
      sums[k] += seconds[k];
    }
    state.SetIterationTime(seconds[0]);
  }
  const double count = static_cast<double>(state.iterations());
  state.counters["chunk_ms"] = 1e3 * sums[1] / count;
  state.counters["decode_ms"] = 1e3 * sums[2] / count;
  state.counters["products_ms"] = 1e3 * sums[3] / count;
  state.counters["over_chunk_and_products"] = sums[0] / (sums[1] + sums[3]);
  state.counters["over_chunk_and_decode"] = sums[0] / (sums[1] + sums[2]);
}

/// Counts the sequences of `context` tokens that fit into `budget` bytes of KV memory of all ranks.
void run_capacity(benchmark::State& state, Stage& stage, const Variant& variant,
                  std::int64_t context, double budget) {
  std::int64_t fitting = 0;
  for (auto _ : state) {
    Engine::Decoder& decoder = stage.decoder(variant);
    const double begin = now();
    for (fitting = -1; kv_bytes(decoder).allocated <= budget; ++fitting) {
      stage.fill(decoder.cache().add_sequence(), context, variant);
      decoder.cache().trim();
    }
    state.SetIterationTime(max_over_ranks(now() - begin));
  }
  state.counters["sequences"] = static_cast<double>(fitting);
}

/// Writes a checkpoint in bf16 with the shapes of `config` and arbitrary values.
void write_checkpoint(const std::filesystem::path& folder, const ModelConfig& config) {
  const std::vector<model::NamedTensor> tensors = model::tensors_of(config);
  std::string header = "{";
  std::int64_t offset = 0;
  for (const auto& [name, shape] : tensors) {
    std::int64_t bytes = sizeof(bfloat16);
    for (const std::int64_t extent : shape) bytes *= extent;
    if (offset > 0) header += ',';
    header += '"' + name + R"(":{"dtype":"BF16","shape":[)" +
              fmt::to_string(fmt::join(shape, ",")) + R"(],"data_offsets":[)" +
              std::to_string(offset) + ',' + std::to_string(offset + bytes) + "]}";
    offset += bytes;
  }
  header += '}';
  while (header.size() % 8 != 0) header += ' ';
  const std::uint64_t length = header.size();
  char prefix[sizeof(length)];
  std::memcpy(prefix, &length, sizeof(length));
  std::ofstream file(folder / "model.safetensors", std::ios::binary);
  file.write(prefix, sizeof(prefix));
  file << header;
  const std::vector<bfloat16> values(std::size_t{1} << 20, bfloat16(0.01f));
  for (std::int64_t left = offset; left > 0;) {
    const std::int64_t bytes = std::min<std::int64_t>(left, values.size() * sizeof(bfloat16));
    file.write(reinterpret_cast<const char*>(values.data()), bytes);
    left -= bytes;
  }
  if (!file.flush()) throw Error("cannot write " + (folder / "model.safetensors").string());
}

/// Reads this rank's share of `bytes` of a file, by position, into memory that was never touched.
/// Loading cannot be faster.
void read_share(const std::filesystem::path& path, std::int64_t bytes) {
  const int file = open(path.c_str(), O_RDONLY);
  char* target = static_cast<char*>(std::malloc(bytes));
  if (file < 0 || !target) throw Error("cannot read " + path.string());
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t count = pread(file, target + done, bytes - done, world().rank() * bytes + done);
    if (count <= 0) throw Error("cannot read " + path.string());
    done += count;
  }
  benchmark::DoNotOptimize(target[bytes - 1]);
  std::free(target);
  close(file);
}

/// Loads from the page cache, and compares with reading the same bytes from it.
void run_load(benchmark::State& state, const std::filesystem::path& config_folder,
              const std::filesystem::path& files) {
  const ModelConfig config = ModelConfig::load(config_folder);
  const auto partition =
      HeadPartition::even(static_cast<int>(config.num_hidden_layers),
                          static_cast<int>(config.num_key_value_heads), world().size());
  const std::int64_t share =
      std::filesystem::file_size(files / "model.safetensors") / world().size();
  std::optional<Model> model;
  double reference = 0;
  const double seconds = time_iterations(
      state,
      [&] { model.emplace(Model::load(files, config, DType::bf16, partition, world().rank())); },
      [&] {
        model.reset();
        release_unused_host_memory();
        world_barrier();
        const double begin = now();
        read_share(files / "model.safetensors", share);
        reference += max_over_ranks(now() - begin);
      });
  const double count = static_cast<double>(state.iterations());
  state.counters["GB/s"] = 1e-9 * static_cast<double>(share) * world().size() / seconds;
  state.counters["read_share_ms"] = 1e3 * reference / count;
  state.counters["share"] = reference / count / seconds;
}

}  // namespace

namespace {

/// Draws of a token from random logits, a few of which stand out.
void run_draw(benchmark::State& state, const SamplingOptions& options) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> logits(151936);
  for (float& logit : logits) logit = 3 * normal(random);
  for (int i = 0; i < 30; ++i) logits[random() % logits.size()] = 14 + normal(random);
  Sampler sampler(options);
  time_iterations(state, [&] { benchmark::DoNotOptimize(sampler(logits)); });
}

}  // namespace

void register_benchmarks(const Options& options) {
  const auto stage = std::make_shared<Stage>();
  const std::filesystem::path folder = model_folder(options, options.config);
  const std::string model = folder.filename().string();
  const bool quick = options.quick;
  const std::int64_t steps = quick ? 4 : 8;
  const auto contexts = quick ? std::vector<std::int64_t>{1024, 4096}
                              : std::vector<std::int64_t>{1024, 4096, 8192, 32768};

  for (const Variant& variant : {full, evicted, skewed}) {
    for (const std::int64_t context : contexts) {
      add(fmt::format("engine/decode/{}/{}/context:{}", model, variant.name, context), steps, 5,
          [=](benchmark::State& state) {
            stage->engine(folder, 0);
            run_decode(state, *stage, variant, context);
          });
    }
  }

  for (const auto& [name, top_k, top_p, min_p] :
       {std::tuple("temperature", 0, 1.0, 0.0), std::tuple("top_p", 0, 0.95, 0.0),
        std::tuple("top_k", 20, 0.95, 0.0), std::tuple("min_p", 0, 1.0, 0.05)}) {
    const SamplingOptions sampling{0.6, top_k, top_p, 1, min_p};
    add(fmt::format("draw/tokens:151936/{}", name), 20, 5,
        [=](benchmark::State& state) { run_draw(state, sampling); });
  }

  // Many sequences at once.
  constexpr std::int64_t batch_context = 1024;
  const auto counts =
      quick ? std::vector<std::int64_t>{1, 4, 16} : std::vector<std::int64_t>{1, 4, 16, 64};
  for (const auto& [name, storage] :
       {std::pair("batch", WeightStorage::as_stored), std::pair("batch_q8", WeightStorage::q8),
        std::pair("batch_q4", WeightStorage::q4)}) {
    for (const Variant& variant : {full, evicted}) {
      for (const std::int64_t sequences : counts) {
        add(fmt::format("engine/{}/{}/{}/context:{}/sequences:{}", name, model, variant.name,
                        batch_context, sequences),
            steps, 5, [=, storage = storage](benchmark::State& state) {
              const Engine& engine = stage->engine(folder, 0, 0, storage);
              run_batch(state, *stage, engine, storage != WeightStorage::as_stored, variant,
                        sequences, batch_context);
            });
      }
    }
  }

  // The steps of a server.
  const std::int64_t served_context = quick ? 1024 : 4096;
  for (const int sequences : {1, 16}) {
    add(fmt::format("engine/served/{}/evict75/mlp/context:{}/sequences:{}", model, served_context,
                    sequences),
        steps, 5, [=](benchmark::State& state) {
          stage->engine(folder, 0);
          run_served(state, *stage, sequences, served_context);
        });
  }
  add(fmt::format("engine/mixed/{}/evict75/mlp/context:{}/sequences:15/chunk:256", model,
                  served_context),
      3, 3, [=](benchmark::State& state) {
        stage->engine(folder, 0);
        run_mixed(state, *stage, 15, 256, served_context);
      });

  const auto prefill = [&](const char* group, std::int64_t layers, bool is_sparse,
                           std::int64_t tokens, int repetitions) {
    add(fmt::format("engine/{}/{}{}/{}/tokens:{}", group, model,
                    layers > 0 ? fmt::format("/layers:{}", layers) : "",
                    is_sparse ? "sparse75" : "dense", tokens),
        1, repetitions, [=](benchmark::State& state) {
          run_prefill(state, *stage, stage->engine(folder, layers), is_sparse, tokens);
        });
  };
  prefill("prefill", 0, false, 512, 5);
  if (!quick) {
    prefill("prefill", 0, false, 4096, 5);
    prefill("prefill", 0, false, 8192, 3);
  }

  // Growth, on few layers, because the times of layers add up.
  const std::int64_t few = quick ? 2 : 4;
  const std::int64_t longest = quick ? 4096 : 16384;
  for (const bool is_sparse : {false, true}) {
    for (std::int64_t tokens = 1024; tokens <= longest; tokens *= 2) {
      prefill("growth/prefill", few, is_sparse, tokens, tokens > 8192 ? 3 : 5);
    }
  }
  for (std::int64_t rows = 1024; rows <= (quick ? 16384 : 131072); rows *= 2) {
    add(fmt::format("engine/growth/decode/{}/layers:{}/rows:{}", model, few, rows), steps, 5,
        [=](benchmark::State& state) {
          stage->engine(folder, few);
          run_decode(state, *stage, full, rows);
        });
  }
  for (const Variant& variant : {full, evicted}) {
    add(fmt::format("engine/capacity/{}/layers:{}/{}/context:4096/budget_MB:1000", model, few,
                    variant.name),
        1, 1, [=](benchmark::State& state) {
          stage->engine(folder, few);
          run_capacity(state, *stage, variant, 4096, 1e9);
        });
  }

  // One layer of larger models, without embedding and output head.
  for (const char* name : {"Qwen3-8B", "Qwen3-32B", "Llama-3.1-8B-Instruct"}) {
    if (quick) break;
    const std::filesystem::path other = model_folder(options, name);
    add(fmt::format("engine/layer/{}/decode/full/context:4096", name), steps, 5,
        [=](benchmark::State& state) {
          stage->engine(other, 1, 1024);
          run_decode(state, *stage, full, 4096);
        });
    add(fmt::format("engine/layer/{}/prefill/dense/tokens:4096", name), 1, 5,
        [=](benchmark::State& state) {
          run_prefill(state, *stage, stage->engine(other, 1, 1024), false, 4096);
        });
  }

  const auto files = std::make_shared<std::unique_ptr<TemporaryFolder>>();
  add(fmt::format("engine/load/{}", model), 1, 5, [=](benchmark::State& state) {
    if (!*files) {
      stage->clear();
      *files = std::make_unique<TemporaryFolder>();
      world().agree_on_root([&] { write_checkpoint((*files)->path(), ModelConfig::load(folder)); });
    }
    run_load(state, folder, (*files)->path());
  });
}

}  // namespace kvzap::perf
