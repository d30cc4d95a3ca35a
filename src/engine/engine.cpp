#include <fmt/format.h>

#include <array>
#include <functional>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "base/stopwatch.hpp"
#include "base/value_types.hpp"
#include "engine/agree_on_memory.hpp"
#include "engine/check_options.hpp"
#include "engine/fork_writing.hpp"
#include "engine/joint_policy.hpp"
#include "engine/policy_layer.hpp"
#include "engine/row_scores.hpp"
#include "engine/sequence_pruning.hpp"

namespace kvzap {
namespace {

template <class Value>
class TypedEngine final : public Engine {
 public:
  TypedEngine(std::shared_ptr<const Model<Value>> model, std::shared_ptr<Scorer> scorer,
              const CacheOptions& options, const Communicator& comm)
      : Engine(options, comm),
        m_model(std::move(model)),
        m_scorer(std::move(scorer)),
        m_decoder(*m_model, m_scorer.get(), comm, options.window, options.page_rows, &m_meter),
        m_standard(std::make_shared<const detail::SequencePruning>(
            detail::SequencePruning{options.policy, options.prune, options.prefill,
                                    options.threshold, detail::uses_policy(options)})) {
    m_decoder.cache().set_limit(options.kv_limit);
  }

  const ModelConfig& config() const override { return m_model->config(); }

  SequenceId add_sequence() override {
    return on_all_ranks([&](std::optional<SequenceId>& made) {
      made = m_decoder.cache().add_sequence();
      m_lives[*made] = new_life(m_standard);
    });
  }
  SequenceId fork(SequenceId source) override {
    return on_all_ranks([&](std::optional<SequenceId>& made) {
      made = m_decoder.cache().fork(source);
      const Life& from = m_lives.at(source);
      m_lives[*made] = from.copy(new_life(from.pruning));
    });
  }
  void free_sequence(SequenceId sequence) override {
    m_lives.erase(sequence);
    m_decoder.cache().free_sequence(sequence);
  }

  std::unique_ptr<Checkpoint> checkpoint(SequenceId sequence) override {
    auto taken = std::make_unique<TypedCheckpoint>();
    detail::agree_on_memory(communicator(), [&] {
      taken->state = std::make_shared<const CacheState>(m_decoder.cache().checkpoint(sequence));
      taken->life = m_lives.at(sequence).copy({});
    });
    return taken;
  }
  void restore(SequenceId sequence, const Checkpoint& checkpoint) override {
    const auto& taken = dynamic_cast<const TypedCheckpoint&>(checkpoint);
    Life& life = m_lives.at(sequence);
    Life again = taken.life.copy({});
    m_decoder.cache().restore(sequence, *taken.state);
    again.policy = std::move(life.policy);
    again.pruning = life.pruning;
    life = std::move(again);
  }
  std::int64_t tokens(SequenceId sequence) const override {
    return m_decoder.cache().tokens(sequence, 0);
  }

  StepRule rule(SequenceId sequence, StepPart part, std::int64_t question) const override {
    return detail::rule_of(*m_lives.at(sequence).pruning, options().sink, part, question);
  }

  std::vector<StepResult> step(const StepBatch& batch, const ProgressCallback& progress) override {
    const bool any = std::any_of(
        batch.spans().begin(), batch.spans().end(),
        [&](const StepBatch::Span& span) { return life_with_policy(span.sequence) != nullptr; });
    if (!any) return m_decoder.step(batch, progress);
    m_batch = batch;
    for (std::size_t s = 0; s < batch.spans().size(); ++s) plan(s);
    // (Others' steps have been given by the caller.)
    const auto planned = [&](const StepBatch::Span& span) {
      Life* const life = life_with_policy(span.sequence);
      return life && span.rule.policy == &life->step ? life : nullptr;
    };
    std::vector<StepResult> results;
    try {
      results = m_decoder.step(m_batch, progress);
    } catch (...) {
      // In the middle of a layer a policy may have begun to sum up. Between steps it holds nothing.
      for (const StepBatch::Span& span : m_batch.spans()) {
        if (Life* const life = planned(span)) life->policy = life->pruning->policy->make();
      }
      throw;
    }
    for (const StepBatch::Span& span : m_batch.spans()) {
      Life* const life = life_with_policy(span.sequence);
      if (!life) continue;
      if (span.rule.part == StepPart::context && life->pruning->policy->info->repeats_context) {
        const auto first = m_batch.tokens().begin() + span.first;
        life->context.insert(life->context.end(), first, first + span.count);
      }
      if (span.rule.part == StepPart::question || span.rule.part == StepPart::generated) {
        ++life->steps;
      }
      if (planned(span)) finish(span);
    }
    return results;
  }

  void end_context(SequenceId sequence, const ProgressCallback& progress) override {
    Life& life = m_lives.at(sequence);
    if (!life.pruning->uses_policy) return;
    life.steps = 0;
    if (life.pruning->policy->info->repeats_context) repeat_context(sequence, progress);
    if (life.pruning->policy->rerotate) close_up(sequence);
  }

  bool can_hold(SequenceId sequence) const override {
    return !m_lives.at(sequence).pruning->uses_policy;
  }

