#include "commands/support/documents.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "commands/support/option_table.hpp"
#include "commands/support/policies_command.hpp"
#include "files/ascii.hpp"
#include "options/help.hpp"

namespace kvzap::driver {
namespace {

std::string joined(const std::vector<std::string>& parts, const std::string& separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size())) {
    text.replace(at, what.size(), by);
  }
  return text;
}

// --- roff

/// Escapes text so that roff shows it unchanged: a minus that can be copied, no escapes, no
/// requests.
std::string roff(const std::string& text) {
  std::string out = replaced(replaced(text, "\\", "\\e"), "-", "\\-");
  if (!out.empty() && (out.front() == '.' || out.front() == '\'')) out = "\\&" + out;
  return replaced(replaced(out, "\n.", "\n\\&."), "\n'", "\n\\&'");
}

std::string roff_option(const Entry& entry) {
  std::vector<std::string> flags;
  for (const std::string& flag : entry.flags) flags.push_back("\\fB" + roff(flag) + "\\fR");
  if (flags.empty()) flags.push_back("\\fI" + roff(entry.name) + "\\fR");
  std::string text = ".TP\n" + joined(flags, ", ");
  if (entry.kind == ValueKind::choice) {
    // A long list may break between its members.
    std::string choices;
    for (const std::string& choice : entry.choices) {
      choices += (choices.empty() ? "" : "|\\:") + roff(choice);
    }
    text += " \\fR" + choices;
  } else if (entry.kind != ValueKind::none && !entry.flags.empty()) {
    text += " \\fI" + roff(entry.type) + "\\fR";
  }
  text += "\n" + roff(entry.description);
  if (!entry.default_text.empty()) text += roff("; default: " + entry.default_text);
  return text + "\n";
}

std::string roff_options(const CLI::App& app) {
  std::vector<std::string> groups;
  const std::vector<Entry> entries = entries_of(app);
  for (const Entry& entry : entries) {
    if (std::find(groups.begin(), groups.end(), entry.group) == groups.end()) {
      groups.push_back(entry.group);
    }
  }
  std::string text;
  for (const std::string& group : groups) {
    if (groups.size() > 1) text += ".PP\n" + roff(group) + ":\n";
    for (const Entry& entry : entries) {
      if (entry.group == group) text += roff_option(entry);
    }
  }
  return text;
}

/// Lists the policies, each with its paper, its needs or effect, and its keys.
std::string roff_policies() {
  std::string text;
  const auto add = [&](const std::string& name, const std::string& paper, const std::string& what,
                       const std::vector<PolicyParameter>& parameters) {
    text += ".TP\n\\fB" + roff(name) + "\\fR\n";
    if (!paper.empty()) text += roff(paper) + ".\n";
    text += roff(what) + ".\n";
    // Lines may end after a comma, and are not stretched.
    if (!parameters.empty()) {
      text += ".na\nKeys: " + replaced(roff(parameters_text(parameters)), ",", ",\\:") + ".\n.ad\n";
    }
  };
  for (const PolicyInfo& info : policies()) {
    add(info.name, info.paper, "Needs " + info.needs, info.parameters);
  }
  for (const ModifierInfo& info : modifiers()) {
    add("+" + info.name, info.paper, info.effect, info.parameters);
  }
  return text;
}

// --- shells

/// Returns the flags of a command, or the subcommands and flags of the program.
std::string words_of(const CLI::App& app) {
  std::vector<std::string> words;
  for (const CLI::App* command : commands_of(app)) words.push_back(command->get_name());
  for (const Entry& entry : entries_of(app)) {
    words.insert(words.end(), entry.flags.begin(), entry.flags.end());
    if (entry.flags.empty()) words.insert(words.end(), entry.choices.begin(), entry.choices.end());
  }
  return joined(words, " ");
}

std::string bash_values(const Entry& entry) {
  switch (entry.kind) {
    case ValueKind::choice:
    case ValueKind::policy:
      return fmt::format("mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$current\")",
                         joined(entry.choices, " "));
    case ValueKind::folder:
      return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$current\")";
    case ValueKind::file:
      return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$current\")";
    case ValueKind::model:  // a folder or a GGUF file
      return "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$current\"; "
             "compgen -f -X '!*.gguf' -- \"$current\")";
    default:
      return ":";
  }
}

