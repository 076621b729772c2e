"""The project itself: its layers, its words, and whether its README is true."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_slt"
README = (ROOT / "README.md").read_text()

# Each module may import those on lines above its own, and nothing below: imports go down only.
ORDER = """
random_weights files entropy quantisation subset_sum attention_hessian
masking ticket
configuration_supermask_gpt2 mask_algebra cross_entropy
layers
named_masks
modeling_supermask_gpt2
plots corpus evaluation theory
causal_lm_loss data curvature hub
curvature_advice
arguments checkpoints batches
monitoring
training
report
__init__
cli
"""
LEVEL = {name: level for level, line in enumerate(ORDER.split("\n")) for name in line.split()}
NO_TORCH = (
    "random_weights",
    "files",
    "ticket",
    "entropy",
    "quantisation",
    "mask_algebra",
    "cli",
    "plots",
    "hub",
    "theory",
    "subset_sum",
)  # at the top of the module


def top_level_imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_go_down_only(path):
    imports = top_level_imports(path)
    for name in imports:
        if name.startswith("."):
            assert LEVEL[name.lstrip(".")] < LEVEL[path.stem], f"{path.stem} imports {name}"
    if path.stem in NO_TORCH:
        assert not [name for name in imports if name.split(".")[0] in ("torch", "transformers")]


def test_the_package_is_flat_and_its_code_can_travel():
    """Remote code finds `from .x import y` in one folder by a regular expression, and nothing else."""
    assert not [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    travelling = (
        "configuration_supermask_gpt2",
        "layers",
        "masking",
        "modeling_supermask_gpt2",
        "random_weights",
    )
    others = ("ticket", "files", "entropy", "quantisation", "named_masks", "cross_entropy")
    for name in (*travelling, *others):
        text = (PACKAGE / f"{name}.py").read_text()
        assert not re.search(r"^\s*from \. import|^\s*from \.\.|^\s*(import|from) hf_slt", text, re.M), name


def test_one_vocabulary():
    for path in (*PACKAGE.glob("*.py"), *ROOT.glob("recipes/*.py")):
        assert not re.search(r"\b(prune_rate|sparsity)\b", path.read_text()), path.name


def test_the_tree_in_the_readme_is_the_tree():
    tree = README.split("## The tree", 1)[1].split("```")[1]
    named = set(re.findall(r"^  (\w+\.py)", tree, re.M))
    assert named == {path.name for path in PACKAGE.glob("*.py")}
    for folder in re.findall(r"^(\w+)/", tree, re.M):
        assert (ROOT / folder).is_dir()


@pytest.mark.parametrize(
    "page", [README, (ROOT / "recipes" / "README.md").read_text()], ids=["README", "recipes"]
)
def test_links_and_commands_name_files_that_are_there(page):
    base = ROOT if page is README else ROOT / "recipes"
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        if "://" not in target:
            assert (base / target).exists(), target
    for path in re.findall(r"recipes/[\w/]+\.(?:py|yaml)", page):
        assert (ROOT / path).exists(), path
    options = set(re.findall(r"--([a-z][a-z_]+) ", "\n".join(re.findall(r"```bash\n(.*?)```", page, re.S))))
    from hf_slt.training.arguments import Arguments

    known = {
        *Arguments().flat(),
        *"config encoding figure file help json only output point preset repeats show".split(),
    }
    assert options <= known, options - known


@pytest.fixture
def workplace(tmp_path):
    """A folder as after `make demo`, but with a ticket that takes a second to find."""
    (tmp_path / "small.txt").write_text("The function returns the value of the name. " * 400)
    words = "--train_files small.txt --vocab_size 280 --block_size 64 --n_layer 1 --n_embd 16 --n_head 2"
    words += " --max_steps 3 --output_dir runs/demo"
    run = subprocess.run(
        [sys.executable, ROOT / "recipes" / "train_gpt2_slt.py", *words.split()],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return tmp_path


@pytest.mark.slow
def test_the_snippets_of_the_readme_run(workplace):
    """All Python blocks, in order, in one interpreter, as a reader would paste them."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    blocks = [block for block in blocks if "push_to_hub" not in block]  # that one runs in test_hub.py
    assert len(blocks) == 3
    (workplace / "snippets.py").write_text("\n".join(blocks))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "snippets.py"], cwd=workplace, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The function returns")
    from hf_slt import verify_ticket

    verify_ticket(workplace / "ticket")
    verify_ticket(workplace / "runs" / "trainer" / "ticket")


def test_version_is_one():
    import hf_slt

    assert f"version: {hf_slt.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_makefile_has_the_two_commands():
    shown = subprocess.run(
        ["make", "-n", "demo", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "recipes/train_gpt2_slt.py" in shown
    assert "pytest" in shown


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
