// Communicator over MPI. communicator_serial.cpp replaces it in a build without MPI.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <kvzap/core/communicator.hpp>
#include <limits>
#include <string>

#include "parallel/mpi_session.hpp"
#include "parallel/node_memory.hpp"
#include "parallel/traffic.hpp"

namespace kvzap {

using parallel::Counted;

namespace {

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(fmt::format("{} failed: {}", call, std::string(text, length)));
}

int narrow(std::size_t count, const char* call) {
  if (count > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    throw Error(fmt::format("{}: {} elements do not fit MPI's int count", call, count));
  }
  return static_cast<int>(count);
}

// Large reductions and broadcasts are split into pieces. So no count overflows MPI's int, and MPI's
// own buffers, which grow with the message, stay small (Open MPI takes half the message on each
// rank).
constexpr std::size_t max_piece = std::size_t{1} << 22;

template <class Value, class Combine>
void reduce(Value* values, std::size_t count, MPI_Datatype type, MPI_Op operation,
            const Combine& combine, const Communicator& comm) {
  if (comm.size() == 1) return;
  const Counted counted(count * sizeof(Value));
  if (parallel::NodeMemory* const node = parallel::NodeMemory::of(comm.mpi())) {
    return node->reduce(values, count, combine);
  }
  for (std::size_t begin = 0; begin < count; begin += max_piece) {
    const int piece = narrow(std::min(max_piece, count - begin), "MPI_Allreduce");
    check(MPI_Allreduce(MPI_IN_PLACE, values + begin, piece, type, operation, comm.mpi()),
          "MPI_Allreduce");
  }
}

template <class Value>
void sum(Value* values, std::size_t count, MPI_Datatype type, const Communicator& comm) {
  reduce(
      values, count, type, MPI_SUM, [](Value a, Value b) { return a + b; }, comm);
}

template <class Value>
void maximum(Value* values, std::size_t count, MPI_Datatype type, const Communicator& comm) {
  reduce(
      values, count, type, MPI_MAX, [](Value a, Value b) { return std::max(a, b); }, comm);
}

}  // namespace

Communicator::Communicator(MPI_Comm comm) : m_comm(comm) {
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(comm, &m_rank), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &m_size), "MPI_Comm_size");
}

Communicator Communicator::world() { return Communicator(MPI_COMM_WORLD); }
Communicator Communicator::self() { return Communicator(MPI_COMM_SELF); }

void Communicator::barrier() const {
  if (m_size == 1) return;
  const Counted counted(0);
  if (parallel::NodeMemory* const node = parallel::NodeMemory::of(m_comm)) return node->meet();
  check(MPI_Barrier(m_comm), "MPI_Barrier");
}

void Communicator::abort(int status) const {
  // Without a launcher there are no other ranks to end, and MPI_Abort would print eight lines.
  if (!parallel::has_mpi_launcher()) std::_Exit(status);
  MPI_Abort(m_comm, status);
  std::_Exit(status);  // MPI_Abort is not declared noreturn
}

int Communicator::ranks_on_node() const {
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(m_comm, MPI_COMM_TYPE_SHARED, m_rank, MPI_INFO_NULL, &node),
        "MPI_Comm_split_type");
  int size = 1;
  const int code = MPI_Comm_size(node, &size);
  check(MPI_Comm_free(&node), "MPI_Comm_free");
  check(code, "MPI_Comm_size");
  return size;
}

void Communicator::all_reduce_sum(float* values, std::size_t count) const {
  sum(values, count, MPI_FLOAT, *this);
}

void Communicator::all_reduce_sum(std::int64_t* values, std::size_t count) const {
  sum(values, count, MPI_INT64_T, *this);
}

void Communicator::all_reduce_sum(double* values, std::size_t count) const {
  sum(values, count, MPI_DOUBLE, *this);
}

std::int64_t Communicator::all_reduce_sum(std::int64_t value) const {
  all_reduce_sum(&value, 1);
  return value;
}

std::int64_t Communicator::all_reduce_max(std::int64_t value) const {
  all_reduce_max(&value, 1);
  return value;
}

void Communicator::all_reduce_max(std::int64_t* values, std::size_t count) const {
  maximum(values, count, MPI_INT64_T, *this);
}

void Communicator::all_reduce_max(double* values, std::size_t count) const {
  maximum(values, count, MPI_DOUBLE, *this);
}

void Communicator::broadcast(void* data, std::size_t bytes, int root) const {
  if (m_size == 1) return;
  const Counted counted(m_rank == root ? bytes : 0);
  auto* const begin_of_data = static_cast<char*>(data);
  if (parallel::NodeMemory* const node = parallel::NodeMemory::of(m_comm)) {
    return node->broadcast(begin_of_data, bytes, root);
  }
  for (std::size_t begin = 0; begin < bytes; begin += max_piece) {
    const int piece = narrow(std::min(max_piece, bytes - begin), "MPI_Bcast");
    check(MPI_Bcast(begin_of_data + begin, piece, MPI_BYTE, root, m_comm), "MPI_Bcast");
  }
}

