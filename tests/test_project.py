"""Tests of the project itself: imports between subpackages, imports of loading a ticket, and claims of the pages."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import make
from distribution import check_distribution
from plain_install import make_plain_install, project, required

import hf_slt
from hf_slt.about import install_command
from hf_slt.text.blocks import DataArguments, load_blocks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_slt"
README = (ROOT / "README.md").read_text()

# -- subpackages ("rooms") ----------------------------------------------------------------------------

# Each may import from those before it.
ROOMS = (
    "errors",
    "about",
    "progress",
    "weights",
    "tickets",
    "sharing",
    "masks",
    "models",
    "runtimes",
    "text",
    "training",
    "papers",
)
HEIGHT = {name: height for height, name in enumerate(("options", *ROOMS, "registration", "__init__", "cli"))}
# The library `evaluate` runs a copy of this file outside of the package, so the file must import the package.
ALLOWED = {("hf_slt.text.evaluation", "hf_slt")}
WITHOUT_TORCH = ("about", "errors", "weights", "tickets")  # read and written where no model is needed
# These modules import names when they are first used, from a table.
LAZY = ("hf_slt.__init__", "hf_slt.registration")


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the full name of every module that a file imports, in any way and anywhere, with its node.

    module: the name of the file itself, such as hf_slt.masks.rules; for a package it ends in .__init__.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = [*(module.split(".")[: -node.level] if node.level else []), node.module]
            for alias in node.names:  # the name may itself be a module
                yield ".".join(filter(None, [*source, alias.name])), node
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                name = getattr(node.args[0], "value", None) if node.args else None
                yield name if isinstance(name, str) and not name.startswith(".") else "?", node


def height(name: str) -> int | None:
    """Return the height of a module of hf_slt, or None for other modules. Other names count as __init__."""
    package, _, rest = name.partition(".")
    return HEIGHT.get(rest.split(".")[0], HEIGHT["__init__"]) if package == "hf_slt" else None


def faults(text: str, module: str) -> list[str]:
    """Return imports from higher subpackages, and imports of torch and transformers where they are not allowed."""
    tree, found = ast.parse(text), []
    for name, node in imports(tree, module):
        above, line = height(name), f"{module}, line {node.lineno}: {name}"
        if name == "?" and module not in LAZY:
            found.append(f"{line}: what is imported cannot be read here")
        if above is not None and above > height(module) and (module, name) not in ALLOWED:
            found.append(f"{line} is of a higher room")
        torch_itself = name.split(".")[0] in ("torch", "transformers") or name.startswith("safetensors.torch")
        if module.split(".")[1] in WITHOUT_TORCH and torch_itself:
            found.append(f"{line} is not needed to read a file")
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_no_module_imports_from_a_higher_room(path):
    assert path.parent == PACKAGE or path.parent.name in ROOMS, "a subpackage that is not in ROOMS"
    assert not faults(path.read_text(), module_name(path))


BAD = {
    "hf_slt.masks.rules": [
        "from ..training.run import Run",
        "from hf_slt.training import run",
        "import hf_slt.training.run as s",
        "def f():\n    from ..models import gpt2",
        "if TYPE_CHECKING:\n    from hf_slt.text.blocks import load_blocks",
        "importlib.import_module('hf_slt.cli')",
        "from importlib import import_module\nimport_module('..cli', 'hf_slt.masks')",
        "__import__('hf_slt.papers.theory')",
        "importlib.import_module(name)",
        "import hf_slt",
        "from .. import registration",
    ],
    "hf_slt.tickets.format": [
        "import torch",
        "def f():\n    from transformers import AutoConfig",
        "from safetensors.torch import load_file",
        "from ..masks.rules import RULES",
        "from ..models import checks",
    ],
    "hf_slt.weights.codes": ["from torch import Tensor", "from ..tickets.format import Header"],
    "hf_slt.errors": ["from .weights.codes import pack_codes", "import torch"],
    "hf_slt.sharing.card": [
        "from .. import __version__",
        "def f():\n    import hf_slt",
        "from ..text.blocks import x",
        "from .. import cli",
    ],
    "hf_slt.text.blocks": ["from ..training.loop import train", "from hf_slt import papers"],
    "hf_slt.registration": ["from . import __version__", "from .cli import main"],
    "hf_slt.__init__": ["from .cli import main", "from . import cli"],
}


@pytest.mark.parametrize(("module", "text"), [(module, text) for module in BAD for text in BAD[module]])
def test_every_kind_of_import_is_seen(module, text):
    assert faults(text, module)


def test_what_is_allowed_is_not_refused():
    for module, text in {
        "hf_slt.tickets.format": "from ..weights.codes import planes\nfrom safetensors.numpy import load",
        "hf_slt.masks.rules": "import torch\nfrom ..weights.random_weights import draw\nfrom .selection import x",
        "hf_slt.sharing.card": "from ..tickets.format import Header\nfrom .hub import x\nimport scipy",
        "hf_slt.papers.theory": "from ..training.loop import x\nfrom hf_slt.models import gpt2",
        "hf_slt.cli": "def f():\n    from . import __version__\n    from .papers.theory import x",
        "hf_slt.__init__": "from .errors import TicketError\nfrom .registration import register_when_needed",
    }.items():
        assert not faults(text, module)


def test_every_public_name_is_where_the_table_says():
    assert sorted(hf_slt._HOMES) == sorted(hf_slt.__all__)
    for name in hf_slt.__all__:
        assert getattr(hf_slt, name).__name__ == name
        assert name in dir(hf_slt)
    with pytest.raises(AttributeError, match="no attribute 'Supermask'"):
        hf_slt.Supermask  # noqa: B018


def imported_by(code: str, folder: Path) -> set[str]:
    """Run code in a new process and return all modules that it has imported."""
    return set(run("-c", f"{code}\nimport sys\nprint(*sys.modules)", cwd=folder).stdout.split())


def test_torch_is_not_imported_before_it_is_needed(tmp_path):
    light = (
        "hf_slt hf_slt.cli hf_slt.options hf_slt.errors hf_slt.weights.random_weights hf_slt.weights.codes"
    )
    light += " hf_slt.weights.quantisation hf_slt.tickets.format hf_slt.tickets.writing hf_slt.tickets.verify"
    light += " hf_slt.tickets.backbones hf_slt.sharing.card hf_slt.sharing.mask_algebra"
    code = "import " + ", ".join(light.split())
    assert not {"torch", "transformers"} & imported_by(code, tmp_path)
    seen = imported_by(f"{code}\nimport transformers", tmp_path)  # transformers imports no torch either
    assert "transformers" in seen
    assert not {"torch", "transformers.models.auto.modeling_auto"} & seen


@pytest.mark.parametrize(
    "first",
    [
        "import hf_slt\nfrom transformers import GPT2LMHeadModel",
        "import hf_slt\nfrom transformers import Trainer",
        "import transformers\nimport hf_slt\nfrom transformers import LlamaForCausalLM",
        "from transformers import AutoModelForCausalLM\nimport hf_slt",
    ],
)
def test_the_auto_classes_know_the_models_in_any_order_of_imports(tmp_path, first):
    make("ticket").save_ticket(tmp_path / "ticket")
    code = f"""{first}
