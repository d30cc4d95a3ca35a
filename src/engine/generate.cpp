#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <kvzap/generate.hpp>
#include <kvzap/snapshot.hpp>

namespace kvzap {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

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
class TypedGenerator final : public Generator {
 public:
  TypedGenerator(std::shared_ptr<const Model<Value>> model, std::shared_ptr<Scorer> scorer,
                 const CacheOptions& options, const Communicator& comm)
      : m_options(options),
        m_comm(comm),
        m_model(std::move(model)),
        m_scorer(std::move(scorer)),
        m_decoder(*m_model, m_scorer.get(), comm, options.window, options.page_rows, &m_meter),
        m_sequence(m_decoder.cache().add_sequence()) {}

  void prefill(const std::vector<TokenId>& context, bool reusable,
               const ProgressCallback& progress) override {
    if (context.empty()) throw Error("the context is empty; expected at least one token");
    if (m_decoder.cache().tokens(m_sequence, 0) != 0) throw Error("prefill was called twice");
    const std::int64_t count = context.size();
    const std::int64_t chunk =
        m_options.prefill == PrefillMode::sparse ? std::min(m_options.chunk, count) : count;
    for (std::int64_t begin = 0; begin < count; begin += chunk) {
      const std::int64_t end = std::min(count, begin + chunk);
      const auto chunk_progress = [&](std::string_view what, std::int64_t done,
                                      std::int64_t total) {
        // In tokens, so that chunks add up whatever their inner steps.
        if (progress) progress(what, begin + (end - begin) * done / total, count);
      };
      m_context_logits =
          m_decoder.step(m_sequence, {context.begin() + begin, context.begin() + end},
                         rule(m_options.prune != PruneMode::none), chunk_progress);
    }
    trim();
    if (reusable) {
      m_checkpoint = m_decoder.cache().checkpoint(m_sequence);
      m_context_counts = m_decoder.counts();
    }
  }

  Answer answer(const std::vector<TokenId>& question, const AnswerOptions& options) override {
    if (m_answers++ > 0) {
      if (!m_checkpoint) throw Error("a second question needs a prefill that is reusable");
      m_decoder.cache().restore(m_sequence, *m_checkpoint);
      m_decoder.set_counts(m_context_counts);
    }
    Sampler sampler(options.sampling);
    const StepRule step_rule = rule(m_options.prune == PruneMode::always);
    // On all ranks; -1 if there is none.
    const auto draw = [&](const std::vector<float>& logits) {
      if (options.on_logits) options.on_logits(logits);
      TokenId token = m_comm.is_root() ? sampler(logits) : 0;
      m_comm.broadcast(&token, sizeof(token), 0);
      return token;
    };
    // Any rank may want to see logits; all take part in bringing them together.
    const bool greedy =
        m_comm.all_reduce_max(options.on_logits ? 1 : 0) == 0 && options.sampling.temperature == 0;
    const auto next = [&](const std::vector<TokenId>& tokens) {
      return greedy ? m_decoder.step_greedy(m_sequence, tokens, step_rule)
                    : draw(m_decoder.step(m_sequence, tokens, step_rule));
    };
    Answer answer;
    answer.question_tokens = question.size();
    auto start = Clock::now();
    TokenId token = 0;
    if (options.max_new_tokens < 1) {
      if (!question.empty()) m_decoder.step_greedy(m_sequence, question, step_rule);
    } else {
      token = question.empty() ? draw(m_context_logits) : next(question);
    }
    answer.question_seconds = seconds_since(start);
    start = Clock::now();
    while (static_cast<std::int64_t>(answer.tokens.size()) < options.max_new_tokens) {
      // The last token that fits is still generated from, not the one after it.
      const bool feeds = !answer.tokens.empty();
      if (feeds && options.max_tokens > 0 &&
          m_decoder.cache().tokens(m_sequence, 0) >= options.max_tokens) {
        answer.stop_reason = StopReason::context_full;
        break;
      }
      if (feeds) token = next({answer.tokens.back()});
      if (token < 0) {
        throw AgreedError(
            "the logits are not finite: weights or activations overflow (try --dtype "
            "bf16 or f32, or check the checkpoint)");
      }
      answer.tokens.push_back(token);
      if (options.on_token) options.on_token(token);
      if (std::find(options.stop_ids.begin(), options.stop_ids.end(), token) !=
          options.stop_ids.end()) {
        answer.stop_reason = StopReason::stop_id;
        break;
      }
    }
    answer.decode_seconds = seconds_since(start);
    trim();
    answer.cache = report();
    return answer;
  }

