"""The project itself: its rooms, what loading a ticket imports, and whether its pages are true."""

import ast
import json
import os
import re
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

import hf_slt
from hf_slt.text.blocks import DataArguments, load_blocks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_slt"
README = (ROOT / "README.md").read_text()

# -- rooms --------------------------------------------------------------------------------------------

ROOMS = ("model", "sharing", "runtimes", "text", "training", "papers")  # each may use those before it
HEIGHT = {name: height for height, name in enumerate(("options", *ROOMS, "__init__", "cli"))}
# The library `evaluate` runs a copy of this file outside of the package, which it then must import.
ALLOWED = {("hf_slt.text.evaluation", "hf_slt")}
MODEL_MAY_USE = {"huggingface_hub", "numpy", "safetensors", "torch", "transformers"} | sys.stdlib_module_names


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, ast.AST]]:
    """Every module that a file imports, in full, with its node: by any way, and wherever it stands.

    module: the file's own name, such as hf_slt.model.layers; a package's ends in .__init__.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = [*(module.split(".")[: -node.level] if node.level else []), node.module]
            for alias in node.names:  # which may be a module too, and then is what is imported
                yield ".".join(filter(None, [*source, alias.name])), node
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                name = getattr(node.args[0], "value", None) if node.args else None
                yield name if isinstance(name, str) and not name.startswith(".") else "?", node


def height(name: str) -> int | None:
    """Of a module of ours; None for another's. What is in no room is of the package's own __init__."""
    package, _, rest = name.partition(".")
    return HEIGHT.get(rest.split(".")[0], HEIGHT["__init__"]) if package == "hf_slt" else None


def faults(text: str, module: str) -> list[str]:
    """Imports that go up, and in the room that travels also those that are not flat or of a stranger."""
    tree, found = ast.parse(text), []
    for name, node in imports(tree, module):
        above, line = height(name), f"{module}, line {node.lineno}: {name}"
        if name == "?":
            found.append(f"{line}: what is imported cannot be read here")
        if above is not None and above > height(module) and (module, name) not in ALLOWED:
            found.append(f"{line} is of a higher room")
        if not module.startswith("hf_slt.model."):
            continue
        if above is None:
            package = name.split(".")[0]
            if package not in MODEL_MAY_USE and (package != "constriction" or node in tree.body):
                found.append(f"{line} is not to be needed by a ticket")
        # Remote code finds siblings in one folder by a regular expression, and in no other form.
        elif not (isinstance(node, ast.ImportFrom) and node.level == 1 and "." not in (node.module or ".")):
            found.append(f"{line} is not of the form `from .x import y`")
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_no_module_imports_from_a_higher_room(path):
    assert path.parent == PACKAGE or path.parent.name in ROOMS, "a room of its own, that nobody knows"
    assert not faults(path.read_text(), module_name(path))


BAD = {
    "hf_slt.model.layers": [
        "from ..training.scores import ScoresLayer",
        "from hf_slt.training import scores",
        "import hf_slt.training.scores as s",
        "def f():\n    from ..sharing import hub",
        "if TYPE_CHECKING:\n    from hf_slt.text.blocks import load_blocks",
        "importlib.import_module('hf_slt.cli')",
        "from importlib import import_module\nimport_module('..cli', 'hf_slt.model')",
        "__import__('hf_slt.papers.theory')",
        "importlib.import_module(name)",
        "from . import ticket",
        "from .sub.ticket import Entry",
        "from hf_slt.model.ticket import Entry",
        "import hf_slt",
        "import datasets",
        "def f():\n    import scipy.stats",
        "import constriction",
    ],
    "hf_slt.sharing.card": [
        "from .. import __version__",
        "def f():\n    import hf_slt",
        "from ..text.blocks import x",
        "from .. import cli",
    ],
    "hf_slt.text.blocks": ["from ..training.loop import train", "from hf_slt import papers"],
    "hf_slt.__init__": ["from .cli import main", "from . import cli"],
}


@pytest.mark.parametrize(("module", "text"), [(module, text) for module in BAD for text in BAD[module]])
def test_every_kind_of_import_is_seen(module, text):
    assert faults(text, module)


def test_what_is_allowed_is_not_refused():
    for module, text in {
        "hf_slt.model.layers": "import torch\nfrom .ticket import Entry\ndef f():\n    import constriction",
        "hf_slt.sharing.card": "from ..model.ticket import Entry\nfrom .verify import x\nimport scipy",
        "hf_slt.papers.theory": "from ..training.loop import x\nfrom hf_slt.model import ticket",
        "hf_slt.cli": "def f():\n    from . import __version__\n    from .papers.theory import x",
        "hf_slt.__init__": "from .model.ticket import TicketError\nfrom .training import scores",
    }.items():
        assert not faults(text, module)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_files(room):
    assert not [path for path in (PACKAGE / room).iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(list((PACKAGE / room).glob("*.py"))) <= 11 + 1  # and its __init__


def test_what_travels_is_short_enough_to_be_read_before_it_is_trusted():
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / "model").glob("*.py")) <= 2000


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


def run(*words: str | Path, **options) -> subprocess.CompletedProcess:
    """A Python program, which must go well."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done