  void judge_context(SequenceId sequence) override {
    const detail::SequencePruning& pruning = *m_lives.at(sequence).pruning;
    if (pruning.prune == PruneMode::none) return;
    const detail::Stopwatch watch(m_evict_seconds);
    auto& cache = m_decoder.cache();
    const ExecutionSpace exec;
    detail::agree_on_memory(communicator(), [&] {
      if (!can_hold(sequence)) {
        throw Error(fmt::format("policy {}: a context cannot be judged after its steps",
                                pruning.policy->name));
      }
      const Cutoff cutoff = {pruning.threshold, std::numeric_limits<std::int64_t>::max()};
      for (std::size_t l = 0; l < cache.shape().heads.size(); ++l) {
        const std::vector<Cutoff> cutoffs(cache.shape().heads[l], cutoff);
        cache.evict(exec, sequence, static_cast<int>(l), cutoffs,
                    {options().sink, options().window});
      }
    });
  }

  void check(const PruneSetting& setting) const override {
    detail::check_options(detail::with_setting(options(), setting),
                          setting.policy && setting.policy->scorer);
    detail::check_rope(detail::with_setting(options(), setting), m_model->config());
  }

  void set_pruning(SequenceId sequence, const PruneSetting& setting) override {
    detail::agree_on_memory(communicator(), [&] {
      check(setting);
      if (tokens(sequence) > 0) {
        throw Error(fmt::format("sequence {} has tokens: it is too late to say how it is pruned",
                                sequence));
      }
      m_lives.at(sequence) = new_life(pruning_of(setting));
    });
  }

  Reading read(SequenceId sequence, const std::vector<TokenId>& tokens, std::int64_t question,
               const std::vector<std::shared_ptr<const PolicyChoice>>& policies, StepOutput output,
               const ProgressCallback& progress) override {
    auto& cache = m_decoder.cache();
    const ModelConfig& config = m_model->config();
    const auto budget_model = detail::budget_model<Value>(config);
    const auto count = static_cast<std::int64_t>(tokens.size());
    // Those that score within the step, and those that have the context repeated alike.
    std::vector<std::vector<std::size_t>> groups(1);
    std::vector<std::unique_ptr<detail::JointPolicy>> joint;
    std::optional<RecentQueries> recent;
    detail::agree_on_memory(communicator(), [&] {
      if (m_lives.at(sequence).pruning->prune != PruneMode::none || this->tokens(sequence) > 0) {
        throw Error(fmt::format("sequence {} is pruned or has tokens: it cannot be read for others",
                                sequence));
      }
      for (std::size_t i = 0; i < policies.size(); ++i) {
        const PolicyChoice& choice = *policies[i];
        try {  // before the context is run for nothing
          for (int l = 0; l < budget_model.layers && choice.budget.has_amount(); ++l) {
            choice.budget.rows_per_head(budget_model, l, count);
          }
          if (choice.info->repeats_context) repeat_steps(tokens, choice.repeat);
        } catch (const Error& error) {
          throw Error(fmt::format("policy {}: {}", choice.name, error.what()));
        }
        std::size_t group = 0;
        if (choice.info->repeats_context) {
          for (group = 1; group < groups.size(); ++group) {
            if (asks_alike(policies[groups[group].front()]->repeat, choice.repeat)) break;
          }
          groups.resize(std::max(groups.size(), group + 1));
        }
        groups[group].push_back(i);
      }
      for (const auto& group : groups) {
        std::vector<std::shared_ptr<const PolicyChoice>> members;
        members.reserve(group.size());
        for (const std::size_t i : group) members.push_back(policies[i]);
        joint.push_back(std::make_unique<detail::JointPolicy>(members, budget_model));
      }
      joint[0]->reserve(cache.shape().heads, count);
      const std::int64_t newest = joint[0]->needs().recent;
      if (newest > 0) recent = recent_queries(newest, false);
    });
    PolicyStep step;
    step.policy = joint[0].get();
    step.recent = recent ? &*recent : nullptr;
    step.question = question;
    StepBatch batch(sequence, tokens, StepRule(), output);
    if (!groups[0].empty()) batch.set_policy(0, &step);
    Reading reading;
    {
      const detail::Stopwatch watch(reading.step_seconds);
      reading.result = std::move(m_decoder.step(batch, progress).front());
    }
    reading.scoring_seconds = joint[0]->seconds();
    for (std::size_t g = 1; g < groups.size(); ++g) {
      const PolicyChoice& choice = *policies[groups[g].front()];
      double seconds = 0;
      {
        const detail::Stopwatch watch(seconds);
        repeat(
            sequence, tokens, choice, [&] { return joint[g].get(); }, progress);
        detail::fence(ExecutionSpace(), "kvzap::engine: the repeat is timed");
      }
      m_repeat_seconds += seconds - joint[g]->seconds();
      joint[g]->add_seconds(seconds - joint[g]->seconds());
      joint[g]->take_context_scores(ExecutionSpace(), communicator(), budget_model.layers);
    }
    reading.scores.resize(policies.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::size_t i = 0; i < groups[g].size(); ++i) {
        reading.scores[groups[g][i]] = joint[g]->scores(i);
      }
    }
    return reading;
  }

