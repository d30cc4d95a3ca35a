// The policies, as tests expect them.
#pragma once

#include <string>
#include <vector>

namespace kvzap::test {

/// Returns the names of all policies, in the order of their list.
inline std::vector<std::string> policy_names() {
  return {"knorm",         "random",        "streaming-llm", "keydiff",      "lagkv",
          "leverage",      "cur",           "compactor",     "qfilter",      "cap",
          "snapkv",        "tova",          "h2o",           "scissorhands", "r-kv",
          "lazy-eviction", "tri-attention", "dropkv",        "pyramidkv",    "expected-attention",
          "non-causal",    "simlayerkv",    "finch",         "kvzap",        "fastkvzip",
          "trim-kv",       "duo-attention", "kvzip",         "kvzip-plus",   "kvcompose"};
}

}  // namespace kvzap::test