from transformers import AutoConfig, AutoModelForCausalLM
assert AutoConfig.from_pretrained("ticket").seed == 7
print(type(AutoModelForCausalLM.from_pretrained("ticket")).__name__)
"""
    assert run("-c", code, cwd=tmp_path).stdout == "SupermaskGPT2LMHeadModel\n"


LOAD = """
import sys
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
def packages():
    return {name.split(".")[0] for name in sys.modules}
GPT2LMHeadModel.from_pretrained(sys.argv[1])
stock = packages()
import hf_slt
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
model(torch.arange(5).view(1, 5))
print(*sorted(packages() - stock - sys.stdlib_module_names))
"""


def run(*words: str | Path, python: str | Path = sys.executable, **options) -> subprocess.CompletedProcess:
    """Run a Python program, which must succeed."""
    done = subprocess.run([python, *words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


def test_loading_a_ticket_imports_nothing_that_stock_does_not(tmp_path):
    model = make()
    model.merge_and_unload().save_pretrained(tmp_path / "stock")
    model.save_ticket(tmp_path / "ticket")
    words = ["-c", LOAD, tmp_path / "stock", tmp_path / "ticket"]
    assert run(*words, cwd=tmp_path).stdout.split() == ["hf_slt"]
    # The check itself works: an additional import is found.
    words[1] = LOAD.replace("import hf_slt", "import hf_slt, constriction")
    assert run(*words, cwd=tmp_path).stdout.split() == ["constriction", "hf_slt"]


# -- the plain installation ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_python(tmp_path_factory):
    """Return a Python with the packages of `pip install -e .`, without extras."""
    return make_plain_install(tmp_path_factory.mktemp("plain") / "venv")


def plain_environment() -> dict[str, str]:
    """Return environment variables for a program that sees only its own packages and no network."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def readme_commands(section: str) -> list[list[str]]:
    """Return the words of each command in the first shell block of a section of the README."""
    (block,) = re.findall(rf"^{section}$.*?```bash\n(.*?)```", README, re.S | re.M)[:1]
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_extras_bring_what_the_plain_installation_does_not():
    plain = required(project()["dependencies"])
    extras = project()["optional-dependencies"]
    for name in ("train", "theory", "curvature", "llama"):
        assert not {re.split(r"[\[><=]", one)[0].lower() for one in extras[name]} & plain, name
    assert extras["all"] == ["hf_slt[train,theory,curvature,llama]"]