  SequenceId prune(SequenceId source, const PruneSetting& setting,
                   const ContextScores* scores) override {
    const bool prunes = setting.policy && setting.prune != PruneMode::none;
    const bool chooses = prunes && detail::chooses_rows(*setting.policy);
    // Where a layer is chosen before the next one runs, nothing of it waits in a ring.
    const bool empties_ring =
        chooses && (setting.policy->rerotate ||
                    (setting.policy->budget.by_layer() && !setting.policy->info->repeats_context));
    const bool communicates = chooses && detail::choice_communicates(setting.policy->budget);
    const ExecutionSpace exec;
    std::vector<ScoredLayer> layers;
    detail::LayerScores first;  // other settings have the scores too
    const SequenceId sequence = on_all_ranks([&](std::optional<SequenceId>& made) {
      check(setting);
      if (setting.prefill != PrefillMode::dense) {
        throw Error("sparse prefill cannot be made up for after a dense one");
      }
      if (m_lives.at(source).pruning->prune != PruneMode::none) {
        throw Error(fmt::format("sequence {} is pruned already", source));
      }
      if (options().decode_every > 0) {
        // What later cuts go by (newest queries, scores of rows) a reading does not leave.
        throw Error("--decode-every goes with a sequence that is pruned as it is run");
      }
      if (prunes) check_scores(source, scores);
      made = m_decoder.cache().fork(source);
      Life& life = m_lives[*made] = new_life(pruning_of(setting));
      if (!prunes) return;
      if (!chooses) return judge(*made, scores->layers);
      life.budget = setting.policy->budget;
      layers = scored_layers(*made, scores->layers);
      first = detail::copy_first(exec, scores->layers, options().sink);
      if (communicates) return;
      choose(*made, layers, scores->layers);
      detail::put_back(exec, first, scores->layers);
      evict(*made, layers, empties_ring, false);
    });
    try {
      if (communicates) {
        choose(sequence, layers, scores->layers);
        detail::put_back(exec, first, scores->layers);
        detail::agree_on_memory(communicator(),
                                [&] { evict(sequence, layers, empties_ring, false); });
      }
      if (prunes && setting.policy->rerotate) close_up(sequence);
    } catch (...) {
      free_sequence(sequence);
      throw;
    }
    return sequence;
  }

  std::size_t trim() override { return m_decoder.cache().trim(); }

  CacheReport report(SequenceId sequence) override { return reports({sequence}).front(); }

  std::vector<CacheReport> reports(const std::vector<SequenceId>& sequences) override {
    auto& cache = m_decoder.cache();
    const ModelConfig& config = m_model->config();
    const HeadPartition& partition = m_model->partition();
    const CacheBytes bytes = cache.bytes();
    std::vector<std::int64_t> mine;
    std::vector<std::int64_t> sums;
    for (const std::size_t value : {bytes.live, bytes.allocated, bytes.returned, m_meter.peak()}) {
      sums.push_back(static_cast<std::int64_t>(value));
    }
    for (const SequenceId sequence : sequences) {
      for (int l = 0; l < partition.n_layers(); ++l) {
        for (int h = 0; h < cache.shape().heads[l]; ++h) mine.push_back(cache.rows(sequence, l, h));
      }
      sums.push_back(cache.counts(sequence).non_finite + m_lives.at(sequence).non_finite);
    }
    const auto all = communicator().all_gather(mine);
    communicator().all_reduce_sum(sums.data(), sums.size());
    std::array<double, 2> seconds = {m_decoder.seconds().scoring + m_repeat_seconds,
                                     m_decoder.seconds().pruning + m_evict_seconds};
    communicator().all_reduce_max(seconds.data(), seconds.size());

    std::vector<CacheReport> reports(sequences.size());
    std::vector<std::size_t> next(all.size(), 0);  // value of each rank
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      CacheReport& report = reports[i];
      report.tokens = cache.tokens(sequences[i], 0) + m_lives.at(sequences[i]).closed_up;
      report.kept.assign(partition.n_layers(), std::vector<std::int64_t>(partition.n_kv_heads()));
      for (int r = 0; r < communicator().size(); ++r) {
        for (int l = 0; l < partition.n_layers(); ++l) {
          for (const int head : partition.heads(l, r)) report.kept[l][head] = all[r][next[r]++];
        }
      }
      report.full_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads *
                          report.tokens * config.head_dim *
                          static_cast<std::int64_t>(sizeof(Value));
      report.live_bytes = sums[0];
      report.allocated_bytes = sums[1];
      report.returned_bytes = sums[2];
      report.peak_allocated_bytes = sums[3];
      report.non_finite_scores = sums[4 + i];
      report.score_seconds = seconds[0];
      report.prune_seconds = seconds[1];
    }
    return reports;
  }

  std::unique_ptr<SnapshotWriting> begin_snapshot(const std::filesystem::path& file,
                                                  SnapshotInfo info, const SnapshotOptions& options,
                                                  SequenceId sequence,
                                                  const Checkpoint* context) override {
    auto& cache = m_decoder.cache();
    const auto state = describe(sequence, context, info);
    const SequenceId copy =
        on_all_ranks([&](std::optional<SequenceId>& made) { made = cache.fork(sequence); });
    const auto free_copy = [&cache, copy] { cache.free_sequence(copy); };
    try {
      return std::make_unique<detail::ForkWriting>(
          kvzap::begin_snapshot(file, cache, copy, m_model->partition(), communicator(), info,
                                options, state.get()),
          state, free_copy);
    } catch (...) {
      free_copy();
      throw;
    }
  }

