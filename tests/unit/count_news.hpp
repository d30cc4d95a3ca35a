// Counts what the whole program asks of operator new, and lets it fail.
#pragma once

#include <cstddef>

namespace kvzap::test {

/// Calls of operator new so far.
extern std::size_t n_news;

/// If not 0, counts down with each call of the form that throws; the one that reaches 0 finds no
/// memory.
extern std::size_t news_until_failure;

}  // namespace kvzap::test