/// Returns whether an argument without a flag is a file or a folder.
bool takes_files(const CLI::App& command) {
  const std::vector<Entry> entries = entries_of(command);
  return std::any_of(entries.begin(), entries.end(), [](const Entry& entry) {
    return entry.flags.empty() &&
           (entry.kind == ValueKind::file || entry.kind == ValueKind::folder);
  });
}

/// Escapes text for a zsh _arguments specification in single quotes.
std::string zsh_text(std::string text) {
  for (const char* special : {"\\", "[", "]", ":"}) {
    text = replaced(text, special, std::string("\\") + special);
  }
  return replaced(replaced(text, "\n", " "), "'", "'\\''");
}

std::string zsh_action(const Entry& entry) {
  switch (entry.kind) {
    case ValueKind::choice:
    case ValueKind::policy:
      return "(" + joined(entry.choices, " ") + ")";
    case ValueKind::folder:
      return "_files -/";
    case ValueKind::file:
      return "_files";
    case ValueKind::model:
      return "_files -g \"*.gguf\"";  // and folders
    default:
      return " ";
  }
}

std::string zsh_arguments(const CLI::App& app) {
  std::string text;
  int position = 0;
  for (const Entry& entry : entries_of(app)) {
    if (entry.flags.empty()) {
      // Two colons make the argument optional. (After a * they would mean something else.)
      const std::string place =
          entry.repeats ? "*" : fmt::format("{}{}", ++position, entry.is_required ? "" : ":");
      text += fmt::format(" \\\n    '{}:{}:{}'", place, zsh_text(entry.name), zsh_action(entry));
      continue;
    }
    const std::string value = entry.kind == ValueKind::none
                                  ? ""
                                  : fmt::format(":{}:{}", zsh_text(entry.type), zsh_action(entry));
    for (const std::string& flag : entry.flags) {
      const std::string others =
          entry.repeats ? "*" : fmt::format("({})", joined(entry.flags, " "));
      // Accepts both --option value and --option=value.
      const char* equals = !value.empty() && flag.rfind("--", 0) == 0 ? "=" : "";
      text += fmt::format(" \\\n    '{}{}{}[{}]{}'", others, flag, equals,
                          zsh_text(entry.description), value);
    }
  }
  return text;
}

}  // namespace

std::string man_page(const CLI::App& app, const std::string& version) {
  std::string text = fmt::format(
      ".\\\" Made by kvzap manual from the program's own options.\n"
      ".TH KVZAP 1 \"\" \"kvzap {}\" \"User Commands\"\n"
      ".SH NAME\nkvzap \\- prune the KV cache of a language model and free the memory\n"
      ".SH SYNOPSIS\n",
      version);
  for (const CLI::App* command : commands_of(app)) {
    std::string arguments;
    bool has_options = false;
    for (const Entry& entry : entries_of(*command)) {
      has_options = has_options || (!entry.flags.empty() && entry.flags.back() != "--help");
      if (!entry.flags.empty()) continue;
      arguments += entry.is_required ? "\n.I " + entry.name : "\n.RI [ " + entry.name + " ]";
    }
    if (arguments.empty() || has_options) arguments += "\n.RI [ options ]";
    text += fmt::format(".B kvzap {}{}\n.br\n", command->get_name(), arguments);
  }
  text += ".B mpirun \\-n\n.I ranks\n.B kvzap run\n.RI [ options ]\n";
  text += ".SH DESCRIPTION\n" + roff(app.get_description()) + "\n.SH OPTIONS\n" + roff_options(app);
  for (const CLI::App* command : commands_of(app)) {
    std::string title = "kvzap " + command->get_name();
    std::transform(title.begin(), title.end(), title.begin(), files::upper);
    text += fmt::format(".SH {}\n{}\n{}", title, roff(command->get_description() + "."),
                        roff_options(*command));
    for (const std::string& example : examples_of(command->get_name())) {
      text += ".PP\n.EX\n" + roff(example) + "\n.EE\n";
    }
  }
  text +=
      ".SH POLICIES\nOf \\fBrun \\-\\-policy\\fR; \\fBkvzap policies\\fR \\fINAME\\fR tells one in "
      "full.\n" +
      roff_policies();
  text += ".SH ENVIRONMENT\n";
  for (const EnvironmentVariable& variable : environment_variables()) {
    text += ".TP\n\\fB" + roff(variable.name) + "\\fR\n" + roff(variable.description) + ".\n";
  }
  text +=
      ".SH EXIT STATUS\n0 on success, 2 if the command line or a deck is wrong, 1 if the "
      "work fails. An error is one line on standard error. Commands that save unfinished work "
      "(eval, collect, "
      "run with \\-\\-snapshot) end with 128 plus the number of SIGTERM, SIGINT, SIGHUP or "
      "SIGUSR1; "
      "serve does so if it has cut requests off.\n"
      ".SH EXAMPLE\n.EX\nkvzap run \\-m Qwen3\\-8B \\-\\-surrogate KVzap\\-mlp\\-Qwen3\\-8B "
      "\\-\\-threshold \\-4 \\-f report.txt \\-\\-question \"What was decided?\"\n.EE\n";
  return text;
}

