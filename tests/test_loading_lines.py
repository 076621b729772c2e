"""Every line by which a page loads a ticket, on a ticket as the presets make it: entropy-coded, with its card.

The command of lm-eval is in training/test_other_tools.py, the snippets of pages in test_project.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_slt.tickets.format import read_header
from hf_slt.training.arguments import parse_arguments
from hf_slt.training.report import train_and_compare

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
from train_gpt2_slt import find_ticket  # noqa: E402

SMALL = "--max_steps 2 --eval_steps 0 --save_steps 0 --n_layer 1 --n_embd 32 --vocab_size 300 --block_size 64"
POCKET = ROOT / "model_cards" / "pocket"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a folder with runs/mine/ticket, trained with the preset nano, and a text."""
    place = tmp_path_factory.mktemp("place")
    text = "A ticket is a seed and a mask. The seed draws every weight; number {} is naïve, déjà vu!\n\n"
    (place / "text.txt").write_text("".join(text.format(number) for number in range(400)))
    words = ["--config", str(ROOT / "recipes" / "nano.yaml"), *SMALL.split()]
    words += ["--train_files", str(place / "text.txt"), "--cache_dir", str(place / "cache")]
    words += ["--output_dir", str(place / "runs" / "mine")]
    train_and_compare(parse_arguments(words), find_ticket, ROOT / "model_cards" / "template.md")
    assert read_header(place / "runs" / "mine" / "ticket" / "mask.safetensors").encoding == "entropy"
    (place / "mine").symlink_to(place / "runs" / "mine" / "ticket")  # the name in the card
    (place / "pocket").symlink_to(POCKET)
    return place


def run(place: Path, *words: str) -> str:
    """Run a Python program in the folder, without a network and with its own cache."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize("name", ["mine", "pocket"])
def test_the_lines_of_the_card(place, name):
    card = place / name / "README.md"
    block = snippets(card, "python")[0]
    assert f'from_pretrained("{name}")' in block
    assert run(place, "-c", block).startswith("The")
    verify = re.search(r"`slt (verify \S+)` does so by hand", card.read_text())[1]
    assert "as they should be" in run(place, "-m", "hf_slt.cli", *verify.split())
    # "Tools that do not import hf_slt, but run where it is installed, load this model with `trust_remote_code=True`."
    assert "`trust_remote_code=True`." in card.read_text()
    trusting = "\n".join(line for line in block.splitlines() if "import hf_slt" not in line)
    trusting = trusting.replace(f'("{name}")', f'("{name}", trust_remote_code=True)')
    trusting = "import sys\n" + trusting + "\nassert 'hf_slt' in sys.modules"
    assert trusting.count("trust_remote_code") == 2
    assert run(place, "-c", trusting).startswith("The")


def test_the_lines_of_the_readme_on_the_ticket_of_a_preset(place):
    """Run the pipeline, the Auto class, merging and verifying. Pushing to the Hub is tested in sharing/test_hub.py."""
    readme = (ROOT / "README.md").read_text()
    lines = [line.split("#")[0].strip() for line in readme.splitlines()]
    used = [line for line in lines if re.search(r'(pipeline|from_pretrained|verify_ticket)\(.*"', line)]
    used = [line for line in used if '"me/' not in line]
    assert len(used) >= 3
    program = ["import hf_slt", "from transformers import AutoModelForCausalLM, pipeline"]
    for line in used:
        program += [re.sub(r'"(ticket|model_cards/pocket)"', '"runs/mine/ticket"', line)]
    assert all('"runs/mine/ticket"' in line for line in program[2:])
    program += ["model = AutoModelForCausalLM.from_pretrained('runs/mine/ticket')"]
    program += ["print(type(model.merge_and_unload()).__name__)"]
    assert "GPT2LMHeadModel" in run(place, "-c", "\n".join(program))


def test_the_mask_file_by_itself_and_another_mask(place):
    program = "from hf_slt import SupermaskGPT2LMHeadModel as model\n"
    program += "import torch\none = model.from_pretrained('runs/mine/ticket/mask.safetensors')\n"
    program += "two = model.from_pretrained('runs/mine/ticket', mask='runs/mine/ticket')\n"
    program += "print(all(map(torch.equal, one.parameters(), two.parameters())))"
    assert run(place, "-c", program) == "True\n"
