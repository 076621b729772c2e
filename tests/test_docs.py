"""Tests of the documentation: the guides run, the messages that are explained exist, and the site builds."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "quick_tour", "rules")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page, except those that need a Hub (names such as me/ticket)."""
    return [one for one in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if '"me/' not in one]


def program_of(page: Path, folder: Path) -> str:
    """Return the blocks of a page in order, as a reader would paste them, with few steps and in its own folder."""
    folder.mkdir()
    (folder / "model_cards").symlink_to(ROOT / "model_cards")
    code = re.sub(r"^steps = \d+", "steps = 2", "\n".join(python_blocks(page)), flags=re.M)
    return f"import os\nos.chdir({str(folder)!r})\n{code}"


@pytest.mark.slow
def test_the_guides_run(tmp_path):
    """Run every page in one process. Each page has its own variables."""
    pages = [page for page in PAGES if python_blocks(page)]
    assert len(pages) >= 9
    program = "\n".join(f"exec({program_of(page, tmp_path / page.stem)!r}, {{}})" for page in pages)
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for words in ("of new images are right", "of new sentences are right", "differs in: seed 7 and 8"):
        assert words in done.stdout
    for ticket in ("images/vit_ticket", "seq2seq/t5_ticket", "several_masks/both", "quick_tour/counting"):
        assert (tmp_path / ticket / "mask.safetensors").exists()


# -- messages --------------------------------------------------------------------------------------------


def texts_of_code() -> list[str]:
    """Return every string in the code. In formatted strings, "..." stands for the values."""
    found = []
    for path in (ROOT / "hf_slt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def explained(page: str) -> list[str]:
    """Return the messages in the first column of the tables, except those marked as of other libraries."""
    rows = re.findall(r"^\| (.*?) \| .* \|$", page, re.M)
    return [one for row in rows if "(of transformers)" not in row for one in re.findall(r"`([^`]+)`", row)]


def is_message(words: str, texts: list[str]) -> bool:
    pattern = re.compile(".*".join(map(re.escape, (part.strip() for part in words.split("...")))))
    return any(pattern.search(text) for text in texts)


def test_messages_that_are_explained_are_those_of_the_code():
    texts = texts_of_code()
    messages = [one for one in explained((ROOT / "docs" / "troubleshooting.md").read_text()) if one != "..."]
    assert len(messages) > 40
    assert [one for one in messages if not is_message(one, texts)] == []
    assert not is_message("a message that ... nobody raises", texts)


# -- the site --------------------------------------------------------------------------------------------


def test_every_rule_has_a_page():
    from hf_slt.masks.rules import RULES

    for name, rule in RULES.items():
        text = (ROOT / "docs" / "rules" / f"{name}.md").read_text()
        assert f"::: hf_slt.masks.rules.{rule.__name__}\n" in text
        assert {"## When to use it", "## When not"} <= set(text.splitlines())
    assert {page.stem for page in (ROOT / "docs" / "rules").iterdir()} == set(RULES)


def test_the_navigation_has_every_page():
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(part):
        for one in part.values() if isinstance(part, dict) else part:
            yield from pages(one) if isinstance(one, dict | list) else [one]

    listed = list(pages(site["nav"]))
    assert len(set(listed)) == len(listed)
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert there <= set(listed)


def test_a_broken_link_ends_the_build(tmp_path):
    """A strict build of two small pages follows a link to a file outside of docs/, and refuses a wrong link."""
    pytest.importorskip("mkdocs")
    for name in ("docs", "recipes", "hf_slt"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "recipes" / "site_hook.py", tmp_path / "recipes")
    (tmp_path / "hf_slt" / "code.py").write_text("x = 1\n")
    (tmp_path / "recipes" / "README.md").write_text("# Notes\n\n[home](../docs/index.md)\n")
    page = tmp_path / "docs" / "index.md"
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: x\nhooks: [recipes/site_hook.py]\ntheme: {name: mkdocs}\n"
    )
    words = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    page.write_text(
        "# Home\n\n[notes](../recipes/README.md), [code](../hf_slt/code.py), [folder](../hf_slt)\n"
    )
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "recipes" / "index.html").exists()
    assert (tmp_path / "site" / "hf_slt" / "code.py").read_text() == "x = 1\n"
    page.write_text("# Home\n\n[notes](../recipes/NOTES.md)\n")
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "NOTES.md" in done.stderr