std::string bash_completion(const CLI::App& app) {
  std::string values, words, names;
  for (const CLI::App* command : commands_of(app)) {
    const std::string name = command->get_name();
    names += (names.empty() ? "" : "|") + name;
    words += fmt::format("    {}) words='{}'{} ;;\n", name, words_of(*command),
                         takes_files(*command) ? " files=1" : "");
    for (const Entry& entry : entries_of(*command)) {
      if (entry.kind == ValueKind::none || entry.flags.empty()) continue;
      std::vector<std::string> patterns;
      for (const std::string& flag : entry.flags)
        patterns.push_back(fmt::format("{},{}", name, flag));
      values += fmt::format("    {}) {}; return ;;\n", joined(patterns, "|"), bash_values(entry));
    }
  }
  return fmt::format(
      R"(# bash completion for kvzap. Made by kvzap completion bash from the program's own options.
_kvzap() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command='' files='' word words
  COMPREPLY=()
  # bash makes a word of the = in --option=value.
  if [[ $previous = '=' ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  if [[ $current = '=' ]]; then current=''; fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in {}) command=$word; break ;; esac
  done
  case $command,$previous in
{}  esac
  case $command in
{}    *) words='{}' ;;
  esac
  if [[ $files && $current != -* ]]; then
    compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current")
    return
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -F _kvzap kvzap

# Behind a launcher, from the last kvzap of the line on; before that as it was without this script.
_kvzap_launched() {{
  local at
  for ((at = COMP_CWORD - 1; at > 0; at--)); do
    if [[ ${{COMP_WORDS[at]##*/}} = kvzap ]]; then
      local words=("${{COMP_WORDS[@]:at}}") count=$((COMP_CWORD - at))
      local COMP_WORDS=("${{words[@]}}") COMP_CWORD=$count
      _kvzap
      return
    fi
  done
  local other=_kvzap_before_${{1##*/}}
  if declare -F "${{!other}}" > /dev/null; then
    "${{!other}}" "$@"
    return
  fi
  compopt -o bashdefault -o default
  mapfile -t COMPREPLY < <(compgen -c -- "${{COMP_WORDS[COMP_CWORD]}}")
}}
_kvzap_follow() {{
  local launcher found
  for launcher in mpirun mpiexec srun; do
    {{ _comp_load "$launcher" || _completion_loader "$launcher"; }} &> /dev/null
    found=$(complete -p "$launcher" 2> /dev/null)
    if [[ $found =~ ' -F '([^ ]+) && ${{BASH_REMATCH[1]}} != _kvzap_launched ]]; then
      printf -v "_kvzap_before_$launcher" %s "${{BASH_REMATCH[1]}}"
    fi
    complete -F _kvzap_launched "$launcher"
  done
}}
_kvzap_follow
)",
      names, values, words, words_of(app));
}

std::string zsh_completion(const CLI::App& app) {
  std::string commands, cases;
  for (const CLI::App* command : commands_of(app)) {
    commands +=
        fmt::format("    '{}:{}'\n", command->get_name(), zsh_text(command->get_description()));
    cases += fmt::format("    {}) _arguments{} ;;\n", command->get_name(), zsh_arguments(*command));
  }
  return fmt::format(
      R"(#compdef kvzap mpirun mpiexec
# zsh completion for kvzap. Made by kvzap completion zsh from the program's own options.
_kvzap() {{
  if [[ $service = (mpirun|mpiexec|srun) ]]; then
    # From the last kvzap of the line on.
    local -i at=${{words[(I)(*/|)kvzap]}}
    if (( at == 0 || at >= CURRENT )); then
      _alternative 'commands:command:_command_names -e' 'files:file:_files'
      return
    fi
    shift $(( at - 1 )) words
    (( CURRENT -= at - 1 ))
    local service=kvzap
  fi
  local curcontext=$curcontext state line
  typeset -A opt_args
  local -a commands=(
{}  )
  _arguments -C{} \
    '1: :->command' '*:: :->arguments'
  case $state in
    command) _describe command commands ;;
    arguments) case $line[1] in
{}    esac ;;
  esac
}}
if [ "$funcstack[1]" = "_kvzap" ]; then _kvzap "$@"; else compdef _kvzap kvzap mpirun mpiexec; fi
)",
      commands, zsh_arguments(app), cases);
}

std::string fish_completion(const CLI::App& app) {
  const auto in_quotes = [](const std::string& text) {
    return "'" + replaced(replaced(replaced(text, "\\", "\\\\"), "'", "\\'"), "\n", " ") + "'";
  };
  const auto values_of = [](const Entry& entry) -> std::string {
    switch (entry.kind) {
      case ValueKind::none:
        return "";
      case ValueKind::choice:
      case ValueKind::policy:
        return " -x -a '" + joined(entry.choices, " ") + "'";
      case ValueKind::folder:
        return " -x -a '(__fish_complete_directories)'";
      case ValueKind::file:
        return " -r -F";
      case ValueKind::model:
        return " -x -a '(__fish_complete_suffix .gguf)'";
      default:
        return " -x";
    }
  };
  std::string text =
      "# fish completion for kvzap. Made by kvzap completion fish from the program's own options.\n"
      "complete -c kvzap -f\n";
  const auto add_options = [&](const CLI::App& command, const std::string& condition) {
    for (const Entry& entry : entries_of(command)) {
      std::string flags;
      for (const std::string& flag : entry.flags) {
        flags += flag.rfind("--", 0) == 0 ? " -l " + flag.substr(2) : " -s " + flag.substr(1);
      }
      std::string values = values_of(entry);
      if (entry.flags.empty() && values == " -x") continue;
      text += fmt::format("complete -c kvzap -n '{}'{}{} -d {}\n", condition, flags, values,
                          in_quotes(entry.description));
    }
  };
  add_options(app, "__fish_use_subcommand");
  for (const CLI::App* command : commands_of(app)) {
    text += fmt::format("complete -c kvzap -n __fish_use_subcommand -a {} -d {}\n",
                        command->get_name(), in_quotes(command->get_description()));
    add_options(*command, "__fish_seen_subcommand_from " + command->get_name());
  }
  return text + R"(
# Behind a launcher, from the last kvzap of the line on.
function __kvzap_place
    set -l words (commandline -opc)
    for at in (seq (count $words) -1 2)
        if string match -qr '(^|/)kvzap$' -- $words[$at]
            echo $at
            return
        end
    end
    return 1
end
function __kvzap_launched
    set -l words (commandline -opc)
    set -l at (__kvzap_place)
    complete -C (string join ' ' -- kvzap (string escape -- $words[$at..-1])[2..-1] (commandline -ct))
end
for launcher in mpirun mpiexec srun
    complete -c $launcher -n __kvzap_place -x -a '(__kvzap_launched)'
end
)";
}

}  // namespace kvzap::driver
