"""Generate greedily from a GGUF file in llama.cpp (xllamacpp): print a text, or tokens per second and peak memory.

    python recipes/llama_generate.py ticket.gguf --prompt "The function returns"
    python recipes/llama_generate.py ticket.gguf [--new 32] [--threads 2] [--repeats 5]

Memory is that of the separate process that runs llama.cpp (llama_server.py). The KV cache has room for the tokens of
the run only, in float16 (the default); batches have at most 64 tokens.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from llama_server import LlamaServer

PROMPT = list(range(1, 9))


class Generation(LlamaServer):
    """A GGUF file that is loaded in llama.cpp. Calling the object generates `new` tokens."""

    def __init__(self, path: str | Path, new: int, threads: int) -> None:
        self.new = new
        room = -(-(len(PROMPT) + new) // 64) * 64
        super().__init__(path, seconds=600, n_ctx=room, n_batch=64, threads=threads)

    def __call__(self) -> list[int]:
        options = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
        found = self.ask("completion", prompt=PROMPT, n_predict=self.new, **options)
        if found["tokens_predicted"] != self.new:
            raise RuntimeError(f"{self.path}: {found['tokens_predicted']} tokens, not {self.new}")
        return found["tokens"]


def main() -> None:
    """Continue a text with a GGUF file in llama.cpp, or time it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="the GGUF file")
    parser.add_argument("--prompt", help="text to continue; with a prompt nothing is timed")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate (default: 32)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats (default: 5)")
    options = parser.parse_args()
    if options.prompt is not None:
        with LlamaServer(
            options.file, n_ctx=0, threads=options.threads
        ) as server:  # n_ctx=0: the context length of the model
            found = server.ask("completion", prompt=options.prompt, n_predict=options.new, temperature=0)
        print(options.prompt + found["content"])
        return
    with Generation(options.file, options.new, options.threads) as generate:
        seconds = []
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            generate()
            seconds.append(time.perf_counter() - started)
        peak = generate.peak_bytes()
    facts = {"tokens_per_second": options.new / statistics.median(seconds[1:]), "peak_bytes": peak}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
