#include "commands/files/dump.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/safetensors_writer.hpp"

namespace kvzap::driver {

Dump::Dump(const std::vector<TokenId>& context, std::size_t questions, const CacheOptions& cache,
           const HeadPartition& partition, const Communicator& comm)
    : m_comm(comm),
      m_partition(partition),
      m_context_tokens(static_cast<std::int64_t>(context.size())),
      m_has_many_questions(questions > 1),
      m_is_after_question(cache.pruning.moment == PruneMoment::question),
      m_keeps_positions(!cache.policy || !cache.policy->rerotate),
      m_scores(partition.n_layers()) {
  for (int layer = 0; layer < partition.n_layers(); ++layer) {
    const std::size_t heads = partition.heads(layer, comm.rank()).size();
    m_scores[layer].assign(heads * context.size(), std::numeric_limits<float>::quiet_NaN());
  }
  m_ids.push_back({"context_ids", {m_context_tokens}, context});
}

void Dump::scores(SequenceId /*sequence*/, int layer, std::int64_t first,
                  const ScoresView& scores) {
  if (!m_records || first >= m_context_tokens) return;
  // Copies between memory spaces need contiguous views, so the rows are packed first.
  const Kokkos::View<float**, Kokkos::LayoutRight, MemorySpace> packed(
      "kvzap::dump_scores", scores.extent(0), scores.extent(1));
  Kokkos::deep_copy(packed, scores);
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), packed);
  const std::int64_t count =
      std::min<std::int64_t>(static_cast<std::int64_t>(host.extent(1)), m_context_tokens - first);
  for (std::size_t head = 0; head < host.extent(0); ++head) {
    float* const row = m_scores[layer].data() + head * m_context_tokens + first;
    for (std::int64_t t = 0; t < count; ++t) {
      // An evicted row has no score any more, so it keeps its last score.
      if (!std::isnan(host(head, t))) row[t] = host(head, t);
    }
  }
}

std::string Dump::numbered(const std::string& name) const {
  return m_has_many_questions ? fmt::format("{}.{}", name, m_answers) : name;
}

/// On every rank, fill(layer, head on this rank, row of `tokens` floats) sets a row. On rank 0,
/// take(index among all heads of all layers, row) receives it.
template <class Fill, class Take>
void Dump::gather(std::int64_t tokens, const Fill& fill, const Take& take) const {
  std::vector<float> mine, all;
  std::vector<std::int64_t> counts(m_comm.size());
  for (int layer = 0; layer < m_partition.n_layers(); ++layer) {
    for (int rank = 0; rank < m_comm.size(); ++rank) {
      counts[rank] = tokens * static_cast<std::int64_t>(m_partition.heads(layer, rank).size());
    }
    mine.resize(counts[m_comm.rank()]);
    const int heads = static_cast<int>(m_partition.heads(layer, m_comm.rank()).size());
    for (int head = 0; head < heads; ++head) fill(layer, head, mine.data() + head * tokens);
    if (m_comm.is_root()) all.resize(m_partition.n_kv_heads() * tokens);
    m_comm.gather(mine.data(), counts, all.data(), 0);
    if (!m_comm.is_root()) continue;
    const float* row = all.data();
    for (int rank = 0; rank < m_comm.size(); ++rank) {
      for (const int head : m_partition.heads(layer, rank)) {
        take(std::int64_t{layer} * m_partition.n_kv_heads() + head, row);
        row += tokens;
      }
    }
  }
}

void Dump::add_scores(const std::string& name) {
  const std::int64_t tokens = m_context_tokens;
  Tensor<float> tensor{name, {m_partition.n_layers(), m_partition.n_kv_heads(), tokens}, {}};
  if (m_comm.is_root()) {
    tensor.values.resize(std::int64_t{m_partition.n_layers()} * m_partition.n_kv_heads() * tokens);
  }
  gather(
      tokens,
      [&](int layer, int head, float* row) {
        std::copy_n(m_scores[layer].data() + head * tokens, tokens, row);
      },
      [&](std::int64_t place, const float* row) {
        std::copy_n(row, tokens, tensor.values.data() + place * tokens);
      });
  m_floats.push_back(std::move(tensor));
}

