#include <fmt/format.h>

#include <cmath>
#include <kvzap/engine.hpp>
#include <kvzap/snapshot.hpp>
#include <optional>

#include "base/instantiate.hpp"

namespace kvzap {
namespace {

void check(const CacheOptions& options, bool has_scorer) {
  if (options.window < 1) {
    throw Error(fmt::format("--window is {}; expected at least 1", options.window));
  }
  if (options.sink < 0) throw Error(fmt::format("--sink is {}; expected 0 or more", options.sink));
  if (options.chunk < 1)
    throw Error(fmt::format("--chunk is {}; expected at least 1", options.chunk));
  if (options.page_rows < 1) {
    throw Error(fmt::format("--page-rows is {}; expected at least 1", options.page_rows));
  }
  if (options.prune != PruneMode::none) {
    if (std::isnan(options.threshold)) {
      throw Error("--threshold is NaN; expected a number (no score is below NaN)");
    }
    if (!has_scorer) {
      throw Error(
          fmt::format("--prune {} needs a surrogate (--surrogate DIR)", name_of(options.prune)));
    }
  }
}

template <class Value, PageOrder order>
class TypedEngine final : public Engine {
 public:
  TypedEngine(std::shared_ptr<const Model<Value>> model, std::shared_ptr<Scorer> scorer,
              const CacheOptions& options, const Communicator& comm)
      : Engine(options, comm),
        m_model(std::move(model)),
        m_scorer(std::move(scorer)),
        m_decoder(*m_model, m_scorer.get(), comm, options.window, options.page_rows, &m_meter) {
    m_decoder.cache().set_limit(options.kv_limit);
  }

  const ModelConfig& config() const override { return m_model->config(); }

  SequenceId add_sequence() override {
    return on_all_ranks([&] { return m_decoder.cache().add_sequence(); });
  }
  SequenceId fork(SequenceId source) override {
    return on_all_ranks([&] { return m_decoder.cache().fork(source); });
  }
  void free_sequence(SequenceId sequence) override { m_decoder.cache().free_sequence(sequence); }

  std::unique_ptr<Checkpoint> checkpoint(SequenceId sequence) override {
    auto taken = std::make_unique<TypedCheckpoint>();
    communicator().agree([&] { taken->state = m_decoder.cache().checkpoint(sequence); });
    return taken;
  }
  void restore(SequenceId sequence, const Checkpoint& checkpoint) override {
    m_decoder.cache().restore(sequence, dynamic_cast<const TypedCheckpoint&>(checkpoint).state);
  }
  std::int64_t tokens(SequenceId sequence) const override {
    return m_decoder.cache().tokens(sequence, 0);
  }

  std::vector<StepResult> step(const StepBatch& batch, const ProgressCallback& progress) override {
    return m_decoder.step(batch, progress);
  }

  std::size_t trim() override { return m_decoder.cache().trim(); }

  CacheReport report(SequenceId sequence) override {
    auto& cache = m_decoder.cache();
    const ModelConfig& config = m_model->config();
    const HeadPartition& partition = m_model->partition();
    CacheReport report;
    report.tokens = cache.tokens(sequence, 0);
    std::vector<std::int64_t> mine;
    for (int l = 0; l < partition.n_layers(); ++l) {
      for (int h = 0; h < cache.shape().heads[l]; ++h) mine.push_back(cache.rows(sequence, l, h));
    }
    const auto all = communicator().all_gather(mine);
    report.kept.assign(partition.n_layers(), std::vector<std::int64_t>(partition.n_kv_heads()));
    for (int r = 0; r < communicator().size(); ++r) {
      auto rows = all[r].begin();
      for (int l = 0; l < partition.n_layers(); ++l) {
        for (int head : partition.heads(l, r)) report.kept[l][head] = *rows++;
      }
    }
    report.non_finite_scores = communicator().all_reduce_sum(cache.counts(sequence).non_finite);
    report.full_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * report.tokens *
                        config.head_dim * static_cast<std::int64_t>(sizeof(Value));
    const CacheBytes bytes = cache.bytes();
    const auto sum = [&](std::size_t value) {
      return communicator().all_reduce_sum(static_cast<std::int64_t>(value));
    };
    report.live_bytes = sum(bytes.live);
    report.allocated_bytes = sum(bytes.allocated);
    report.returned_bytes = sum(bytes.returned);
    report.peak_allocated_bytes = sum(m_meter.peak());
    return report;
  }

