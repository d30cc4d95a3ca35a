# Splits of a model and its rows over ranks, placed by the engine's own code.
import json
import subprocess

import cost

PAGE_ROWS = 64
WINDOW = 128
# Name of a split -> its title.
SPLITS = {
    "heads": "heads only",
    "pages": "heads and pages, balanced",
    "even": "rows evenly (ideal)",
    "replicas": "replicas, each with the better of both",
}


class Replayer:
    """Runs perf/replay_placement."""

    def __init__(self, program, tolerance=0.05, placement="even", page_rows=PAGE_ROWS):
        self.program, self.tolerance, self.placement, self.page_rows = program, tolerance, placement, page_rows

    def __call__(self, shape, rows, ranks, window=WINDOW):
        """Returns {ranks: layers}, the layers as replay_placement prints them."""
        given = {"rows": rows, "ranks": ranks, "group": shape.group, "head_dim": shape.dim,
                 "page_rows": self.page_rows, "window": window, "tolerance": self.tolerance,
                 "placement": self.placement}
        try:
            run = subprocess.run([str(self.program)], input=json.dumps(given), stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
        except OSError as error:
            raise ValueError(f"{self.program}: {error.strerror}; build it with -DKVZAP_ENABLE_PERF=ON") from error
        if run.returncode != 0:
            raise ValueError(run.stderr.strip())
        return {entry["ranks"]: entry["layers"] for entry in json.loads(run.stdout)}


def heads_only(layers):
    return [cost.Layer(layer["rows"], layer["before"]) for layer in layers]


def balanced(layers):
    return [cost.Layer(layer["rows"], layer["after"], layer["is_shared"], layer["sent"], layer["received"],
                       layer["messages"]) for layer in layers]


def even(layers, ranks):
    result = balanced(layers)
    for layer in result:
        layer.largest = layer.total / ranks
    return result


def skew(layers, ranks, name):
    """Returns the largest rank's rows over the mean, of the sum over layers and of the worst layer."""
    ratios = [layer[name] * ranks / layer["rows"] for layer in layers if layer["rows"]]
    total = sum(layer[name] for layer in layers) * ranks / sum(layer["rows"] for layer in layers)
    return total, max(ratios)


def candidates(shape, machine, ranks, sequences, placed):
    """Returns {split: (replicas, seconds by part)} of the splits that are possible.

    placed[n]: {ranks: layers} of n sequences. Replicas divide ranks and sequences; the best number of them is taken.
    """
    result = {}

    def step(on, tokens, layers):
        one = cost.Step(shape, machine, on, tokens)
        return one.parts(layers) if one.fits(layers) else None

    here = placed[sequences][ranks]
    if ranks <= shape.kv_heads:
        result["heads"] = (1, step(ranks, sequences, heads_only(here)))
    result["pages"] = (1, step(ranks, sequences, balanced(here)))
    result["even"] = (1, step(ranks, sequences, even(here, ranks)))
    for tokens, by_ranks in placed.items():
        replicas = sequences // tokens
        if replicas < 2 or ranks % replicas or ranks // replicas not in by_ranks:
            continue
        on = ranks // replicas
        layers = by_ranks[on]
        parts = [step(on, tokens, balanced(layers))]
        if on <= shape.kv_heads:
            parts.append(step(on, tokens, heads_only(layers)))
        for one in filter(None, parts):
            best = result.get("replicas")
            if not best or sum(one.values()) < sum(best[1].values()):
                result["replicas"] = (replicas, one)
    return {name: found for name, found in result.items() if found[1]}
