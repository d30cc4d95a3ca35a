"""Tables of perf/peers/quality, from the summaries of kvzap eval and the records of other engines."""
import collections
import json
import math
import re
import sys

import processors
from engines.records import matched_share, read

KV_TYPES = ("bf16", "q8", "q4", "q8,q4")
NARROW_KV_TYPES = ("q4,q3", "q3", "q8,q2", "q4,q2", "q3,q2", "q2")
PERPLEXITY_KV_TYPES = (*KV_TYPES, *NARROW_KV_TYPES)
WINDOWS = (8, 32, 128, 1)  # recent tokens that KVzap keeps
EVALUATIONS = ("facts", "facts-closed", "ruler-1024", "ruler-2048", "ruler-2048-oracle", "ruler-4096", "ruler-4096-oracle",
               "summary", "perplexity", "generation", "kv-perplexity", "linear-ruler", "linear-facts", "window", "every",
               "demo", "newer", "rest", "fitted", "policy-windows", *(f"read-pages-{share}-{rows}" for share in ("all", "0.5", "0.25") for rows in (64, 16)),
               *(f"ruler-{length}-window-{window}" for length in (4096, 8000) for window in ("128", "32", "8", "8-sink-4")),
               *(f"end-to-end-{tasks}" for tasks in ("facts", "ruler-1024", "ruler-2048", "ruler-4096", "perplexity")),
               *(f"kv-types-{kv_type}" for kv_type in PERPLEXITY_KV_TYPES),
               *(f"{tasks}-window-{window}" for tasks in ("generation", "facts", "ruler", "perplexity", "ruler-2048") for window in WINDOWS))
ENGINES = ("kvzap", "kvpress", "openvino", "llama.cpp", "vllm")


def score(answer, row):
    """The metrics string_match_all and string_match_part of kvzap eval."""
    share = matched_share(answer, row["answer"])
    return float(share > 0) if row.get("metric") == "string_match_part" else share


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else None


def row_of(summary):
    """What a summary's row of all prompts says."""
    keep = ("setting", "prompts", "accuracy", "accuracy_low", "accuracy_high", "perplexity", "evict_ratio_mean",
            "evict_ratio_min", "evict_ratio_max", "kv_bytes_at_end", "full_kv_bytes_at_end")
    row = {key: summary[key] for key in keep if summary.get(key) is not None}
    row["setting"] = setting_of(row["setting"])
    return row


def setting_of(setting):
    """The setting with the names of surrogates instead of their paths."""
    return re.sub(r"(surrogate=)[^:@+,;]*/", r"\1", setting)


def perplexity_changes(records, rows):
    """Adds to the rows of perplexities how much larger each is than the first setting's on the same prompts, as a
    fraction, with the standard error over prompts."""
    losses = collections.defaultdict(dict)
    for record in records:
        if record.get("nll") is not None:
            losses[setting_of(record["setting"])][record["id"]] = (record["nll"], record["generated_tokens"])
    first = losses[rows[0]["setting"]]
    for row in rows[1:]:
        pairs = [(loss - first[name][0], tokens) for name, (loss, tokens) in losses[row["setting"]].items() if name in first]
        tokens = sum(count for _, count in pairs)
        if len(pairs) < 2:
            continue
        mean_change = sum(change for change, _ in pairs) / tokens
        spread = sum((change - mean_change * count) ** 2 for change, count in pairs) * len(pairs) / (len(pairs) - 1)
        row["perplexity_change"] = math.expm1(mean_change)
        row["perplexity_change_error"] = math.sqrt(spread) / tokens
        row["tokens"] = tokens