  void write_snapshot(const std::filesystem::path& file, const std::string& model_name,
                      SequenceId sequence) override {
    SnapshotInfo info;
    info.model = model_name;
    info.prune = name_of(options().prune);
    info.further["prefill"] = std::string(name_of(options().prefill));
    if (options().prune != PruneMode::none) {
      info.threshold = options().threshold;
      info.sink = options().sink;
      info.further["surrogate"] = m_scorer->kind();
    }
    kvzap::write_snapshot(file, m_decoder.cache(), sequence, m_model->partition(), communicator(),
                          info);
  }

  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head_on_rank) override {
    return m_decoder.cache().positions(sequence, layer, head_on_rank);
  }
  void set_observer(StepObserver* observer) override { m_decoder.set_observer(observer); }
  void set_attention_path(AttentionPath path) override { m_decoder.set_attention_path(path); }

 private:
  struct TypedCheckpoint final : Checkpoint {
    typename KVCache<Value, order>::Checkpoint state;
  };

  // A new sequence on every rank, or, with an error, on none.
  template <class Make>
  SequenceId on_all_ranks(const Make& make) {
    std::optional<SequenceId> made;
    try {
      communicator().agree([&] { made = make(); });
    } catch (...) {
      if (made) m_decoder.cache().free_sequence(*made);
      throw;
    }
    return *made;
  }

  MemoryMeter m_meter;
  std::shared_ptr<const Model<Value>> m_model;
  std::shared_ptr<Scorer> m_scorer;
  Decoder<Value, order> m_decoder;
};

}  // namespace

std::string_view name_of(PruneMode mode) {
  switch (mode) {
    case PruneMode::none:
      return "none";
    case PruneMode::prefill:
      return "prefill";
    case PruneMode::always:
      return "always";
  }
  return "unknown";
}

std::string_view name_of(PrefillMode mode) {
  return mode == PrefillMode::dense ? "dense" : "sparse";
}

double CacheReport::evict_ratio(int layer) const {
  const auto& heads = kept.at(layer);
  if (tokens == 0 || heads.empty()) return 0;
  std::int64_t evicted = 0;
  for (std::int64_t rows : heads) evicted += tokens - rows;
  return static_cast<double>(evicted) / (static_cast<double>(heads.size()) * tokens);
}

double CacheReport::evict_ratio() const {
  double sum = 0;
  for (std::size_t l = 0; l < kept.size(); ++l) sum += evict_ratio(static_cast<int>(l));
  return kept.empty() ? 0 : sum / kept.size();
}

StepRule Engine::rule(bool judges) const {
  StepRule rule;
  rule.score = judges;
  rule.eviction = {m_options.threshold, m_options.sink, judges};
  return rule;
}

template <class Value>
std::unique_ptr<Engine> Engine::create(std::shared_ptr<const Model<Value>> model,
                                       std::shared_ptr<Scorer> scorer, const CacheOptions& options,
                                       const Communicator& comm) {
  check(options, scorer != nullptr);
  if (options.order == PageOrder::dim_major) {
    return std::make_unique<TypedEngine<Value, PageOrder::dim_major>>(
        std::move(model), std::move(scorer), options, comm);
  }
  return std::make_unique<TypedEngine<Value, PageOrder::token_major>>(
      std::move(model), std::move(scorer), options, comm);
}

// NOLINTBEGIN(bugprone-macro-parentheses): a type takes none
#define KVZAP_INSTANTIATE(Value)                                                                \
  template std::unique_ptr<Engine> Engine::create(std::shared_ptr<const Model<Value>>,          \
                                                  std::shared_ptr<Scorer>, const CacheOptions&, \
                                                  const Communicator&);
KVZAP_FOR_EACH_VALUE(KVZAP_INSTANTIATE)
#undef KVZAP_INSTANTIATE
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace kvzap
