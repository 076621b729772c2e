"""What docs/run_elsewhere.md says, as a reader would paste it: a Llama from training to llama.cpp, and ONNX."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import logits_of, make

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run_elsewhere.md").read_text()


def block_of(section: str, language: str) -> str:
    """The first block of code in a section of the page."""
    return re.findall(rf"^{section}$.*?```{language}\n(.*?)```", PAGE, re.S | re.M)[0]


@pytest.mark.slow
def test_a_llama_is_trained_exported_and_completes_a_text_in_llama_cpp(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    for name in ("recipes", "model_cards"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "text.txt").write_text("The function returns a mask, and the mask is number {}. " * 400)
    lines = block_of("## llama.cpp", "bash").replace("\\\n", " ").splitlines()
    _, train, export, complete = (shlex.split(line, comments=True) for line in lines if line)
    assert train[:2] == ["accelerate", "launch"]
    few = "--max_steps 4 --eval_steps 2 --save_steps 0 --vocab_size 300 --block_size 32 --n_layer 1"
    few += " --per_device_train_batch_size 2 --train_files text.txt --cache_dir cache"

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "accelerate.commands.accelerate_cli", *train[1:], *few.split())
    assert export[0] == "slt"
    assert "tq1_0, 1.69 bits per weight" in run("-m", "hf_slt.cli", *export[1:])
    assert complete[0] == "python"
    prompt = complete[complete.index("--prompt") + 1]
    text = run(*complete[1:])
    assert text.startswith(prompt)
    assert len(text) > len(prompt) + 10


@pytest.mark.slow
def test_a_ticket_runs_in_onnxruntime(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("transformers.exporters")
    monkeypatch.chdir(tmp_path)
    ticket = make("ticket")
    ticket.save_ticket("runs/mine/ticket")
    found: dict = {}
    exec(block_of("## ONNX", "python"), found)
    np.testing.assert_allclose(found["logits"], logits_of(ticket, found["inputs"]["input_ids"]), atol=1e-4)
    ids = torch.randint(60, (3, 9))  # another batch, another length
    again = onnxruntime.InferenceSession("ticket.onnx").run(["logits"], {"input_ids": ids.numpy()})[0]
    np.testing.assert_allclose(again, logits_of(ticket, ids), atol=1e-4)
    assert np.abs(again).max() > 0.1