def test_only_what_is_required_is_in_the_plain_installation(plain_python):
    absent = ["gguf", "hypothesis", "lm_eval", "peft", "pytest", "scipy", "tensorboard", "trl", "xllamacpp"]
    code = f"import importlib.util as u; print([one for one in {absent} if u.find_spec(one)])"
    assert run("-c", code, python=plain_python, env=plain_environment()).stdout == "[]\n"


@pytest.mark.slow
def test_the_commands_of_the_readme_run_without_extras(plain_python, tmp_path):
    """Run the README's section on training, with few steps, then its section on other programs."""
    for name in ("recipes", "model_cards"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "texts").mkdir()
    sentence = "A ticket is a seed and a mask, and number {} is a small one. "
    for name in ("one", "two"):
        words = "".join(sentence.format(number) for number in range(400))
        (tmp_path / "texts" / f"{name}.txt").write_text(words)
    (tmp_path / "unseen.txt").write_text(sentence.format("none") * 40)
    here = {"python": plain_python, "cwd": tmp_path, "env": plain_environment()}

    train, *after = readme_commands("## Train")
    launch = {"accelerate": ["-m", "accelerate.commands.accelerate_cli"], "python": []}[train[0]]
    assert train[-3:] == ["--compare", "random_mask", "dense"]
    few = "--max_steps 4 --eval_steps 2 --save_steps 0 --vocab_size 300 --block_size 32 --n_embd 32".split()
    few += ["--cache_dir", str(tmp_path / "cache")]
    done = run(*launch, *train[1:], *few, **here)
    shown = done.stdout
    assert "\r" not in done.stderr  # no terminal: lines, and no bars
    if (
        train[0] == "python" or "--config_file" in train
    ):  # accelerate launch by itself has five lines of advice
        assert "not passed" not in done.stderr
    rows = [line for line in shown.splitlines() if re.match(r"(ticket|random mask|dense twin) .* kB$", line)]
    assert len(rows) == 3
    assert "gap closed between random mask and dense twin" in shown
    folder = tmp_path / "runs" / "mine"
    for path in ("curves.png", "comparison.png", "ticket/README.md", "ticket/masks.png", "report.json"):
        assert (folder / path).stat().st_size > 500, path

    export, *elsewhere = readme_commands("## Run elsewhere")
    assert export[1] == "export"
    for words in (*after, *elsewhere):
        assert words[0] == "slt"
        run("-m", "hf_slt.cli", *words[1:], **here)
    refused = subprocess.run(
        [here.pop("python"), "-m", "hf_slt.cli", *export[1:]], capture_output=True, text=True, **here
    )
    assert refused.returncode == 1
    assert "GGUF files: the package gguf is not installed; pip install" in refused.stderr
    assert "[llama]" in refused.stderr


