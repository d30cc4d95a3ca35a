#include "commands/support/command_line.hpp"

#include <fmt/format.h>

#include "commands/support/version.hpp"
#include "engine/build_info.hpp"
#include "options/help.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

std::string version_text() {
  std::string text = fmt::format("kvzap {}\n{:<16} {}", version, "revision", revision);
  for (const auto& [name, what] : engine::build_info()) {
    text += fmt::format("\n{:<16} {}", name, what);
  }
  return text;
}

}  // namespace

// The locale of streams is left alone if it is classic: std::locale::global would also set that of
// C functions in the whole process.
ClassicLocale::ClassicLocale() {
  if (m_streams != std::locale::classic()) std::locale::global(std::locale::classic());
}

ClassicLocale::~ClassicLocale() {
  if (m_streams != std::locale::classic()) std::locale::global(m_streams);
}

CommandLine::CommandLine()
    : app("kvzap prunes the KV cache of a language model while it runs, and frees the memory.\n"
          "Flags that begin with --kokkos- are passed to Kokkos.") {
  // Set first, because subcommands inherit it.
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_help_flag("-h,--help", "print this and exit");
  app.set_version_flag("-V,--version", version_text,
                       "print the version and the build configuration, and exit");
  app.require_subcommand(1);
  app.name("kvzap");
  add_commands(app, *this);
  make_strict(app);
  // Set last, because subcommands would inherit it.
  app.footer("kvzap help COMMAND, or kvzap COMMAND --help, lists the options of a command.");
}

}  // namespace kvzap::driver
