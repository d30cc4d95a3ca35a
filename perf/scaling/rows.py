# Kept rows of a model that was not run, from those of recorded ones.
import json
import pathlib
import random

RECORDED = pathlib.Path(__file__).resolve().parent / "kept_rows.json"


def load(path=RECORDED):
    return json.loads(pathlib.Path(path).read_text())


def shares(prompt, window):
    """Shares of the rows before the window that each head keeps: [layer][head]."""
    before = prompt["tokens"] - window
    return [[min(1.0, max(0.0, (rows - window) / before)) for rows in layer] for layer in prompt["kept_rows"]]


def slice_mean(ascending, part, parts):
    """Returns the mean of part `part` of `parts` equal parts of a sorted list; elements may be cut."""
    begin, end = part * len(ascending) / parts, (part + 1) * len(ascending) / parts
    total = sum(value * max(0.0, min(end, i + 1) - max(begin, i)) for i, value in enumerate(ascending))
    return total / (end - begin)


def stretched(recorded, layers, heads, order):
    """Maps recorded shares to another number of layers and heads.

    A layer takes the recorded layer at the same relative depth with its two neighbours. Their shares are sorted and
    cut into as many equal parts as there are heads; a head gets the mean of one part. So the mean stays, and the
    spread over heads nearly. `order[layer]` is the permutation that says which head gets which part.
    """
    result = []
    for layer in range(layers):
        at = round(layer * (len(recorded) - 1) / max(1, layers - 1))
        pool = sorted(x for near in recorded[max(0, at - 1):at + 2] for x in near)
        values = [slice_mean(pool, h, heads) for h in range(heads)]
        result.append([values[place] for place in order[layer]])
    return result


def kept(recording, amount, tokens, layers, heads, sequences, window=128, seed=1):
    """Returns rows [sequence][layer][head] of sequences of `tokens` tokens.

    Sequences take the recorded prompts of `amount` in turns. A head has the same place in the order of all of
    them, as long heads of the recorded models are long for every text.
    """
    prompts = [p for p in recording["prompts"] if p["amount"] == amount]
    if not prompts:
        known = sorted({p["amount"] for p in recording["prompts"]})
        raise ValueError(f"no recorded prompts with '{amount}'; expected one of {known}")
    generator = random.Random(seed)
    order = [generator.sample(range(heads), heads) for _ in range(layers)]
    window = min(window, tokens)
    maps = [stretched(shares(p, recording["window"]), layers, heads, order) for p in prompts]
    one = [[[window + round(share * (tokens - window)) for share in layer] for layer in m] for m in maps]
    return [one[s % len(one)] for s in range(sequences)]


def spread(rows):
    """Returns the largest head of a layer over the mean of its heads, averaged over layers and sequences."""
    ratios = [max(layer) * len(layer) / sum(layer) for sequence in rows for layer in sequence]
    return sum(ratios) / len(ratios)
