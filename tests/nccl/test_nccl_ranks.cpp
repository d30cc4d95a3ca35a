// What ranks exchange by NCCL, which is emulated: the sums are MPI's, a call waits for nothing, and
// where NCCL cannot be used all ranks use MPI.
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <cstdlib>
#include <functional>
#include <optional>
#include <vector>

#include "base/launch_graph.hpp"
#include "parallel/nccl_emulated.hpp"
#include "parallel/rank_exchange.hpp"

namespace kvzap {
namespace {

using parallel::NcclRanks;
using parallel::RankExchange;
using parallel::nccl::emulation;
using Counts = RankExchange::Counts;
using Values = Kokkos::View<float*, MemorySpace>;

/// A communicator of its own for each test: all ranks, or those of equal `color`.
class Ranks {
 public:
  explicit Ranks(int color = 0) {
    const Communicator world = Communicator::world();
    MPI_Comm_split(world.mpi(), color, world.rank(), &m_mpi);
    m_comm.emplace(m_mpi);
  }
  ~Ranks() { MPI_Comm_free(&m_mpi); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  const Communicator& operator*() const { return *m_comm; }
  const Communicator* operator->() const { return &*m_comm; }

 private:
  MPI_Comm m_mpi = MPI_COMM_NULL;
  std::optional<Communicator> m_comm;
};

/// What tests change of the emulation is undone after each.
class Nccl : public ::testing::Test {
 protected:
  Nccl() { m_before = emulation.communicators; }
  ~Nccl() override {
    EXPECT_EQ(emulation.communicators, m_before);
    emulation = {};
    emulation.communicators = m_before;
  }
  ExecutionSpace exec;
  RankExchange exchange;

 private:
  int m_before = 0;
};

bool is_alone() { return Communicator::world().size() == 1; }

// Small integers, whose sums are exact in any order.
float value(int rank, std::int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101); }

Values some_values(std::int64_t count, int rank) {
  Values values("values", count);
  const auto host = Kokkos::create_mirror_view(values);
  for (std::int64_t i = 0; i < count; ++i) host(i) = value(rank, i);
  Kokkos::deep_copy(values, host);
  return values;
}

std::vector<float> on_host(const Values& values) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), values);
  return {host.data(), host.data() + host.size()};
}

linalg::Matrix matrix(const Values& values) {
  return linalg::Matrix(values.data(), 1, values.extent(0));
}

std::vector<float> sum_by_mpi(const Communicator& comm, std::int64_t count) {
  std::vector<float> sums = on_host(some_values(count, comm.rank()));
  comm.all_reduce_sum(sums.data(), sums.size());
  return sums;
}

TEST_F(Nccl, SumsAreThoseOfMpi) {
  const Ranks ranks;
  // More than a piece of MPI's at last.
  for (const std::int64_t count : {0, 1, 5, 4097, (1 << 22) + 3}) {
    const Values values = some_values(count, ranks->rank());
    exchange.sum(exec, *ranks, matrix(values));
    EXPECT_EQ(on_host(values), sum_by_mpi(*ranks, count)) << count;
  }
  EXPECT_EQ(RankExchange::enqueues(exec, *ranks), ranks->size() > 1);
}

TEST_F(Nccl, GathersAndExchangesRaggedCounts) {
  const Ranks ranks;
  const int size = ranks->size(), rank = ranks->rank();
  for (const std::int64_t unit : {0, 1, 5, 9000}) {
    const auto count = [&](int from, int to) { return unit * ((3 * from + to) % 4); };
    Counts counts, sent, received;
    for (int r = 0; r < size; ++r) {
      counts.push_back(count(r, 0));
      sent.push_back(count(rank, r));
      received.push_back(count(r, rank));
    }
    const auto sum_of = [](const Counts& of) {
      return std::accumulate(of.begin(), of.end(), std::int64_t{0});
    };
    const Values own = some_values(counts[rank], rank);
    const Values all("all", sum_of(counts));
    exchange.all_gather(exec, *ranks, own.data(), counts, all.data());
    std::vector<float> expected(sum_of(counts));
    ranks->all_gather(on_host(own).data(), counts, expected.data());
    EXPECT_EQ(on_host(all), expected) << unit;

    const Values given = some_values(sum_of(sent), rank);
    const Values taken("taken", sum_of(received));
    exchange.exchange(exec, *ranks, given.data(), sent, taken.data(), received);
    expected.resize(sum_of(received));
    ranks->exchange(on_host(given).data(), sent, expected.data(), received);
    EXPECT_EQ(on_host(taken), expected) << unit;
  }
}

