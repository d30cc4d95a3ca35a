#!/usr/bin/env python3
"""Answers prompts with OpenVINO GenAI, with a full KV cache and with its cache eviction.

Settings:
  full           all tokens, K and V in 16 bits
  full-u8        all tokens, K and V in OpenVINO's 8-bit format, with its scales
  METHOD@RATIO   eviction; K and V in 16 bits
METHOD is an aggregation of attention scores (sum, norm-sum) with any of these:
  +snapkv    scores of the prompt's last 8 tokens and of new tokens, instead of all
  +kvcrush   one eighth of the kept blocks are chosen by KVCrush (anchor: mean)
norm-sum+snapkv is the engine's default. Left out, because they fail in version 2026.4.1: the aggregation Adaptive
R-KV, which stops at a check of its own when it has to evict from a prompt, and apply_rotation, which does so when the
eviction moves K by more blocks than a prefill chunk of 256 tokens has, and assumes a RoPE base of 10,000.

The engine evicts blocks of 32 tokens, in each layer the same for all heads. It evicts only after the first decode
step: the full cache answers the whole prompt and the first two new tokens, so the peak of memory is that of the
prompt. It keeps the first block, the newest (a quarter of the kept ones, at most four) and the best between them:
(1 - RATIO) of the prompt's tokens, rounded up to whole blocks, at least three blocks, with KVCrush four.

evict_ratio: tokens that the first eviction removes, divided by the prompt's; 0 if the answer ends before it.
kv_bytes: the largest number of occupied blocks (PipelineMetrics.cache_usage after each step) times the bytes
of a block. The pool of blocks is larger and allocated before.

--model is a GGUF file. OpenVINO rounds the zero points of Q4_1 and reads no BF16, so the program writes weights
of all types as F16 (gguf_files.py) into a temporary folder. The engine chooses the type of its products: bf16 where
the processor has instructions for them.
"""
import math
import pathlib
import tempfile
import time

import numpy
import openvino
import openvino_genai as genai

import gguf_files
import records

BLOCK = 32  # tokens; the engine's, on CPUs
MOST_RECENT = 4  # blocks; the engine's default
SNAPKV_WINDOW = 8  # tokens; the engine's default
METHODS = ("sum", "norm-sum", "sum+snapkv", "norm-sum+snapkv", "norm-sum+snapkv+kvcrush")
RATIOS = ("0.5", "0.75")


def settings():
    return ["full", "full-u8"] + [f"{method}@{ratio}" for method in METHODS for ratio in RATIOS]


def parse(setting):
    """Aggregation, set of extras and ratio of a setting with eviction."""
    method, _, ratio = setting.partition("@")
    aggregation, *extras = method.split("+")
    if aggregation not in ("sum", "norm-sum") or not set(extras) <= {"snapkv", "kvcrush"}:
        raise ValueError(f"--settings: expected full, full-u8 or METHOD@RATIO, found {setting}")
    try:
        value = float(ratio)
    except ValueError:
        value = 0
    if not 0 < value < 1:
        raise ValueError(f"--settings: {method}: expected a ratio between 0 and 1 after @, found '{ratio}'")
    return aggregation, set(extras), value


def kept_blocks(setting, tokens):
    """Full blocks that the cache of a prompt keeps beside the last, partial one, after the first new token."""
    _, extras, ratio = parse(setting)
    partial = (tokens + 1) % BLOCK
    blocks = math.ceil((math.ceil((1 - ratio) * tokens) + 1 - partial) / BLOCK)
    return max(blocks, 4 if "kvcrush" in extras else 3)


