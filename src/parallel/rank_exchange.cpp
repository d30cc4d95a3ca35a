#include <fmt/format.h>

#include <cstdlib>
#include <kvzap/core/types.hpp>
#include <string_view>

#include "parallel/nccl_ranks.hpp"
#include "parallel/rank_exchange.hpp"

namespace kvzap::parallel {

bool NcclRanks::is_wanted() {
  const char* const asked = std::getenv("KVZAP_NCCL");
  const std::string_view name = asked ? asked : "";
  if (name.empty() || name == "on") return true;
  if (name == "off") return false;
  throw Error(fmt::format("KVZAP_NCCL is \"{}\"; expected on or off", name));
}

// Names a wrong KVZAP_NCCL before the first step.
RankExchange::RankExchange() { NcclRanks::is_wanted(); }

}  // namespace kvzap::parallel