def evaluation(folder):
    """{tasks: {name: prompts}, rows: [...]} of kvzap eval's folder; accuracy of each task in rows[i].tasks."""
    summary = json.loads((folder / "summary.json").read_text())
    names = list(dict.fromkeys(row["task"] for row in summary["rows"]))
    whole = "all" if "all" in names else names[0]
    rows = {row["setting"]: row_of(row) for row in summary["rows"] if row["task"] == whole}
    for row in summary["rows"]:
        if row["task"] != whole:
            rows[row["setting"]].setdefault("tasks", {})[row["task"]] = row.get("accuracy")
    if "perplexity" in next(iter(rows.values())):
        lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run leaves a part of a line
        perplexity_changes(records, list(rows.values()))
    about = json.loads((folder / "evaluation.json").read_text())
    tasks = [{**task, "file": task["file"].rsplit("/", 1)[-1]} for task in about["tasks"]]
    options = {key: about["options"][key] for key in ("dtype", "raw", "window", "sink", "read_pages", "page_rows", "n_predict", "per_task")
               if key in about["options"]}
    return {"model": summary["model"]["name"], "version": summary["version"], "tasks": tasks, "options": options,
            "prompts": summary["prompts"], "complete": summary["complete"], "rows": list(rows.values())}


def engine(work, name, prompts, ours):
    """Means over the prompts of one engine's records, by setting, beside kvzap's of the same setting and prompts."""
    groups = collections.defaultdict(list)
    for record in read(work / f"{name}.records.jsonl"):
        groups[record["setting"]].append(record)
    rows = []
    for setting, records in groups.items():
        row = {"setting": setting, "prompts": len(records), "version": records[0]["version"],
               "accuracy": mean(score(record["answer"], prompts[record["id"]]) for record in records)}
        for key in ("evict_ratio", "kv_bytes", "kv_bytes_full", "prefill_seconds"):
            row[key] = mean(record[key] for record in records if record.get(key) is not None)
        tokens = sum(max(0, record["new_tokens"] - 1) for record in records)
        seconds = sum(record["decode_seconds"] for record in records)
        row["decode_tokens_per_second"] = tokens / seconds if seconds else None
        same = [ours[setting, record["id"]] for record in records if (setting, record["id"]) in ours]
        if len(same) == len(records):
            row["kvzap_accuracy"] = mean(record["score"] for record in same)
            row["kvzap_evict_ratio"] = mean(record["evict_ratio"] for record in same)
        rows.append(row)
    return {"prompts": len(prompts), "rows": rows}


def percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def mebibytes(value):
    return "" if value is None else f"{value / 2**20:.1f}"


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def shown(row):
    if "perplexity" in row:
        change = row.get("perplexity_change")
        return f"{row['perplexity']:.3f}" + ("" if change is None else
                                             f" ({100 * change:+.2f} ± {100 * row['perplexity_change_error']:.2f} %)")
    return f"{percent(row['accuracy'])} ({100 * row['accuracy_low']:.1f}–{100 * row['accuracy_high']:.1f})"


def print_evaluation(name, result):
    """One table of the full cache and thresholds, with the reached evict ratios, and one of budgets, by evict ratio."""
    measure = "perplexity" if "perplexity" in result["rows"][0] else "accuracy (95 % interval)"
    print(f"## {name}: {result['prompts']} prompts" + ("" if result["complete"] else ", incomplete") + "\n")
    budgets, ratios, others = collections.defaultdict(dict), set(), []
    for row in result["rows"]:
        match = re.fullmatch(r"(.*?)@evict-ratio=([\d.]+)(.*)", row["setting"])
        if match:
            budgets[match[1] + match[3]][match[2]] = row
            ratios.add(match[2])
        else:
            others.append(row)
    table(["setting", "evict ratio (least–most)", "KV MiB at the end", measure],
          [[row["setting"], f"{row['evict_ratio_mean']:.3f} ({row['evict_ratio_min']:.2f}–{row['evict_ratio_max']:.2f})",
            mebibytes(row["kv_bytes_at_end"]), shown(row)] for row in others])
    if budgets:
        columns = sorted(ratios, key=float)
        table(["policy at evict ratio", *columns],
              [[policy, *(shown(cells[ratio]) if ratio in cells else "" for ratio in columns)]
               for policy, cells in budgets.items()])


