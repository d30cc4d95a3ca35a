#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <kvzap/core/communicator.hpp>
#include <kvzap/core/threads.hpp>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using kvzap::AgreedError;
using kvzap::Communicator;
using kvzap::Error;

TEST(Communicator, KnowsItsPlace) {
  const auto comm = Communicator::world();
  int rank = 0, size = 1;
#if KVZAP_HAVE_MPI
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
#endif
  EXPECT_EQ(comm.rank(), rank);
  EXPECT_EQ(comm.size(), size);
  EXPECT_EQ(comm.is_root(), rank == 0);
  const int on_node = comm.ranks_on_node();
  EXPECT_GE(on_node, 1);
  EXPECT_LE(on_node, size);
}

// Counts from none to more than a buffer of shared memory, unlike from rank to rank.
TEST(Communicator, GathersAndExchangesFloatsOfAnyCounts) {
  const auto comm = Communicator::world();
  const int size = comm.size();
  const auto value = [](int from, int to, std::int64_t i) {
    return static_cast<float>(from) + 100.0f * static_cast<float>(to) +
           static_cast<float>(i % 1000) / 1024.0f;
  };
  const kvzap::Traffic before = Communicator::traffic();
  for (const std::int64_t unit : {0, 1, 5, 9000, 40000}) {
    const auto count = [&](int from, int to) { return unit * ((3 * from + to) % 4); };
    std::vector<std::int64_t> counts, sent, received;
    for (int r = 0; r < size; ++r) {
      counts.push_back(count(r, 0));
      sent.push_back(count(comm.rank(), r));
      received.push_back(count(r, comm.rank()));
    }
    std::vector<float> own, all, expected;
    for (std::int64_t i = 0; i < counts[comm.rank()]; ++i) own.push_back(value(comm.rank(), 0, i));
    for (int r = 0; r < size; ++r) {
      for (std::int64_t i = 0; i < counts[r]; ++i) expected.push_back(value(r, 0, i));
    }
    all.resize(expected.size() + 1, -1);
    expected.push_back(-1);
    comm.all_gather(own.data(), counts, all.data());
    EXPECT_EQ(all, expected) << unit;

    own.clear();
    expected.clear();
    for (int r = 0; r < size; ++r) {
      for (std::int64_t i = 0; i < sent[r]; ++i) own.push_back(value(comm.rank(), r, i));
      for (std::int64_t i = 0; i < received[r]; ++i) expected.push_back(value(r, comm.rank(), i));
    }
    all.assign(expected.size() + 1, -1);
    expected.push_back(-1);
    comm.exchange(own.data(), sent, all.data(), received);
    EXPECT_EQ(all, expected) << unit;
  }
  const kvzap::Traffic after = Communicator::traffic();
  EXPECT_EQ(after.calls - before.calls, size > 1 ? 10 : 0);
  EXPECT_EQ(after.bytes > before.bytes, size > 1);
}

TEST(Communicator, TransfersBytesBetweenTwoRanks) {
  const auto comm = Communicator::world();
  const int last = comm.size() - 1;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{9} << 20}) {
    std::vector<char> data(bytes, static_cast<char>(comm.rank() + 1));
    comm.transfer(data.data(), bytes, last, 0);
    const auto expected = static_cast<char>(comm.rank() == 0 ? last + 1 : comm.rank() + 1);
    EXPECT_EQ(data, std::vector<char>(bytes, expected));
  }
}

TEST(Communicator, SumsFloatsToTheSameBitsOnEveryRank) {
  const auto comm = Communicator::world();
  for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{100000}}) {
    std::vector<float> values(count + 1, -1.0f);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = 1.0f / static_cast<float>(i % 1000 + 1 + comm.rank());
    }
    comm.all_reduce_sum(values.data(), count);
    EXPECT_EQ(values[count], -1.0f);
    std::vector<std::int64_t> bits;
    for (std::size_t i = 0; i < count; ++i) {
      double expected = 0;
      for (int rank = 0; rank < comm.size(); ++rank) expected += 1.0 / (i % 1000 + 1 + rank);
      ASSERT_NEAR(values[i], expected, 1e-6 * expected);
      std::int32_t word;
      std::memcpy(&word, &values[i], sizeof(word));
      bits.push_back(word);
    }
    for (const auto& theirs : comm.all_gather(bits)) EXPECT_EQ(theirs, bits);
  }
}