def eviction_config(setting, blocks):
    aggregation, extras, _ = parse(setting)
    crush = max(1, blocks // 8) if "kvcrush" in extras else 0
    recent = min(MOST_RECENT, max(1, blocks // 4))
    config = genai.CacheEvictionConfig(
        BLOCK, recent * BLOCK, (blocks - crush) * BLOCK,
        getattr(genai.AggregationMode, aggregation.replace("-", "_").upper()),
        snapkv_window_size=SNAPKV_WINDOW if "snapkv" in extras else 0,
    )
    config.kvcrush_config = genai.KVCrushConfig(crush, genai.KVCrushAnchorPointMode.MEAN)
    return config


class OpenVino:
    name = "openvino"

    def __init__(self, options):
        for setting in options.settings:
            if setting not in ("full", "full-u8"):
                parse(setting)
        self.version = genai.__version__
        self.threads = options.threads
        self.token_bytes = 2 * gguf_files.kv_values(options.model)
        self.num_blocks = math.ceil(records.longest(options) / BLOCK) + 1
        self.folder = tempfile.TemporaryDirectory(prefix="kvzap-openvino-")
        self.file = pathlib.Path(self.folder.name) / "model.gguf"
        gguf_files.write_f16(options.model, self.file)
        self.tokenizer = genai.Tokenizer(str(self.file))
        self.made = None, None

    def pipeline(self, setting, tokens):
        """The size of the cache belongs to the whole pipeline: another size needs another one."""
        blocks = kept_blocks(setting, tokens) if "@" in setting else None
        if self.made[0] == (setting, blocks):
            return self.made[1]
        self.made = None, None
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = self.num_blocks
        scheduler.enable_prefix_caching = False
        if blocks is not None:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = eviction_config(setting, blocks)
        properties = {"INFERENCE_NUM_THREADS": self.threads,
                      "KV_CACHE_PRECISION": "u8" if setting == "full-u8" else "f16"}
        # The first pipeline leaves its model there, which loads faster than the GGUF file.
        saved = (self.file.parent / "openvino_model.xml").exists()
        if not saved:
            properties["enable_save_ov_model"] = True
        pipeline = genai.ContinuousBatchingPipeline(
            str(self.file.parent if saved else self.file), self.tokenizer, scheduler, "CPU", **properties)
        self.made = (setting, blocks), pipeline
        return pipeline

    def answer(self, setting, row):
        pipeline, stop_ids = self.pipeline(setting, len(row["ids"])), row["stop_ids"]
        config = genai.GenerationConfig()
        config.do_sample = False
        config.max_new_tokens = row["max_new_tokens"]
        config.ignore_eos = not stop_ids
        if stop_ids:
            config.eos_token_id = stop_ids[0]
            config.stop_token_ids = set(stop_ids)
        ids = openvino.Tensor(numpy.array([row["ids"]], dtype=numpy.int64))
        new, blocks, evicted, first = [], [], 0, None
        start = time.perf_counter()
        handle = pipeline.add_request(0, ids, config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            metrics = pipeline.get_metrics()
            blocks.append(round(metrics.cache_usage / 100 * self.num_blocks))
            # In this step the cache held the prompt and all earlier new tokens.
            full = math.ceil((len(row["ids"]) + len(new)) / BLOCK)
            if new and evicted == 0:
                evicted = BLOCK * (full - blocks[-1])
            while handle.can_read():
                for output in handle.read().values():
                    new += output.generated_ids
            if new and first is None:
                first = time.perf_counter()
        end = time.perf_counter()
        if not new:
            raise RuntimeError(f"the engine drew no token, its status is {handle.get_status()}")
        block_bytes = metrics.cache_size_in_bytes // self.num_blocks
        return {
            "answer": self.tokenizer.decode([token for token in new if token not in stop_ids]),
            "prompt_tokens": len(row["ids"]),
            "new_tokens": len(new),
            "evict_ratio": evicted / len(row["ids"]),
            "kv_bytes": max(blocks) * block_bytes,
            "kv_bytes_end": blocks[-1] * block_bytes,
            "kv_bytes_full": (len(row["ids"]) + len(new) - 1) * self.token_bytes,
            "prefill_seconds": first - start,
            "decode_seconds": end - first,
        }


if __name__ == "__main__":
    records.main(__doc__, OpenVino, settings)
