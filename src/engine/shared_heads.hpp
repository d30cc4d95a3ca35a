// Heads that several ranks work on: which rank computes which outputs of q, k and v, which ranks
// have a part of a head's attention, and the copies and merges that follow.
#pragma once

#include <kvzap/core/head_partition.hpp>
#include <kvzap/core/types.hpp>
#include <vector>

namespace kvzap::engine {

/// Some columns of a matrix that are copied to another one.
struct ColumnCopy {
  const float* from;
  std::int64_t from_stride;
  float* to;
  std::int64_t to_stride;
  std::int64_t columns;
};

/// Copies the columns of `rows` rows.
void copy_columns(const ExecutionSpace& exec, std::int64_t rows,
                  const std::vector<ColumnCopy>& copies);

/// The columns of one KV head in a rank's part of attended heads, with the partial results of
/// `parts` ranks. Each is a record for every row: these columns of the rank's attention over its
/// part of the rows, then the log-sum-exp of each query head in them.
struct AttendedMerge {
  float* to;
  std::int64_t to_stride;
  std::int64_t columns;
  std::int64_t first;  // of these columns, in their query head
  std::int64_t query_heads;
  std::int64_t first_part;  // in the list of records
  std::int64_t parts;
};

/// Merges partial attention exactly: each part weighs exp(its log-sum-exp), divided by the sum of
/// these weights. records: the first record of each part.
void merge_attended(const ExecutionSpace& exec, std::int64_t rows, std::int64_t head_dim,
                    const std::vector<AttendedMerge>& merges,
                    const std::vector<const float*>& records);

/// Where ranks have the outputs of q, k and v and the inputs of o.
class SharedHeads {
 public:
  /// The sizes of a layer's attention. kv_dim: see HeadPartition::projected. vectors: of a row.
  /// With one, the model has latent attention (ModelConfig::row_vectors): query heads are dealt
  /// whole, and the owner of the KV head computes its keys.
  struct Sizes {
    std::int64_t group, head_dim, kv_dim, vectors = 2;
  };
  /// sizes: of each layer.
  SharedHeads(const HeadPartition& partition, std::vector<Sizes> sizes);

  /// Outputs begin … end - 1 of q, k and v (HeadPartition::projected) are a rank's own outputs from
  /// `column` on.
  struct Segment {
    std::int64_t begin, end;
    int rank;
    std::int64_t column;
  };
  /// Returns the segments of a layer, ascending.
  const std::vector<Segment>& segments(int layer) const { return m_segments[layer]; }
  /// Returns the number of each rank's own outputs.
  const std::vector<std::int64_t>& widths(int layer) const { return m_widths[layer]; }

  /// The part of a KV head in a rank's inputs of o: columns begin … end - 1 of all query heads are
  /// its inputs from `column` on.
  struct Piece {
    int head;
    std::int64_t begin, end;
    std::int64_t column;
    std::int64_t query_heads;  // that have a part in it
    std::int64_t columns() const { return end - begin; }
    /// Returns the floats of its record for one token.
    std::int64_t record() const { return columns() + query_heads; }
  };
  const std::vector<Piece>& pieces(int layer, int rank) const { return m_pieces[layer][rank]; }
  /// Returns the number of a rank's inputs of o.
  std::int64_t inputs(int layer, int rank) const;
  const Sizes& sizes(int layer) const { return m_sizes[layer]; }

 private:
  IndexRanges projected(const HeadPartition& partition, int layer, int rank) const;
  IndexRanges attended(const HeadPartition& partition, int layer, int rank) const;

  std::vector<Sizes> m_sizes;                             // (layer)
  std::vector<std::vector<Segment>> m_segments;           // (layer)
  std::vector<std::vector<std::int64_t>> m_widths;        // (layer, rank)
  std::vector<std::vector<std::vector<Piece>>> m_pieces;  // (layer, rank)
};

/// The ranks that share the attention of a long span's new tokens: the owner of a head and, with
/// more ranks than KV heads, ranks that own none, dealt to the heads of a layer.
class HeadTeams {
 public:
  HeadTeams(const HeadPartition& partition, int rank);

  struct Place {
    int head = -1;  // of the team; -1: the rank is in none
    int place = 0;  // 0: the owner
    int size = 1;
  };
  /// Returns this rank's place in a layer.
  const Place& of_rank(int layer) const { return m_places[layer]; }
  /// Returns the ranks of a head's team, the owner first.
  const std::vector<int>& members(int layer, int head) const { return m_members[layer][head]; }

 private:
  std::vector<Place> m_places;                           // (layer)
  std::vector<std::vector<std::vector<int>>> m_members;  // (layer, head)
};

}  // namespace kvzap::engine
