"""Reads the folders that `kvzap eval` writes."""
import json
import pathlib
import re

from .errors import PlotError, expect, is_number, plain, shown
from .files import read_report

BUDGETS = ("evict-ratio", "threshold", "keep-tokens", "kv-budget")


def split_setting(label):
    """"snapkv@evict-ratio=0.5@prune-after=question": ("snapkv@prune-after=question", "evict-ratio")."""
    first, *rest = re.split(r"(?<!\\)@", label)  # one after a backslash belongs to the policy
    budgets = [part.split("=")[0] for part in rest if part.split("=")[0] in BUDGETS]
    return "@".join([first, *(part for part in rest if part.split("=")[0] not in BUDGETS)]), "".join(budgets[:1])


class Evaluation:
    """What a folder of `kvzap eval` says of every task and setting."""

    FIGURES = ("accuracy", "accuracy_low", "accuracy_high", "perplexity")
    RATIOS = ("evict_ratio_mean", "evict_ratio_min", "evict_ratio_max")

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.file = self.folder / "summary.json"
        self.name = self.folder.resolve().name
        summary = read_report(self.file, "kvzap.evaluation_summary")
        model = summary.get("model")
        self.model = model.get("name") if isinstance(model, dict) else model
        expect(isinstance(self.model, str), self.file, "model.name", "text", shown(self.model))
        rows = summary.get("rows")
        expect(isinstance(rows, list) and rows, self.file, "rows", "a list that is not empty", shown(rows))
        for i, row in enumerate(rows):
            expect(isinstance(row, dict), self.file, f"rows[{i}]", "an object", shown(row))
            self.check(f"rows[{i}]", row)
        self.rows = rows
        self.tasks = list(dict.fromkeys(row["task"] for row in rows))

    def check(self, where, row):
        for name in ("task", "setting", "policy"):
            expect(isinstance(row.get(name), str), self.file, f"{where}.{name}", "text", shown(row.get(name)))
        for name in self.FIGURES:
            value = row.get(name)
            good = value is None or is_number(value) and (
                0 <= value <= 1e300 if name == "perplexity" else -1e-9 <= value <= 1 + 1e-9)
            expect(good, self.file, f"{where}.{name}", "a number that is not negative" if name == "perplexity" else
                   "a number from 0 to 1", shown(value))
        for name in self.RATIOS:
            value = row.get(name)
            expect(is_number(value) and -1e-9 <= value <= 1 + 1e-9, self.file, f"{where}.{name}",
                   "a number from 0 to 1", shown(value))
        row["series"], row["budget"] = split_setting(row["setting"])
        # An evict ratio for which a threshold was looked up.
        if is_number(row.get("threshold")):
            row["budget"] = "threshold"

    def keep_ratios(self, i):
        """Of row i, (layer, KV head)."""
        ratios = self.rows[i].get("keep_ratio")
        good = isinstance(ratios, list) and ratios and all(
            isinstance(heads, list) and heads and len(heads) == len(ratios[0]) and all(map(is_number, heads))
            for heads in ratios)
        expect(good, self.file, f"rows[{i}].keep_ratio", "a list of numbers for each layer, of one length",
               shown(ratios))
        return ratios

    def records(self, setting):
        """Evict ratios of the prompts under a setting, {task: [ratio]}."""
        file, ratios = self.folder / "records.jsonl", {}
        try:
            with open(file, "rb") as stream:
                for number, line in enumerate(stream, 1):
                    if not line.endswith(b"\n"):
                        break  # cut off in the middle; the command goes on before it
                    where = f"line {number}"
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise PlotError(f"{file}: {where}: not JSON: {error}") from None
                    expect(isinstance(record, dict), file, where, "an object", shown(record))
                    if record.get("setting") != setting:
                        continue
                    task, ratio = record.get("task"), record.get("evict_ratio")
                    expect(isinstance(task, str), file, f"{where}: task", "text", shown(task))
                    expect(is_number(ratio) and -1e-9 <= ratio <= 1 + 1e-9, file, f"{where}: evict_ratio",
                           "a number from 0 to 1", shown(ratio))
                    ratios.setdefault(task, []).append(ratio)
        except OSError as error:
            raise PlotError(f"{file}: {error.strerror or error}") from None
        expect(ratios, file, "setting", f"a record of {json.dumps(setting)}", "none")
        return ratios


def chosen(flag, wanted, separator, known):
    """The parts of an option's list, each of which must be known; None where it is not given."""
    if wanted is None:
        return None
    names = [name.strip() for name in wanted.split(separator) if name.strip()]
    for name in names or [""]:
        if name not in known:
            raise PlotError(f"--{flag}: expected {', '.join(map(json.dumps, known))}; found {json.dumps(name)}")
    return names


def read_evaluations(options):
    """The evaluations with the rows that --policies and --tasks leave, and the tasks in order, "all" first."""
    evaluations = [Evaluation(folder) for folder in options.files]
    tasks = list(dict.fromkeys(task for e in evaluations for task in e.tasks))
    tasks.sort(key=lambda task: task != "all")
    picked = chosen("tasks", options.tasks, ",", tasks)
    if picked is None:
        # Of a single task "all" says the same.
        picked = tasks[1:] if len(tasks) == 2 and tasks[0] == "all" else tasks
    known = list(dict.fromkeys(name for e in evaluations for row in e.rows for name in (row["policy"], row["series"])))
    policies = chosen("policies", options.policies, ";", known)
    for e in evaluations:
        e.indices = [i for i, row in enumerate(e.rows)
                     if policies is None or row["policy"] in policies or row["series"] in policies]
    return evaluations, picked


def source_of(evaluation, evaluations):
    """What sets an evaluation apart from the others, before the names of its lines and panels."""
    if len(evaluations) == 1:
        return ""
    if len({e.model for e in evaluations}) == len(evaluations):
        return f"{plain(evaluation.model, 24)}: "
    return f"{plain(evaluation.name, 24)}: "


def lines_of(evaluations):
    """{name of a line: {task: [(evict ratio, figure, low, high, whether that is a perplexity)]}}, sorted by ratio."""
    # A policy with thresholds and with evict ratios is two lines.
    budgets = {}
    for e in evaluations:
        for i in e.indices:
            budgets.setdefault((e.file, e.rows[i]["series"]), set()).add(e.rows[i]["budget"])
    # Evaluations are told apart where two of them have a line of the same name.
    series = [s for e in evaluations for s in {e.rows[i]["series"] for i in e.indices}]
    lines = {}
    for e in evaluations:
        for i in e.indices:
            row = e.rows[i]
            name = plain(row["series"])
            if len(budgets[e.file, row["series"]]) > 1 and row["budget"]:
                name += f" ({row['budget'].replace('-', ' ')})"
            if series.count(row["series"]) > 1 or len({e.model for e in evaluations}) > 1:
                name = source_of(e, evaluations) + name
            is_perplexity = row.get("accuracy") is None
            value = row.get("perplexity") if is_perplexity else row["accuracy"]
            if value is None:
                continue
            scale = 1 if is_perplexity else 100
            bounds = (None, None) if is_perplexity else (row.get("accuracy_low"), row.get("accuracy_high"))
            low, high = (scale * (value if bound is None else bound) for bound in bounds)
            is_full = row["policy"] == "none"
            point = (row["evict_ratio_mean"], scale * value, low, high, is_perplexity)
            line = lines.setdefault((name, is_full), {"from": e, "tasks": {}})
            line["tasks"].setdefault(row["task"], []).append(point)
    for line in lines.values():
        for points in line["tasks"].values():
            points.sort()
    return lines
