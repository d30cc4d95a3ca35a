// The prunings that requests may ask for, beside the server's own.
#pragma once

#include <cstdint>
#include <kvzap/engine/engine.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/engine/pruning.hpp>
#include <kvzap/engine/repeat_prompt.hpp>
#include <optional>
#include <string>
#include <vector>

namespace kvzap::server {

/// The fields of a request's "kvzap" object.
struct PruneWish {
  std::optional<std::string> policy;  // NAME[:key=value,…][+MODIFIER…], or "none"
  // At most one of these is set.
  std::optional<double> threshold, evict_ratio;
  std::optional<std::int64_t> keep_tokens, kv_bytes;
  Pruning::DecodeCuts decode;  // without `every`, `keep` and `evict_ratio`: the server's
  std::optional<PruneMode> prune;
  std::optional<std::string> kv_type;  // as page_format_from_name

  bool has_amount() const { return threshold || evict_ratio || keep_tokens || kv_bytes; }
  bool has_cuts() const { return decode != Pruning::DecodeCuts(); }
};

/// Turns the wishes of requests into prunings, and loads their policies. Every rank has one.
class RequestPolicies {
 public:
  /// Finds out which policies the engine can run for requests: those that read no file and learn
  /// from no text. `engine` and the config of `setup` must outlive the object. `repeat`: for
  /// policies with PolicyInfo::repeats_context; absent: there are none. `offers`: whether requests
  /// may name a policy or a type of rows at all. Does not communicate.
  RequestPolicies(const Engine& engine, const PolicySetup& setup,
                  std::optional<RepeatPrompt> repeat, bool offers = true);

  /// Returns the names that a request may give as its policy.
  const std::vector<std::string>& names() const { return m_names; }

  /// Returns the pruning of a request: the server's own, with another amount or mode, or a policy
  /// of the request. Equal wishes, and wishes for the server's own values, give equal prunings.
  /// Throws BadRequest if the server cannot prune that way. Thread-safe.
  Pruning pruning_of(const PruneWish& wish) const;
  /// Returns the type of cached rows of a request: its own, or the server's. Throws BadRequest.
  /// Thread-safe.
  PageFormat page_format_of(const PruneWish& wish) const;
  /// Returns the fields of a request's "kvzap" object with which it may change the amount of the
  /// server's own policy; none if the server prunes nothing.
  std::vector<std::string> amounts() const;
  /// Loads the policy of a pruning that pruning_of has returned. All ranks get the same policy.
  /// Throws Error. Does not communicate.
  LoadedPruning load(const Pruning& pruning) const;

 private:
  bool has_own_kvzap() const;
  bool can_run(const PolicyInfo& info) const;
  Pruning blank() const;
  Pruning standard(const PruneWish& wish) const;
  Pruning of_server(const PruneWish& wish, const std::string& name) const;
  Pruning requested(const PruneWish& wish) const;

  const Engine& m_engine;
  PolicySetup m_setup;
  std::optional<RepeatPrompt> m_repeat;
  std::vector<std::string> m_names;
};

}  // namespace kvzap::server
