#!/usr/bin/env python3
"""Times prefill and decode of a GGUF file in llama.cpp, through one of two packages.

llama-cpp-python is compiled for this processor, and calls the library directly; the first decode step is not timed.
xllamacpp comes compiled, with kernels up to AVX2; its server object takes token ids, and the times are those that
the server reports. They include drawing a greedy token, less than 1 ms. Both use flash attention, K and V of
--kv-type, and batches of 2,048 tokens in parts of 512. KV bytes are those of all cells of the context, which llama.cpp
allocates at once.

A file that is not there is made from a config.json, with random weights in bf16. Prints one JSON object. Its field
"refused" has the reason if no package is installed or the file cannot be run.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import resource
import time

PACKAGES = {"llama-cpp-python": "llama_cpp", "xllamacpp": "xllamacpp"}
PAD = 256  # llama.cpp rounds a context up to a multiple of this number of cells
BATCH, PART = 2048, 512
KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a value


def make(config, path):
    import gguf_shapes

    gguf_shapes.make(config, path)


def prompt(options):
    import numpy

    return numpy.random.default_rng(1).integers(0, 1000, options.context).tolist()


def cells(options):
    return (options.context + options.new + 2 + PAD - 1) // PAD * PAD


def kv_type(types, options):
    return getattr(types, f"GGML_TYPE_{options.kv_type.upper()}")


def by_library(options):
    """Seconds of the prefill and of a decode step, by llama-cpp-python."""
    import llama_cpp

    model = llama_cpp.Llama(
        options.gguf, n_ctx=cells(options), n_threads=options.threads, n_threads_batch=options.threads,
        type_k=kv_type(llama_cpp, options), type_v=kv_type(llama_cpp, options),
        n_batch=BATCH, n_ubatch=PART, flash_attn=True, verbose=False)  # fmt: skip
    ids = prompt(options)
    begin = time.perf_counter()
    model.eval(ids)
    prefill = time.perf_counter() - begin
    model.eval([5])  # the first one warms up
    begin = time.perf_counter()
    for step in range(options.new):
        model.eval([step + 7])
    return prefill, (time.perf_counter() - begin) / options.new, ""


def by_server(options):
    """The same by xllamacpp."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.gguf
    parameters.n_ctx, parameters.n_parallel = cells(options), 1
    parameters.n_batch, parameters.n_ubatch = BATCH, PART
    parameters.cpuparams.n_threads = options.threads
    parameters.cpuparams_batch.n_threads = options.threads
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    parameters.cache_type_k = parameters.cache_type_v = kv_type(xllamacpp.ggml_type, options)
    # No copies of earlier prompts' caches.
    parameters.cache_prompt, parameters.cache_ram_mib, parameters.n_ctx_checkpoints = False, 0, 0
    parameters.verbosity = 1
    server = xllamacpp.Server(parameters)
    # The prompt gives the first token, so there are options.new steps.
    result = server.handle_completions({
        "prompt": prompt(options), "n_predict": options.new + 1, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True,
        "cache_prompt": False,
    })  # fmt: skip
    if "timings" not in result:
        raise RuntimeError(result.get("error", {}).get("message") or str(result))
    times = result["timings"]
    if (times["prompt_n"], times["predicted_n"]) != (options.context, options.new + 1):
        raise RuntimeError(f"expected {options.context} and {options.new + 1} tokens, the server counts {times}")
    prefill, decode = times["prompt_ms"] / 1000, times["predicted_ms"] / 1000 / options.new
    return prefill, decode, kernels(xllamacpp.get_system_info())


def kernels(system):
    """The widest instruction set of a text such as "CPU : SSE3 = 1 | AVX2 = 1 |"."""
    sets = {entry.split("=")[0].split(":")[-1].strip() for entry in system.split("|") if entry.strip().endswith("= 1")}
    return next((name for name in ("AMX_INT8", "AVX512_VNNI", "AVX512", "AVX2", "AVX") if name in sets), "")


def installed_package(options):
    names = [options.package] if options.package else list(PACKAGES)
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]):
            return name
    raise ImportError(f"llama.cpp is not installed: expected the package {' or '.join(names)}")


def measure(options, package):
    from engines import gguf_files

    run = by_library if package == "llama-cpp-python" else by_server
    prefill, decode, instructions = run(options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "kernels": instructions,
        "file_bytes": os.path.getsize(options.gguf),
        "prefill_s": [prefill],
        "decode_s_per_token": [decode],
        "kv_bytes": round(KV_BYTES[options.kv_type] * gguf_files.kv_values(options.gguf) * cells(options)),
        "peak_rss_bytes": peak,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="folder with a config.json, if the file has to be made")
    parser.add_argument("--gguf", required=True, metavar="FILE", help="made with weights in bf16 if it is not there")
    parser.add_argument("--package", choices=list(PACKAGES), help="default: the first one that is installed")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-type", choices=list(KV_BYTES), default="f16", help="of K and V")
    parser.add_argument("--only-make", action="store_true", help="the file")
    options = parser.parse_args()
    if not os.path.exists(options.gguf):
        if not options.config:
            parser.error(f"--gguf: no file {options.gguf}, and no CONFIG to make it of")
        # By a process of its own, whose memory is not counted.
        maker = multiprocessing.Process(target=make, args=(options.config, options.gguf))
        maker.start()
        maker.join()
        if maker.exitcode != 0:
            raise SystemExit(f"{options.gguf} could not be made")
    if options.only_make:
        return
    result = {"peer": "llama.cpp", "threads": options.threads, "context": options.context}
    try:
        package = installed_package(options)
        result["package"] = f"{package} {importlib.metadata.version(package)}"
        result.update(measure(options, package))
    except (ImportError, RuntimeError, ValueError) as error:
        result["refused"] = " ".join(str(error).split()) or type(error).__name__
    print(json.dumps(result))


if __name__ == "__main__":
    main()