TEST_F(Nccl, SeveralCommunicatorsWork) {
  const int before = emulation.communicators;
  const int rank = Communicator::world().rank();
  const bool halves_are_alone = Communicator::world().size() < 3;
  {
    const Ranks all, again, half(rank % 2);
    for (int i = 0; i < 3; ++i) {
      for (const Ranks* ranks : {&all, &half, &again}) {
        const Values values = some_values(100 + i, (*ranks)->rank());
        exchange.sum(exec, **ranks, matrix(values));
        EXPECT_EQ(on_host(values), sum_by_mpi(**ranks, 100 + i));
      }
    }
    if (!is_alone() && !halves_are_alone && half->size() > 1) {
      EXPECT_EQ(emulation.communicators, before + 3);
    }
    EXPECT_NE(NcclRanks::known(*all, exec) == nullptr, !is_alone());
    if (!is_alone()) {
      EXPECT_NE(NcclRanks::known(*all, exec), NcclRanks::known(*again, exec));
    }
  }
  EXPECT_EQ(emulation.communicators, before);  // freed with MPI's
}

/// Returns rank 0's standard error while `work` runs.
std::string errors_of(const std::function<void()>& work) {
  ::testing::internal::CaptureStderr();
  work();
  return ::testing::internal::GetCapturedStderr();
}

// The only test that makes the process print its note: it must be the first to share a device.
TEST_F(Nccl, RanksThatShareADeviceUseMpi) {
  if (is_alone()) GTEST_SKIP() << "needs several ranks";
  const Ranks ranks, others;
  emulation.share_a_device = true;
  const Values values = some_values(50, ranks->rank());
  std::string text = errors_of([&] { exchange.sum(exec, *ranks, matrix(values)); });
  EXPECT_EQ(on_host(values), sum_by_mpi(*ranks, 50));
  EXPECT_FALSE(RankExchange::enqueues(exec, *ranks));
  EXPECT_EQ(text, ranks->is_root()
                      ? "kvzap: note: ranks exchange values of devices by MPI: ranks 0 "
                        "and 1 share a device, which NCCL refuses\n"
                      : "");
  text = errors_of([&] { RankExchange::prepare(exec, *others); });
  EXPECT_EQ(text, "");
  EXPECT_FALSE(RankExchange::enqueues(exec, *others));
}

TEST_F(Nccl, RanksUseMpiIfOneCannotConnect) {
  if (is_alone()) GTEST_SKIP() << "needs several ranks";
  const Ranks ranks, others;
  const bool is_last = ranks->rank() + 1 == ranks->size();
  if (is_last) emulation.of_init = parallel::nccl::ncclSystemError;
  const int aborted = emulation.aborted;
  errors_of([&] { RankExchange::prepare(exec, *ranks); });
  EXPECT_FALSE(RankExchange::enqueues(exec, *ranks));
  EXPECT_EQ(emulation.aborted, aborted + (is_last ? 0 : 1));
  emulation.of_init = parallel::nccl::ncclSuccess;
  emulation.of_id = parallel::nccl::ncclSystemError;
  errors_of([&] { RankExchange::prepare(exec, *others); });
  EXPECT_FALSE(RankExchange::enqueues(exec, *others));
  const Values values = some_values(5, ranks->rank());
  exchange.sum(exec, *others, matrix(values));
  EXPECT_EQ(on_host(values), sum_by_mpi(*others, 5));
}

TEST_F(Nccl, EnvironmentTurnsItOff) {
  EXPECT_EQ(NcclRanks::version(), "2.28.9");
  const Ranks ranks;
  if (ranks->is_root()) setenv("KVZAP_NCCL", "off", 1);  // one rank is enough
  RankExchange::prepare(exec, *ranks);
  EXPECT_FALSE(RankExchange::enqueues(exec, *ranks));
  setenv("KVZAP_NCCL", "off", 1);
  EXPECT_EQ(NcclRanks::version(), "2.28.9, off (KVZAP_NCCL)");
  setenv("KVZAP_NCCL", "On", 1);
  try {
    const RankExchange named;
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "KVZAP_NCCL is \"On\"; expected on or off");
  }
  unsetenv("KVZAP_NCCL");
}