TEST(Communicator, ReducesIntegers) {
  const auto comm = Communicator::world();
  const std::int64_t large = std::int64_t{1} << 40;
  const std::int64_t size = comm.size();
  EXPECT_EQ(comm.all_reduce_sum(large + comm.rank()), size * large + size * (size - 1) / 2);
  EXPECT_EQ(comm.all_reduce_max(large - comm.rank()), large);
  EXPECT_EQ(comm.all_reduce_max(-large - comm.rank()), -large);
  std::vector<std::int64_t> sums = {comm.rank(), large, -1, 7};
  comm.all_reduce_sum(sums.data(), 3);
  EXPECT_EQ(sums, (std::vector<std::int64_t>{size * (size - 1) / 2, size * large, -size, 7}));
  std::vector<std::int64_t> each = {comm.rank(), large - comm.rank(), -3};
  comm.all_reduce_max(each.data(), each.size());
  EXPECT_EQ(each, (std::vector<std::int64_t>{size - 1, large, -3}));
}

TEST(Communicator, BroadcastsFromAnyRoot) {
  const auto comm = Communicator::world();
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<char> data(1001, static_cast<char>(comm.rank()));
    comm.broadcast(data.data(), 1000, root);
    EXPECT_EQ(std::vector<char>(data.begin(), data.end() - 1),
              std::vector<char>(1000, static_cast<char>(root)));
    EXPECT_EQ(data.back(), static_cast<char>(comm.rank()));
    comm.broadcast(nullptr, 0, root);
  }
}

TEST(Communicator, BroadcastsVectorsAndStringsOfAnyLength) {
  const auto comm = Communicator::world();
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::size_t length : {0, 1, 1000}) {
      const auto own = length + static_cast<std::size_t>(comm.rank());
      const std::vector<double> numbers_of_root(length + static_cast<std::size_t>(root),
                                                root + 0.5);
      std::vector<double> numbers(own, comm.rank() + 0.5);
      comm.broadcast(numbers, root);
      EXPECT_EQ(numbers, numbers_of_root);
      std::string text(own, static_cast<char>('a' + comm.rank()));
      comm.broadcast(text, root);
      EXPECT_EQ(text, std::string(numbers_of_root.size(), static_cast<char>('a' + root)));
    }
  }
}

TEST(Communicator, AllGathersUnequalLengths) {
  const auto comm = Communicator::world();
  // Rank r has r of them: rank 0 none.
  const std::vector<std::int64_t> mine(comm.rank(), std::int64_t{1} << (33 + comm.rank()));
  const auto all = comm.all_gather(mine);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(comm.size()));
  for (int rank = 0; rank < comm.size(); ++rank) {
    EXPECT_EQ(all[rank], std::vector<std::int64_t>(rank, std::int64_t{1} << (33 + rank)));
  }
  for (const auto& none : comm.all_gather({})) EXPECT_TRUE(none.empty());
}

TEST(Communicator, GathersUnequalCountsOnTheRoot) {
  const auto comm = Communicator::world();
  for (int root = 0; root < comm.size(); ++root) {
    // The first rank has none, the others 3, 6, ...
    std::vector<float> mine, expected;
    for (int rank = 0; rank < comm.size(); ++rank) {
      for (int i = 0; i < 3 * rank; ++i) {
        const float value = 100.0f * rank + i;
        expected.push_back(value);
        if (rank == comm.rank()) mine.push_back(value);
      }
    }
    const auto all = comm.gather(mine.data(), mine.size(), root);
    EXPECT_EQ(all, comm.rank() == root ? expected : std::vector<float>{});
  }
}

/// What agree() throws when `work` fails here or elsewhere; empty if it does not.
template <class Work>
std::string agreed_text(const Communicator& comm, Work&& work) {
  try {
    comm.agree(work);
  } catch (const AgreedError& error) {
    return error.what();
  }
  return "";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

/// Every rank has the same text.
void expect_same_everywhere(const Communicator& comm, const std::string& text) {
  const std::vector<std::int64_t> letters(text.begin(), text.end());
  for (const auto& theirs : comm.all_gather(letters)) EXPECT_EQ(theirs, letters);
}

// Ranks of one node, up to eight, share memory. MPI libraries spin instead.
TEST(Communicator, WaitingRanksSleep) {
  const auto comm = Communicator::world();
  if (comm.size() < 2 || comm.size() > 8 || comm.ranks_on_node() < comm.size()) GTEST_SKIP();
  const auto expect_sleep = [&](const std::function<void()>& wait) {
    comm.barrier();
    if (comm.is_root()) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const std::clock_t start = std::clock();
    wait();
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    EXPECT_LT(seconds, 0.25);
  };
  std::vector<float> values(1000);
  expect_sleep([&] { comm.barrier(); });
  expect_sleep([&] { comm.all_reduce_sum(values.data(), values.size()); });
  expect_sleep([&] { comm.broadcast(values.data(), values.size() * sizeof(float), 0); });
  expect_sleep([&] { comm.agree([] {}); });
}

#if KVZAP_HAVE_MPI
TEST(Communicator, EachCommunicatorHasItsOwnState) {
  const auto world = Communicator::world();
  for (int colors = 1; colors <= world.size(); ++colors) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(world.mpi(), world.rank() % colors, world.rank(), &part);
    {
      const Communicator comm(part);
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(comm.all_reduce_sum(std::int64_t{1}), comm.size());
        std::vector<double> numbers(20000, world.rank());
        comm.all_reduce_max(numbers.data(), numbers.size());
        EXPECT_EQ(numbers.back(), world.rank() % colors + (comm.size() - 1) * colors);
      }
    }
    MPI_Comm_free(&part);
    EXPECT_EQ(world.all_reduce_max(std::int64_t{world.rank()}), world.size() - 1);
  }
}
#endif

