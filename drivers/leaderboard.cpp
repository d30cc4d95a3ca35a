#include "leaderboard.hpp"

#include "options.hpp"

namespace kvzap::driver {

void declare(CLI::App& app, LeaderboardOptions& options) {
  app.add_option("evaluations", options.evaluations, "folders that kvzap eval has written");
  declare_deck(app, options.config, "");
}

void leaderboard(const LeaderboardOptions& /*options*/, const Communicator& /*comm*/,
                 const std::string& /*version*/) {
  throw AgreedError("leaderboard: not there yet");
}

}  // namespace kvzap::driver