  CacheReport report() override {
    auto& cache = m_decoder.cache();
    const ModelConfig& config = m_model->config();
    const HeadPartition& partition = m_model->partition();
    CacheReport report;
    report.tokens = cache.tokens(m_sequence, 0);
    std::vector<std::int64_t> mine;
    for (int l = 0; l < partition.n_layers(); ++l) {
      for (int h = 0; h < cache.shape().heads[l]; ++h) mine.push_back(cache.rows(m_sequence, l, h));
    }
    const auto all = m_comm.all_gather(mine);
    report.kept.assign(partition.n_layers(), std::vector<std::int64_t>(partition.n_kv_heads()));
    for (int r = 0; r < m_comm.size(); ++r) {
      auto rows = all[r].begin();
      for (int l = 0; l < partition.n_layers(); ++l) {
        for (int head : partition.heads(l, r)) report.kept[l][head] = *rows++;
      }
    }
    report.non_finite_scores = m_comm.all_reduce_sum(m_decoder.counts().non_finite);
    report.full_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * report.tokens *
                        config.head_dim * static_cast<std::int64_t>(sizeof(Value));
    const CacheBytes bytes = cache.bytes();
    const auto sum = [&](std::size_t value) {
      return m_comm.all_reduce_sum(static_cast<std::int64_t>(value));
    };
    report.live_bytes = sum(bytes.live);
    report.allocated_bytes = sum(bytes.allocated);
    report.returned_bytes = sum(bytes.returned);
    report.peak_allocated_bytes = sum(m_meter.peak());
    return report;
  }

  void write_snapshot(const std::filesystem::path& file, const std::string& model_name) override {
    SnapshotInfo info;
    info.model = model_name;
    info.prune = name_of(m_options.prune);
    info.further["prefill"] = std::string(name_of(m_options.prefill));
    if (m_options.prune != PruneMode::none) {
      info.threshold = m_options.threshold;
      info.sink = m_options.sink;
      info.further["surrogate"] = m_scorer->kind();
    }
    kvzap::write_snapshot(file, m_decoder.cache(), m_sequence, m_model->partition(), m_comm, info);
  }

  std::vector<std::int64_t> positions(int layer, int head_on_rank) override {
    return m_decoder.cache().positions(m_sequence, layer, head_on_rank);
  }
  void set_observer(StepObserver* observer) override { m_decoder.set_observer(observer); }
  void set_attention_path(AttentionPath path) override { m_decoder.set_attention_path(path); }

 private:
  StepRule rule(bool judge) const {
    StepRule rule;
    rule.score = judge;
    rule.eviction = {m_options.threshold, m_options.sink, judge};
    return rule;
  }

  void trim() {
    if (m_options.trim) m_decoder.cache().trim();
  }

  CacheOptions m_options;
  Communicator m_comm;
  MemoryMeter m_meter;
  std::shared_ptr<const Model<Value>> m_model;
  std::shared_ptr<Scorer> m_scorer;
  Decoder<Value, order> m_decoder;
  SequenceId m_sequence;
  std::optional<typename KVCache<Value, order>::Checkpoint> m_checkpoint;
  AppendCounts m_context_counts;
  std::vector<float> m_context_logits;
  int m_answers = 0;
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

std::string_view name_of(StopReason reason) {
  switch (reason) {
    case StopReason::stop_id:
      return "stop_id";
    case StopReason::max_new_tokens:
      return "max_new_tokens";
    case StopReason::context_full:
      return "context_full";
  }
  return "unknown";
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

template <class Value>
std::unique_ptr<Generator> Generator::create(std::shared_ptr<const Model<Value>> model,
                                             std::shared_ptr<Scorer> scorer,
                                             const CacheOptions& options,
                                             const Communicator& comm) {
  check(options, scorer != nullptr);
  if (options.order == PageOrder::dim_major) {
    return std::make_unique<TypedGenerator<Value, PageOrder::dim_major>>(
        std::move(model), std::move(scorer), options, comm);
  }
  return std::make_unique<TypedGenerator<Value, PageOrder::token_major>>(
      std::move(model), std::move(scorer), options, comm);
}

template std::unique_ptr<Generator> Generator::create(std::shared_ptr<const Model<float>>,
                                                      std::shared_ptr<Scorer>, const CacheOptions&,
                                                      const Communicator&);
template std::unique_ptr<Generator> Generator::create(std::shared_ptr<const Model<half>>,
                                                      std::shared_ptr<Scorer>, const CacheOptions&,
                                                      const Communicator&);
template std::unique_ptr<Generator> Generator::create(std::shared_ptr<const Model<bfloat16>>,
                                                      std::shared_ptr<Scorer>, const CacheOptions&,
                                                      const Communicator&);

}  // namespace kvzap
