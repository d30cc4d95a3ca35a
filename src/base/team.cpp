#include "base/team.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace kvzap::base {
namespace {

TeamShape initial_shape() {
  const char* asked = std::getenv("KVZAP_TEAM");
  if (!asked || !*asked) return {0, 0};
  TeamShape shape;
  char rest = 0;
  // NOLINTNEXTLINE(cert-err34-c): a failed conversion is refused
  if (std::sscanf(asked, "%d,%d%c", &shape.threads, &shape.lanes, &rest) != 2 ||
      shape.threads < 1 || shape.lanes < 1) {
    throw Error(fmt::format("KVZAP_TEAM is \"{}\"; expected threads,lanes such as 4,1", asked));
  }
  return shape;
}

TeamShape& forced_shape() {
  static TeamShape shape = initial_shape();
  return shape;
}

}  // namespace

TeamShape team_shape(TeamShape wanted) {
  if (forced_shape().threads > 0) {
    return {std::min(forced_shape().threads, ExecutionSpace().concurrency()), forced_shape().lanes};
  }
  return runs_on_host ? TeamShape{1, 1} : wanted;
}

void set_team_shape(TeamShape shape) { forced_shape() = shape; }

}  // namespace kvzap::base
