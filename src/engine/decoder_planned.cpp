// Decode steps on devices whose launches are recorded and repeated: what differs from step to step
// is planned for all layers ahead, and read by kernels from memory.
#include "base/scratch.hpp"
#include "engine/decoder.hpp"
#include "parallel/traffic.hpp"

namespace kvzap {
namespace {

// A backend that refuses so often is not asked again.
constexpr int most_refusals = 3;

}  // namespace

// One token for each sequence, and blocks that only launch kernels.
bool Decoder::can_plan() const {
  const engine::StepOutputs& outputs = m_step.outputs;
  const bool reads_all =
      outputs.count() == m_step.tokens() && outputs.n_hidden() == 0 && outputs.are_consecutive();
  if (!m_step.deferred || m_observer || !reads_all) return false;
  if (m_step.tokens() > m_step.most_rows()) return false;  // they pass layers in blocks
  if (m_step.has_scores && !m_scorer->is_repeatable()) return false;
  if (m_step.outcome() != engine::done) return false;
  if (m_model.config().experts && !m_experts.by_choices()) return false;
  return base::LaunchGraph::is_available() && m_attention.can_plan(m_step);
}

// Ranks must have exchanges that do not wait, and must all be able to.
bool Decoder::all_can_plan() const {
  if (m_comm.size() == 1) return can_plan();
  if (!m_step.deferred || m_agrees_often) return false;
  if (!parallel::RankExchange::enqueues(m_step.exec, m_comm)) return false;
  return m_comm.all_reduce_max(can_plan() ? 0 : 1) == 0;
}

// In the order in which the layers run, because attention reads a layer before its new row is in.
void Decoder::plan() {
  m_attention.begin_plans(m_step);
  m_cache.plan_appends(m_step.spans().size());
  for (int l = 0; l < static_cast<int>(m_layers.size()); ++l) {
    if (m_cache.shape().has_rows(l)) m_attention.plan(m_step, l);
    for (const int layer : m_ends[l]) {
      const auto& spans = appended_to(layer);
      if (m_step.shares_rows(layer)) {
        count_tokens(layer, spans);
      } else if (m_cache.shape().keeps_rows(layer)) {
        m_cache.plan_append(m_step.exec, spans, layer, m_step.new_keys(layer),
                            m_step.new_values(layer), m_step.new_scores(layer));
      }
    }
  }
  m_attention.copy_plans(m_step);
  m_cache.copy_plans(m_step.exec);
  m_step.is_planned = true;
}

// What decides the launches of the step, and their arguments.
std::vector<std::int64_t> Decoder::planned_shape() {
  std::vector<std::int64_t> shape{base::memory_moves, m_step.tokens(), m_step.outputs.n_tokens,
                                  m_step.outputs.n_drawn(), m_step.has_scores ? 1 : 0};
  for (const StepBatch::Span& span : m_step.spans()) shape.push_back(span.rule.score ? 1 : 0);
  m_attention.add_planned_shape(shape);
  // Kernels take the places of states as arguments. A sequence's states are in one block of memory,
  // and change places with those of the next step.
  for (int l = 0; l < static_cast<int>(m_layers.size()); ++l) {
    if (!m_cache.shape().has_state(l)) continue;
    for (const StepBatch::Span& span : m_step.spans()) {
      const auto state = m_cache.state(m_step.exec, span.sequence, l);
      shape.push_back(reinterpret_cast<std::intptr_t>(state.before.data()));
      shape.push_back(reinterpret_cast<std::intptr_t>(state.after.data()));
    }
    break;
  }
  return shape;
}

// Plans the step. Returns its shape, which several ranks make of the numbers of their own shapes: a
// call of NCCL is recorded, or launched by a graph, on all ranks or on none.
std::vector<std::int64_t> Decoder::plan_with_ranks() {
  std::vector<std::int64_t> shape;
  m_step.locally([&] {
    plan();
    shape = planned_shape();
  });
  if (m_comm.size() == 1) return shape;
  std::vector<std::int64_t> numbers(m_comm.size() + 1, 0);
  numbers[0] = m_step.outcome();
  numbers[m_comm.rank() + 1] = m_shape_numbers.of(shape);
  m_comm.all_reduce_max(numbers.data(), numbers.size());
  m_step.throw_if(numbers[0]);
  return numbers;  // memory that moves on a rank changes a number: the first one stays
}

// Records the launches of the step on all ranks, or on none.
bool Decoder::record(engine::RecordedSteps::Recorded& recorded) {
  bool is_recorded = false;
  Traffic& traffic = parallel::traffic_of_process();
  const Traffic before = traffic;
  m_step.locally(
      [&] { is_recorded = recorded.graph.record(m_step.exec, [&] { run_layers({}); }); });
  recorded.traffic.calls = traffic.calls - before.calls;
  recorded.traffic.bytes = traffic.bytes - before.bytes;
  traffic = before;
  m_cache.note_planned(false);
  m_step.pending = linalg::Matrix();
  const bool fails = !is_recorded || m_step.outcome() != engine::done;
  if (m_comm.all_reduce_max(fails ? 1 : 0) == 0) return true;
  // The backend may refuse to record what it launches; an error of the step's own comes again.
  ++m_refusals;
  recorded.graph.clear();
  m_step.forget_failure();
  return false;
}

void Decoder::run_planned() {
  run_plans();
  m_step.locally([&] {
    for (int l = 0; l < static_cast<int>(m_layers.size()); ++l) {
      if (!counts_tokens(l)) continue;
      for (const StepBatch::Span& span : m_step.spans()) {
        m_cache.count_tokens(span.sequence, l, span.count);
      }
    }
  });
}

// Launches the step, by a graph if its shape has come before.
void Decoder::run_plans() {
  const std::vector<std::int64_t> shape = plan_with_ranks();
  if (m_step.outcome() != engine::done) return;
  engine::RecordedSteps::Recorded* recorded = nullptr;  // null: the launches are not to be recorded
  m_step.by_policy([&] {  // an error on one rank ends all: they have agreed on the step
    const auto found = m_recorded.find(shape);
    if (found.came_before && m_refusals < most_refusals) recorded = &found.recorded;
  });
  if (m_step.outcome() != engine::done) return;
  if (recorded == nullptr) return run_layers({});
  if (!recorded->graph.is_recorded() && !record(*recorded)) return run_layers({});
  m_step.by_policy([&] {
    recorded->graph.launch(m_step.exec);
    parallel::traffic_of_process().calls += recorded->traffic.calls;
    parallel::traffic_of_process().bytes += recorded->traffic.bytes;
    m_cache.note_planned(true);
    ++m_repeated_steps;
  });
}

}  // namespace kvzap
