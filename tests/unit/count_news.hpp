// Counts what the whole program asks of operator new.
#pragma once

#include <cstddef>

namespace kvzap::test {

/// Calls of operator new so far.
extern std::size_t n_news;

}  // namespace kvzap::test
