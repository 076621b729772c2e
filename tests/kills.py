"""Kill writers in the middle of a save. The folder must then load as the old or as the new ticket, with its tokenizer
and generation settings. Also load tickets while two processes overwrite them.

    python -m tests.kills --count 100    # kill -9 in overwriting saves, and the same number in packing

A writer is a separate process that overwrites one folder again and again; it is killed after a random time.
`stops_everywhere` does the same systematically: it stops a process at each call that changes the file system.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from hf_slt import SupermaskGPT2Config, SupermaskGPT2LMHeadModel, verify_ticket
from hf_slt.tickets import files
from hf_slt.tickets.writing import rewrite_ticket

TINY = {
    "n_layer": 1,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 16,
    "scale_with_width": True,
}
IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
CHANGES = ("rename", "replace", "link", "mkdir", "unlink", "rmdir")
Write = Callable[[], Any]


def make_model(seed: int, **changes: Any) -> SupermaskGPT2LMHeadModel:
    """Make a model whose generation settings also differ from those of other models."""
    model = SupermaskGPT2LMHeadModel(SupermaskGPT2Config(**(TINY | {"seed": seed} | changes))).eval()
    model.generation_config.max_new_tokens = seed
    return model


def save_with_tokenizer(model: Any, folder: Path, **options: Any) -> None:
    """Save a ticket, and a file in place of its tokenizer, in one step."""
    with files.staged(folder) as stage:
        model.save_ticket(stage, **options)
        (stage / "tokenizer.json").write_text(str(model.config.seed))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(IDS).logits


def loads_as(folder: Path, known: dict[str, torch.Tensor], *, ticket: bool = True) -> str:
    """Load a folder in every way and return the name of its model. Its other files must belong to the same model."""
    if ticket:
        verify_ticket(folder)
    found = set()
    for load in (SupermaskGPT2LMHeadModel.from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(folder)
        logits = logits_of(model)
        found.add(next((name for name, one in known.items() if torch.equal(logits, one)), "neither"))
        assert model.generation_config.max_new_tokens == model.config.seed
        if (folder / "tokenizer.json").exists():
            assert (folder / "tokenizer.json").read_text() == str(model.config.seed)
    assert len(found) == 1, found
    return found.pop()


def run_killed(write: Write, stop: int) -> bool:
    """Run a write in a process that is killed after `stop` calls that change the file system."""
    calls = 0

    def dying(function: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def run() -> None:
        patches = [mock.patch.object(os, name, dying(getattr(os, name))) for name in CHANGES]
        patches.append(mock.patch.object(files, "swap_folders", dying(files.swap_folders)))
        for patch in patches:
            patch.start()
        write()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode != 0


def stops_everywhere(folder: Path, before: Write, after: Write) -> Iterator[int]:
    """Write `before`, then `after` over it, and kill the second write one call later each time."""
    stop, killed = 0, True
    while killed:
        shutil.rmtree(folder, ignore_errors=True)
        before()
        killed = run_killed(after, stop)
        yield stop
        stop += 1


def kills(count: int, folder: Path, writes: list[Write], seed: int = 0) -> Iterator[None]:
    """Start a process that repeats all writes, and kill it at a random moment; do this `count` times."""
    rng = random.Random(seed)

    def run() -> None:
        while True:
            for write in writes:
                write()

    writes[0]()
    for _ in range(count):
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        time.sleep(rng.uniform(0.02, 0.2))
        process.kill()
        process.join()
        yield


def reads(count: int, folder: Path, writes: list[Write], known: dict[str, torch.Tensor]) -> Iterator[str]:
    """Load the folder `count` times and yield the results, while one process per write repeats it forever."""

    def repeat(write: Write) -> None:
        while True:
            write()

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=repeat, args=(write,)) for write in writes]
    for writer in writers:
        writer.start()
    try:
        for _ in range(count):
            try:
                model = SupermaskGPT2LMHeadModel.from_pretrained(folder)
                logits = logits_of(model)
                assert model.generation_config.max_new_tokens == model.config.seed
                yield next((name for name, one in known.items() if torch.equal(logits, one)), "neither")
            except Exception as error:
                yield f"{type(error).__name__}: {error}"
    finally:
        for writer in writers:
            writer.kill()
            writer.join()


def plans(folder: Path) -> tuple[dict[str, list[Write]], dict[str, torch.Tensor]]:
    """Return the writes that overwrite each other, and the logits of their models."""
    one, two = make_model(1), make_model(2, layer_norm_epsilon=1e-3)
    known = {"one": logits_of(one), "two": logits_of(two)}
    return {
        "saves": [
            lambda: save_with_tokenizer(one, folder),
            lambda: save_with_tokenizer(two, folder, encoding="entropy"),
        ],
        "packing": [
            lambda: one.save_ticket(folder),
            *(
                lambda coding=coding: rewrite_ticket(folder, folder, encoding=coding)
                for coding in ("entropy", "packed")
            ),
        ],
    }, known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="how many kills of each kind")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "ticket")
        what, known = plans(folder)
        for name, writes in what.items():
            found: Counter = Counter()
            shutil.rmtree(folder, ignore_errors=True)
            for _ in tqdm(kills(options.count, folder, writes), total=options.count, desc=name):
                cut = any(path.name.startswith(".next-") for path in folder.iterdir())
                try:
                    found[loads_as(folder, known) + (", switch cut" if cut else "")] += 1
                except Exception as error:
                    found[f"LOST: {error}"] += 1
            failed += found["neither"] + sum(count for key, count in found.items() if key.startswith("LOST"))
            print(f"{name}: {dict(found)}")
        found = Counter(reads(options.count, folder, what["saves"], known))
        failed += sum(count for key, count in found.items() if key not in known)
        print(f"reads during overwrites: {dict(found)}")
    sys.exit(f"{failed} lost" if failed else 0)


if __name__ == "__main__":
    main()
