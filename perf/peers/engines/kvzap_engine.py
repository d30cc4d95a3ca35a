#!/usr/bin/env python3
"""Answers prompts with kvzap's own Python package, with full and pruned caches and K and V of several types.

Settings: full and kvzap (the recommended threshold of --surrogate), each alone and with -q8 or -q4, for --kv-type.
The whole prompt is the context: KVzap's scores depend on hidden states alone, and the question lies in the window.

kv_bytes: the peak of all pages, a layer's full rows in prefill among them; kv_bytes_end: the rows at the end.
Seconds are measured around the calls.

--model is a GGUF file or a folder. Weights are unpacked to bf16, as other engines have them.
"""
import time

import kvzap

import records

SETTINGS = tuple(name + kv_type for name in ("full", "kvzap") for kv_type in ("", "-q8", "-q4"))


def settings():
    return list(SETTINGS)


class Kvzap:
    name = "kvzap"
    version = kvzap.__version__

    def __init__(self, options):
        records.check_settings(options, SETTINGS)
        self.options = options
        if options.surrogate is None and any(setting.startswith("kvzap") for setting in options.settings):
            raise ValueError("--settings: kvzap needs --surrogate")
        self.made = None, None

    def llm(self, setting):
        if self.made[0] != setting:
            name, _, kv_type = setting.partition("-")
            pruning = f"kvzap@surrogate={self.options.surrogate}@threshold=auto" if name == "kvzap" else None
            self.made = None, None
            self.made = setting, kvzap.LLM(str(self.options.model), pruning, weights="unpacked", threads=self.options.threads,
                                           chat_template=False, kv_type=kv_type or None)
        return self.made[1]

    def answer(self, setting, row):
        first = []

        def on_text(_):
            if not first:
                first.append(time.perf_counter())

        with self.llm(setting).session() as session:
            start = time.perf_counter()
            session.read(row["ids"])
            answer = session.ask(max_new_tokens=row["max_new_tokens"], on_text=on_text)
            end = time.perf_counter()
            report, new = session.report, len(session.answer_ids)
            if session.context_ids.tolist() != row["ids"]:
                raise RuntimeError(f"ids: the context has {len(session.context_ids)} tokens, expected {len(row['ids'])}")
        return {
            "answer": answer,
            "prompt_tokens": len(row["ids"]),
            "new_tokens": new,
            "evict_ratio": report.evict_ratio,
            "kv_bytes": report.peak_allocated_bytes,
            "kv_bytes_end": report.live_bytes,
            "kv_bytes_full": report.full_bytes,
            "prefill_seconds": (first[0] if first else end) - start,
            "decode_seconds": end - first[0] if first else 0.0,
        }


if __name__ == "__main__":
    records.main(__doc__, Kvzap, settings)
