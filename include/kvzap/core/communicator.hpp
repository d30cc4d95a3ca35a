// The ranks that share one model, and the agreement on errors that ends all ranks together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>
#include <string>
#include <type_traits>
#include <vector>

#if KVZAP_HAVE_MPI
#include <mpi.h>
#endif

namespace kvzap {

/// An error that every rank of a communicator knows. Each rank throws it with the same text, so
/// only rank 0 needs to print it and all ranks can shut down in order.
class AgreedError : public Error {
 public:
  using Error::Error;
};

/// A rank ran out of memory. Every rank throws this error.
class AgreedOutOfMemory : public AgreedError {
 public:
  using AgreedError::AgreedError;
};

/// What this process has sent to other ranks since its start, and how long it was in such calls.
struct Traffic {
  std::int64_t calls = 0;  // collective operations, and messages of `transfer`
  std::int64_t bytes = 0;  // of this rank's own data in them
  double seconds = 0;      // in these calls, waiting for other ranks included
};

/// A non-owning handle to an MPI communicator whose calls check every return code and every count.
/// It is copyable; the MPI communicator must outlive it. In a build without MPI (KVZAP_HAVE_MPI is
/// 0) it stands for this process alone, and every collective call returns this rank's data.
/// Every function that moves data between ranks is collective and blocking. All throw Error if MPI
/// reports one.
class Communicator {
 public:
#if KVZAP_HAVE_MPI
  /// Sets the error handler of `comm` to MPI_ERRORS_RETURN so that errors can be reported.
  explicit Communicator(MPI_Comm comm);
  MPI_Comm mpi() const { return m_comm; }
#endif
  /// Returns all ranks that were started together.
  static Communicator world();
  /// Returns a communicator of this rank alone.
  static Communicator self();

  int rank() const { return m_rank; }
  int size() const { return m_size; }
  bool is_root() const { return m_rank == 0; }
  /// Returns the number of ranks on this rank's node, this one included. Collective.
  int ranks_on_node() const;

  /// Sums `count` floats over ranks, in place. They are in host memory, or in device memory if this
  /// MPI can read it.
  void all_reduce_sum(float* values, std::size_t count) const;
  std::int64_t all_reduce_sum(std::int64_t value) const;
  /// Sums each of `count` values in host memory over ranks, in place.
  void all_reduce_sum(std::int64_t* values, std::size_t count) const;
  void all_reduce_sum(double* values, std::size_t count) const;
  std::int64_t all_reduce_max(std::int64_t value) const;
  /// Takes the maximum of each of `count` values over ranks, in place.
  void all_reduce_max(std::int64_t* values, std::size_t count) const;
  void all_reduce_max(double* values, std::size_t count) const;
  /// Copies `bytes` bytes of the root's `data` to all ranks.
  void broadcast(void* data, std::size_t bytes, int root) const;
  /// Copies the root's vector to all ranks. Their vectors may have another length before.
  /// Allocates.
  template <class Value>
  void broadcast(std::vector<Value>& values, int root) const {
    broadcast_sequence(values, root);
  }
  /// Copies the root's string to all ranks. Allocates.
  void broadcast(std::string& text, int root) const { broadcast_sequence(text, root); }
  /// Returns every rank's `values` on every rank, in rank order. Lengths may differ.
  std::vector<std::vector<std::int64_t>> all_gather(const std::vector<std::int64_t>& values) const;
  /// Concatenates every rank's `count` floats on the root; counts may differ. Returns an empty
  /// vector on other ranks.
  std::vector<float> gather(const float* values, std::size_t count, int root) const;

  /// Concatenates the ranks' values into `all` on the root. Every rank knows all `counts`, and
  /// `all` has room for their sum. Allocates nothing.
  void gather(const float* values, const std::vector<std::int64_t>& counts, float* all,
              int root) const;

  /// Concatenates the ranks' floats on every rank, in rank order: counts[r] of rank r. Every rank
  /// knows all `counts`, and `all` has room for their sum. Memory as for all_reduce_sum. Allocates
  /// nothing for up to 8 ranks of one node.
  void all_gather(const float* values, const std::vector<std::int64_t>& counts, float* all) const;
  /// Sends floats to each rank, and receives floats from each, both in rank order: sent[r] go to
  /// rank r, and received[r] come from it. Memory as for all_reduce_sum.
  void exchange(const float* values, const std::vector<std::int64_t>& sent, float* all,
                const std::vector<std::int64_t>& received) const;
  /// Copies bytes from rank `from` to rank `to`; returns at once on other ranks, which need not
  /// call it. Host memory.
  void transfer(char* data, std::size_t bytes, int from, int to) const;
  /// Returns the traffic of this process so far, over all communicators.
  static Traffic traffic();

  /// Runs `local_work` on every rank; it must not communicate. If it throws on any rank, every rank
  /// throws AgreedError with the text of the lowest rank that failed. Collective.
  void agree(const std::function<void()>& local_work) const;
  /// Runs `root_work` on rank 0 alone. Errors are handled as by `agree`. Collective.
  void agree_on_root(const std::function<void()>& root_work) const;

  /// Waits for every rank. Collective.
  void barrier() const;
  /// Ends every rank at once with this exit status. Call it after an error on one rank while others
  /// wait.
  [[noreturn]] void abort(int status) const;

 private:
  void agree(const std::function<void()>& local_work, bool all_work) const;
  template <class Sequence>
  void broadcast_sequence(Sequence& values, int root) const {
    static_assert(std::is_trivially_copyable_v<typename Sequence::value_type>);
    auto count = static_cast<std::int64_t>(values.size());
    broadcast(&count, sizeof(count), root);
    values.resize(static_cast<std::size_t>(count));
    broadcast(values.data(), values.size() * sizeof(typename Sequence::value_type), root);
  }

#if KVZAP_HAVE_MPI
  MPI_Comm m_comm;
#else
  Communicator() = default;
#endif
  int m_rank = 0;
  int m_size = 1;
};

}  // namespace kvzap
