"""Writes the man page and the completion scripts of kvzap-plot, from its own table of options.

    python3 plot_documents.py KVZAP_PLOT.PY FOLDER VERSION
"""
import argparse
import pathlib
import re
import sys


def parser_of(script):
    sys.path.insert(0, str(script.parent))
    sys.dont_write_bytecode = True
    from plot.arguments import parser

    return parser()


def commands_of(parser):
    """(name, what it does, its parser) of every subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return [(name, helps.get(name, ""), sub) for name, sub in action.choices.items()]
    return []


def options_of(parser):
    return [action for action in parser._actions if action.option_strings]


def help_of(parser, action):
    """One line, with defaults put in."""
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return re.sub(r"\s+", " ", text).strip()


def takes_value(action):
    return action.nargs != 0


def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", text)


def value_of(action):
    if action.choices:
        return "|".join(map(str, action.choices))
    return action.metavar or action.dest.upper()


def roff_options(parser):
    lines = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) or action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            name = ", ".join(f"\\fB{roff(flag)}\\fR" for flag in action.option_strings)
            if takes_value(action):
                name += f" \\fI{roff(value_of(action))}\\fR"
        else:
            metavar = action.metavar or action.dest
            name = f"\\fI{roff(metavar if isinstance(metavar, str) else ' '.join(metavar))}\\fR"
        lines += [".TP", name, roff(help_of(parser, action)) or "\\&"]
    return "\n".join(lines) + "\n"


def man_page(parser, version):
    about = roff(re.sub(r"\n\n+", "\n.PP\n", (parser.description or "").strip())).replace("\\&.PP", ".PP")
    page = (
        f'.TH KVZAP\\-PLOT 1 "" "kvzap {version}" "User Commands"\n'
        ".SH NAME\nkvzap\\-plot \\- draw what kvzap has written\n"
        ".SH SYNOPSIS\n.B kvzap\\-plot\n.I command\n.RI [ options ]\n.I file ...\n"
        f".SH DESCRIPTION\n{about}\n.SH OPTIONS\n{roff_options(parser)}"
    )
    for name, text, command in commands_of(parser):
        page += f".SH KVZAP\\-PLOT {roff(name.upper())}\n{roff(text)}\n{roff_options(command)}"
    return page + ".SH SEE ALSO\n.BR kvzap (1)\n"


def words_of(parser):
    return " ".join(flag for action in options_of(parser) for flag in action.option_strings)


def bash(parser):
    words, values = [], []
    names = [name for name, _, _ in commands_of(parser)]
    for name, _, command in commands_of(parser):
        words.append(f"    {name}) words='{words_of(command)}' ;;")
        for action in options_of(command):
            if not takes_value(action):
                continue
            pattern = "|".join(f"{name},{flag}" for flag in action.option_strings)
            if action.choices:
                offer = f"""mapfile -t COMPREPLY < <(compgen -W '{" ".join(map(str, action.choices))}' -- "$current")"""
            elif action.metavar in ("FILE", "DIR"):
                kind = "-d" if action.metavar == "DIR" else "-f"
                offer = f'compopt -o filenames; mapfile -t COMPREPLY < <(compgen {kind} -- "$current")'
            else:
                offer = ":"
            values.append(f"    {pattern}) {offer}; return ;;")
    new_line = "\n"
    return f"""# bash completion for kvzap-plot, made from its own options.
_kvzap_plot() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command='' word words
  COMPREPLY=()
  if [[ $previous = '=' ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  if [[ $current = '=' ]]; then current=''; fi
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in {"|".join(names)}) command=$word; break ;; esac
  done
  case $command,$previous in
{new_line.join(values)}
  esac
  case $command in
{new_line.join(words)}
    *) words='{" ".join(names)} {words_of(parser)}' ;;
  esac
  if [[ $command && $current != -* ]]; then
    compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current")
    return
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -F _kvzap_plot kvzap-plot
"""


def zsh_text(text):
    for special in "\\[]:":
        text = text.replace(special, "\\" + special)
    return text.replace("'", "'\\''")


def zsh(parser):
    def arguments(command):
        parts = []
        for action in options_of(command):
            value = ""
            if takes_value(action):
                offer = f"({' '.join(map(str, action.choices))})" if action.choices else (
                    "_files" if action.metavar == "FILE" else "_files -/" if action.metavar == "DIR" else " ")
                value = f":{zsh_text(str(action.metavar or action.dest))}:{offer}"
            others = " ".join(action.option_strings)
            parts += [f"'({others}){flag}[{zsh_text(help_of(command, action))}]{value}'"
                      for flag in action.option_strings]
        return " ".join(parts)

    commands = commands_of(parser)
    described = "\n".join(f"    '{name}:{zsh_text(text)}'" for name, text, _ in commands)
    cases = "\n".join(f"      {name}) _arguments {arguments(command)} '*:file:_files' ;;"
                      for name, _, command in commands)
    return f"""#compdef kvzap-plot
# zsh completion for kvzap-plot, made from its own options.
_kvzap_plot() {{
  local curcontext=$curcontext state line
  typeset -A opt_args
  local -a commands=(
{described}
  )
  _arguments -C {arguments(parser)} '1: :->command' '*:: :->arguments'
  case $state in
    command) _describe command commands ;;
    arguments) case $line[1] in
{cases}
    esac ;;
  esac
}}
if [ "$funcstack[1]" = "_kvzap_plot" ]; then _kvzap_plot "$@"; else compdef _kvzap_plot kvzap-plot; fi
"""


def fish(parser):
    def quoted(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion for kvzap-plot, made from its own options."]
    for name, text, command in commands_of(parser):
        lines.append(f"complete -c kvzap-plot -f -n __fish_use_subcommand -a {name} -d {quoted(text)}")
        for action in options_of(command):
            flags = "".join(f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
                            for flag in action.option_strings)
            value = "" if not takes_value(action) else (
                f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else
                " -r -F" if action.metavar == "FILE" else
                " -x -a '(__fish_complete_directories)'" if action.metavar == "DIR" else " -x")
            lines.append(f"complete -c kvzap-plot -n '__fish_seen_subcommand_from {name}'{flags}{value} "
                         f"-d {quoted(help_of(command, action))}")
    return "\n".join(lines) + "\n"


def main():
    script, folder, version = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]), sys.argv[3]
    parser = parser_of(script)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in (("kvzap-plot.1", man_page(parser, version)), ("kvzap-plot.bash", bash(parser)),
                       ("_kvzap-plot", zsh(parser)), ("kvzap-plot.fish", fish(parser))):
        (folder / file).write_text(text)


if __name__ == "__main__":
    main()