# -- pages --------------------------------------------------------------------------------------------

UNTRACKED = {".venv", ".venv-lowest", "runs", "site", ".pytest_cache"}
PAGES = [path for path in ROOT.rglob("*.md") if not UNTRACKED & {*path.relative_to(ROOT).parts}]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_commands_name_files_that_are_there(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and "{{" not in target:
            assert (page.parent / target).exists(), target
    for path in re.findall(r"\b(?:recipes|docs|tests|hf_slt)/[\w/]+\.(?:py|yaml|md|json)\b", text):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_the_snippets_run(plain_python, tmp_path):
    """Run all Python blocks of the README and of two pages, in order, as a reader would paste them."""
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    here = [block for block in blocks if "push_to_hub" not in block]
    assert len(here) == len(blocks) - 1 > 1  # that one runs in sharing/test_hub.py
    for page in ("training", "any_model"):
        here += re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.S)
    (tmp_path / "snippets.py").write_text("\n".join(here))
    done = run("snippets.py", cwd=tmp_path, python=plain_python, env=plain_environment())
    assert done.stdout.startswith("The city was founded in")
    hf_slt.verify_ticket(tmp_path / "ticket")
    hf_slt.verify_ticket(tmp_path / "runs" / "trainer" / "ticket")
    assert (tmp_path / "runs" / "trainer" / "ticket" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "tickets"),
    [
        ("first_ticket", "of the bits have changed", ["first_ticket"]),
        ("two_tasks", "loss on words with mask words", ["words", "digits"]),
    ],
)
def test_the_notebooks_run(plain_python, tmp_path, name, words, tickets):
    """Run all cells in order, with few steps. The notebooks are stored without outputs."""
    cells = json.loads((ROOT / "recipes" / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(short := re.sub(r"^STEPS = \d+", "STEPS = 5", text, flags=re.M))
    assert short != text
    environment = {**plain_environment(), "MPLBACKEND": "Agg"}
    done = run("cells.py", cwd=tmp_path, python=plain_python, env=environment)
    assert words in done.stdout
    for ticket in tickets:
        hf_slt.verify_ticket(tmp_path / ticket)


# -- the included tickets ----------------------------------------------------------------------------------

CARDS = ROOT / "model_cards"
TICKETS = {"pocket": 300_000, "prose": 1_700_000}  # bytes of their folders without figures, at most
TEXT = "enwiki2014-valid.parquet"  # that their cards name; not part of the project


@pytest.mark.parametrize("name", TICKETS)
def test_the_tickets_that_come_along_are_whole_strict_and_small(name):
    header = hf_slt.verify_ticket(CARDS / name)
    card = (CARDS / name / "README.md").read_text()
    assert header.is_strict
    assert header.digest in card
    assert "CC BY-SA 3.0" in card
    sizes = [path.stat().st_size for path in (CARDS / name).iterdir() if path.suffix != ".png"]
    assert sum(sizes) < TICKETS[name]


def test_a_ticket_writes_without_being_named():
    words = ["-m", "hf_slt.cli", "generate", "--max_new_tokens", "5", "--greedy"]
    text = run(*words, env={**os.environ, "HF_HUB_OFFLINE": "1"}).stdout
    assert text.startswith("The city was founded in")


@pytest.mark.slow
@pytest.mark.parametrize("name", TICKETS)
def test_the_tickets_that_come_along_have_the_loss_that_their_cards_state(name):
    """Uses the text that the cards name, from the folder that the variable HF_SLT_DATA names."""
    text = Path(os.environ.get("HF_SLT_DATA", "")) / TEXT
    if not text.is_file():
        pytest.skip(f"{TEXT} is not part of the project; HF_SLT_DATA names no folder that has it")
    report = json.loads((CARDS / name / "report.json").read_text())
    same = {key: report["arguments"][key] for key in ("block_size", "validation_blocks")}
    files = {"train_files": [str(text)], "validation_files": [str(text)]}
    corpus = load_blocks(DataArguments(tokenizer=str(CARDS / name), **files, **same))
    model = hf_slt.SupermaskGPT2LMHeadModel.from_pretrained(CARDS / name).eval()
    ids = torch.as_tensor(corpus.validation[np.arange(len(corpus.validation))]["input_ids"]).long()
    with torch.no_grad():
        losses = [model(some, labels=some).loss.item() for some in ids.split(16)]
    assert abs(sum(losses) / len(losses) - report["loss"]) < 1e-3
    assert f"{report['loss']:.4f}" in (CARDS / name / "README.md").read_text()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Copy the files of the project, without the virtual environment and results."""
    folder = tmp_path_factory.mktemp("clone") / "project"
    own = shutil.ignore_patterns(
        *UNTRACKED, "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", ".git", "build"
    )
    shutil.copytree(ROOT, folder, ignore=own)
    return folder


def build(kind: str, folder: Path, out: Path) -> Path:
    """Build a distribution with the backend that pyproject.toml names."""
    code = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(out)!r})"
    run("-c", code, cwd=folder)
    (made,) = out.iterdir()
    return made


def test_a_source_distribution_is_the_whole_project(copy, tmp_path):
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    with tarfile.open(build("sdist", copy, tmp_path)) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    left_out = files - held
    assert left_out <= {".gitignore", ".ci/run"}  # of the repository
    assert not [name for name in held if "__pycache__" in name or ".venv" in name]


def test_a_wheel_is_typed_and_has_no_tests(copy, tmp_path):
    with zipfile.ZipFile(build("wheel", copy, tmp_path)) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {str(path.relative_to(copy)) for path in (copy / "hf_slt").rglob("*") if path.is_file()}
    tickets = [path for name in TICKETS for path in (copy / "model_cards" / name).iterdir()]
    cards = {f"hf_slt/{path.relative_to(copy)}" for path in tickets}
    assert held == {*package, *cards, "hf_slt/model_cards/template.md"}


@pytest.mark.exhaustive
def test_what_is_built_passes_twine_and_runs_in_an_empty_environment(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("twine")
    version, text, *_ = check_distribution(tmp_path)
    assert version == f"hf_slt {hf_slt.__version__}\n"
    assert text.startswith("The city was founded in")


def test_the_address_of_the_repository_stands_in_one_place(copy, tmp_path):
    """If it is filled in once, in pyproject.toml, it appears in the metadata, in error messages and in cards."""
    assert install_command("llama") == 'pip install -e ".[llama]" (in a clone of hf_slt)'
    before = (copy / "pyproject.toml").read_text()
    address = "https://example.org/hf_slt"
    after = before.replace('# Repository = "https://..."', f'Repository = "{address}"')
    assert after != before
    (copy / "pyproject.toml").write_text(after)
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; "
    run("-c", f"{code}make({str(tmp_path)!r})", cwd=copy)
    (copy / "pyproject.toml").write_text(before)
    code = "from hf_slt.about import install_command as i; print(i()); print(i('llama'))"
    found = run("-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout.splitlines()
    assert found == [f'pip install "hf_slt{extra} @ git+{address}"' for extra in ("", "[llama]")]


def test_version_is_one():
    assert f"version: {hf_slt.__version__}" in (ROOT / "CITATION.cff").read_text()


# -- time limits ------------------------------------------------------------------------------------------


def test_every_test_has_a_time_limit(request, pytestconfig):
    assert float(pytestconfig.getini("timeout")) > 0
    slow = [item for item in request.session.items if item.get_closest_marker("slow")]
    assert all(item.get_closest_marker("timeout").args[0] > 0 for item in slow)


@pytest.mark.parametrize("wait", ["time.sleep(1000)", "subprocess.run(['sleep', '1000'])"])
def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path, wait):
    code = f"import subprocess, time\ndef test_a():\n    {wait}\ndef test_b():\n    pass\n"
    (tmp_path / "test_hang.py").write_text(code)
    words = ["-m", "pytest", "-c", ROOT / "pyproject.toml", "-o", "timeout=2", "-p", "no:cacheprovider"]
    command = [sys.executable, *words, tmp_path / "test_hang.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr


# -- the benchmark ----------------------------------------------------------------------------------------

BENCHMARK = [sys.executable, ROOT / "recipes" / "benchmark.py"]
ROWS = (
    "step step_busy step_accum edge_popup step_memory select select_busy launches draw load first_token imports "
    "bytes generate_b1 generate_b8 evaluate_learning generate_learning generate_memory input_speed input_memory "
    "resume growth"
).split()


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    """Smoke test: every row gives two numbers; no timing is asserted."""
    path = tmp_path / "rows.json"
    command = [*BENCHMARK, "--repeats", "1", "--json", path]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(path.read_text())
    assert [row["id"] for row in rows] == ROWS
    for row in rows:
        assert row.keys() >= {"what", "baseline", "ours", "theirs", "ratio", "reach"}
        assert row["ours"] > 0
        assert row["theirs"] > 0
        assert row["ratio"] == row["ours"] / row["theirs"]
    # Measure one row again: only this row is replaced.
    subprocess.run([*command, "--only", "draw"], check=True, capture_output=True)
    again = json.loads(path.read_text())
    assert [new["id"] for new, old in zip(again, rows, strict=True) if new != old] == ["draw"]
    # Presets are not mixed, and other files are not overwritten.
    for text, words in (
        (path.read_text().replace('"quick"', '"full"'), "is of preset full, not quick"),
        ("{}", "holds no rows"),
    ):
        path.write_text(text)
        refused = subprocess.run([*command, "--only", "draw"], capture_output=True, text=True)
        assert refused.returncode
        assert words in refused.stderr
        assert path.read_text() == text


@pytest.mark.slow
def test_the_benchmark_runs_in_llama_cpp(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    path = tmp_path / "rows.json"
    subprocess.run(
        [*BENCHMARK, "--only", "llama", "--repeats", "1", "--json", path], check=True, capture_output=True
    )
    rows = {row["id"].removeprefix("llama: "): row for row in json.loads(path.read_text())}
    names = [*(f"{one} against stock" for one in ("tq2_0", "f16", "q4_0")), "tq2_0 against q4_0"]
    assert rows.keys() == {*names, *(f"Llama {name}" for name in names)}
    for row in rows.values():
        for ours, theirs in (row["details"][what] for what in ("tokens_per_second", "memory")):
            assert min(ours, theirs) > 0
    for family in ("", "Llama "):
        sizes = [
            rows[f"{family}{one} against stock"]["details"]["bytes"][0] for one in ("tq2_0", "q4_0", "f16")
        ]
        assert sizes == sorted(sizes)


def test_the_table_of_speeds_is_the_committed_one():
    path = ROOT / "recipes" / "results" / "benchmark.json"
    rows = json.loads(path.read_text())
    assert [row["id"] for row in rows] == ROWS
    assert {row["preset"] for row in rows} == {"full"}
    text = (ROOT / "recipes" / "README.md").read_text()
    for name in ("benchmark.json", "ternary.json"):
        shown = subprocess.run(
            [*BENCHMARK, "--show", path.with_name(name)], capture_output=True, text=True, check=True
        )
        assert shown.stdout in text
