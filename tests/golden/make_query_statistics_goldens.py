#!/usr/bin/env python3
"""Writes tests/golden/collect/MODEL.queries.safetensors: what kvpress collects of queries.

Run from anywhere, without network access; takes seconds:

    python3 -m venv venv && venv/bin/pip install kvpress==0.5.5 transformers==5.24.0 torch safetensors
    venv/bin/python tests/golden/make_query_statistics_goldens.py inputs/models/recall-4m \\
        tests/golden/models/qwen2-random

kvpress' own collect_queries (presses/expected_attention_with_stats.py) runs over the texts of
tests/golden/collect/texts.jsonl, which take the place of the data set that it would load; none is cut.
Models run in float32 (kvpress' main uses bfloat16).

    layers                    which layers are here: the first and the last
    queries                   how many of each head: the tokens but each text's first 4
    query_mean, query_cov     (layer, query head, head_dim) and (layer, query head, head_dim, head_dim), made in
                              float64 from the queries that collect_queries gives back, and checked
                              against its own float32 results
"""

import argparse
import json
import pathlib

import datasets
import safetensors.torch
import torch
from kvpress.presses import expected_attention_with_stats as kvpress_statistics
from transformers import AutoModelForCausalLM

OUT = pathlib.Path(__file__).resolve().parent / "collect"
SINK = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    lines = (OUT / "texts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    kvpress_statistics.load_dataset = lambda *_, **__: datasets.Dataset.from_dict({"text": texts})
    for folder in parser.parse_args().models:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        longest = max(map(len, texts))
        queries, mean, covariance = kvpress_statistics.collect_queries(
            model, "texts", len(texts), longest, SINK, text_column="text"
        )
        exact = torch.cat(queries, dim=-2).double()
        count = exact.shape[-2]
        exact_mean = exact.mean(dim=-2)
        centred = exact - exact_mean.unsqueeze(-2)
        exact_covariance = centred.transpose(-2, -1) @ centred / (count - 1)
        torch.testing.assert_close(mean, exact_mean.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(covariance, exact_covariance.float(), rtol=1e-4, atol=1e-4)
        layers = torch.tensor([0, len(mean) - 1])
        tensors = {
            "layers": layers,
            "queries": torch.tensor([count]),
            "query_mean": exact_mean[layers].float(),
            "query_cov": exact_covariance[layers].float(),
        }
        safetensors.torch.save_file(tensors, OUT / f"{folder.resolve().name}.queries.safetensors")
        print(folder.name, count, exact_covariance.diagonal(dim1=-2, dim2=-1).mean().item())


if __name__ == "__main__":
    main()
