#include "commands/lab/leaderboard.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "commands/lab/leaderboard_data.hpp"
#include "commands/lab/leaderboard_page.hpp"
#include "commands/support/setup.hpp"
#include "files/json_file.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

bool writes_html(const LeaderboardOptions& o) {
  if (!o.format.empty()) return o.format == "html";
  if (o.output.empty() || o.output == "-") return false;
  const std::string ending = fs::path(o.output).extension().string();
  if (ending == ".html" || ending == ".htm") return true;
  require(ending == ".md" || ending == ".markdown",
          fmt::format("-o {}: expected an ending of .md or .html, or --format", o.output));
  return false;
}

}  // namespace

void check_options(const LeaderboardOptions& o) {
  require(!o.evaluations.empty(), "no evaluations: give folders written by kvzap eval");
  require(!fs::is_directory(o.output),
          fmt::format("-o {}: is a folder; expected a file", o.output));
  writes_html(o);
  require(o.json != "-" || o.output != "-", "-o - and --json -: give one of them");
}

void declare(CLI::App& app, LeaderboardOptions& o) {
  app.add_option("evaluations", o.evaluations, "folders written by kvzap eval; required")
      ->type_name("DIR");
  app.add_option(
         "-o,--output", o.output,
         "write the page to this file, as Markdown (.md) or HTML (.html); default: Markdown on "
         "standard output")
      ->type_name("FILE");
  app.add_option("--format", o.format, "format of the page, whatever the name of the file")
      ->check(CLI::IsMember({"markdown", "html"}));
  app.add_option(
         "--task", o.task,
         "show the results of this task first, and order rows by its accuracy; all: every prompt "
         "counts once, and a column for each task follows")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--json", o.json,
                 "write the joined rows to this file; - is standard output, instead of the page")
      ->type_name("FILE");
  declare_deck(app, o.config, "");
}

void leaderboard(const LeaderboardOptions& options, const Communicator& comm,
                 const std::string& version) {
  comm.agree_on_root([&] {
    const Leaderboard board = join_evaluations(options.evaluations, options.task);
    const std::string page =
        writes_html(options) ? html_page(board, version) : markdown_page(board);
    if (!options.json.empty()) {
      write_whole(options.json, files::json_lines(to_json(board, version)));
    }
    if (!options.output.empty() || options.json != "-") {
      write_whole(options.output.empty() ? "-" : options.output, page, "-o");
    }
    flush_stdout();
  });
}

}  // namespace kvzap::driver
