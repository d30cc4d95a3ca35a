// The ranks that share one model, and how an error on one of them ends all of them.
#pragma once

#include <cstddef>
#include <functional>
#include <kvzap/config.hpp>
#include <kvzap/core/types.hpp>
#include <vector>

#if KVZAP_HAVE_MPI
#include <mpi.h>
#endif

namespace kvzap {

/// An error that every rank of a communicator has been told of: each throws it with the same text,
/// so that rank 0 alone need print it and all can leave in good order.
class AgreedError : public Error {
 public:
  using Error::Error;
};

/// A rank had no memory; every rank throws this.
class AgreedOutOfMemory : public AgreedError {
 public:
  using AgreedError::AgreedError;
};

/// A non-owning handle on an MPI communicator whose calls check every return code and every count.
/// Copyable; the MPI communicator must outlive it. Built without MPI (KVZAP_HAVE_MPI is 0) it is
/// this process alone, and every collective call returns what one rank has.
class Communicator {
 public:
#if KVZAP_HAVE_MPI
  /// The communicator's errors are switched to MPI_ERRORS_RETURN so that they can be reported.
  explicit Communicator(MPI_Comm comm);
  MPI_Comm mpi() const { return m_comm; }
#endif
  /// All ranks that were started together.
  static Communicator world();
  /// This rank alone.
  static Communicator self();

  int rank() const { return m_rank; }
  int size() const { return m_size; }
  bool is_root() const { return m_rank == 0; }
  /// Ranks that run on this rank's node, this one included. Collective.
  int ranks_on_node() const;

  /// In-place sum over ranks of `count` floats in host memory, or in a device's if
  /// this MPI reads such memory.
  void all_reduce_sum(float* values, std::size_t count) const;
  std::int64_t all_reduce_sum(std::int64_t value) const;
  /// In place, each of `count` values in host memory by itself.
  void all_reduce_sum(std::int64_t* values, std::size_t count) const;
  void all_reduce_sum(double* values, std::size_t count) const;
  std::int64_t all_reduce_max(std::int64_t value) const;
  /// In place, each of `count` values by itself.
  void all_reduce_max(std::int64_t* values, std::size_t count) const;
  void all_reduce_max(double* values, std::size_t count) const;
  void broadcast(void* data, std::size_t bytes, int root) const;
  /// Every rank's `values`, in rank order (lengths may differ), on every rank.
  std::vector<std::vector<std::int64_t>> all_gather(const std::vector<std::int64_t>& values) const;
  /// Concatenates every rank's `count` floats on the root; counts may differ. Empty elsewhere.
  std::vector<float> gather(const float* values, std::size_t count, int root) const;

  /// The same where every rank knows all counts: into `all` on the root, which has room for them,
  /// and without taking memory.
  void gather(const float* values, const std::vector<std::int64_t>& counts, float* all,
              int root) const;

  /// Runs `local_work`, which must not communicate, on every rank. If it throws on any rank, every
  /// rank throws AgreedError with the text of the lowest rank that failed. Collective.
  void agree(const std::function<void()>& local_work) const;
  /// The same for work that rank 0 alone does.
  void agree_on_root(const std::function<void()>& root_work) const;

  /// Waits for every rank. Collective.
  void barrier() const;
  /// Ends every rank at once, with this exit status: for an error on one rank while others wait.
  [[noreturn]] void abort(int status) const;

 private:
  void agree(const std::function<void()>& local_work, bool all_work) const;

#if KVZAP_HAVE_MPI
  MPI_Comm m_comm;
#else
  Communicator() = default;
#endif
  int m_rank = 0;
  int m_size = 1;
};

}  // namespace kvzap