  std::vector<std::string> write_snapshot(const std::filesystem::path& file, SnapshotInfo info,
                                          const SnapshotOptions& options, SequenceId sequence,
                                          const Checkpoint* context) override {
    const auto state = describe(sequence, context, info);
    const auto writing =
        kvzap::begin_snapshot(file, m_decoder.cache(), sequence, m_model->partition(),
                              communicator(), info, options, state.get());
    writing->finish();
    return writing->notes();
  }

  Resumed resume(const SnapshotReader& reader) override {
    auto loaded = load_snapshot(reader, m_decoder.cache(), m_model->partition(), communicator());
    Resumed resumed;
    resumed.sequence = loaded.sequence;
    try {
      detail::agree_on_memory(communicator(), [&] {
        m_lives[loaded.sequence] = read_life(reader, "", loaded.recent_queries);
        if (!loaded.context) return;
        auto context = std::make_unique<TypedCheckpoint>();
        context->state = std::make_shared<const CacheState>(std::move(*loaded.context));
        // Without cuts while the model generates no newer queries are taken after the context.
        context->life = read_life(reader, "context_", loaded.recent_queries).copy({});
        resumed.context = std::move(context);
      });
    } catch (...) {
      free_sequence(loaded.sequence);
      throw;
    }
    return resumed;
  }

  void check_more_context(SequenceId sequence, std::int64_t count) const override {
    const Life& life = m_lives.at(sequence);
    if (!life.pruning->uses_policy) return;
    const PolicyChoice& choice = *life.pruning->policy;
    const auto refuse = [&](const std::string& what) {
      throw Error(fmt::format("policy {}: nothing can be added to a context that it has pruned: {}",
                              choice.name, what));
    };
    if (choice.info->repeats_context) refuse("it has the model repeat the context as a whole");
    if (!choice.info->scores_again || choice.info->has_own_budget) {
      refuse("it cannot score again after each chunk");
    }
    if (choice.rerotate) refuse("it has closed up the positions");
    if (life.recent && !life.recent->lasts() && count < life.recent->capacity()) {
      refuse(
          fmt::format("it scores by the {} newest tokens, of which {} are new, and without "
                      "--prefill sparse earlier ones are not kept",
                      life.recent->capacity(), count));
    }
  }

