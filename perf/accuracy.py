#!/usr/bin/env python3
"""Accuracy of eviction policies on the demo model's tasks, one run of kvzap for each prompt.

  perf/accuracy.py build/kvzap "snapkv --evict-ratio 0.5" "keydiff+ada --evict-ratio 0.75"

Every further argument is what follows --policy. Prints right answers, and the evict ratio that was
reached; --json FILE writes them. The tasks are inputs/eval/recall-512.jsonl, the first 6 prompts of each,
unless --tasks and --per-task say otherwise. A prompt counts as right if the model's answer has the
expected text in it (each of them, if there are several), upper and lower case alike.
"""
import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_tasks(path, per_task):
    seen, tasks = {}, []
    for line in path.read_text().splitlines():
        task = json.loads(line)
        seen[task["task"]] = seen.get(task["task"], 0) + 1
        if seen[task["task"]] <= per_task:
            tasks.append(task)
    return tasks


def is_right(answer, expected):
    expected = expected if isinstance(expected, list) else [expected]
    return all(str(text).lower() in answer.lower() for text in expected)


def run(program, model, dtype, task, arguments, folder):
    context = folder / "context.txt"
    context.write_text(task["context"])
    command = [*shlex.split(program), "run", "-m", str(model), "-f", str(context), "--question", task["question"],
               "-n", str(task["max_new_tokens"]), "--dtype", dtype, "--json", "-", "-q", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{shlex.join(command)}\n{result.stderr}")
    return json.loads(result.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help='the program, such as build/kvzap or "mpirun -n 2 build/kvzap"')
    parser.add_argument("policy", nargs="+", help='such as "snapkv+ada --evict-ratio 0.5"; "" for the full cache')
    parser.add_argument("--model", default=ROOT / "inputs/models/recall-4m", type=pathlib.Path)
    parser.add_argument("--tasks", default=ROOT / "inputs/eval/recall-512.jsonl", type=pathlib.Path)
    parser.add_argument("--per-task", default=6, type=int)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    tasks = read_tasks(options.tasks, options.per_task)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for policy in options.policy:
            arguments = ["--policy", *shlex.split(policy)] if policy else []
            right, by_task, ratios = 0, {}, []
            for task in tasks:
                report = run(options.program, options.model, options.dtype, task, arguments, pathlib.Path(folder))
                answer = report["answers"][0]
                good = is_right(answer["text"], task["answer"])
                right += good
                by_task.setdefault(task["task"], []).append(good)
                ratios.append(report["context"]["evict_ratio"])
            rows.append({"policy": policy or "none", "prompts": len(tasks), "right": right,
                         "by_task": {name: sum(good) for name, good in by_task.items()},
                         "evict_ratio": sum(ratios) / len(ratios)})
            print(f"{rows[-1]['policy']:48} {right:3} of {len(tasks)}   evict ratio {rows[-1]['evict_ratio']:.3f}",
                  flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
