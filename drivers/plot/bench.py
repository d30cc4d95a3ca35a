"""`kvzap-plot bench`: speed and memory against the tokens in the cache."""
import json
import pathlib

from .errors import expect, integers, is_number, plain
from .files import read_report


class Bench:
    """A table of `kvzap bench`: rows by the names of its fields, model and machine in words."""

    NUMBERS = ("batch", "evict_ratio", "skew", "depth", "tokens_per_second", "tokens_per_second_stddev", "evicted",
               "kv_live_bytes", "kv_allocated_bytes")

    def __init__(self, file):
        report = read_report(file, "kvzap.bench")
        results = report.get("results")
        expect(isinstance(results, list) and results, file, "results", "a list that is not empty",
               json.dumps(results)[:60])
        self.rows = []
        for i, result in enumerate(results):
            row = {}
            for name in ("test", *self.NUMBERS):
                value = result.get(name) if isinstance(result, dict) else None
                good = isinstance(value, str) if name == "test" else is_number(value)
                expect(good, file, f"results[{i}].{name}", "text" if name == "test" else "a number",
                       json.dumps(value)[:60])
                row[name] = value
            self.rows.append(row)
        model, system = (report.get(name) if isinstance(report.get(name), dict) else {} for name in ("model", "system"))
        options = report.get("options") if isinstance(report.get("options"), dict) else {}
        words = [model.get("name"), options.get("dtype")]
        if integers([model.get("layers"), model.get("all_layers")]) and model["layers"] != model["all_layers"]:
            words[0] = f"{model.get('name')} ({model['layers']} of {model['all_layers']} layers)"
        ranks = system.get("ranks")
        words.append(f"{ranks} rank{'s' if ranks != 1 else ''}" if integers([ranks]) else None)
        words.append(system.get("processor"))
        self.words = ", ".join(plain(word, 60) for word in words if isinstance(word, str) and word)


def plot_bench(options, pyplot):
    tables = {file: Bench(file) for file in options.files}
    tests = {}
    for file, table in tables.items():
        source = f"{pathlib.Path(file).stem}: " if len(tables) > 1 else ""
        for row in table.rows:
            label = f"{source}evict ratio {row['evict_ratio']:g}"
            label += f", heads 1:{row['skew']:g}" if row["skew"] != 1 else ""
            label += f", batch {row['batch']}" if row["batch"] != 1 else ""
            tests.setdefault(row["test"], {}).setdefault(label, []).append(row)
    figure, axes = pyplot.subplots(3, len(tests), squeeze=False, sharex="col", constrained_layout=True,
                                   gridspec_kw={"height_ratios": (3, 2, 2)}, figsize=(0.6 + 4.2 * len(tests), 6.6))
    largest = max(row["kv_allocated_bytes"] for lines in tests.values() for rows in lines.values() for row in rows)
    unit, divisor = next((u, d) for u, d in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if largest >= d or d == 1)
    for column, (test, lines) in zip(axes.T, tests.items()):
        for label, rows in lines.items():
            rows = sorted(rows, key=lambda row: row["depth"])
            depths, rates, deviations, live, allocated, evicted = (
                [row[name] for row in rows] for name in ("depth", "tokens_per_second", "tokens_per_second_stddev",
                                                         "kv_live_bytes", "kv_allocated_bytes", "evicted"))
            color = column[0].errorbar(depths, rates, deviations, marker="o", capsize=2, label=label)[0].get_color()
            column[1].plot(depths, [value / divisor for value in allocated], marker="o", color=color)
            column[1].plot(depths, [value / divisor for value in live], color=color, linestyle=":", linewidth=1)
            column[2].plot(depths, evicted, marker="o", color=color)
        column[0].set_title(test)
        column[2].set_ylim(-0.03, 1.03)
        for ax in column:
            ax.grid(True, alpha=0.3)
        for ax in column[:2]:
            ax.set_ylim(bottom=0)
        column[0].legend(fontsize=7)
    for ax, name in zip(axes[:, 0], ("tokens/s", f"KV, {unit}\n(dotted: live)", "evicted,\nreached")):
        ax.set_ylabel(name)
    figure.supxlabel("tokens in the cache before", fontsize=pyplot.rcParams["axes.labelsize"])
    figure.suptitle("\n".join(dict.fromkeys(table.words for table in tables.values())), fontsize=pyplot.rcParams["axes.labelsize"])
    return figure
