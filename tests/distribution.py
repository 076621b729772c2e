"""Build the wheel and the source distribution, check both, and use the wheel in an otherwise empty environment.

    python tests/distribution.py dist          # what `make dist` runs

The environment holds the packages that the wheel requires, and not this project's folder.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from plain_install import ROOT, make_plain_install

SMOKE = """
import importlib.metadata, sys
from pathlib import Path
import hf_slt
from transformers import AutoModelForCausalLM, pipeline
from hf_slt.sharing.card import model_cards
home = Path(hf_slt.__file__).parent
assert sys.prefix in str(home), home                       # the installed package, not this project's folder
assert hf_slt.__version__ == importlib.metadata.version("hf_slt")
header = hf_slt.verify_ticket(model_cards() / "pocket")
write = pipeline("text-generation", str(model_cards() / "pocket"))
assert write("The city was", max_new_tokens=4)[0]["generated_text"].startswith("The city was")
config = hf_slt.SupermaskGPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, density=0.3, seed=7)
model = AutoModelForCausalLM.from_config(config)
model.save_ticket("ticket")
hf_slt.verify_ticket("ticket")
"""
COMMANDS = [
    "--version",
    "generate --greedy --max_new_tokens 4",
    "inspect ticket",
    "verify ticket",
    "merge ticket stock",
]


def check_distribution(folder: Path) -> list[str]:
    """Build into a folder, check what was built, and run the smoke tests.

    Args:
        folder (`Path`):
            Where the two files are written.

    Returns:
        `list[str]`: what the commands of the installed `slt` printed.
    """
    folder = folder.resolve()
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    _run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    with tempfile.TemporaryDirectory() as empty:
        python = make_plain_install(Path(empty) / "venv", wheel)
        _run(python, "-c", SMOKE, cwd=empty)
        return [_run(python.with_name("slt"), *words.split(), cwd=empty) for words in COMMANDS]


def _run(*words: object, cwd: object = ROOT) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, "HF_HUB_OFFLINE": "1"}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=str(cwd), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    target = Path(sys.argv[1])
    check_distribution(target)
    print(f"{target}: built, checked by twine, and run in an empty environment")
