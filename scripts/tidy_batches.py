#!/usr/bin/env python3
"""Runs clang-tidy over many sources at once: those of one or several folders as one translation unit,
because nearly all of a file's time goes into the headers of Kokkos and the standard library. Used by
scripts/tidy, which see. A file whose names collide with another's of its unit is taken out and checked
alone; that takes longer, and nothing else.

Usage: tidy_batches.py CLANG_TIDY BUILD_FOLDER JOBS FILE...
"""
import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

# Kokkos marks functions for the static analyzer with attributes that do not fit lambdas. The
# options may be GCC's.
EXTRA = ["-U__clang_analyzer__", "-Wno-unknown-warning-option"]

# Folders of src that form one unit, together with the folders below them; every other folder is its
# own unit. Units are not larger, so that several processors have work and fewer names must differ.
TOGETHER = [("base", "parallel", "linalg"), ("model", "text"), ("cache", "io", "engine"), ("policy", "train"), ("eval",)]


def commands(build):
    """{absolute path of a source: its arguments without compiler, launcher, source and output}."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        arguments, i = [], next(n for n, word in enumerate(words) if word.startswith("-"))
        while i < len(words):
            word = words[i]
            if word in ("-o", "-c"):
                i += 2
            elif word == "-include" and "cmake_pch" in words[i + 1]:
                i += 2  # another compiler's
            elif word in ("-isystem", "-include", "-I", "-D"):
                arguments.append(word + words[i + 1])
                i += 2
            elif word == "-Winvalid-pch":
                i += 1
            else:
                arguments.append(word)
                i += 1
        found[os.path.realpath(os.path.join(entry["directory"], entry["file"]))] = arguments
    return found


def tidy(program, name, sources, flags):
    """clang-tidy's output on one unit that holds all the sources; empty if there is nothing to say."""
    with tempfile.TemporaryDirectory(prefix="kvzap-tidy-") as folder:
        unit = sources[0]
        if len(sources) > 1:
            unit = os.path.join(folder, name.replace("/", "_") + ".cpp")
            lines = (f'#include "{source}"  // NOLINT(bugprone-suspicious-include)\n' for source in sources)
            pathlib.Path(unit).write_text("".join(lines))
        # A local name may shadow one of another file's namespace: the compilers check -Wshadow file
        # by file.
        arguments = [*dict.fromkeys(flag for source in sources for flag in flags[source]), "-Wno-shadow"]
        if len(sources) == 1:
            arguments = flags[unit]
        database = [{"directory": os.getcwd(), "file": unit, "arguments": ["c++", *arguments, "-c", unit]}]
        pathlib.Path(folder, "compile_commands.json").write_text(json.dumps(database))
        done = subprocess.run(
            [program, "-p", folder, f"--config-file={os.path.abspath('.clang-tidy')}", "--quiet",
             *(f"--extra-arg={flag}" for flag in EXTRA), unit],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0 and not done.stdout.strip():
            return ""
        # Drop the count of suppressed warnings from system headers.
        errors = (line for line in done.stderr.splitlines(True) if not line.endswith(" generated.\n"))
        return done.stdout + "".join(errors) or f"clang-tidy: exit status {done.returncode}\n"


def check(program, name, sources, flags):
    """The findings in the sources: all in one unit, but for those that do not compile in it."""
    output = tidy(program, name, sources, flags)
    if len(sources) == 1 or "[clang-diagnostic" not in output:
        return output
    # "FILE:LINE:COLUMN: error: redefinition of 'fail' [clang-diagnostic-error]"
    named = {line.split(":")[0] for line in output.splitlines() if "[clang-diagnostic" in line}
    alone = [source for source in sources if source in named] or sources
    rest = [source for source in sources if source not in alone]
    print(f"{name}: alone, for they share names with others or do not compile:",
          *(os.path.relpath(source) for source in alone), file=sys.stderr)
    outputs = [tidy(program, name, [source], flags) for source in alone]
    return "".join(outputs) + (check(program, name, rest, flags) if rest else "")


def unit_of(file):
    """The unit's name, such as "src/model+text"."""
    top, *below = os.path.dirname(os.path.relpath(file)).split(os.sep)
    if not below:
        return top
    return os.path.join(top, "+".join(next((unit for unit in TOGETHER if below[0] in unit), below[:1])))


def main():
    program, build, jobs, *files = sys.argv[1:]
    flags = commands(pathlib.Path(build).resolve())
    batches = {}
    for file in files:
        path = os.path.realpath(file)
        if path in flags:  # else it is the stand-in of another file, where an option is off
            batches.setdefault(unit_of(file), []).append(path)
    largest_first = sorted(batches.items(), key=lambda item: -sum(map(os.path.getsize, item[1])))
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        outputs = list(pool.map(lambda item: check(program, *item, flags), largest_first))
    for output in filter(None, outputs):
        print(output)
    sys.exit(any(outputs))


if __name__ == "__main__":
    main()
