"""Run llama.cpp (xllamacpp) in a separate process, which is killed if it does not answer in time.

    with LlamaServer("ticket.gguf", threads=2) as server:
        server.ask("completion", prompt="The function returns", n_predict=40)["content"]

`xllamacpp.Server` cannot be ended safely: its destructor waits for a thread that may never end, and Python
cannot interrupt it. Therefore it runs in a child process, which is killed without cleaning up. Run as a script, this
file is that child: it reads one JSON request per line and writes one JSON answer per line. The child imports
nothing but llama.cpp, so its resident memory is that of running the GGUF file.
"""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 120.0  # to load a file, or to answer


class LlamaServer:
    """A GGUF file that is loaded in llama.cpp. `settings` are arguments of `make_options`."""

    def __init__(self, path: str | Path, seconds: float = SECONDS, **settings: Any) -> None:
        self.path, self.seconds = path, seconds
        words = [sys.executable, __file__, json.dumps({"path": str(path), "seconds": seconds, **settings})]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._exchange("")  # wait for the line that says that the file is loaded

    def ask(self, what: str, **question: Any) -> Any:
        """Return the answer of an endpoint of llama.cpp's HTTP server, such as completion or tokenize."""
        return self._exchange(json.dumps({"what": what, "question": question}) + "\n")

    def peak_bytes(self) -> int:
        """Return the peak resident memory so far. Linux only."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # closing fails if a request is still unread: it is dropped
                pipe.close()

    def __enter__(self) -> "LlamaServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, request: str) -> Any:
        late = threading.Event()

        def kill() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(self.seconds, kill)
        timer.start()
        line = ""
        try:
            with suppress(BrokenPipeError):
                self.process.stdin.write(request)
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
            if not line:
                self.close()
        if late.is_set():
            raise TimeoutError(f"{self.path}: llama.cpp did not answer within {self.seconds:g} seconds")
        if not line:
            raise RuntimeError(f"{self.path}: llama.cpp ended with code {self.process.returncode}")
        return json.loads(line)


def make_options(
    path: str, n_ctx: int, threads: int = 1, n_batch: int | None = None, exact: bool = False
) -> Any:
    """Return options for llama.cpp. With `exact`, keys and values are in float32, as in transformers."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = path
    options.n_ctx, options.n_parallel = n_ctx, 1
    if n_batch is not None:
        options.n_batch = options.n_ubatch = n_batch
    options.warmup, options.fit_params, options.verbosity = False, False, -1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    if exact:
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return options


def serve(seconds: float, **settings: Any) -> None:
    """Answer requests until standard input ends."""
    import xllamacpp

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # send what llama.cpp prints to stderr: it must not mix with the answers
    server = xllamacpp.Server(make_options(**settings))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        data, kind = json.dumps(request["question"]).encode(), {"Content-Type": "application/json"}
        message = urllib.request.Request(f"{server.listening_address}/{request['what']}", data, kind)
        with urllib.request.urlopen(message, timeout=seconds) as answer:
            print(json.dumps(json.load(answer)), file=answers, flush=True)


if __name__ == "__main__":
    code = 1
    try:
        serve(**json.loads(sys.argv[1]))
        code = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)  # without the destructor of the server
