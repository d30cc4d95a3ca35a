#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kvzap/core/array_view.hpp>
#include <kvzap/lab/collect.hpp>

#include "base/kokkos_compat.hpp"
#include "base/scratch.hpp"
#include "base/stopwatch.hpp"
#include "engine/watching.hpp"
#include "linalg/gemm.hpp"
#include "parallel/message.hpp"
#include "policy/output_norms.hpp"
#include "policy/row_math.hpp"

namespace kvzap {

template <class Visit>
void list_fields(CollectText& text, Visit& visit) {
  visit("ids", text.ids);
  visit("text_begin", text.text_begin);
  visit("text_end", text.text_end);
  visit("repeat_begin", text.repeat_begin);
  visit("repeat_end", text.repeat_end);
  visit("positions", text.positions);
}

namespace {

using linalg::Matrix;
using Indices = Kokkos::View<const std::int64_t*, MemorySpace>;
using Factors = Kokkos::View<float*, MemorySpace>;
using Range = policy::PolicyRange;

// chosen(i, :) = hidden(rows(i), :)
void gather_hidden(const ExecutionSpace& exec, const TokenBlock::HiddenView& hidden,
                   const Indices& rows, const Matrix& chosen) {
  const auto columns = static_cast<std::int64_t>(chosen.extent(1));
  Kokkos::parallel_for(
      "kvzap::collect::gather_hidden", Range(exec, 0, chosen.extent(0)),
      KOKKOS_LAMBDA(const std::int64_t i) {
        for (std::int64_t c = 0; c < columns; ++c) chosen(i, c) = hidden(rows(i), c);
      });
}

// factors(i) = 1 / |hidden(first + i, :)|
void inverse_norms(const ExecutionSpace& exec, const TokenBlock::HiddenView& hidden,
                   std::int64_t first, std::int64_t count, const Factors& factors) {
  const auto columns = static_cast<std::int64_t>(hidden.extent(1));
  Kokkos::parallel_for(
      "kvzap::collect::inverse_norms", Range(exec, 0, count), KOKKOS_LAMBDA(const std::int64_t i) {
        // Partial sums: a single sum would lose digits in wide models.
        constexpr int lanes = 8;
        float sums[lanes] = {};
        for (std::int64_t c = 0; c < columns; ++c) {
          const float x = hidden(first + i, c);
          sums[c % lanes] += x * x;
        }
        float sum = 0;
        for (int k = 0; k < lanes; ++k) sum += sums[k];
        factors(i) = 1 / base::math::sqrt(sum);
      });
}

// chosen(i, head) = log of mass(head, rows(i))
void take_logarithms(const ExecutionSpace& exec, const Matrix& mass, const Indices& rows,
                     const Matrix& chosen) {
  const auto heads = static_cast<std::int64_t>(mass.extent(0));
  Kokkos::parallel_for(
      "kvzap::collect::logarithms", Range(exec, 0, chosen.extent(0) * heads),
      KOKKOS_LAMBDA(const std::int64_t i) {
        chosen(i / heads, i % heads) = base::math::log(mass(i % heads, rows(i / heads)));
      });
}

Indices to_device(const std::vector<std::int64_t>& values) {
  const Kokkos::View<const std::int64_t*, Kokkos::HostSpace,
                     Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      host(values.data(), values.size());
  const Kokkos::View<std::int64_t*, MemorySpace> device("kvzap::collect::rows", values.size());
  Kokkos::deep_copy(device, host);
  return device;
}

// Scratch memory, reused for each text.
struct CollectScratch {
  linalg::Vector mass;
  linalg::Vector norms;
  linalg::Vector hidden;
  linalg::Vector scores;
  Factors inverse_norms;
  policy::OutputNorms output_norms;
};

// Collects the pairs of one text from its step, layer by layer.
class CollectWatcher final : public Policy {
 public:
  CollectWatcher(DType dtype, const CollectText& text, CollectScratch& scratch, TextPairs& pairs)
      : m_dtype(dtype), m_text(text), m_scratch(scratch), m_pairs(pairs) {
    std::vector<std::int64_t> rows;
    for (const std::int64_t position : text.positions) rows.push_back(text.text_begin + position);
    m_rows = to_device(rows);
  }

  PolicyNeeds needs() const override {
    PolicyNeeds needs;
    needs.blocks = true;
    needs.log_sum_exp = true;
    needs.output_weights = true;
    return needs;
  }

