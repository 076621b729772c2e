"""A rule of your own for the training recipe: a Python file and a class in it, or an importable module and a class.

    --rule mine.py:AboveMedian --temperature 3
    --rule package.module:AboveMedian

The file is code, and is run. Therefore only the command line can name it: a ticket, a checkpoint or a preset cannot. A
ticket stores the name of the class, codes and factors, and loads without the rule.
"""

import importlib.util
import pkgutil
import sys
from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..errors import SLTError
from ..masks.rules import RULES, Rule
from ..options import did_you_mean


def add_own_rule(place: str, taken: Collection[str] = ()) -> str:
    """Add a user's rule to the rules that are known by name.

    Args:
        place (`str`):
            `"FILE.py:CLASS"` or `"package.module:CLASS"`.
        taken (`Collection[str]`, *optional*):
            Names that no option of the rule may have, because other options have them.

    Returns:
        `str`: the name of the rule, which is that of the class.

    Raises:
        [`SLTError`]: if there is no such file, module or class, or if the class is not a rule.
    """
    module, _, name = place.rpartition(":")
    found = _names_in(place, module)
    if not name or name not in found:
        own = sorted(key for key, one in found.items() if _is_rule(one) and one.__module__ != Rule.__module__)
        there = f"; the rules there are {', '.join(own)}" if own else ""
        raise SLTError(f"rule {place}: no class {name!r} in {module}{did_you_mean(name, own) or there}")
    rule = found[name]
    if not _is_rule(rule):
        raise SLTError(f"rule {place}: {name} is not a class derived from hf_slt.masks.rules.Rule")
    if "__dataclass_fields__" not in vars(rule):
        raise SLTError(f"rule {place}: {name} is not a dataclass; write @dataclass(frozen=True) above it")
    if rule.__abstractmethods__:
        raise SLTError(f"rule {place}: {name} does not define {', '.join(sorted(rule.__abstractmethods__))}")
    for one in fields(rule):
        if one.default is MISSING:
            raise SLTError(f"rule {place}: option {one.name} of {name} has no default; give it one")
        if one.name in taken:
            raise SLTError(f"rule {place}: option {one.name} of {name} is taken by another; rename it")
    RULES[name] = rule
    return name


def _is_rule(one: Any) -> bool:
    return isinstance(one, type) and issubclass(one, Rule)


def _names_in(place: str, module: str) -> dict[str, Any]:
    """Run a Python file, or import a module, and return what it defines."""
    path = Path(module)
    if path.suffix == ".py" and not path.is_file():
        raise SLTError(f"rule {place}: there is no file {module} in {Path.cwd()}")
    try:
        if path.suffix != ".py":
            return vars(pkgutil.resolve_name(f"{module}:"))
        name = f"hf_slt_own_rule_{path.stem}"
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = made = importlib.util.module_from_spec(spec)  # dataclasses look there
        spec.loader.exec_module(made)
        return vars(made)
    except Exception as error:  # the code can raise anything
        why = " ".join(str(error).split()) or "no message"
        raise SLTError(f"rule {place}: {module} cannot be read: {type(error).__name__}: {why}") from error
