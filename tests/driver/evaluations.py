"""Folders as kvzap eval writes them (docs/reference/evaluation.md), with figures that are made up."""
import hashlib
import json

LAYERS, HEADS = 6, 4
TASKS = ("niah_single", "niah_noise", "facts")


def noise(*parts):
    """The same number from 0 to 1 for the same parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") / 2**32


def settings(policies, ratios=(0.25, 0.5, 0.75, 0.9), thresholds=(-5.0, -4.0, -3.0)):
    """(label, policy, "evict_ratio" or "threshold", its value, mean evict ratio)."""
    rows = [("none", "none", None, None, 0.0)]
    for policy in policies:
        if policy == "kvzap":
            rows += [(f"kvzap@threshold={t:g}", policy, "threshold", t, (t + 6) / 4) for t in thresholds]
        else:
            rows += [(f"{policy}@evict-ratio={r:g}", policy, "evict_ratio_asked", r, r) for r in ratios]
    return rows


def write_evaluation(folder, policies=("kvzap", "snapkv", "knorm+ada"), tasks=TASKS, prompts=10, model="recall-4m",
                     **options):
    """A folder of an evaluation that nobody has made, and its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = settings(policies, **options.pop("settings", {}))
    model = {"name": model, "folder": f"models/{model}", "config_hash": "0123456789abcdef"}
    evaluation = {"format": "kvzap.evaluation", "format_version": 1, "version": "0.1.0", "model": model,
                  "options": {"dtype": "f32", "window": 32, **options},
                  "tasks": [{"file": "recall.jsonl", "rows": prompts * len(tasks), "hash": f"{prompts:016x}"}],
                  "settings": [{"label": label, "policy": policy} for label, policy, *_ in chosen]}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    records, rows = [], []
    for label, policy, kind, value, mean in chosen:
        everything = []
        for t, task in enumerate(tasks):
            mine = []
            for i in range(prompts):
                # Thresholds evict more from some tasks than from others.
                spread = (noise(label, task, i) - 0.5) * 0.1 + 0.08 * (t - 1) if kind == "threshold" else 0
                ratio = min(max(mean + spread, 0), 1) if mean else 0.0
                falls = 0.9 if policy in ("none", "kvzap") else 0.5 + 0.4 * noise(policy)
                right = noise(label, task, i, "right") > max(0, ratio - falls) / (1 - falls) if ratio else 1
                mine.append({"task_file": "recall.jsonl", "line": t * prompts + i + 1, "id": "", "task": task,
                             "metric": "string_match_all", "setting": label, "policy": policy, "score": float(right),
                             "answers": ["4711"], "scores": [float(right)], "expected": ["4711"],
                             "context_tokens": 500, "question_tokens": 12, "generated_tokens": 4,
                             "evict_ratio": ratio,
                             "kept_rows": [[round(500 * (1 - ratio))] * HEADS for _ in range(LAYERS)],
                             "kv_bytes": round(1e6 * (1 - ratio)), "full_kv_bytes": 1000000,
                             "prefill_seconds": 0.01, "decode_seconds": 0.02})
            everything += mine
            rows.append(summary_row(task, label, policy, kind, value, mine))
        rows.append(summary_row("all", label, policy, kind, value, everything))
        records += everything
    summary = {"format": "kvzap.evaluation_summary", "format_version": 1, "model": model, "rows": rows}
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps(summary))
    return summary


def summary_row(task, label, policy, kind, value, records):
    mean = lambda name: sum(r[name] for r in records) / len(records)  # noqa: E731
    accuracy, ratio = mean("score"), mean("evict_ratio")
    error = 2 * (accuracy * (1 - accuracy) / len(records)) ** 0.5
    shape = [[min(1, max(0, 1 - ratio * 2 * noise(policy, layer, head))) for head in range(HEADS)]
             for layer in range(LAYERS)]
    row = {"task": task, "setting": label, "policy": policy, "prompts": len(records), "accuracy": accuracy,
           "accuracy_low": max(0, accuracy - error), "accuracy_high": min(1, accuracy + error),
           "evict_ratio_mean": ratio, "evict_ratio_min": min(r["evict_ratio"] for r in records),
           "evict_ratio_max": max(r["evict_ratio"] for r in records), "kv_bytes": mean("kv_bytes"),
           "full_kv_bytes": mean("full_kv_bytes"), "prefill_seconds": sum(r["prefill_seconds"] for r in records),
           "decode_seconds": sum(r["decode_seconds"] for r in records), "keep_ratio": shape}
    if kind:
        row[kind] = value
    return row
