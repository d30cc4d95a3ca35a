"""Sampling options, and the names that other libraries give them."""
from __future__ import annotations

import difflib
import json
import secrets
from typing import Any

NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repeat_last_n")
GRAMMARS = ("json_schema", "grammar", "regex")
OWN = {"ask": ("question", "max_new_tokens", "on_text"), "stream": ("question", "max_new_tokens"),
       "generate": ("prompts", "max_new_tokens"),
       "LLM": ("model", "pruning", "dtype", "kv_type", "weights", "threads", "max_context", "chat_template", "thinking",
               "system", "progress", "comm", "lookup", "read_pages")}
# Names of transformers, vLLM, llama.cpp, OpenAI and ollama.
_ANSWER = "max_new_tokens of ask, stream and generate"
FOREIGN = {
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length", "n_predict", "num_predict", "max_completion_tokens"), _ANSWER),
    **dict.fromkeys(("temp", "do_sample"), "temperature (0 is greedy)"),
    **dict.fromkeys(("stop", "stop_strings", "stop_sequences", "eos_token_id", "stop_token_ids"),
                    "on_text, which ends an answer by returning False"),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), "presence_penalty and frequency_penalty"),
    **dict.fromkeys(("streamer", "stream"), "stream"), "random_seed": "seed",
    **dict.fromkeys(("torch_dtype", "precision"), "dtype"), "tensor_parallel_size": "comm",
    **dict.fromkeys(("n_ctx", "max_model_len", "num_ctx", "max_seq_len", "ctx_size"), "max_context"),
    **dict.fromkeys(("n_threads", "num_threads"), "threads"),
    **dict.fromkeys(("cache_type", "kv_cache_dtype", "cache_dtype"), "kv_type"),
    **dict.fromkeys(("quantization", "load_in_8bit", "load_in_4bit"), "weights"),
    **dict.fromkeys(("device", "device_map", "n_gpu_layers"), "none: a package computes where its Kokkos does"),
    **dict.fromkeys(("policy", "press"), "pruning"), "enable_thinking": "thinking",
    "prompt_lookup_num_tokens": "lookup", "system_prompt": "system",
    "model_path": "model",
    **dict.fromkeys(("response_format", "guided_json", "schema"), "json_schema"),
    **dict.fromkeys(("guided_regex", "pattern"), "regex"), "guided_grammar": "grammar",
}


def _schema_text(schema: Any) -> str:
    """The text of a schema: a text, a dictionary, or a class of pydantic."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return schema if isinstance(schema, str) else json.dumps(schema)


def checked(call: str, given: dict[str, Any], comm: Any) -> dict[str, Any]:
    """Sampling options, with a random seed for -1 (of rank 0 if there are several) and schemas as texts. Raises TypeError for other names."""
    for name in given:
        if name in NAMES or (name in GRAMMARS and call != "LLM"):
            continue
        if name in FOREIGN:
            raise TypeError(f"{call}: unexpected keyword argument {name!r}; kvzap's is {FOREIGN[name]}")
        near = difflib.get_close_matches(name, (*NAMES, *OWN[call]), 1)
        raise TypeError(f"{call}: unexpected keyword argument {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    grammars = [name for name in GRAMMARS if given.get(name) is not None]
    if len(grammars) > 1:
        raise TypeError(f"{call}: {grammars[0]} and {grammars[1]} exclude each other")
    given = {name: value for name, value in given.items() if name not in GRAMMARS or value is not None}
    if "json_schema" in given:
        given = {**given, "json_schema": _schema_text(given["json_schema"])}
    if given.get("seed") == -1:
        seed = secrets.randbits(63)
        given = {**given, "seed": comm.bcast(seed) if comm is not None else seed}
    return given
