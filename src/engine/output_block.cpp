#include "engine/output_block.hpp"

#include "base/kokkos_compat.hpp"
#include "base/machine.hpp"
#include "engine/step_kernels.hpp"

namespace kvzap::engine {

using linalg::Matrix;

void OutputBlock::reserve(Step& step) {
  const std::int64_t hidden = step.config.hidden_size;
  const std::int64_t vocabulary = step.config.vocab_size;
  const std::int64_t local = step.model.weights().output_head.outputs();
  const StepOutputs& outputs = step.outputs;
  step.reserve(Step::projected, outputs.n_head() * local);
  step.reserve(Step::mixed, outputs.count() * hidden);
  step.reserve(Step::gates, outputs.n_head() * step.model.weights().output_map.outputs());
  if (!outputs.are_consecutive()) {
    base::reserve_scratch(m_rows, outputs.count() * hidden, "kvzap::decoder::last_rows");
    base::reserve_scratch(m_added, outputs.count() * hidden, "kvzap::decoder::last_added");
    base::reserve_scratch(m_device_rows, outputs.count(), "kvzap::decoder::output_rows");
  }
  base::reserve_scratch(m_tokens, outputs.n_tokens, "kvzap::decoder::tokens");
  m_host_tokens.resize(outputs.n_tokens + 1);
  m_draws.reserve(outputs.n_drawn(), local);
  base::reserve_scratch(m_local_logits, outputs.n_logits * local, "kvzap::decoder::logits");
  m_hidden.resize(step.comm.is_root() ? outputs.n_hidden() * hidden : 0);
  const int ranks = step.comm.size();
  if (step.comm.is_root()) {
    m_gathered_logits.resize(ranks > 1 ? outputs.n_logits * vocabulary : 0);
  }
  m_logit_counts.resize(ranks);
  for (int r = 0; r < ranks; ++r) {
    const auto [begin, end] = even_range(vocabulary, ranks, r);
    m_logit_counts[r] = outputs.n_logits * (end - begin);
  }
  m_results.clear();
  m_results.resize(step.spans().size());
  m_sequences.clear();
  for (const StepBatch::Span& span : step.spans()) m_sequences.push_back(span.sequence);
  if (!step.comm.is_root()) return;
  for (std::int64_t o = outputs.n_tokens, end = o; o < outputs.count(); o = end) {
    const std::int64_t span = outputs.spans[o];
    while (end < outputs.count() && outputs.spans[end] == span) ++end;
    if (o < outputs.n_head()) {
      m_results[span].logits.resize((end - o) * vocabulary);
    } else {
      m_results[span].hidden.reserve((end - o) * hidden);
    }
  }
}

void OutputBlock::begin(const Step& step) {
  const StepOutputs& outputs = step.outputs;
  std::size_t draw = 0;  // of its span
  for (std::size_t i = 0; i < outputs.drawn.size(); ++i) {
    const std::int64_t output = outputs.drawn[i];
    const std::int64_t span = outputs.spans[output];
    draw = i > 0 && outputs.spans[outputs.drawn[i - 1]] == span ? draw + 1 : 0;
    m_draws.rows()[i] = {output, step.spans()[span].draws[draw]};
  }
  m_draws.place(step.exec);
}

std::vector<StepResult> OutputBlock::run(Step& step) {
  const StepOutputs& outputs = step.outputs;
  if (step.deferred || outputs.n_head() > 0) {
    parallel::RankExchange::wait(step.exec, step.comm);  // the next fence would hide NCCL's errors
  }
  step.locally([&] { read(step); });
  if (step.deferred) {
    step.locally([&] { step.cache.collect(m_sequences); });
  }
  // One exchange carries the tokens and the outcome of the step.
  m_host_tokens[outputs.n_tokens] = step.outcome();
  step.comm.all_reduce_max(m_host_tokens.data(), outputs.n_tokens + 1);
  step.throw_if(m_host_tokens[outputs.n_tokens]);
  take_tokens(step);
  if (outputs.n_logits > 0) gather_logits(step);
  // Logits of all tokens of a text take much memory, which on a device is pinned.
  const auto spans = static_cast<std::int64_t>(step.spans().size());
  if (base::machine().on_device() && outputs.n_logits > spans) m_local_logits = {};
  if (step.comm.is_root()) {
    auto state = m_hidden.begin();
    for (std::int64_t o = outputs.n_head(); o < outputs.count(); ++o) {
      std::vector<float>& own = m_results[outputs.spans[o]].hidden;
      own.insert(own.end(), state, state + step.config.hidden_size);
      state += step.config.hidden_size;
    }
  }
  return std::move(m_results);
}

void OutputBlock::take_tokens(const Step& step) {
  for (std::int64_t o = 0; o < step.outputs.n_tokens; ++o) {
    const std::int64_t span = step.outputs.spans[o];
    StepResult& result = m_results[span];
    const StepOutput output = step.spans()[span].output;
    if (output == StepOutput::drawn || output == StepOutput::all_drawn) {
      result.drawn = static_cast<TokenId>(m_host_tokens[o]);
    } else {
      result.argmax = token_of_key(m_host_tokens[o]);
    }
    if (output == StepOutput::all_argmax) result.all_argmax.push_back(result.argmax);
    if (output == StepOutput::all_drawn) result.all_drawn.push_back(result.drawn);
  }
}

// Copies the rows whose hidden states are asked for to the host.
void OutputBlock::read_hidden(const Step& step, const Matrix& normed) {
  const StepOutputs& outputs = step.outputs;
  if (m_hidden.empty()) return;
  base::fence(step.exec, "kvzap::decoder: the host reads hidden states");
  Kokkos::deep_copy(Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                        m_hidden.data(), outputs.n_hidden(), step.config.hidden_size),
                    Kokkos::subview(normed, range(outputs.n_head(), outputs.count()), Kokkos::ALL));
}

