// The file of `kvzap run --dump`: a run's tokens, scores, evictions and logits, for other programs.
#pragma once

#include <kvzap/core/head_partition.hpp>
#include <kvzap/engine/generate.hpp>
#include <string>
#include <vector>

namespace kvzap::driver {

/// Collects data during a run. Rank 0 then writes them to one safetensors file:
///
/// | tensor | type | shape |
/// | --- | --- | --- |
/// | context_ids | I32 | (context tokens) |
/// | question_ids | I32 | (question tokens) |
/// | scores | F32 | (layers, KV heads, context tokens): scores of the context's pairs when it was
/// pruned, NaN without a score |
/// | evicted_after_prefill | U8 | (layers, KV heads, context tokens) |
/// | evicted_at_end | U8 | (layers, KV heads, tokens seen) |
/// | generated | I32 | (new tokens) |
/// | logits | F32 | (new tokens, vocabulary): the logits from which each token was drawn |
///
/// With several questions, a tensor that depends on a question has the question's number after a
/// point, from 1 on: question_ids.1, generated.2. Pruning after the question (--prune-after
/// question) depends on it, so scores and evicted_after_prefill then have numbers too. If positions
/// were renumbered (+rerotate), they no longer identify tokens, and both evicted_… tensors are left
/// out.
///
/// It observes the generator on every rank. All ranks make the same calls in the same order.
class Dump final : public StepObserver {
 public:
  /// `partition` must outlive this object. Scores are recorded from the beginning.
  Dump(const std::vector<TokenId>& context, std::size_t questions, const CacheOptions& cache,
       const HeadPartition& partition, const Communicator& comm);

  void scores(SequenceId sequence, int layer, std::int64_t first,
              const ScoresView& scores) override;

  /// Call it after the prefill.
  void take_prefill(Generator& generator);
  /// Adds the callbacks that it needs to those of `options`.
  void begin_answer(const std::vector<TokenId>& question, Generator& generator,
                    AnswerOptions& options);
  void end_answer(Generator& generator, const Answer& answer);

  /// Throws AgreedError if the file cannot be written.
  void write(const std::string& file, const std::map<std::string, std::string>& metadata);

 private:
  template <class T>
  struct Tensor {
    std::string name;
    std::vector<std::int64_t> shape;
    std::vector<T> values;  // on rank 0
  };

  std::string numbered(const std::string& name) const;
  void add_scores(const std::string& name);
  void add_evicted(const std::string& name, Generator& generator, std::int64_t tokens);
  void take_after_question(Generator& generator);
  template <class Fill, class Take>
  void gather(std::int64_t tokens, const Fill& fill, const Take& take) const;

  Communicator m_comm;
  const HeadPartition& m_partition;
  std::int64_t m_context_tokens;
  bool m_has_many_questions;
  bool m_is_after_question;
  bool m_keeps_positions;

  int m_answers = 0;
  bool m_records = true;
  bool m_waits_for_question = false;
  /// [layer]: (head on this rank, context token).
  std::vector<std::vector<float>> m_scores;
  std::vector<std::vector<float>> m_scores_of_prefill;
  std::vector<float> m_logits;
  std::vector<Tensor<std::int32_t>> m_ids;
  std::vector<Tensor<float>> m_floats;
  std::vector<Tensor<std::uint8_t>> m_flags;
};

}  // namespace kvzap::driver