  std::vector<std::int64_t> positions(SequenceId sequence, int layer, int head_on_rank) override {
    return m_decoder.cache().positions(sequence, layer, head_on_rank);
  }
  std::vector<std::vector<float>> scores(SequenceId sequence, int layer) override {
    auto& cache = m_decoder.cache();
    const int heads = cache.shape().heads[layer];
    std::int64_t longest = 0;
    for (int h = 0; h < heads; ++h) longest = std::max(longest, cache.rows(sequence, layer, h));
    const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> of_rows(
        Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::engine::row_scores"), heads,
        longest);
    const ExecutionSpace exec;
    cache.row_scores(exec, sequence, layer, of_rows);
    exec.fence();
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), of_rows);
    std::vector<std::vector<float>> result(heads);
    for (int h = 0; h < heads; ++h) {
      result[h].assign(host.data() + h * longest,
                       host.data() + h * longest + cache.rows(sequence, layer, h));
    }
    return result;
  }
  CacheBytes bytes() const override { return m_decoder.cache().bytes(); }
  std::size_t bytes_per_token() const override {
    return heads_of_all_layers() *
           page_row_bytes(m_decoder.cache().shape().head_dim, sizeof(Value));
  }
  std::size_t bytes_per_sequence() const override {
    const CacheShape& shape = m_decoder.cache().shape();
    return heads_of_all_layers() * shape.window * ring_row_bytes(shape.head_dim, sizeof(Value));
  }
  std::size_t free_bytes() const override { return m_decoder.cache().pool().free_bytes(); }
  void set_observer(StepObserver* observer) override {
    m_observer = observer;
    m_decoder.set_observer(observer);
  }
  void set_attention_path(AttentionPath path) override { m_decoder.set_attention_path(path); }

 private:
  /// What a policy keeps of a sequence between steps.
  struct Life {
    std::shared_ptr<const detail::SequencePruning> pruning;
    std::unique_ptr<Policy> policy;
    std::optional<RecentQueries> recent;
    std::int64_t steps = 0;        // since the context, or since the last cut
    std::int64_t closed_up = 0;    // positions fewer than tokens
    std::int64_t non_finite = 0;   // rows that the last cut has kept for want of a finite score
    std::vector<TokenId> context;  // that a policy will want repeated
    // Of the step under way.
    PolicyStep step;
    Budget budget;
    bool cuts = false;  // choose when it is over

    /// With another policy object: one serves one sequence, and holds nothing between steps.
    Life copy(Life into) const {
      if (recent) into.recent = recent->clone();
      into.steps = steps;
      into.closed_up = closed_up;
      into.non_finite = non_finite;
      into.context = context;
      into.pruning = pruning;
      return into;
    }
  };

  using CacheState = typename KVCache<Value, engine_page_order>::Checkpoint;

  struct TypedCheckpoint final : Checkpoint {
    std::shared_ptr<const CacheState> state;  // which a snapshot under way reads, too
    Life life;
  };

  /// Adds to `info` what a snapshot of the sequence has of the engine. Collective. Returns the
  /// cache's part of `context`, null if there is none.
  std::shared_ptr<const CacheState> describe(SequenceId sequence, const Checkpoint* context,
                                             SnapshotInfo& info) {
    const auto* const taken = dynamic_cast<const TypedCheckpoint*>(context);
    const Life& life = m_lives.at(sequence);
    const detail::SequencePruning& pruning = *life.pruning;
    std::array<std::int64_t, 2> non_finite = {life.non_finite, taken ? taken->life.non_finite : 0};
    detail::agree_on_memory(communicator(), [&] {
      if (context && (!taken || taken->state->sequence != sequence)) {
        throw Error(fmt::format("the context is not a state of sequence {}", sequence));
      }
      if (life.recent && life.recent->lasts()) info.recent_queries = life.recent->to_host();
    });
    communicator().all_reduce_sum(non_finite.data(), non_finite.size());
    const auto note = [&](const std::string& prefix, const Life& of, std::int64_t of_all_ranks) {
      info.state[prefix + "steps"] = of.steps;
      info.state[prefix + "closed_up"] = of.closed_up;
      info.state[prefix + "cut_non_finite"] = of_all_ranks;
      info.state[prefix + "to_repeat"] = static_cast<std::int64_t>(of.context.size());
    };
    note("", life, non_finite[0]);
    if (taken) note("context_", taken->life, non_finite[1]);
    info.prune = name_of(pruning.prune);
    info.further["prefill"] = std::string(name_of(pruning.prefill));
    if (pruning.prune != PruneMode::none) {
      info.sink = options().sink;
      const bool has_budget = pruning.uses_policy && detail::chooses_rows(*pruning.policy);
      if (!has_budget) info.threshold = rule(sequence, StepPart::context, 0).eviction.threshold;
      if (pruning.uses_policy) {
        info.further["policy"] = pruning.policy->name;
        if (has_budget) info.further["budget"] = pruning.policy->budget.text();
      } else {
        info.further["surrogate"] = m_scorer->kind();
      }
    }
    return taken ? taken->state : nullptr;
  }

  /// What `describe` has noted with this prefix.
  Life read_life(const SnapshotReader& reader, const std::string& prefix,
                 const std::vector<SnapshotQueries>& recent) {
    const SnapshotInfo& info = reader.header().info;
    const auto refuse = [&](const std::string& what) {
      throw Error(fmt::format("snapshot {}: {}", reader.file().string(), what));
    };
    const auto number = [&](const char* name) {
      const auto found = info.state.find(prefix + name);
      const std::int64_t value = found == info.state.end() ? 0 : found->second;
      if (value < 0) refuse(fmt::format("/state: {}{} is {}", prefix, name, value));
      return value;
    };
    Life life = new_life(m_standard);
    life.steps = number("steps");
    life.closed_up = number("closed_up");
    life.non_finite = communicator().is_root() ? number("cut_non_finite") : 0;
    const std::int64_t to_repeat = number("to_repeat");
    if (to_repeat > static_cast<std::int64_t>(info.token_ids.size())) {
      refuse(fmt::format("the policy has yet to repeat {} tokens, and there are {} token_ids",
                         to_repeat, info.token_ids.size()));
    }
    life.context.assign(info.token_ids.begin(), info.token_ids.begin() + to_repeat);
    if (!life.recent || !life.recent->lasts()) return life;
    const std::string& policy = m_standard->policy->name;
    if (recent.empty()) {
      refuse(
          fmt::format("it has no newest queries, by which policy {} scores: it was written "
                      "under another one",
                      policy));
    }
    try {
      life.recent->from_host(recent);
    } catch (const OutOfMemory&) {
      throw;
    } catch (const Error& error) {
      refuse(error.what());
    }
    return life;
  }

  std::size_t heads_of_all_layers() const {
    const std::vector<int>& heads = m_decoder.cache().shape().heads;
    return static_cast<std::size_t>(std::accumulate(heads.begin(), heads.end(), 0));
  }

  Life new_life(const std::shared_ptr<const detail::SequencePruning>& pruning) const {
    Life life;
    life.pruning = pruning;
    if (!pruning->uses_policy) return life;
    life.policy = pruning->policy->make();
    const PolicyNeeds needs = life.policy->needs();
    if (needs.recent > 0) {
      // Whether rows are scored in several steps, so that the newest tokens of a step are too few.
      life.recent = recent_queries(
          needs.recent, options().decode_every > 0 || pruning->prefill == PrefillMode::sparse);
    }
    return life;
  }

  RecentQueries recent_queries(std::int64_t count, bool every_layer) const {
    const int group = static_cast<int>(m_model->config().query_group());
    std::vector<int> query_heads;
    for (const int heads : m_decoder.cache().shape().heads) query_heads.push_back(heads * group);
    return RecentQueries(count, query_heads, static_cast<int>(m_model->config().head_dim),
                         every_layer);
  }

  std::shared_ptr<const detail::SequencePruning> pruning_of(const PruneSetting& setting) const {
    const CacheOptions options = detail::with_setting(this->options(), setting);
    // The decoder's fast path is the engine's own scorer's.
    const bool uses_scorer = options.policy && options.policy->scorer == m_scorer;
    return std::make_shared<const detail::SequencePruning>(
        detail::SequencePruning{options.policy, options.prune, options.prefill, options.threshold,
                                options.policy && (detail::uses_policy(options) || !uses_scorer)});
  }

  /// Null where the sequence has none, or is none.
  Life* life_with_policy(SequenceId sequence) {
    const auto found = m_lives.find(sequence);
    return found == m_lives.end() || !found->second.pruning->uses_policy ? nullptr : &found->second;
  }

  /// Rows per head that a cut leaves after `tokens` tokens. A question as long as this is a reason
  /// to cut at once, as in kvpress' DecodingPress.
  std::int64_t decode_target(std::int64_t tokens) const {
    if (options().decode_keep > 0) return options().decode_keep;
    return std::max<std::int64_t>(
        1, static_cast<std::int64_t>(tokens * (1 - options().decode_evict_ratio)));
  }

  /// What the policy does to a span of m_batch.
  void plan(std::size_t index) {
    const StepBatch::Span& span = m_batch.spans()[index];
    if (!life_with_policy(span.sequence)) return;
    Life& life = m_lives.at(span.sequence);
    const PolicyChoice& choice = *life.pruning->policy;
    if (span.rule.part == StepPart::other || choice.info->repeats_context) return;
    const PolicyNeeds needs = life.policy->needs();
    const std::int64_t before = m_decoder.cache().tokens(span.sequence, 0);
    PolicyStep& step = life.step;
    step = PolicyStep();
    step.policy = life.policy.get();
    step.recent = life.recent ? &*life.recent : nullptr;
    step.question = span.rule.question;
    step.closed_up = life.closed_up;
    life.cuts = false;
    const bool is_context =
        span.rule.part == StepPart::context || span.rule.part == StepPart::whole;
    if (is_context && detail::chooses_rows(choice)) {
      life.budget = choice.budget;
      step.budget = &life.budget;
      step.chooses = before == 0 && life.budget.by_layer();
      life.cuts = !step.chooses;
    } else if (is_context) {
      step.scores_all = !choice.info->judges_tokens;
    } else {
      const std::int64_t tokens = before + life.closed_up + span.count;
      life.budget = choice.budget;
      life.budget.amount =
          options().decode_keep > 0 ? Budget::Amount::keep_tokens : Budget::Amount::evict_ratio;
      life.budget.keep_tokens = options().decode_keep;
      life.budget.evict_ratio = options().decode_evict_ratio;
      life.budget.layer_ratios.clear();
      step.budget = &life.budget;
      life.cuts = options().decode_every > 0 &&
                  (life.steps + 1 >= options().decode_every || span.count >= decode_target(tokens));
      if (!life.cuts && span.rule.eviction.judge) {
        step.scores_all = false;
      } else if (!life.cuts && !(needs.every_step && options().decode_every > 0)) {
        // Without a cut to come no one asks for their queries.
        if (!step.recent || options().decode_every == 0) return;
        step.only_watches = true;
      }
    }
    // Cached rows get new scores when the step is over. With a threshold they keep the one that
    // they got in their own step, by which they are judged once.
    step.keeps_scores = !step.only_watches && step.scores_all && !step.chooses &&
                        (life.cuts || (before > 0 && !span.rule.eviction.judge));
    m_batch.set_policy(index, &step);
  }

  /// Gives rows the scores that a step has left, and cuts the sequence if it is time.
  void finish(const StepBatch::Span& span) {
    Life& life = m_lives.at(span.sequence);
    if (!life.step.keeps_scores) return;
    const detail::Stopwatch watch(m_evict_seconds);
    const auto scores = std::move(life.step.scores);  // which go in any case
    life.step.scores.clear();
    auto& cache = m_decoder.cache();
    const ExecutionSpace exec;
    const int layers = static_cast<int>(scores.size());
    detail::agree_on_memory(communicator(), [&] {
      for (int l = 0; l < layers; ++l) {
        cache.set_row_scores(exec, span.sequence, l, scores[l]);
      }
    });
    if (life.cuts) cut(span.sequence, scores);
  }

  static bool asks_alike(const RepeatPrompt& a, const RepeatPrompt& b) {
    return a.first == b.first && a.later == b.later && a.suffix == b.suffix &&
           a.prefix == b.prefix && a.chunk == b.chunk && a.overlap == b.overlap;
  }

  /// Lets the model repeat the context before the eyes of a policy, which `make` gives, and leaves
  /// the sequence as it was.
  template <class Make>
  void repeat(SequenceId sequence, const std::vector<TokenId>& context, const PolicyChoice& choice,
              const Make& make, const ProgressCallback& progress) {
    auto& cache = m_decoder.cache();
    const std::vector<RepeatStep> steps = repeat_steps(context, choice.repeat);
    std::int64_t all = 0;
    for (const RepeatStep& repeat : steps) all += static_cast<std::int64_t>(repeat.tokens.size());
    typename KVCache<Value, engine_page_order>::Checkpoint before;
    Policy* policy = nullptr;
    detail::agree_on_memory(communicator(), [&] {
      for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
        for (int h = 0; h < cache.shape().heads[l]; ++h) {
          if (cache.rows(sequence, l, h) == static_cast<std::int64_t>(context.size())) continue;
          throw Error(fmt::format("policy {}: sequence {} does not have all rows of its context",
                                  choice.name, sequence));
        }
      }
      policy = make();
      before = cache.checkpoint(sequence);
    });
    std::int64_t done = 0;
    for (const RepeatStep& repeat : steps) {
      PolicyStep step;
      step.policy = policy;
      step.only_observes = true;
      step.repeats_begin = repeat.begin;
      step.repeats_end = repeat.end;
      const auto count = static_cast<std::int64_t>(repeat.tokens.size());
      StepBatch batch(sequence, repeat.tokens, StepRule(), StepOutput::none);
      batch.set_policy(0, &step);
      m_decoder.step(batch, [&](std::string_view, std::int64_t part, std::int64_t parts) {
        if (progress) progress("repeat", done + count * part / parts, all);
      });
      cache.restore(sequence, before);
      done += count;
    }
  }

  /// The same for the sequence's own policy, by whose scores it is cut.
  void repeat_context(SequenceId sequence, const ProgressCallback& progress) {
    Life& life = m_lives.at(sequence);
    const PolicyChoice& choice = *life.pruning->policy;
    auto& cache = m_decoder.cache();
    const ExecutionSpace exec;
    // The policy's own time in these steps is counted by the decoder.
    const double scoring_before = m_decoder.seconds().scoring;
    double seconds = 0;
    detail::LayerScores scores;
    {
      const detail::Stopwatch watch(seconds);
      std::unique_ptr<Policy> policy;
      const auto make = [&] {
        policy = choice.make();
        return policy.get();
      };
      repeat(sequence, life.context, choice, make, progress);
      for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
        scores.push_back(policy->context_scores(exec, communicator(), l));
        if (m_observer) m_observer->scores(sequence, l, 0, scores.back());
      }
      detail::fence(exec, "kvzap::engine: the repeat is timed");
    }
    m_repeat_seconds += seconds - (m_decoder.seconds().scoring - scoring_before);
    const detail::Stopwatch watch(m_evict_seconds);
    detail::agree_on_memory(communicator(), [&] {
      for (std::size_t l = 0; l < scores.size(); ++l) {
        cache.set_row_scores(exec, sequence, static_cast<int>(l), scores[l]);
      }
    });
    life.budget = choice.budget;
    cut(sequence, scores);
    life.context = {};
  }

  /// What a choice from `scores` is made of.
  std::vector<ScoredLayer> scored_layers(SequenceId sequence, const detail::LayerScores& scores) {
    auto& cache = m_decoder.cache();
    std::vector<ScoredLayer> layers(scores.size());
    for (std::size_t l = 0; l < layers.size(); ++l) {
      layers[l].layer = static_cast<int>(l);
      layers[l].heads = m_model->partition().heads(static_cast<int>(l), m_model->rank());
      layers[l].scores = scores[l];
      for (std::size_t h = 0; h < layers[l].heads.size(); ++h) {
        layers[l].rows.push_back(cache.rows(sequence, static_cast<int>(l), static_cast<int>(h)));
      }
      detail::before_allocation(layers[l].heads.size() * scores[l].extent(1));
      layers[l].keep = decltype(layers[l].keep)("kvzap::policy::keep", layers[l].heads.size(),
                                                scores[l].extent(1));
    }
    return layers;
  }

  /// Cuts to life.budget by scores that the rows have.
  void cut(SequenceId sequence, const detail::LayerScores& scores) {
    const bool empties_ring = m_lives.at(sequence).pruning->policy->rerotate;
    std::vector<ScoredLayer> layers;
    if (!detail::choice_communicates(m_lives.at(sequence).budget)) {
      detail::agree_on_memory(communicator(), [&] {
        layers = scored_layers(sequence, scores);
        choose(sequence, layers, scores);
        evict(sequence, layers, empties_ring, true);
      });
      return;
    }
    detail::agree_on_memory(communicator(), [&] { layers = scored_layers(sequence, scores); });
    choose(sequence, layers, scores);
    detail::agree_on_memory(communicator(), [&] { evict(sequence, layers, empties_ring, true); });
  }

  /// Which rows stay; collective if choice_communicates.
  void choose(SequenceId sequence, const std::vector<ScoredLayer>& layers,
              const detail::LayerScores& scores) {
    const Life& life = m_lives.at(sequence);
    const std::int64_t tokens = m_decoder.cache().tokens(sequence, 0) + life.closed_up;
    detail::choose_rows(ExecutionSpace(), communicator(), life.budget,
                        detail::budget_model<Value>(m_model->config()), tokens, options().sink,
                        layers, scores);
  }

  /// empties_ring: no row is left in a ring (positions can only be closed up then). is_stored: rows
  /// have the scores that they were chosen by in the cache too.
  void evict(SequenceId sequence, const std::vector<ScoredLayer>& layers, bool empties_ring,
             bool is_stored) {
    Life& life = m_lives.at(sequence);
    auto& cache = m_decoder.cache();
    const ExecutionSpace exec;
    const std::int64_t tokens = cache.tokens(sequence, 0);
    life.non_finite = 0;
    for (const ScoredLayer& layer : layers) {
      const std::int64_t stored =
          cache.evict(exec, sequence, layer.layer, layer.keep, empties_ring).non_finite;
      life.non_finite += is_stored ? stored : detail::count_non_finite(exec, layer, tokens);
    }
    life.steps = 0;
  }

  /// Refuses what are not the scores of all rows that a sequence has.
  void check_scores(SequenceId sequence, const ContextScores* scores) const {
    const auto& heads = m_decoder.cache().shape().heads;
    bool fits = scores && scores->layers.size() == heads.size();
    for (std::size_t l = 0; fits && l < heads.size(); ++l) {
      fits = static_cast<int>(scores->layers[l].extent(0)) == heads[l] &&
             static_cast<std::int64_t>(scores->layers[l].extent(1)) == tokens(sequence);
    }
    if (!fits) {
      throw Error(fmt::format("there are no scores of the {} rows of sequence {} to prune by",
                              tokens(sequence), sequence));
    }
  }

  /// Judges the rows of a context, all of which are there, as if they had been when they left the
  /// window.
  void judge(SequenceId sequence, const detail::LayerScores& scores) {
    Life& life = m_lives.at(sequence);
    auto& cache = m_decoder.cache();
    const ExecutionSpace exec;
    const EvictionRule eviction = rule(sequence, StepPart::context, 0).eviction;
    if (life.pruning->prune == PruneMode::always) {
      // Those of the window are judged later.
      for (std::size_t l = 0; l < scores.size(); ++l) {
        cache.set_row_scores(exec, sequence, static_cast<int>(l), scores[l]);
      }
    }
    const std::int64_t judged = cache.tokens(sequence, 0) - options().window;
    if (judged <= 0) return;
    for (const ScoredLayer& layer : scored_layers(sequence, scores)) {
      detail::judge_rows(exec, layer, eviction, judged);
      life.non_finite += detail::count_non_finite(exec, layer, judged);
      cache.evict(exec, sequence, layer.layer, layer.keep);
    }
  }

  /// Of a sequence whose heads all have as many rows.
  void close_up(SequenceId sequence) {
    Life& life = m_lives.at(sequence);
    auto& cache = m_decoder.cache();
    const std::int64_t before = cache.tokens(sequence, 0);
    // A rank without any head cannot know how many.
    std::int64_t rows = 0;
    for (int l = 0; l < static_cast<int>(cache.shape().heads.size()); ++l) {
      if (cache.shape().heads[l] > 0) rows = cache.rows(sequence, l, 0);
    }
    rows = communicator().all_reduce_max(rows);
    detail::agree_on_memory(communicator(), [&] {
      cache.close_up(ExecutionSpace(), sequence, m_decoder.inverse_frequencies(), rows);
    });
    life.closed_up += before - cache.tokens(sequence, 0);
    // Their queries have been turned to positions that are no more.
    if (life.recent) life.recent->restart(cache.tokens(sequence, 0));
  }

  // A new sequence on every rank, or, with an error, on none. `make` first sets it.
  template <class Make>
  SequenceId on_all_ranks(const Make& make) {
    std::optional<SequenceId> made;
    try {
      detail::agree_on_memory(communicator(), [&] { make(made); });
    } catch (...) {
      if (made) free_sequence(*made);
      throw;
    }
    return *made;
  }

  MemoryMeter m_meter;
  std::shared_ptr<const Model<Value>> m_model;
  std::shared_ptr<Scorer> m_scorer;
  Decoder<Value> m_decoder;
  std::shared_ptr<const detail::SequencePruning>
      m_standard;  // of sequences without a setting of their own
  std::map<SequenceId, Life> m_lives;
  StepBatch m_batch;
  StepObserver* m_observer = nullptr;
  double m_evict_seconds = 0;
  double m_repeat_seconds = 0;  // of the model, in steps that repeat contexts
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
  return detail::scorer_rule(judges, m_options.threshold, m_options.sink);
}

StepRule Engine::rule(StepPart part, std::int64_t question) const {
  const detail::SequencePruning pruning{m_options.policy, m_options.prune, m_options.prefill,
                                        m_options.threshold, detail::uses_policy(m_options)};
  return detail::rule_of(pruning, m_options.sink, part, question);
}

std::vector<std::string> Engine::write_snapshot(const std::filesystem::path& file,
                                                const std::string& model_name,
                                                SequenceId sequence) {
  SnapshotInfo info;
  info.model = model_name;
  return write_snapshot(file, std::move(info), {}, sequence);
}

template <class Value>
std::unique_ptr<Engine> Engine::create(std::shared_ptr<const Model<Value>> model,
                                       std::shared_ptr<Scorer> scorer, const CacheOptions& options,
                                       const Communicator& comm) {
  detail::check_options(options, scorer != nullptr);
  detail::check_rope(options, model->config());
  return std::make_unique<TypedEngine<Value>>(std::move(model), std::move(scorer), options, comm);
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
