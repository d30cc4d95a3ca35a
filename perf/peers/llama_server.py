#!/usr/bin/env python3
"""llama.cpp's server of the package xllamacpp at a port, until SIGTERM. Each of --parallel slots has room for --context tokens, K and V in 16 bits."""
import argparse
import signal

import xllamacpp


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.hostnames, parameters.port = ["127.0.0.1"], options.port
    parameters.n_ctx, parameters.n_parallel, parameters.kv_unified = options.context * options.parallel, options.parallel, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    # No copies of earlier prompts' caches beside the context.
    parameters.cache_ram_mib = parameters.n_ctx_checkpoints = 0
    parameters.verbosity = 1
    # The server ends with the object.
    server = xllamacpp.Server(parameters)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