  void observe(PolicyLayer& layer, const TokenBlock& block) override {
    if (block.first == 0) begin_layer(layer);
    take_hidden(layer, block);
    const std::int64_t begin = std::max(block.first, m_text.repeat_begin);
    const std::int64_t end = std::min(block.first + block.count, m_text.repeat_end);
    if (begin >= end) return;
    if (!m_has_norms) find_norms(layer);
    const auto own = std::make_pair(begin - block.first, end - block.first);
    TokenBlock queries;
    queries.first = begin;
    queries.count = end - begin;
    queries.hidden = Kokkos::subview(block.hidden, own, Kokkos::ALL);
    queries.queries = Kokkos::subview(block.queries, own, Kokkos::ALL, Kokkos::ALL);
    queries.log_sum_exp = Kokkos::subview(block.log_sum_exp, own, Kokkos::ALL);
    base::reserve_scratch(m_scratch.inverse_norms, queries.count, "kvzap::collect::inverse_norms");
    inverse_norms(layer.exec(), block.hidden, own.first, queries.count, m_scratch.inverse_norms);
    MassFactors factors;
    factors.rows = norms(layer);
    factors.queries =
        Kokkos::subview(m_scratch.inverse_norms, std::make_pair(std::int64_t{0}, queries.count));
    layer.attention_mass(queries, MassReduction::max, mass(layer), factors);
  }

  void score(PolicyLayer& layer, const ScoreView& scores) override {
    const auto count = static_cast<std::int64_t>(m_rows.extent(0));
    base::reserve_scratch(m_scratch.scores, count * layer.heads(), "kvzap::collect::scores");
    const Matrix chosen(m_scratch.scores.data(), count, layer.heads());
    take_logarithms(layer.exec(), mass(layer), m_rows, chosen);
    std::vector<float>& target = m_pairs.layers.at(layer.layer()).scores;
    target.resize(static_cast<std::size_t>(count * layer.heads()));
    copy_out(layer, m_scratch.scores, target.data(), count * layer.heads());
    engine::keep_first_row(layer.exec(), scores);
  }

 private:
  static std::int64_t total(const PolicyLayer& layer) { return layer.extents().tokens; }
  static std::int64_t query_heads(const PolicyLayer& layer) {
    return static_cast<std::int64_t>(layer.heads()) * layer.extents().group;
  }
  // (head, row)
  Matrix mass(const PolicyLayer& layer) const {
    return Matrix(m_scratch.mass.data(), layer.heads(), total(layer));
  }
  // (query head, row)
  Matrix norms(const PolicyLayer& layer) const {
    return Matrix(m_scratch.norms.data(), query_heads(layer), total(layer));
  }

  static void copy_out(PolicyLayer& layer, const linalg::Vector& source, float* target,
                       std::int64_t count) {
    base::fence(layer.exec(), "kvzap::collect: on its way to the file");
    const Kokkos::View<float*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>> host(
        target, count);
    Kokkos::deep_copy(host, Kokkos::subview(source, std::make_pair(std::int64_t{0}, count)));
  }

  void begin_layer(PolicyLayer& layer) {
    base::reserve_scratch(m_scratch.mass, layer.heads() * total(layer), "kvzap::collect::mass");
    base::reserve_scratch(m_scratch.norms, query_heads(layer) * total(layer),
                          "kvzap::collect::norms");
    Kokkos::deep_copy(layer.exec(), mass(layer), 0.0F);
    Kokkos::deep_copy(layer.exec(), norms(layer), 0.0F);
    m_has_norms = false;
    m_taken = 0;
    m_pairs.layers.at(layer.layer()).hidden.clear();
  }

