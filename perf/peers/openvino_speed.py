#!/usr/bin/env python3
"""Times prefill and decode of a GGUF file in OpenVINO GenAI (continuous batching, one sequence, greedy).

OpenVINO reads the file itself and chooses the types of its products. The KV cache has 16 bits, as kvzap's, or with
--kv-type u8 the engine's own default of 8. One prefill step takes the whole prompt, after a short one that compiles
kernels. This is faster than the default of 256 tokens a step: 11 s instead of 18 s for 2,048 tokens of Qwen3-0.6B in
Q8_0, on two busy Xeon cores.
Prefill ends with the first token, and the first decode step is not timed. KV bytes are those of the occupied blocks of
32 tokens, the peak is that of the process, which also converts the file.

Prints one JSON object. Its field "refused" has OpenVINO's reason if it cannot run the file.
"""
import argparse
import json
import math
import os
import resource
import time

BLOCK = 32  # tokens; the engine's, on CPUs
SHORT = 64  # tokens of the untimed prefill


def request(pipeline, number, ids, new):
    """Times of all steps in which the sequence got a token, and the largest share of the cache in use."""
    import numpy
    import openvino
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, new
    tensor = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
    times, usage = [time.perf_counter()], 0.0
    handle = pipeline.add_request(number, tensor, config)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        drawn = 0
        while handle.can_read():
            drawn += sum(len(output.generated_ids) for output in handle.read().values())
        usage = max(usage, pipeline.get_metrics().cache_usage)
        times += [time.perf_counter()] * drawn
    if len(times) != new + 1:
        raise RuntimeError(f"expected {new} tokens, the engine drew {len(times) - 1}")
    return times, usage


def measure(options):
    import numpy
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = math.ceil((options.context + options.new + 2) / BLOCK) + 1
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = max(options.context, SHORT)
    pipeline = genai.ContinuousBatchingPipeline(
        options.gguf, genai.Tokenizer(options.gguf), scheduler, "CPU",
        INFERENCE_NUM_THREADS=options.threads, KV_CACHE_PRECISION=options.kv_type)  # fmt: skip
    ids = numpy.random.default_rng(1).integers(0, 1000, options.context).tolist()
    request(pipeline, 0, ids[:SHORT], 3)
    times, usage = request(pipeline, 1, ids, options.new + 2)
    size = pipeline.get_metrics().cache_size_in_bytes
    return {
        "prefill_s": [times[1] - times[0]],
        "decode_s_per_token": [(times[-1] - times[2]) / options.new],
        "kv_bytes": round(usage / 100 * scheduler.num_kv_blocks) * (size // scheduler.num_kv_blocks),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", metavar="FILE.gguf")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-type", choices=["f16", "u8"], default="f16", help="of K and V")
    options = parser.parse_args()
    result = {"peer": "openvino", "threads": options.threads, "context": options.context}
    try:
        import openvino_genai as genai

        result["package"] = f"openvino-genai {genai.__version__.split('-')[0]}"
        result.update(measure(options))
    except (ImportError, RuntimeError, ValueError) as error:
        # The first line names a place in OpenVINO's source.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        result["refused"] = " ".join(lines) or type(error).__name__
    print(json.dumps(result))


if __name__ == "__main__":
    main()
