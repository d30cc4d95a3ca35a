// The order in which prompts get the rows of a step.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvzap::server {

struct Sequence;

/// Prompt tokens that ran for one client. A client that returns begins with the least count among
/// those that are there: it neither makes up for its absence nor pays for its past (the virtual
/// token counter of Sheng et al., "Fairness in Serving Large Language Models", 2024, of prompts).
struct ClientShare {
  std::int64_t served = 0;
};

/// The shares of clients with requests. A share lives as long as somebody holds it.
class ClientShares {
 public:
  std::shared_ptr<ClientShare> of(const std::string& client);

 private:
  std::map<std::string, std::weak_ptr<ClientShare>> m_shares;
};

/// A prompt that may get rows of a step.
struct Reader {
  Sequence* sequence = nullptr;
  std::int64_t id = 0;      // of its request; later requests have larger ones
  std::int64_t fresh = 0;   // tokens to run, from its beginning on, outside kept states
  std::int64_t left = 0;    // tokens that remain of them
  std::int64_t served = 0;  // of its client
  bool is_first = false;    // the others have passed it over for long
};

/// Rows of a step that prompts may get.
struct PrefillRows {
  std::int64_t brief = 0;  // all short prompts together
  std::int64_t others = 0;
};

/// Shares out a step's rows. A prompt is short if it adds at most an eighth to a full step.
///
/// Short prompts get up to half of the rows, and a step with some of them has no more rows of other
/// prompts than of these, or an eighth: so it ends soon. The other rows belong to the client for
/// which the fewest tokens ran, and of its prompts to the one with the fewest tokens left. The
/// oldest prompt is first once it got nothing in several steps, so no prompt starves.
class PrefillOrder {
 public:
  explicit PrefillOrder(std::int64_t max_batch_tokens) : m_eighth(max_batch_tokens / 8) {}

  bool is_short(std::int64_t fresh) const { return fresh <= m_eighth; }
  /// Puts the prompts in the order in which they get rows.
  void sort(std::vector<Reader>& readers) const;
  /// `rows`: those that the step has for prompts.
  PrefillRows rows(const std::vector<Reader>& readers, std::int64_t rows) const;

 private:
  std::int64_t m_eighth;
};

}  // namespace kvzap::server