TEST(Agree, RunsTheWorkOnEveryRank) {
  const auto comm = Communicator::world();
  int runs = 0;
  EXPECT_EQ(agreed_text(comm, [&] { ++runs; }), "");
  EXPECT_EQ(runs, 1);
}

TEST(Agree, OneRankFailing) {
  const auto comm = Communicator::world();
  for (int failing = 0; failing < comm.size(); ++failing) {
    const std::string reason = "config.json: field a is " + std::to_string(failing);
    const auto text = agreed_text(comm, [&] {
      if (comm.rank() == failing) throw Error(reason);
    });
    expect_contains(text, reason);
    if (comm.size() > 1) {
      expect_contains(text,
                      "rank " + std::to_string(failing) + " of " + std::to_string(comm.size()));
    } else {
      EXPECT_EQ(text, reason);
    }
    expect_same_everywhere(comm, text);
  }
}

TEST(Agree, AllRanksFailing) {
  const auto comm = Communicator::world();
  // The lowest rank speaks for all, and as nothing points at one node, no rank is named.
  const auto text = agreed_text(
      comm, [&] { throw std::runtime_error("failure number " + std::to_string(comm.rank())); });
  EXPECT_EQ(text, "failure number 0");
  expect_same_everywhere(comm, text);
}

TEST(Agree, SomeRanksFailing) {
  const auto comm = Communicator::world();
  if (comm.size() < 2) GTEST_SKIP() << "needs two ranks";
  const auto text = agreed_text(comm, [&] {
    if (comm.rank() > 0) throw Error(std::string(comm.rank() * 5000, 'x'));
  });
  EXPECT_EQ(text.substr(0, 5001), std::string(5000, 'x') + " ");
  expect_contains(text, "rank 1 of");
  expect_same_everywhere(comm, text);
}

TEST(Agree, OutOfMemoryAndEmptyTexts) {
  const auto comm = Communicator::world();
  expect_contains(agreed_text(comm,
                              [&] {
                                if (comm.rank() == comm.size() - 1) throw std::bad_alloc();
                              }),
                  "out of memory");
  EXPECT_THROW(comm.agree([&] { throw Error(""); }), AgreedError);
}

TEST(Agree, TheCommunicatorStaysUsableAfterAnError) {
  const auto comm = Communicator::world();
  for (int i = 0; i < 50; ++i) {
    EXPECT_THROW(comm.agree([&] {
      if (comm.rank() == i % comm.size()) throw Error("again");
    }),
                 AgreedError);
    EXPECT_EQ(comm.all_reduce_sum(std::int64_t{1}), comm.size());
  }
}

TEST(Threads, RanksShareTheCoresOfTheirNode) {
  const char* const set = std::getenv("OMP_NUM_THREADS");
  const std::string before = set ? set : "";
  const Communicator comm = Communicator::world();
  unsetenv("OMP_NUM_THREADS");
  const int threads = kvzap::threads_of_rank(comm);
  setenv("OMP_NUM_THREADS", "7,2", 1);
  EXPECT_EQ(kvzap::threads_of_rank(comm), 7);
  if (set) {
    setenv("OMP_NUM_THREADS", before.c_str(), 1);
  } else {
    unsetenv("OMP_NUM_THREADS");
  }
  EXPECT_GE(threads, 1);
  const auto cores = static_cast<std::int64_t>(sysconf(_SC_NPROCESSORS_ONLN));
  EXPECT_LE(comm.all_reduce_sum(std::int64_t{threads}), std::max<std::int64_t>(cores, comm.size()));
}

}  // namespace
