#!/usr/bin/env python3
"""kvpress' own evaluation beside `kvzap eval`: the same rows, policies and evict ratios on the same cores.

  build/peers/bin/python perf/peers/evaluate.py --json evaluate.json

The prompts are dealt to --rounds rounds, in each of which one program after the other evaluates all settings on
the round's prompts; which of them begins alternates. kvpress' side does what its evaluation/evaluate.py does for
a press: its pipeline, once for every context with the questions about it. It has the model in memory before its
time begins, although evaluate.py loads it anew for every press and ratio; kvzap's time is that of the whole
program, loading included. A ratio of seconds above 1 is in kvzap's favour. For a model as small as the demo's
--threads 1 may be the peer's better choice.

An answer is right as far as the expected texts stand in it (RULER's string_match_all, upper and lower case
alike). For policies without chance, accuracies are compared setting by setting: further apart than one prompt in
thirty is told, and the exit status is 1 then.
"""
import argparse
import collections
import datetime
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import kvpress
from kvpress.presses.kvzap_press import KVzapModel, KVzapPress

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "perf"))
import programs  # noqa: E402
from engines import records  # noqa: E402

# By kvzap's names; each is made anew for a ratio. Not pyramidkv: its layers keep unequal numbers of rows, and
# transformers makes one mask for all of them, so that its pipeline fails on the first question.
PRESSES = {
    "knorm": lambda r: kvpress.KnormPress(r),
    "random": lambda r: kvpress.RandomPress(r, seed=1),
    "streaming-llm": lambda r: kvpress.StreamingLLMPress(r),
    "keydiff": lambda r: kvpress.KeyDiffPress(r),
    "lagkv": lambda r: kvpress.LagKVPress(r),
    "cur": lambda r: kvpress.CURPress(r),
    "leverage": lambda r: kvpress.LeverageScorePress(r),
    "compactor": lambda r: kvpress.CompactorPress(r),
    "snapkv": lambda r: kvpress.SnapKVPress(r),
    "tova": lambda r: kvpress.TOVAPress(r),
    "expected-attention": lambda r: kvpress.ExpectedAttentionPress(r),
    "non-causal": lambda r: kvpress.NonCausalAttnPress(r),
    "h2o": lambda r: kvpress.ObservedAttentionPress(r),
    "kvzip": lambda r: kvpress.KVzipPress(r),
    "kvzip-plus": lambda r: kvpress.KVzipPress(r, kvzip_plus_normalization=True),
    "snapkv+ada": lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r)),
    "expected-attention+ada": lambda r: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(r)),
}
# Neither program draws the other's numbers.
WITH_CHANCE = {"random", "leverage", "compactor"}
EAGER = {"h2o"}  # presses that need the weights of attention
DEFAULT = ("knorm;snapkv;expected-attention;tova;keydiff;streaming-llm;lagkv;cur;non-causal;h2o;"
           "snapkv+ada;expected-attention+ada")


def read_rows(path, per_task):
    seen, rows = collections.Counter(), []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        seen[row["task"]] += 1
        if not per_task or seen[row["task"]] <= per_task:
            rows.append(row)
    return rows


class Peer:
    def __init__(self, options):
        self.options = options
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        self.pipeline = pipeline("kv-press-text-generation", model=self.model,
                                 tokenizer=AutoTokenizer.from_pretrained(options.model), device="cpu")
        self.surrogate = KVzapModel.from_pretrained(options.surrogate).eval() if options.surrogate else None

    def press(self, policy, value):
        if policy == "none":
            return None
        if policy != "kvzap":
            return PRESSES[policy](value)
        press = KVzapPress()
        press.kvzap_model = self.surrogate
        press.post_init_from_model = lambda model: None  # it would ask for one of NVIDIA's
        return kvpress.DMSPress(press, threshold=value, sliding_window_size=self.options.window)

    def evaluate(self, rows, policy, value):
        """(score of every row, sum of the contexts' evict ratios weighted by their rows, seconds)."""
        contexts = collections.defaultdict(list)
        for i, row in enumerate(rows):
            contexts[row["context"]].append(i)
        press = self.press(policy, value)
        self.model.set_attn_implementation("eager" if policy in EAGER else "sdpa")
        answers, evicted = [None] * len(rows), 0.0
        begin = time.perf_counter()
        for context, indices in contexts.items():
            first = rows[indices[0]]
            output = self.pipeline(context, questions=[rows[i]["question"] for i in indices],
                                   answer_prefix=first.get("answer_prefix", ""), press=press,
                                   max_new_tokens=first["max_new_tokens"])
            for i, answer in zip(indices, output["answers"]):
                answers[i] = answer
            if press is not None:
                evicted += press.compression_ratio * len(indices)
        seconds = time.perf_counter() - begin
        return [records.matched_share(answer, row["answer"]) for answer, row in zip(answers, rows)], evicted, seconds


