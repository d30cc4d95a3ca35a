// A leaderboard as Markdown, HTML and JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "commands/lab/leaderboard_data.hpp"

namespace kvzap::driver {

std::string markdown_page(const Leaderboard& board);
/// Fills leaderboard.html with the notes and the table of `board`.
std::string html_page(const Leaderboard& board, const std::string& version);
nlohmann::ordered_json to_json(const Leaderboard& board, const std::string& version);

}  // namespace kvzap::driver
