#!/usr/bin/env python3
"""kvzap collect beside kvpress' own collector: the same texts, model and cores, in turn.

  build/peers/bin/python perf/peers/collect_pairs.py --kvpress CHECKOUT --texts TEXTS.jsonl -m FOLDER

kvpress' collector (KVzapDataCollector in kvzap/data.py) is not in its package: CHECKOUT is a checkout of its
repository. It runs the model once over each text and its repetition, with transformers' eager attention, which keeps
all weights. TEXTS.jsonl is a file for kvzap collect, such as scripts/train-real-model --texts writes; FOLDER a Hugging
Face folder that both read (kvzap convert makes one of a GGUF file). Both take the first --max-texts texts, in bfloat16.

kvzap's seconds are those of the whole program, which writes a file of all pairs of each text. kvpress' are those of
collect() alone, with the model in memory, which returns --tokens pairs of each text. Figures are medians over --rounds.
With --max-texts of 2 and more, the rate of kvzap grows a little, because it loads the model once.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import pandas
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def kvzap_seconds(options, texts, folder):
    command = [options.kvzap, "collect", "-q", "-m", options.model, "-f", texts, "--compression", "0", "-t", options.threads,
               "-o", folder / "pairs.h5"]
    begin = time.perf_counter()
    done = subprocess.run([str(part) for part in command], stdout=subprocess.DEVNULL,
                          env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}")
    (folder / "pairs.h5").unlink()
    return seconds


def kvpress_seconds(collector, rows, options):
    begin = time.perf_counter()
    collector.collect(pandas.DataFrame(rows), n_tokens=options.tokens)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress", type=pathlib.Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--texts", type=pathlib.Path, required=True)
    parser.add_argument("-m", "--model", type=pathlib.Path, required=True)
    parser.add_argument("--kvzap", type=pathlib.Path, default=ROOT / "build/kvzap")
    parser.add_argument("--max-texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=500, help="pairs that kvpress keeps of a text; fewer than any has")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sys.path.insert(0, str(options.kvpress / "kvzap"))
    import data
    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16,
                                                              attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    collector = data.KVzapDataCollector(model, tokenizer)
    rows = [json.loads(line) for line in options.texts.read_text().splitlines()[:options.max_texts]]
    tokens = sum(len(tokenizer.encode(row["text"])) for row in rows)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        texts = folder / "texts.jsonl"
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for _ in range(options.rounds):
            ours.append(kvzap_seconds(options, texts, folder))
            theirs.append(kvpress_seconds(collector, rows, options))
            print(f"kvzap {ours[-1]:.1f} s, kvpress {theirs[-1]:.1f} s", file=sys.stderr, flush=True)
    ours, theirs = statistics.median(ours), statistics.median(theirs)
    print(json.dumps({"texts": len(rows), "tokens": tokens, "threads": options.threads, "rounds": options.rounds,
                      "kvzap_seconds": ours, "kvpress_seconds": theirs, "kvzap_tokens_per_second": tokens / ours,
                      "kvpress_tokens_per_second": tokens / theirs, "ratio": theirs / ours}, indent=1))


if __name__ == "__main__":
    main()
