// The order in which prompts get the rows of a step.
#include <gtest/gtest.h>

#include "server/prefill_order.hpp"

namespace kvzap::server {
namespace {

std::vector<std::int64_t> ids_of(const std::vector<Reader>& readers) {
  std::vector<std::int64_t> ids;
  for (const Reader& one : readers) ids.push_back(one.id);
  return ids;
}

TEST(PrefillOrder, ShortPromptsThenTheLeastServedClientThenTheLeastLeft) {
  const PrefillOrder order(64);
  // id, fresh, left, served
  std::vector<Reader> readers = {{nullptr, 1, 200, 200, 90}, {nullptr, 2, 200, 30, 90},
                                 {nullptr, 3, 300, 300, 10}, {nullptr, 4, 8, 8, 90},
                                 {nullptr, 5, 8, 4, 90},     {nullptr, 6, 200, 30, 90}};
  order.sort(readers);
  EXPECT_EQ(ids_of(readers), (std::vector<std::int64_t>{5, 4, 3, 2, 6, 1}));
  // The tail of a long prompt makes it no short one.
  EXPECT_FALSE(order.is_short(9));
  for (Reader& one : readers) one.is_first = one.id == 1;
  order.sort(readers);
  EXPECT_EQ(ids_of(readers), (std::vector<std::int64_t>{1, 5, 4, 3, 2, 6}));
}

TEST(PrefillOrder, StepsWithShortPromptsEndSoon) {
  const PrefillOrder order(64);
  const Reader brief = {nullptr, 1, 5, 5, 0}, other = {nullptr, 2, 200, 100, 0};
  const auto expect = [&](const std::vector<Reader>& readers, std::int64_t rows,
                          std::int64_t of_brief, std::int64_t of_others) {
    const PrefillRows found = order.rows(readers, rows);
    EXPECT_EQ(found.brief, of_brief);
    EXPECT_EQ(found.others, of_others);
  };
  expect({other}, 64, 0, 64);
  expect({brief, brief}, 64, 64, 0);
  expect({brief, other}, 64, 32, 8);
  expect({brief, brief, brief, other}, 64, 32, 15);
  expect(std::vector<Reader>(20, brief), 64, 64, 0);
  std::vector<Reader> crowd(20, brief);
  crowd.push_back(other);
  expect(crowd, 64, 32, 32);
  expect(crowd, 8, 4, 4);  // decoding sequences take the rest
  expect({brief, other}, 1, 1, 1);
}

TEST(ClientShares, AClientThatReturnsIsNeitherAheadNorBehind) {
  ClientShares shares;
  const auto one = shares.of("one");
  EXPECT_EQ(one->served, 0);
  one->served = 500;
  const auto two = shares.of("two");
  EXPECT_EQ(two->served, 500);
  EXPECT_EQ(shares.of("one"), one);
  two->served = 700;
  EXPECT_EQ(shares.of("three")->served, 500);
  // It has gone in between.
  EXPECT_EQ(shares.of("three")->served, 500);
}

}  // namespace
}  // namespace kvzap::server