void OutputBlock::compute(Step& step) {
  if (step.outputs.count() == 0) return;
  const ExecutionSpace& exec = step.exec;
  const ModelConfig& config = step.config;
  const Model::Weights& weights = step.model.weights();
  const std::vector<std::int64_t>& rows = step.outputs.rows;
  const std::int64_t all = step.outputs.count(), n_tokens = step.outputs.n_tokens;
  const std::int64_t outputs = step.outputs.n_head();
  const std::int64_t local = weights.output_head.outputs();
  const bool adds = step.pending.extent(0) > 0;
  Matrix last, added;
  if (step.outputs.are_consecutive()) {
    const auto own = range(rows.front(), rows.front() + all);
    last = Kokkos::subview(step.h, own, Kokkos::ALL);
    if (adds) added = Kokkos::subview(step.pending, own, Kokkos::ALL);
  } else {
    Kokkos::deep_copy(Kokkos::subview(m_device_rows, range(0, all)),
                      Kokkos::View<const std::int64_t*, Kokkos::HostSpace>(rows.data(), all));
    last = Matrix(m_rows.data(), all, config.hidden_size);
    gather_rows(exec, step.h, m_device_rows, last);
    if (adds) {
      added = Matrix(m_added.data(), all, config.hidden_size);
      gather_rows(exec, step.pending, m_device_rows, added);
    }
  }
  const Matrix normed = step.matrix(Step::mixed, all, config.hidden_size);
  auto rounded = step.linear.room_for_rounded(step.model.dtype(), all, config.hidden_size);
  if (outputs < all) rounded = linalg::RoundedRows();  // the product takes some of the rows
  add_and_norm(exec, last, added, norm_of(config, weights.final_norm), normed, rounded);
  read_hidden(step, normed);
  if (outputs == 0) return;
  const Matrix x = Kokkos::subview(normed, range(0, outputs), Kokkos::ALL);
  const Matrix y = step.matrix(Step::projected, outputs, local);
  if (weights.output_map.outputs() > 0) {
    const Matrix mapped = step.matrix(Step::gates, outputs, config.hidden_size);
    step.linear(exec, x, rounded, weights.output_map, {}, mapped);
    activate(exec, mapped, x, {},
             {config.activation, static_cast<float>(config.gate_limit), false});
    add_and_norm(exec, x, {}, norm_of(config, weights.output_map_norm), x, rounded);
  }
  step.linear(exec, x, rounded, weights.output_head, weights.head_bias, y);
  if (config.logits_divisor != 1) scale(exec, y, static_cast<float>(1 / config.logits_divisor));
  if (config.logits_soft_cap > 0) {
    soft_cap(exec, y, static_cast<float>(config.logits_soft_cap));
  }
  if (n_tokens > step.outputs.n_drawn()) {
    argmax(exec, Kokkos::subview(y, range(0, n_tokens), Kokkos::ALL), weights.first_token,
           Kokkos::subview(m_tokens, range(0, n_tokens)));
  }
  m_draws.run(exec, y, m_tokens);  // replaces argmaxes between
}

// Copies this rank's part of the logits, or tokens, to the host.
void OutputBlock::read(const Step& step) {
  const std::int64_t n_tokens = step.outputs.n_tokens, outputs = step.outputs.n_head();
  if (outputs == 0) return;
  const std::int64_t local = step.model.weights().output_head.outputs();
  const Matrix y = step.matrix(Step::projected, outputs, local);
  base::fence(step.exec, "kvzap::decoder: the host reads tokens and logits");
  Kokkos::deep_copy(Kokkos::View<std::int64_t*, Kokkos::HostSpace>(m_host_tokens.data(), n_tokens),
                    Kokkos::subview(m_tokens, range(0, n_tokens)));
  if (outputs > n_tokens) {
    Kokkos::deep_copy(Kokkos::View<float**, Kokkos::LayoutRight, base::StagingSpace>(
                          m_local_logits.data(), outputs - n_tokens, local),
                      Kokkos::subview(y, range(n_tokens, outputs), Kokkos::ALL));
  }
}

// Turns the (output, part of the vocabulary) of each rank into (output, vocabulary) on rank 0.
void OutputBlock::gather_logits(const Step& step) {
  const std::int64_t vocabulary = step.config.vocab_size;
  const StepOutputs& outputs = step.outputs;
  const float* source = m_local_logits.data();
  if (step.comm.size() > 1) {
    step.comm.gather(source, m_logit_counts, m_gathered_logits.data(), 0);
    source = m_gathered_logits.data();
  }
  if (!step.comm.is_root()) return;
  for (int r = 0; r < step.comm.size(); ++r) {
    const auto [begin, end] = even_range(vocabulary, step.comm.size(), r);
    std::int64_t last = -1, row = 0;  // the span, and the output among its own
    for (std::int64_t o = outputs.n_tokens; o < outputs.n_head(); ++o) {
      const std::int64_t span = outputs.spans[o];
      row = span == last ? row + 1 : 0;
      last = span;
      std::copy_n(source, end - begin, m_results[span].logits.data() + row * vocabulary + begin);
      source += end - begin;
    }
  }
}

}  // namespace kvzap::engine
