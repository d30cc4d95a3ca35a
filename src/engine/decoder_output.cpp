#include "engine/decoder_state.hpp"
#include "engine/step_kernels.hpp"
#include "model/model_weights.hpp"

namespace kvzap {
namespace {

using engine::range;
using linalg::ConstVector;
using linalg::Matrix;

}  // namespace

// Computes this rank's part of the logits of the step's outputs: for the last token of a span, or
// for each of its tokens. Tokens are reduced over ranks; logits are gathered on rank 0. Only these
// leave a device.
void Decoder::output_head() {
  Scratch& scratch = *m_scratch;
  const ExecutionSpace& exec = scratch.exec;
  const ModelConfig& config = m_model.config();
  const std::int64_t outputs = scratch.output_rows.size();
  const std::int64_t n_argmax = scratch.n_argmax;
  const std::int64_t n_logits = outputs - n_argmax;
  const std::int64_t local = m_model.weights().output_head.outputs();
  locally([&] {
    if (outputs == 0) return;
    Matrix last, added;
    if (outputs_lie_together()) {
      const auto rows = range(scratch.output_rows.front(), scratch.output_rows.front() + outputs);
      last = Kokkos::subview(scratch.h, rows, Kokkos::ALL);
      if (scratch.pending.extent(0) > 0) {
        added = Kokkos::subview(scratch.pending, rows, Kokkos::ALL);
      }
    } else {
      Kokkos::deep_copy(Kokkos::subview(scratch.device_rows, range(0, outputs)),
                        Kokkos::View<const std::int64_t*, Kokkos::HostSpace>(
                            scratch.output_rows.data(), outputs));
      last = scratch.matrix(Scratch::last_rows, outputs, config.hidden_size);
      engine::gather_rows(exec, scratch.h, scratch.device_rows, last);
      if (scratch.pending.extent(0) > 0) {
        added = scratch.matrix(Scratch::last_added, outputs, config.hidden_size);
        engine::gather_rows(exec, scratch.pending, scratch.device_rows, added);
      }
    }
    const Matrix x = scratch.matrix(Scratch::attended, outputs, config.hidden_size);
    const Matrix y = scratch.matrix(Scratch::projected, outputs, local);
    const auto rounded =
        scratch.linear.room_for_rounded(m_model.dtype(), outputs, config.hidden_size);
    engine::add_and_norm(exec, last, added, engine::norm_of(config, m_model.weights().final_norm),
                         x, rounded);
    scratch.linear(exec, x, rounded, m_model.weights().output_head, ConstVector(), y);
    if (config.logits_divisor != 1) {
      engine::scale(exec, y, static_cast<float>(1 / config.logits_divisor));
    }
    if (config.logits_soft_cap > 0) {
      engine::soft_cap(exec, y, static_cast<float>(config.logits_soft_cap));
    }
    if (n_argmax > 0) {
      engine::argmax(exec, Kokkos::subview(y, range(0, n_argmax), Kokkos::ALL),
                     m_model.weights().first_token,
                     Kokkos::subview(scratch.argmax, range(0, n_argmax)));
    }
    base::fence(exec, "kvzap::decoder: the host reads tokens and logits");
    Kokkos::deep_copy(
        Kokkos::View<std::int64_t*, Kokkos::HostSpace>(scratch.argmax_keys.data(), n_argmax),
        Kokkos::subview(scratch.argmax, range(0, n_argmax)));
    if (n_logits > 0) {
      Kokkos::deep_copy(Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace>(
                            scratch.local_logits.data(), n_logits, local),
                        Kokkos::subview(y, range(n_argmax, outputs), Kokkos::ALL));
    }
  });
  if (scratch.deferred) locally([&] { m_cache.collect(scratch.sequences); });

  // One exchange carries the tokens and the outcome of the step.
  scratch.argmax_keys[n_argmax] = engine::outcome_of(m_failure);
  m_comm.all_reduce_max(scratch.argmax_keys.data(), n_argmax + 1);
  throw_if(scratch.argmax_keys[n_argmax]);
  for (std::int64_t o = 0; o < n_argmax; ++o) {
    scratch.results[scratch.output_spans[o]].argmax = engine::token_of_key(scratch.argmax_keys[o]);
  }
  if (n_logits > 0) gather_logits();
}

// Turns the (output, part of the vocabulary) of each rank into (output, vocabulary) on rank 0.
void Decoder::gather_logits() {
  Scratch& scratch = *m_scratch;
  const std::int64_t vocabulary = m_model.config().vocab_size;
  const std::int64_t outputs = scratch.output_rows.size() - scratch.n_argmax;
  const float* source = scratch.local_logits.data();
  if (m_comm.size() > 1) {
    m_comm.gather(source, scratch.logit_counts, scratch.gathered_logits.data(), 0);
    source = scratch.gathered_logits.data();
  }
  if (!m_comm.is_root()) return;
  for (int r = 0; r < m_comm.size(); ++r) {
    const auto [begin, end] = even_range(vocabulary, m_comm.size(), r);
    std::int64_t last = -1, row = 0;  // the span, and the output among its own
    for (std::int64_t o = 0; o < outputs; ++o) {
      const std::int64_t span = scratch.output_spans[scratch.n_argmax + o];
      row = span == last ? row + 1 : 0;
      last = span;
      std::copy_n(source, end - begin,
                  scratch.results[span].logits.data() + row * vocabulary + begin);
      source += end - begin;
    }
  }
}

}  // namespace kvzap
