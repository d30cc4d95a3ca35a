// Which rows the tokens of a block see: cached rows, and new rows up to their own.
#pragma once

#include <kvzap/core/attention.hpp>
#include <vector>

#include "engine/shared_heads_block.hpp"
#include "engine/step.hpp"

namespace kvzap::engine {

class AttentionSpans {
 public:
  /// `shared`: null with one rank. It must outlive this object. `read`: the pages that steps of one
  /// token read.
  AttentionSpans(DType dtype, const SharedHeadsBlock* shared, const ReadPages& read)
      : m_shared(shared), m_read(read), m_rows(dtype) {}

  /// Reserves the rows that windows see, for sequences that have rows in rings. row_values: the
  /// most values that a layer's keys of a token have.
  void reserve(const Step& step, std::int64_t row_values);
  /// Lists the spans of a layer for rows of the step. Spans that run in turn are left
  /// to list_turn.
  void list(const Step& step, int layer, const RowRange& rows);
  /// Lists row `turn` among `rows` of each span that runs in turn. Returns whether there is one.
  bool list_turn(const Step& step, int layer, const RowRange& rows, std::int64_t turn);
  void release();

  /// Spans over the step's new rows.
  const std::vector<AttentionSpan>& spans() const { return m_spans; }
  /// Spans whose windows begin in a ring, over the rows that they see in order of position: (row,
  /// head, dim).
  const std::vector<AttentionSpan>& joined() const { return m_joined; }
  const ArrayView& joined_keys() const { return m_keys; }
  const ArrayView& joined_values() const { return m_values; }

 private:
  void list_windows(const Step& step, int layer, const RowRange& rows);
  void list_chunks(const Step& step, int layer, const RowRange& rows);

  ReadPages pages_of(const Step& step, const StepBatch::Span& span) const;

  const SharedHeadsBlock* m_shared;
  ReadPages m_read;
  std::vector<AttentionSpan> m_spans, m_joined;
  ArrayView m_keys, m_values;  // of m_rows
  ValueBuffer m_rows;
};

}  // namespace kvzap::engine