def print_engine(name, result):
    print(f"## {name}: {result['prompts']} prompts\n")
    table(["setting", "accuracy", "kvzap's", "evict ratio", "kvzap's", "KV MiB", "prefill s", "decode tokens/s"],
          [[row["setting"], percent(row["accuracy"]), percent(row.get("kvzap_accuracy")),
            "" if row["evict_ratio"] is None else f"{row['evict_ratio']:.3f}",
            f"{row['kvzap_evict_ratio']:.3f}" if "kvzap_evict_ratio" in row else "", mebibytes(row["kv_bytes"]),
            "" if row["prefill_seconds"] is None else f"{row['prefill_seconds']:.2f}",
            "" if row["decode_tokens_per_second"] is None else f"{row['decode_tokens_per_second']:.1f}"]
           for row in result["rows"]])
    apart = [row["setting"] for row in result["rows"]
             if "kvzap_accuracy" in row and abs(row["kvzap_accuracy"] - row["accuracy"]) > 1 / 30 + 1e-9]
    compared = sum("kvzap_accuracy" in row for row in result["rows"])
    if compared:
        print(f"Accuracy within one prompt in thirty of kvzap's: {compared - len(apart)} of {compared} settings"
              + (f"; further apart: {', '.join(apart)}" if apart else "") + "\n")


def curve_of(work):
    """Accuracy of kvzap's thresholds under each surrogate of the learning curve, ordered by R2."""
    rows, prompts = [], 0
    for folder in sorted(work.glob("curve/*/summary.json")):
        result, quality = evaluation(folder.parent), json.loads((folder.parent / "r2.json").read_text())
        kind, _, pairs = folder.parent.name.rpartition("-")
        points = [{"accuracy": row["accuracy"], "evict_ratio": row["evict_ratio_mean"]} for row in result["rows"]
                  if row["setting"].startswith("kvzap")]
        rows.append({"surrogate": kind, "pairs": int(pairs), "r2": quality["mean"], "points": points})
        prompts = result["prompts"]
    return {"prompts": prompts, "rows": sorted(rows, key=lambda row: row["r2"])} if rows else None


def write(work, results):
    """Prints the tables; with a folder `results`, writes one JSON file for each part too."""
    found = {}
    for name in EVALUATIONS:
        if (work / name / "summary.json").exists():
            found[name] = evaluation(work / name)
            print_evaluation(name, found[name])
    ours = {}
    for name in ("ruler-1024", "every"):
        if (work / name / "records.jsonl").exists():
            ours.update({(record["setting"], record["id"]): record for record in read(work / name / "records.jsonl")})
    for name in ENGINES:
        if (work / f"{name}.records.jsonl").exists():
            prompts = {row["id"]: row for row in read(work / "engines.jsonl")}
            found[name] = engine(work, name, prompts, ours)
            print_engine(name, found[name])
    curve = curve_of(work)
    if curve:
        found["curve"] = curve
        print(f"## curve: {curve['prompts']} prompts\n")
        table(["surrogate", "pairs", "mean R2", "accuracy at evict ratio", "accuracy at evict ratio"],
              [[row["surrogate"], row["pairs"], f"{row['r2']:.3f}",
                *(f"{percent(point['accuracy'])} at {point['evict_ratio']:.3f}" for point in row["points"])]
               for row in curve["rows"]])
    examples = {path.stem.split("-", 1)[1]: json.loads(path.read_text())["context"] for path in
                sorted(work.glob("adaptivity-*.json"))}
    if examples:
        found["adaptivity"] = {name: {"tokens": context["tokens"], "evict_ratio": context["evict_ratio"]}
                               for name, context in examples.items()}
        print("## adaptivity\n")
        table(["text", "tokens", "evict ratio"],
              [[name, row["tokens"], f"{row['evict_ratio']:.3f}"] for name, row in found["adaptivity"].items()])
    if results:
        results.mkdir(parents=True, exist_ok=True)
        for name, result in found.items():
            text = json.dumps({"processor": processors.this_one().title, **result}, indent=1)
            (results / f"{name}.json").write_text(text + "\n")
    if not found:
        sys.exit(f"{work}: no results")