  // Copies the hidden states of the collected positions in the block, after those of earlier
  // blocks.
  void take_hidden(PolicyLayer& layer, const TokenBlock& block) {
    std::vector<std::int64_t> rows;
    for (std::size_t i = m_taken; i < m_text.positions.size(); ++i) {
      const std::int64_t row = m_text.text_begin + m_text.positions[i] - block.first;
      if (row >= block.count) break;
      rows.push_back(row);
    }
    if (rows.empty()) return;
    const auto count = static_cast<std::int64_t>(rows.size());
    const auto columns = static_cast<std::int64_t>(block.hidden.extent(1));
    base::reserve_scratch(m_scratch.hidden, count * columns, "kvzap::collect::hidden");
    gather_hidden(layer.exec(), block.hidden, to_device(rows),
                  Matrix(m_scratch.hidden.data(), count, columns));
    m_floats.resize(static_cast<std::size_t>(count * columns));
    copy_out(layer, m_scratch.hidden, m_floats.data(), count * columns);
    std::vector<char>& all = m_pairs.layers.at(layer.layer()).hidden;
    all.resize(m_rows.extent(0) * static_cast<std::size_t>(columns) * size_of(m_dtype));
    char* target = all.data() + m_taken * static_cast<std::size_t>(columns) * size_of(m_dtype);
    with_value_type(m_dtype, [&](auto zero) {
      for (const float x : m_floats) {
        const auto value = static_cast<decltype(zero)>(x);
        std::memcpy(target, &value, sizeof(value));
        target += sizeof(value);
      }
    });
    m_taken += rows.size();
  }

  // Sets the norms of the text's rows only.
  void find_norms(PolicyLayer& layer) {
    const auto text = std::make_pair(m_text.text_begin, m_text.text_end);
    const std::int64_t group = layer.extents().group;
    for (int head = 0; head < layer.heads(); ++head) {
      const auto of_head = std::make_pair(head * group, (head + 1) * group);
      m_scratch.output_norms(layer, head, text.first, text.second - text.first,
                             Kokkos::subview(norms(layer), of_head, text));
    }
    m_has_norms = true;
  }

  DType m_dtype;  // of the collected hidden states
  const CollectText& m_text;
  CollectScratch& m_scratch;
  TextPairs& m_pairs;
  Indices m_rows;
  std::vector<float> m_floats;
  std::size_t m_taken = 0;
  bool m_has_norms = false;
};

}  // namespace

CollectResult collect_pairs(const std::shared_ptr<const Model>& model,
                            const std::vector<CollectText>& texts, PairsWriter& writer,
                            const Communicator& comm, const std::function<bool()>& stop,
                            const ProgressCallback& progress) {
  CollectScratch scratch;
  CollectText text;
  TextPairs pairs;
  pairs.layers.resize(static_cast<std::size_t>(model->config().num_hidden_layers));
  const CacheOptions options =
      engine::watching_options("collect", [&]() -> std::unique_ptr<Policy> {
        return std::make_unique<CollectWatcher>(model->dtype(), text, scratch, pairs);
      });
  const auto engine = Engine::create(model, nullptr, options, comm);

  CollectResult result;
  const std::int64_t total = writer.planned_texts();
  while (writer.texts() < total && !result.stopped) {
    if (comm.is_root()) text = texts.at(static_cast<std::size_t>(writer.texts()));
    parallel::broadcast(comm, 0, text);
    if (progress) progress("texts", writer.texts(), total);
    const SequenceId sequence = engine->add_sequence();
    engine->step(StepBatch(sequence, text.ids, engine->rule(StepPart::context), StepOutput::none));
    engine->free_sequence(sequence);
    for (std::size_t l = 0; l < pairs.layers.size(); ++l) {
      if (model->config().is_full(static_cast<std::int64_t>(l))) continue;
      // No surrogate scores this layer. Zeros take no room in the compressed file.
      const std::size_t n = text.positions.size();
      pairs.layers[l].hidden.assign(
          n * model->config().attention_inputs() * size_of(model->dtype()), 0);
      pairs.layers[l].scores.assign(
          n * model->partition().heads(static_cast<int>(l), comm.rank()).size(), 0.0F);
    }
    for (const auto& layer : pairs.layers) {
      result.non_finite_scores += std::count_if(layer.scores.begin(), layer.scores.end(),
                                                [](float score) { return !std::isfinite(score); });
    }
    {
      const base::Stopwatch watch(result.write_seconds);
      writer.append(pairs);
    }
    ++result.texts;
    result.pairs += static_cast<std::int64_t>(text.positions.size());
    result.tokens += static_cast<std::int64_t>(text.ids.size());
    result.stopped = comm.all_reduce_max(stop && stop() ? std::int64_t{1} : std::int64_t{0}) != 0;
  }
  {
    const base::Stopwatch watch(result.write_seconds);
    writer.close();
  }
  if (progress) progress("texts", writer.texts(), total);
  result.stopped = result.stopped && writer.texts() < total;
  result.non_finite_scores = comm.all_reduce_sum(result.non_finite_scores);
  comm.all_reduce_max(&result.write_seconds, 1);
  return result;
}

}  // namespace kvzap