std::vector<std::vector<std::int64_t>> Communicator::all_gather(
    const std::vector<std::int64_t>& values) const {
  if (m_size == 1) return {values};
  const Counted counted(values.size() * sizeof(std::int64_t));
  const int count = narrow(values.size(), "MPI_Allgatherv");
  std::vector<int> counts(m_size);
  check(MPI_Allgather(&count, 1, MPI_INT, counts.data(), 1, MPI_INT, m_comm), "MPI_Allgather");
  std::vector<int> begins(m_size + 1, 0);
  std::size_t total = 0;
  for (int r = 0; r < m_size; ++r) {
    total += counts[r];
    begins[r + 1] = narrow(total, "MPI_Allgatherv");
  }
  std::vector<std::int64_t> all(total);
  check(MPI_Allgatherv(values.data(), count, MPI_INT64_T, all.data(), counts.data(), begins.data(),
                       MPI_INT64_T, m_comm),
        "MPI_Allgatherv");
  std::vector<std::vector<std::int64_t>> result(m_size);
  for (int r = 0; r < m_size; ++r) {
    result[r].assign(all.begin() + begins[r], all.begin() + begins[r + 1]);
  }
  return result;
}

std::vector<float> Communicator::gather(const float* values, std::size_t count, int root) const {
  if (m_size == 1) return {values, values + count};
  const Counted counted(m_rank == root ? 0 : count * sizeof(float));
  const int my_count = narrow(count, "MPI_Gatherv");
  std::vector<int> counts(m_size);
  check(MPI_Gather(&my_count, 1, MPI_INT, counts.data(), 1, MPI_INT, root, m_comm), "MPI_Gather");
  std::vector<int> begins(m_size + 1, 0);
  std::vector<float> all;
  if (m_rank == root) {
    std::size_t total = 0;
    for (int r = 0; r < m_size; ++r) {
      total += counts[r];
      begins[r + 1] = narrow(total, "MPI_Gatherv");
    }
    all.resize(total);
  }
  check(MPI_Gatherv(values, my_count, MPI_FLOAT, all.data(), counts.data(), begins.data(),
                    MPI_FLOAT, root, m_comm),
        "MPI_Gatherv");
  return all;
}

void Communicator::gather(const float* values, const std::vector<std::int64_t>& counts, float* all,
                          int root) const {
  constexpr int tag = 4711;
  if (m_size == 1) {
    std::copy_n(values, counts.at(0), all);
    return;
  }
  const Counted counted(m_rank == root ? 0 : counts.at(m_rank) * sizeof(float));
  for (int r = 0; r < m_size; ++r) {
    const std::size_t count = counts.at(r);
    if (r == root && m_rank == root) std::copy_n(values, count, all);
    for (std::size_t begin = 0; r != root && begin < count; begin += max_piece) {
      const int piece = narrow(std::min(max_piece, count - begin), "MPI_Send");
      if (m_rank == root) {
        check(MPI_Recv(all + begin, piece, MPI_FLOAT, r, tag, m_comm, MPI_STATUS_IGNORE),
              "MPI_Recv");
      } else if (m_rank == r) {
        check(MPI_Send(values + begin, piece, MPI_FLOAT, root, tag, m_comm), "MPI_Send");
      }
    }
    if (m_rank == root) all += count;
  }
}

namespace {

/// Counts and offsets as MPI takes them.
struct Extents {
  Extents(const std::vector<std::int64_t>& of, const char* call) {
    std::int64_t total = 0;
    for (const std::int64_t count : of) {
      counts.push_back(narrow(count, call));
      begins.push_back(narrow(total, call));
      total += count;
    }
  }
  std::vector<int> counts, begins;
};

}  // namespace

void Communicator::all_gather(const float* values, const std::vector<std::int64_t>& counts,
                              float* all) const {
  const auto own = static_cast<std::size_t>(counts.at(m_rank));
  if (m_size == 1) {
    std::copy_n(values, own, all);
    return;
  }
  const Counted counted(own * sizeof(float));
  if (parallel::NodeMemory* const node = parallel::NodeMemory::of(m_comm)) {
    return node->all_gather(values, counts.data(), all);
  }
  const Extents extents(counts, "MPI_Allgatherv");
  check(MPI_Allgatherv(values, extents.counts[m_rank], MPI_FLOAT, all, extents.counts.data(),
                       extents.begins.data(), MPI_FLOAT, m_comm),
        "MPI_Allgatherv");
}

void Communicator::exchange(const float* values, const std::vector<std::int64_t>& sent, float* all,
                            const std::vector<std::int64_t>& received) const {
  if (m_size == 1) {
    std::copy_n(values, sent.at(0), all);
    return;
  }
  std::int64_t total = -sent.at(m_rank);
  for (const std::int64_t count : sent) total += count;
  const Counted counted(static_cast<std::size_t>(total) * sizeof(float));
  if (parallel::NodeMemory* const node = parallel::NodeMemory::of(m_comm)) {
    return node->exchange(values, sent.data(), all, received.data());
  }
  const Extents to(sent, "MPI_Alltoallv"), from(received, "MPI_Alltoallv");
  check(MPI_Alltoallv(values, to.counts.data(), to.begins.data(), MPI_FLOAT, all,
                      from.counts.data(), from.begins.data(), MPI_FLOAT, m_comm),
        "MPI_Alltoallv");
}

void Communicator::transfer(char* data, std::size_t bytes, int from, int to) const {
  constexpr int tag = 4712;
  if (from == to || (m_rank != from && m_rank != to)) return;
  const Counted counted(m_rank == from ? bytes : 0);
  for (std::size_t begin = 0; begin < bytes; begin += max_piece) {
    const int piece = narrow(std::min(max_piece, bytes - begin), "MPI_Send");
    if (m_rank == from) {
      check(MPI_Send(data + begin, piece, MPI_BYTE, to, tag, m_comm), "MPI_Send");
    } else {
      check(MPI_Recv(data + begin, piece, MPI_BYTE, from, tag, m_comm, MPI_STATUS_IGNORE),
            "MPI_Recv");
    }
  }
}

Traffic Communicator::traffic() { return parallel::traffic_of_process(); }

}  // namespace kvzap