int fences = 0;

// A rank enqueues its calls while the others have not come to theirs, and without a fence.
TEST_F(Nccl, CallsWaitForNothing) {
  if (is_alone()) GTEST_SKIP() << "needs several ranks";
  const Ranks ranks;
  RankExchange::prepare(exec, *ranks);
  const int rank = ranks->rank(), size = ranks->size();
  const Values values = some_values(9, rank), all("all", size);
  base::LaunchGraph graph;
  int turn = 0;
  if (rank > 0) MPI_Recv(&turn, 1, MPI_INT, rank - 1, 0, ranks->mpi(), MPI_STATUS_IGNORE);
  fences = 0;
  Kokkos::Tools::Experimental::set_begin_fence_callback(
      [](const char*, const std::uint32_t, std::uint64_t*) { ++fences; });
  graph.record(exec, [&] {
    exchange.sum(exec, *ranks, matrix(values));
    exchange.all_gather(exec, *ranks, values.data(), Counts(size, 1), all.data());
  });
  Kokkos::Tools::Experimental::set_begin_fence_callback(nullptr);
  EXPECT_EQ(fences, 0);
  if (rank + 1 < size) MPI_Send(&turn, 1, MPI_INT, rank + 1, 0, ranks->mpi());
  EXPECT_EQ(on_host(values), on_host(some_values(9, rank)));

  graph.launch(exec);
  std::vector<float> expected = sum_by_mpi(*ranks, 9);
  EXPECT_EQ(on_host(values), expected);
  EXPECT_EQ(on_host(all), std::vector<float>(size, expected[0]));
  graph.launch(exec);
  for (float& x : expected) x *= static_cast<float>(size);
  EXPECT_EQ(on_host(values), expected);
}

/// Expects an Error of this text.
void expect_error(const std::function<void()>& work, const std::string& text) {
  try {
    work();
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), text);
  }
}

TEST_F(Nccl, ErrorsAreThrown) {
  if (is_alone()) GTEST_SKIP() << "needs several ranks";
  const Ranks ranks;
  RankExchange::prepare(exec, *ranks);
  const Values values = some_values(3, ranks->rank());
  emulation.of_call = parallel::nccl::ncclInvalidUsage;
  expect_error([&] { exchange.sum(exec, *ranks, matrix(values)); },
               "NCCL: ncclAllReduce failed: emulated error; no details");
  expect_error(
      [&] {
        exchange.all_gather(exec, *ranks, values.data(), Counts(ranks->size(), 1), values.data());
      },
      "NCCL: ncclSend or ncclRecv failed: emulated error; no details");
  emulation.of_call = parallel::nccl::ncclSuccess;
  exchange.sum(exec, *ranks, matrix(values));
  EXPECT_EQ(on_host(values), sum_by_mpi(*ranks, 3));

  // A device that is still busy when another rank has vanished.
  emulation.busy_polls = 1000000;
  emulation.asynchronous = parallel::nccl::ncclRemoteError;
  const int aborted = emulation.aborted;
  expect_error([&] { RankExchange::wait(exec, *ranks); },
               "NCCL: a call on the device failed: emulated error; no details");
  EXPECT_GT(emulation.busy_polls, 990000);
  EXPECT_EQ(emulation.aborted, aborted + 1);
  expect_error([&] { exchange.sum(exec, *ranks, matrix(values)); },
               "NCCL: the ranks have been aborted after an error");
  RankExchange::wait(exec, *ranks);
}

TEST_F(Nccl, TrafficCountsCallsAndBytes) {
  if (is_alone()) GTEST_SKIP() << "needs several ranks";
  const Ranks ranks;
  RankExchange::prepare(exec, *ranks);
  const int size = ranks->size();
  const Values values = some_values(12, ranks->rank()), all("all", 12 * size);
  const Traffic before = Communicator::traffic();
  exchange.sum(exec, *ranks, matrix(values));
  exchange.all_gather(exec, *ranks, values.data(), Counts(size, 3), all.data());
  exchange.exchange(exec, *ranks, values.data(), Counts(size, 2), all.data(), Counts(size, 2));
  const Traffic after = Communicator::traffic();
  EXPECT_EQ(after.calls - before.calls, 3);
  EXPECT_EQ(after.bytes - before.bytes, 4 * (12 + 3 + 2 * (size - 1)));
}

}  // namespace
}  // namespace kvzap
