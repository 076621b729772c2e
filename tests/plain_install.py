"""Make a virtual environment with exactly the packages of `pip install -e .` without extras."""

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # installed with pytest

ROOT = Path(__file__).parents[1]


def project() -> dict:
    """Return the [project] table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(requirements: list[str]) -> set[str]:
    """Return the names of all distributions that these requirements install, directly or indirectly."""
    found: set[tuple[str, str]] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, parent_extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": parent_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                todo += [(Requirement(text), extra) for text in distribution(name).requires or ()]
    return {name for name, _ in found}


def make_plain_install(folder: Path, wheel: Path | None = None) -> Path:
    """Make the environment in a folder, with links to the packages installed here. Return its Python.

    hf_slt is that of this folder, or of a wheel.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for name in required(project()["dependencies"]):
        held = distribution(name)
        for top in {path.parts[0] for path in held.files or ()} - {"..", "__pycache__"}:
            source, link = Path(str(held.locate_file(top))), packages / top
            if source.exists() and not link.is_symlink():  # several distributions may share a folder
                link.symlink_to(source)
    python = folder / "bin" / "python"
    if wheel is None:
        (packages / "hf_slt.pth").write_text(f"{ROOT}\n")  # as an editable installation does
    else:
        words = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
        elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-m", "pip", "--python", str(python), *words]
        subprocess.run(command, env=elsewhere, check=True)
    return python