void Dump::add_evicted(const std::string& name, Generator& generator, std::int64_t tokens) {
  if (!m_keeps_positions) return;
  generator.gather_pages();
  Tensor<std::uint8_t> tensor{name, {m_partition.n_layers(), m_partition.n_kv_heads(), tokens}, {}};
  if (m_comm.is_root()) {
    tensor.values.resize(std::int64_t{m_partition.n_layers()} * m_partition.n_kv_heads() * tokens);
  }
  gather(
      tokens,
      [&](int layer, int head, float* row) {
        // Not all layers are pruned.
        const bool is_pruned = generator.engine().config().is_full(layer);
        std::fill_n(row, tokens, is_pruned ? 1.0f : 0.0f);
        for (const std::int64_t position : generator.positions(layer, head)) {
          if (position < tokens) row[position] = 0;
        }
      },
      [&](std::int64_t place, const float* row) {
        for (std::int64_t t = 0; t < tokens; ++t) {
          tensor.values[place * tokens + t] = row[t] != 0 ? 1 : 0;
        }
      });
  m_flags.push_back(std::move(tensor));
}

void Dump::take_prefill(Generator& generator) {
  m_records = false;
  if (m_is_after_question) {
    m_scores_of_prefill = m_scores;
    return;
  }
  add_scores("scores");
  m_scores.clear();
  add_evicted("evicted_after_prefill", generator, m_context_tokens);
}

void Dump::take_after_question(Generator& generator) {
  if (!m_waits_for_question) return;
  m_waits_for_question = false;
  m_records = false;
  add_scores(numbered("scores"));
  add_evicted(numbered("evicted_after_prefill"), generator, m_context_tokens);
}

void Dump::begin_answer(const std::vector<TokenId>& question, Generator& generator,
                        AnswerOptions& options) {
  ++m_answers;
  m_ids.push_back(
      {numbered("question_ids"), {static_cast<std::int64_t>(question.size())}, question});
  m_logits.clear();
  if (m_is_after_question) {
    m_scores = m_scores_of_prefill;
    m_records = m_waits_for_question = true;
    options.on_token = [this, &generator, rest = std::move(options.on_token)](TokenId token) {
      take_after_question(generator);
      if (rest) rest(token);
    };
  }
  options.on_logits = [this,
                       rest = std::move(options.on_logits)](const std::vector<float>& logits) {
    m_logits.insert(m_logits.end(), logits.begin(), logits.end());
    if (rest) rest(logits);
  };
}

void Dump::end_answer(Generator& generator, const Answer& answer) {
  take_after_question(generator);  // no token was generated
  add_evicted(numbered("evicted_at_end"), generator, answer.cache.tokens);
  const auto count = static_cast<std::int64_t>(answer.tokens.size());
  m_ids.push_back({numbered("generated"), {count}, answer.tokens});
  const std::int64_t width =
      count == 0 ? 0 : static_cast<std::int64_t>(m_logits.size()) / count;  // rank 0 has the logits
  m_floats.push_back({numbered("logits"), {count, width}, std::move(m_logits)});
  m_logits = {};
}

void Dump::write(const std::string& file, const std::map<std::string, std::string>& metadata) {
  m_comm.agree_on_root([&] {
    std::vector<model::SafetensorsEntry> entries;
    for (const auto& t : m_ids) entries.push_back({t.name, "I32", t.shape, t.values.data()});
    for (const auto& t : m_floats) entries.push_back({t.name, "F32", t.shape, t.values.data()});
    for (const auto& t : m_flags) entries.push_back({t.name, "U8", t.shape, t.values.data()});
    model::write_safetensors(file, entries, metadata, "--dump");
  });
}

}  // namespace kvzap::driver
