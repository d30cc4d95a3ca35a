#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "base/lru_cache.hpp"

namespace {

using kvzap::base::LruCache;

TEST(LruCache, ForgetsWhatWasNotAskedForTheLongest) {
  LruCache<int, std::string> cache(2);
  int made = 0;
  const auto get = [&](int key) {
    return cache.get(key, [&] {
      ++made;
      return std::to_string(key);
    });
  };
  EXPECT_EQ(get(1), "1");
  EXPECT_EQ(get(2), "2");
  EXPECT_EQ(get(1), "1");
  EXPECT_EQ(made, 2);
  EXPECT_EQ(get(3), "3");  // 2 goes
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(get(1), "1");
  EXPECT_EQ(made, 3);
  EXPECT_EQ(get(2), "2");
  EXPECT_EQ(made, 4);
  EXPECT_EQ(cache.size(), 2u);
}

TEST(LruCache, FailingToMakeChangesNothing) {
  LruCache<int, int> cache(1);
  cache.get(1, [] { return 10; });
  EXPECT_THROW(cache.get(2, []() -> int { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_EQ(cache.size(), 1u);
  EXPECT_EQ(cache.get(1, [] { return 11; }), 10);
}

}  // namespace
