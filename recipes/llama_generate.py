"""Greedy tokens of a GGUF file in llama.cpp (xllamacpp): how many a second, and the most memory it took.

    python recipes/llama_generate.py ticket.gguf [--new 32] [--threads 2] [--repeats 5]

Imports nothing but llama.cpp, so that the resident memory of the process is that of running the file.
Keys and values are for the tokens of the run and float16, as by default; batches are of 64 tokens at most.
"""

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import xllamacpp

PROMPT = list(range(1, 9))


def generation(path: str | Path, new: int, threads: int) -> Callable[[], list[int]]:
    """A function that generates so many tokens, of a file that is loaded here."""
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel = -(-(len(PROMPT) + new) // 64) * 64, 1
    options.n_batch = options.n_ubatch = 64
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    options.warmup, options.fit_params, options.verbosity = False, False, -1
    server = xllamacpp.Server(options)
    question = {
        "prompt": PROMPT,
        "n_predict": new,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    data, kind = (
        json.dumps({**question, "return_tokens": True}).encode(),
        {"Content-Type": "application/json"},
    )

    def generate() -> list[int]:
        request = urllib.request.Request(f"{server.listening_address}/completion", data, kind)
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        if found["tokens_predicted"] != new:
            raise RuntimeError(f"{path}: {found['tokens_predicted']} tokens, not {new}")
        return found["tokens"]

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="the GGUF file")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats (default: 5)")
    options = parser.parse_args()
    generate, seconds = generation(options.file, options.new, options.threads), []
    for _ in range(options.repeats + 1):
        started = time.perf_counter()
        generate()
        seconds.append(time.perf_counter() - started)
    peak = 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # on Linux
    facts = {"tokens_per_second": options.new / statistics.median(seconds[1:]), "peak_bytes": peak}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
