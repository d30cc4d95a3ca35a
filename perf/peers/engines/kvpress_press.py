#!/usr/bin/env python3
"""Answers prompts with transformers and kvpress' presses, for perf/peers/quality.

Settings have kvzap's labels: snapkv@evict-ratio=0.5, kvzap@threshold=-4.1722. `kv_bytes` are the bytes of the cache's tensors after
the context: presses with one length for all heads shorten it, the others (+ada, kvzip, kvzap) only mask pairs. `evict_ratio`
is the press's own figure after the context. `prefill_seconds` are those of the context, with the press; `decode_seconds`
those of question and answer.
"""
import importlib.metadata
import pathlib
import sys
import time
import types

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import evaluate  # noqa: E402
from engines import records  # noqa: E402

# kvzip-plus takes two more prefills of each prompt, one setting of it is enough.
POLICIES = ("streaming-llm", "keydiff", "tova", "snapkv", "knorm", "expected-attention", "snapkv+ada")
RATIOS = ("0.5", "0.75")


def settings():
    return ["none", *(f"{policy}@evict-ratio={ratio}" for policy in POLICIES for ratio in RATIOS),
            "kvzip-plus@evict-ratio=0.75"]


class Kvpress:
    name = "kvpress"

    def __init__(self, options):
        for setting in options.settings:
            policy = setting.partition("@")[0]
            if policy not in ("none", *(["kvzap"] if options.surrogate else []), *evaluate.PRESSES):
                raise ValueError(f"--settings: expected none, a policy of perf/peers/evaluate.py or, with --surrogate, "
                                 f"kvzap; found {setting}")
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.version = importlib.metadata.version("kvpress")
        self.peer = evaluate.Peer(types.SimpleNamespace(dtype="bf16", model=options.model, surrogate=options.surrogate,
                                                        window=128))

    def answer(self, setting, row):
        policy, _, amount = setting.partition("@")
        value = float(amount.partition("=")[2]) if amount else None
        press, pipeline = self.peer.press(policy, value), self.peer.pipeline
        cache, prefilled = transformers.DynamicCache(), []
        generate = pipeline.generate_answer

        def generate_timed(**arguments):
            prefilled.append(time.perf_counter())
            prefilled.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
            prefilled.append(arguments["context_length"])
            return generate(**arguments)

        pipeline.generate_answer = generate_timed
        begin = time.perf_counter()
        try:
            answer = pipeline(row["context"], question=row["question"], answer_prefix=row.get("answer_prefix", ""),
                              press=press, cache=cache, max_new_tokens=row["max_new_tokens"])["answer"]
        finally:
            del pipeline.generate_answer
        end = time.perf_counter()
        config = self.peer.model.config
        pair = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return {"answer": answer, "prompt_tokens": len(row["ids"]), "new_tokens": len(pipeline.tokenizer.encode(answer)),
                "evict_ratio": press.compression_ratio if press is not None else 0.0, "kv_bytes": prefilled[1],
                "kv_bytes_full": pair * prefilled[2], "prefill_seconds": prefilled[0] - begin,
                "decode_seconds": end - prefilled[0]}


if __name__ == "__main__":
    records.main(__doc__, Kvpress, settings)
