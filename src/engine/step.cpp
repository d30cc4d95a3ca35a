#include "engine/step.hpp"

#include <new>
#include <numeric>

#include "base/machine.hpp"
#include "model/step_block.hpp"

namespace kvzap::engine {

namespace {

bool is_drawn(StepOutput output) {
  return output == StepOutput::drawn || output == StepOutput::all_drawn;
}

bool is_token(StepOutput output) {
  return output == StepOutput::argmax || output == StepOutput::all_argmax || is_drawn(output);
}

bool is_hidden(StepOutput output) {
  return output == StepOutput::hidden || output == StepOutput::all_hidden;
}

bool is_each(StepOutput output) {
  return output == StepOutput::all_argmax || output == StepOutput::all_logits ||
         output == StepOutput::all_hidden || output == StepOutput::all_drawn;
}

}  // namespace

void StepOutputs::list(const StepBatch& batch) {
  const auto n_spans = static_cast<std::int64_t>(batch.spans().size());
  spans.clear();
  rows.clear();
  drawn.clear();
  // Returns the number of rows that it has added.
  const auto add = [&](const auto& is_kind) {
    const std::int64_t before = count();
    for (std::int64_t s = 0; s < n_spans; ++s) {
      const StepBatch::Span& span = batch.spans()[s];
      if (span.output == StepOutput::none || !is_kind(span.output)) continue;
      const std::int64_t end = span.first + span.count;
      for (std::int64_t row = is_each(span.output) ? span.first : end - 1; row < end; ++row) {
        if (is_drawn(span.output)) drawn.push_back(count());
        spans.push_back(s);
        rows.push_back(row);
      }
    }
    return count() - before;
  };
  n_tokens = add(is_token);
  n_logits = add([](StepOutput output) { return !is_token(output) && !is_hidden(output); });
  add(is_hidden);
}

bool StepOutputs::are_consecutive() const {
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != rows[0] + static_cast<std::int64_t>(i)) return false;
  }
  return true;
}

void Step::place_new_rows(MemoryMeter* meter) {
  const int layers = static_cast<int>(config.num_hidden_layers);
  m_places.assign(layers, 0);
  m_new_rows.emplace_back(model.dtype(), meter);
  for (int l = 0; l < layers; ++l) {
    std::size_t& place = m_places[rows_of(l)];
    if (!shares_rows(l)) {
      m_last_own = l;
    } else if (place == 0) {
      place = m_new_rows.size();
      m_new_rows.emplace_back(model.dtype(), meter);
    }
  }
}

void Step::begin(const StepBatch& batch) {
  m_batch = &batch;
  has_scores = has_policies = is_planned = false;
  first_positions.clear();
  for (const StepBatch::Span& span : spans()) {
    has_scores = has_scores || is_scored(span.rule);
    has_policies = has_policies || span.rule.policy;
    first_positions.push_back(cache.tokens(span.sequence, 0));
  }
  // A decode step on a device waits only once, at its end.
  deferred = tokens() == static_cast<std::int64_t>(spans().size()) && base::machine().on_device() &&
             !has_policies;
  outputs.list(batch);
}

void Step::reserve() {
  // Layers of a model without weights run elsewhere, with a residual stream of their own.
  const std::int64_t streamed = model.weights().are_here() ? tokens() * config.hidden_size : 0;
  base::reserve_scratch(m_residual, streamed, "kvzap::decoder::activations");
  h = linalg::Matrix(m_residual.data(), streamed > 0 ? tokens() : 0, config.hidden_size);
  pending = linalg::Matrix();
  reserve(normed, most_rows() * config.attention_inputs());
  m_positions.reserve(tokens(), "kvzap::decoder::positions");
  positions = m_positions.device();
  for (std::size_t p = 0; p < m_new_rows.size(); ++p) {
    std::int64_t values = 0, heads = 0;
    for (int l = 0; l < static_cast<int>(config.num_hidden_layers); ++l) {
      if (m_places[l] != p || shares_rows(l)) continue;
      values = std::max(values, kv_heads(l) * head_dim(l));
      heads = std::max(heads, kv_heads(l));
    }
    m_new_rows[p].reserve(tokens() * values, config.row_vectors(),
                          has_scores ? tokens() * heads : 0);
  }
  exchange.reserve(comm, tokens() * config.hidden_size, 0);
}

void Step::place_positions() {
  locally([&] {
    for (std::size_t s = 0; s < spans().size(); ++s) {
      std::int64_t* const own = m_positions.host() + spans()[s].first;
      std::iota(own, own + spans()[s].count, first_positions[s]);
    }
    m_positions.copy(exec, tokens());
    if (!deferred) base::fence(exec, "kvzap::decoder: the host may write positions again");
  });
}

void Step::release() {
  for (NewRows& rows : m_new_rows) rows.release();
  // Not = {}: Clang 14 would emit no destructor for these types.
  positions = decltype(positions)();
  m_positions.release();
  h = linalg::Matrix();
  pending = linalg::Matrix();
  m_residual = {};
  for (linalg::Vector& buffer : m_buffers) buffer = {};
}

std::int64_t Step::most_rows() const { return std::min(tokens(), model::block_tokens(config)); }

RowRange Step::read_rows(int layer, const RowRange& rows) const {
  if (layer < m_last_own) return rows;
  RowRange read{rows.end, rows.begin};
  for (const std::int64_t row : outputs.rows) {
    if (row < rows.begin || row >= rows.end) continue;
    read = {std::min(read.begin, row), std::max(read.end, row + 1)};
  }
  return read.count() > 0 ? read : RowRange{rows.begin, rows.begin};
}

Outcome Step::outcome() const {
  if (!m_failure) return Outcome::done;
  try {
    std::rethrow_exception(m_failure);
  } catch (const std::bad_alloc&) {
    return Outcome::out_of_memory;
  } catch (const OutOfMemory&) {
    return Outcome::out_of_memory;
  } catch (const AgreedOutOfMemory&) {
    return Outcome::out_of_memory;
  } catch (...) {
    return Outcome::failed;
  }
}

void Step::throw_if(std::int64_t worst) {
  if (worst == Outcome::done) return;
  const std::exception_ptr failure = std::exchange(m_failure, nullptr);
  if (comm.size() == 1 && worst == Outcome::failed) std::rethrow_exception(failure);
  try {
    comm.agree([&] {
      if (failure) std::rethrow_exception(failure);
    });
  } catch (const AgreedError& error) {
    if (worst == Outcome::out_of_memory) throw StepOutOfMemory(error.what());
    throw;
  }
}

}  // namespace kvzap::engine
