// Limits of the fields of requests, for their readers and for the document of /openapi.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvzap::server::limits {

template <class T>
struct Range {
  T least, most;
};

inline constexpr std::int64_t any_count = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t any_int = std::numeric_limits<int>::max();

inline constexpr Range<double> temperature = {0, 100};
inline constexpr Range<double> share = {0, 1};  // top_p, min_p
inline constexpr Range<double> penalty = {-2, 2};
inline constexpr Range<double> repetition_penalty = {1e-3, 1e3};
inline constexpr Range<double> bias = {-100, 100};
inline constexpr Range<std::int64_t> top_k = {-1, any_int};
inline constexpr Range<std::int64_t> best_of = {1, any_int};
inline constexpr Range<std::int64_t> min_tokens = {0, any_count};
inline constexpr Range<std::int64_t> keep_tokens = {1, any_count};
inline constexpr Range<std::int64_t> top_n = {0, any_count};  // 0: all
inline constexpr Range<std::int64_t> logprobs = {0, 20};
// An answer ends with the context before the largest number. Completions take 0, too.
inline constexpr Range<std::int64_t> max_tokens = {1, std::int64_t{1} << 40};

inline constexpr std::size_t stops = 16;
inline constexpr std::size_t stop_bytes = 1024;
inline constexpr std::size_t token_rules = 1024;
inline constexpr std::size_t parts = 4096;     // of a content
inline constexpr std::size_t messages = 4096;  // of a chat
inline constexpr std::size_t tools = 256;
inline constexpr std::size_t calls = 256;  // of a message
inline constexpr std::size_t tool_name = 128;
inline constexpr std::size_t choices = 4096;  // of guided_choice

}  // namespace kvzap::server::limits