class Ours:
    def __init__(self, options):
        self.options = options

    def evaluate(self, rows, settings, folder):
        """{(policy, value): (sum of scores, sum of evict ratios)} and the program's seconds."""
        o = self.options
        tasks, out = folder / "tasks.jsonl", folder / "out"
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        policies = []
        for policy in dict.fromkeys(policy for policy, _ in settings):
            values = ",".join(f"{value:g}" for name, value in settings if name == policy and value is not None)
            kind = "thresholds" if policy == "kvzap" else "evict-ratios"
            policies.append(f"{policy}@{kind}={values}" if values else policy)
        command = ["mpirun", "-n", o.ranks, *shlex.split(o.mpirun_flags), o.build / "kvzap", "eval", "-q",
                   "-m", o.model, "--tasks", tasks, "--policies", ";".join(policies), "--dtype", o.dtype,
                   "--window", o.window, "--parallel", "prompts", "-o", out]
        if o.surrogate:
            command += ["--surrogate", o.surrogate]
        command = [str(part) for part in command + shlex.split(o.eval_arguments)]
        begin = time.perf_counter()
        done = subprocess.run(command, env={**os.environ, **programs.ENVIRONMENT}, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)}: exit status {done.returncode}")
        figures = {}
        for row in json.loads((out / "summary.json").read_text())["rows"]:
            if row["task"] == "all":
                value = row.get("threshold", row.get("evict_ratio_asked") if row["policy"] != "none" else None)
                figures[row["policy"], value] = (row["accuracy"] * row["prompts"],
                                                 row["evict_ratio_mean"] * row["prompts"])
        return figures, seconds


