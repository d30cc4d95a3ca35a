// Structs as messages between ranks.
#include <gtest/gtest.h>

#include <limits>

#include "parallel/message.hpp"

namespace kvzap {
namespace {

enum class Colour { red, green };

struct Part {
  std::int64_t number = 0;
  std::string text;
  bool operator==(const Part& other) const { return number == other.number && text == other.text; }
  template <class Visit>
  friend void list_fields(Part& part, Visit& visit) {
    visit("number", part.number);
    visit("text", part.text);
  }
};

struct Whole {
  bool flag = false;
  Colour colour = Colour::red;
  double real = 0;
  std::vector<float> reals;
  std::vector<bool> flags;
  std::vector<std::vector<int>> lists;
  std::vector<Part> parts;
  std::optional<Part> part, no_part;
  std::map<std::string, std::pair<int, std::string>> table;
  std::array<std::int64_t, 2> two = {};

  template <class Visit>
  friend void list_fields(Whole& whole, Visit& visit) {
    visit("flag", whole.flag);
    visit("colour", whole.colour);
    visit("real", whole.real);
    visit("reals", whole.reals);
    visit("flags", whole.flags);
    visit("lists", whole.lists);
    visit("parts", whole.parts);
    visit("part", whole.part);
    visit("no_part", whole.no_part);
    visit("table", whole.table);
    visit("two", whole.two);
  }
};

/// `size`: bytes of a text, so that a message takes one broadcast or two.
Whole whole_of(int rank, std::size_t size) {
  Whole whole;
  whole.flag = true;
  whole.colour = Colour::green;
  whole.real = std::numeric_limits<double>::denorm_min() * (rank + 1);
  whole.reals = {1.5f, -0.0f, std::numeric_limits<float>::infinity()};
  whole.flags = {true, false, true};
  whole.lists = {{1, rank}, {}, {3}};
  whole.parts = {{rank, std::string(size, 'x')}, {2, std::string("\0b", 2)}};
  whole.part = Part{7, "seven"};
  whole.table = {{"a", {1, "b"}}, {"", {rank, ""}}};
  whole.two = {rank, -1};
  return whole;
}

void expect_same(const Whole& found, const Whole& expected) {
  EXPECT_EQ(found.flag, expected.flag);
  EXPECT_EQ(found.colour, expected.colour);
  EXPECT_EQ(found.real, expected.real);
  EXPECT_EQ(found.reals, expected.reals);
  EXPECT_EQ(found.flags, expected.flags);
  EXPECT_EQ(found.lists, expected.lists);
  EXPECT_EQ(found.parts, expected.parts);
  EXPECT_EQ(found.part, expected.part);
  EXPECT_EQ(found.no_part, expected.no_part);
  EXPECT_EQ(found.table, expected.table);
  EXPECT_EQ(found.two, expected.two);
}

TEST(Message, TakesWhatWasThereBefore) {
  const Whole expected = whole_of(1, 3);
  Whole found = whole_of(5, 100);
  found.no_part = Part{1, "gone"};
  found.table["further"] = {1, "gone"};
  parallel::from_message(parallel::to_message(expected), found);
  expect_same(found, expected);
}

TEST(Message, CutOffOrTooLongIsRefused) {
  const std::string message = parallel::to_message(whole_of(1, 3));
  Whole whole;
  for (std::size_t size = 0; size < message.size(); ++size) {
    EXPECT_THROW(parallel::from_message(message.substr(0, size), whole), Error) << size;
  }
  EXPECT_THROW(parallel::from_message(message + '\0', whole), Error);
  // A number of elements that no message has room for.
  EXPECT_THROW(parallel::from_message(std::string(8, '\xff'), whole.reals), Error);
}

TEST(Message, BroadcastFromEachRank) {
  const Communicator comm = Communicator::world();
  for (const std::size_t size : {0, 8000, 8192, 100000}) {
    for (int root = 0; root < comm.size(); ++root) {
      Whole whole = whole_of(comm.rank(), size);
      std::int64_t number = comm.rank();
      parallel::broadcast(comm, root, whole, number);
      expect_same(whole, whole_of(root, size));
      EXPECT_EQ(number, root);
    }
  }
}

TEST(Message, GatherAndSum) {
  const Communicator comm = Communicator::world();
  const auto size = static_cast<std::size_t>(comm.rank());
  const std::vector<Whole> all = parallel::all_gather(comm, whole_of(comm.rank(), size));
  ASSERT_EQ(static_cast<int>(all.size()), comm.size());
  for (int rank = 0; rank < comm.size(); ++rank) {
    expect_same(all[rank], whole_of(rank, static_cast<std::size_t>(rank)));
  }
  std::vector<std::int64_t> numbers = {1, comm.rank()};
  parallel::all_reduce_sum(comm, numbers);
  const std::int64_t n = comm.size();
  EXPECT_EQ(numbers, (std::vector<std::int64_t>{n, n * (n - 1) / 2}));
}

}  // namespace
}  // namespace kvzap