def test_loading_a_ticket_imports_nothing_that_stock_does_not(tmp_path):
    model = make()
    model.merge_and_unload().save_pretrained(tmp_path / "stock")
    model.save_ticket(tmp_path / "ticket")
    words = ["-c", LOAD, tmp_path / "stock", tmp_path / "ticket"]
    assert run(*words, cwd=tmp_path).stdout.split() == ["hf_slt"]
    # It would be seen.
    words[1] = LOAD.replace("import hf_slt", "import hf_slt, constriction")
    assert run(*words, cwd=tmp_path).stdout.split() == ["constriction", "hf_slt"]


# -- pages --------------------------------------------------------------------------------------------

UNTRACKED = {".venv", ".venv-lowest", "runs", ".pytest_cache"}
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
def test_the_snippets_run(tmp_path):
    """All Python blocks of the README and of the page on training, in order, as a reader would paste them."""
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    here = [block for block in blocks if "push_to_hub" not in block]
    assert len(here) == len(blocks) - 1 > 1  # that one runs in sharing/test_hub.py
    here += re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)
    (tmp_path / "snippets.py").write_text("\n".join(here))
    done = run("snippets.py", cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.stdout.startswith("The function returns")
    hf_slt.verify_ticket(tmp_path / "ticket")
    hf_slt.verify_ticket(tmp_path / "runs" / "trainer" / "ticket")
    assert (tmp_path / "runs" / "trainer" / "ticket" / "tokenizer.json").exists()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """All its cells in order, with few steps; it is kept without outputs."""
    cells = json.loads((ROOT / "recipes" / "first_ticket.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(short := text.replace("STEPS = 150", "STEPS = 5"))
    assert short != text
    done = run("cells.py", cwd=tmp_path, env={**os.environ, "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"})
    assert "of the bits have changed" in done.stdout
    hf_slt.verify_ticket(tmp_path / "first_ticket")


# -- the ticket that comes along ---------------------------------------------------------------------------

POCKET = ROOT / "model_cards" / "pocket"


def test_the_ticket_that_comes_along_is_whole_small_and_needs_no_name():
    header = hf_slt.verify_ticket(POCKET)
    card = (POCKET / "README.md").read_text()
    assert header.mask_digest in card
    assert sum(path.stat().st_size for path in POCKET.iterdir() if path.suffix != ".png") < 300_000
    words = ["-m", "hf_slt.cli", "generate", "--max_new_tokens", "5", "--greedy"]
    assert run(*words, env={**os.environ, "HF_HUB_OFFLINE": "1"}).stdout.startswith("The function returns")


@pytest.mark.slow
def test_the_ticket_that_comes_along_has_the_loss_that_its_card_states():
    """On the text that the card names; another version of Python has another."""
    report = json.loads((POCKET / "report.json").read_text())
    corpus = load_blocks(DataArguments(vocab_size=2048, block_size=128, validation_blocks=128))
    if corpus.digest != report["text"]:
        pytest.skip("this Python has another text")
    model = hf_slt.SupermaskGPT2LMHeadModel.from_pretrained(POCKET).eval()
    ids = torch.as_tensor(corpus.validation[np.arange(len(corpus.validation))]["input_ids"]).long()
    with torch.no_grad():
        losses = [model(some, labels=some).loss.item() for some in ids.split(16)]
    assert abs(sum(losses) / len(losses) - report["loss"]) < 1e-3
    assert f"{report['loss']:.4f}" in (POCKET / "README.md").read_text()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project's files alone."""
    folder = tmp_path_factory.mktemp("clone") / "project"
    own = shutil.ignore_patterns(
        *UNTRACKED, "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", ".git", "build"
    )
    shutil.copytree(ROOT, folder, ignore=own)
    return folder


def build(kind: str, folder: Path, out: Path) -> Path:
    """A distribution, by the backend that pyproject.toml names."""
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
    cards = {f"hf_slt/model_cards/pocket/{path.name}" for path in (copy / "model_cards" / "pocket").iterdir()}
    assert held == {*package, *cards, "slt_command.py", "hf_slt/model_cards/template.md"}


def test_version_is_one():
    assert f"version: {hf_slt.__version__}" in (ROOT / "CITATION.cff").read_text()


# -- the benchmark ----------------------------------------------------------------------------------------

BENCHMARK = [sys.executable, ROOT / "recipes" / "benchmark.py"]
ROWS = (
    "step step_accum edge_popup step_memory select draw load first_token bytes generate_b1 generate_b8 "
    "generate_memory growth"
).split()


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    """A smoke test: every row gives two numbers; nothing timed is asserted."""
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
    # One row again: it alone is replaced.
    subprocess.run([*command, "--only", "draw"], check=True, capture_output=True)
    again = json.loads(path.read_text())
    assert [new["id"] for new, old in zip(again, rows, strict=True) if new != old] == ["draw"]
    # Sizes are not mixed, and what is not ours is left alone.
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
    assert rows.keys() == {f"{one} against stock" for one in ("tq2_0", "f16", "q4_0")} | {
        "tq2_0 against q4_0"
    }
    for row in rows.values():
        for ours, theirs in (row["details"][what] for what in ("tokens_per_second", "memory")):
            assert min(ours, theirs) > 0
    sizes = [rows[f"{one} against stock"]["details"]["bytes"][0] for one in ("tq2_0", "q4_0", "f16")]
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