def named(policy, value):
    if value is None:
        return policy
    return f"{policy} {'threshold' if policy == 'kvzap' else 'evict ratio'} {value:g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "inputs/models/recall-4m")
    parser.add_argument("--surrogate", type=pathlib.Path, help="for thresholds of kvzap")
    parser.add_argument("--tasks", type=pathlib.Path, default=ROOT / "inputs/eval/recall-512.jsonl")
    parser.add_argument("--per-task", type=int, default=6, help="first prompts of every task; 0: all")
    parser.add_argument("--policies", default=DEFAULT, help="kvzap's names, between semicolons: "
                        + ", ".join(PRESSES))
    parser.add_argument("--evict-ratios", default="0.25,0.5,0.75,0.9")
    parser.add_argument("--thresholds", default="", help="of kvzap, which is then evaluated too")
    parser.add_argument("--window", type=int, default=128, help="of kvzap and kvpress' DMSPress")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=os.cpu_count())
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of kvpress")
    parser.add_argument("--mpirun-flags", default="--oversubscribe --bind-to none --mca mpi_yield_when_idle 1")
    parser.add_argument("--eval-arguments", default="", help="further arguments of kvzap eval")
    parser.add_argument("--json", type=pathlib.Path, help="also write the results to this file")
    options = parser.parse_args()
    policies = [name.strip() for name in options.policies.split(";") if name.strip()]
    for name in policies:
        if name not in PRESSES:
            parser.error(f"--policies: {name}: expected some of {', '.join(PRESSES)}")
    ratios = [float(r) for r in options.evict_ratios.split(",")]
    settings = [("none", None)] + [(policy, ratio) for policy in policies for ratio in ratios if ratio > 0]
    if options.thresholds:
        if not options.surrogate:
            parser.error("--thresholds: needs --surrogate")
        settings += [("kvzap", float(t)) for t in options.thresholds.split(",")]
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    rows = read_rows(options.tasks, options.per_task)
    # Round by round, so that every round has prompts of every task.
    parts = [rows[i::options.rounds] for i in range(options.rounds)]
    parts = [part for part in parts if part]
    peer, ours = Peer(options), Ours(options)

    zero = lambda: {"right": 0.0, "evicted": 0.0, "seconds": 0.0}  # noqa: E731
    theirs, mine = collections.defaultdict(zero), collections.defaultdict(zero)
    our_seconds = 0.0
    peer.evaluate(parts[0][:1], "none", None)  # the first call of a pipeline takes longer
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts):
            def run_kvzap():
                where = pathlib.Path(folder) / str(number)
                where.mkdir()
                figures, seconds = ours.evaluate(part, settings, where)
                for key, (right, evicted) in figures.items():
                    mine[key]["right"] += right
                    mine[key]["evicted"] += evicted
                print(f"round {number + 1}: kvzap {seconds:.1f} s", file=sys.stderr, flush=True)
                return seconds

            def run_kvpress():
                sum_before = sum(item["seconds"] for item in theirs.values())
                for key in settings:
                    scores, evicted, seconds = peer.evaluate(part, *key)
                    theirs[key]["right"] += sum(scores)
                    theirs[key]["evicted"] += evicted
                    theirs[key]["seconds"] += seconds
                spent = sum(item["seconds"] for item in theirs.values()) - sum_before
                print(f"round {number + 1}: kvpress {spent:.1f} s", file=sys.stderr, flush=True)

            if number % 2 == 0:
                our_seconds += run_kvzap()
                run_kvpress()
            else:
                run_kvpress()
                our_seconds += run_kvzap()

    results, apart = [], []
    print(f"{'setting':42} {'accuracy: kvzap':>16} {'kvpress':>8}  {'evict ratio: kvzap':>18} {'kvpress':>8}")
    for key in settings:
        a, b = mine[key], theirs[key]
        result = {"policy": key[0], "value": key[1], "accuracy": a["right"] / len(rows),
                  "peer_accuracy": b["right"] / len(rows), "evict_ratio": a["evicted"] / len(rows),
                  "peer_evict_ratio": b["evicted"] / len(rows), "peer_seconds": b["seconds"],
                  "compared": key[0].split("+")[0] not in WITH_CHANCE}
        results.append(result)
        difference = abs(result["accuracy"] - result["peer_accuracy"])
        note = "" if result["compared"] else "  (chance: not compared)"
        if result["compared"] and difference > 1 / 30 + 1e-9:
            apart.append(named(*key))
            note = "  more than one prompt in thirty apart"
        print(f"{named(*key):42} {result['accuracy']:16.3f} {result['peer_accuracy']:8.3f}  "
              f"{result['evict_ratio']:18.3f} {result['peer_evict_ratio']:8.3f}{note}")
    peer_seconds = sum(item["seconds"] for item in theirs.values())
    compared = sum(result["compared"] for result in results)
    print(f"\n{len(rows)} prompts, {len(settings)} settings, {options.dtype}: kvzap {our_seconds:.1f} s on "
          f"{options.ranks} ranks, kvpress {peer_seconds:.1f} s on {options.threads} threads: ratio "
          f"{peer_seconds / our_seconds:.1f}")
    print(f"accuracy within one prompt in thirty: {compared - len(apart)} of {compared} settings"
          + (f"; further apart: {', '.join(apart)}" if apart else ""))
    if options.json:
        options.json.write_text(json.dumps({
            "command": shlex.join(["perf/peers/evaluate.py", *sys.argv[1:]]),
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                         "kvpress": __import__("importlib.metadata").metadata.version("kvpress"),
                         "python": platform.python_version()},
            "prompts": len(rows), "settings": len(settings), "dtype": options.dtype, "ranks": options.ranks,
            "threads": options.threads, "seconds": our_seconds, "peer_seconds": peer_seconds,
            "ratio": peer_seconds / our_seconds, "apart": apart, "results": results}, indent=1) + "\n")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
