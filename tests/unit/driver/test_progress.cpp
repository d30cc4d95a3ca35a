#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "console/progress.hpp"

namespace kvzap::driver {
namespace {

TEST(Progress, EachWorkHasItsOwnClock) {
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); };
  testing::internal::CaptureStderr();
  {
    Progress bar(true, ProgressStyle::bar);
    // A bar within the first tenth of a second would have the time before the work in its rate.
    bar.update("answer", 1, 10, "tokens");
    bar.update("answer", 10, 10, "tokens");
    pause();
    bar.update("answer", 10, 10, "tokens");
    bar.update("answer", 2, 10, "tokens");
    pause();
    bar.update("answer", 1, 10, "tokens");  // after an answer that was interrupted
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace kvzap::driver
