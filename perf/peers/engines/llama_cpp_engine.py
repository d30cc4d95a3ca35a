#!/usr/bin/env python3
"""Answers prompts with llama.cpp (the server in the package xllamacpp), with K and V of several types.

Settings: f16 (the full cache in 16 bits), bf16, q8_0 and q4_0, for K and V alike, all with flash attention,
which quantised V needs. llama.cpp evicts nothing: evict_ratio is 0.

kv_bytes: the cells of all tokens but the last, times the bytes of K and V of the type in all layers. llama.cpp
allocates the cells of the whole context before. Seconds are those that the server reports.

--model is a GGUF file. The prebuilt package has kernels for AVX2 only. Generation ends at the end token of the
file, so the prompts' stop_ids must hold it.
"""
import gguf
import xllamacpp

import gguf_files
import records

SETTINGS = ("f16", "bf16", "q8_0", "q4_0")
PAD = 256  # llama.cpp rounds a context up to a multiple of this number of cells


def settings():
    return list(SETTINGS)


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, options):
        records.check_settings(options, SETTINGS)
        self.version = f"xllamacpp {xllamacpp.__version__}"
        self.model = str(options.model)
        self.threads = options.threads
        self.kv_values = gguf_files.kv_values(options.model)
        self.end = gguf_files.reader(options.model).fields["tokenizer.ggml.eos_token_id"].contents()
        self.context = (records.longest(options) + PAD - 1) // PAD * PAD
        self.made = None, None

    def server(self, setting):
        if self.made[0] == setting:
            return self.made[1]
        self.made = None, None
        parameters = xllamacpp.CommonParams()
        parameters.model.path = self.model
        parameters.n_ctx = self.context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = self.threads
        parameters.cpuparams_batch.n_threads = self.threads
        parameters.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{setting.upper()}")
        parameters.cache_type_v = parameters.cache_type_k
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        # No copies of earlier prompts' caches.
        parameters.cache_prompt = False
        parameters.cache_ram_mib = 0
        parameters.n_ctx_checkpoints = 0
        parameters.verbosity = 1
        self.made = setting, xllamacpp.Server(parameters)
        return self.made[1]

    def answer(self, setting, row):
        if self.end not in row["stop_ids"]:
            raise ValueError(f"stop_ids: expected the end token of {self.model}, {self.end}, found {row['stop_ids']}")
        result = self.server(setting).handle_completions({
            "prompt": row["ids"], "n_predict": row["max_new_tokens"], "samplers": ["top_k"], "top_k": 1,
            "cache_prompt": False,
        })
        if "choices" not in result:
            raise RuntimeError(result.get("error", result))
        tokens, new = result["usage"]["prompt_tokens"], result["usage"]["completion_tokens"]
        if tokens != len(row["ids"]):
            raise RuntimeError(f"ids: expected {len(row['ids'])} tokens of the prompt, the engine counts {tokens}")
        values = (tokens + new - 1) * self.kv_values
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[setting.upper()]]
        return {
            "answer": result["choices"][0]["text"],
            "prompt_tokens": tokens,
            "new_tokens": new,
            "evict_ratio": 0.0,
            "kv_bytes": values // block * block_bytes,
            "kv_bytes_end": values // block * block_bytes,
            "kv_bytes_full": 2 * values,
            "prefill_seconds": result["timings"]["prompt_ms"] / 1000,
            "decode_seconds": result["timings"]["predicted_ms"] / 1000,
        }


if __name__ == "__main__":
    records.main(__doc__, LlamaCpp, settings)
