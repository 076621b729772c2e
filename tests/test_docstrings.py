"""Test that every public name documents what it does, its arguments, its result and the errors that it raises.

The tests check the functions and classes of the package whose names have no leading underscore, and the public
methods of these classes. Three kinds of names need less:

- a property is read, not called: its docstring says what it is;
- a method that overrides a method of a base class needs no docstring, because the base class documents it: one of
  ours, which is checked, or one of another library;
- a field with a help text (an option, which `docs/options.md` lists) is not repeated under `Args:`.
"""

import ast
import dataclasses
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hf_slt

MODULES = sorted(
    one.name
    for one in pkgutil.walk_packages(hf_slt.__path__, "hf_slt.")
    if one.name != "hf_slt.cli"  # its functions are commands: `slt COMMAND --help` documents them
)


def section(docstring: str, *titles: str) -> str | None:
    """Return the lines of a section of a docstring, such as `Args:`, up to the next section, or None."""
    found = re.search(rf"^(?:{'|'.join(titles)}):\n((?:[ ]+.*\n|\n)*)", docstring + "\n", re.M)
    return found and found.group(1)


def documented(docstring: str) -> set[str]:
    """Return the parameters that `Args:` describes: names at the first level of indentation."""
    lines = section(docstring, "Args") or ""
    names = re.findall(r"^ {4}((?:\*{0,2}\w+(?:, )?)+)(?: \(.*\))?:", lines, re.M)
    return {name.strip("* ") for one in names for name in one.split(",")}


def parameters(function: Any) -> list[str]:
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def raised(function: Any) -> set[str]:
    """Return the names of the errors that a function raises itself, without those of functions inside it."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except OSError:  # made at run time, as in the tests below
        return set()
    found, waiting = set(), [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(
            node, ast.FunctionDef | ast.Lambda | ast.Try
        ):  # an error raised in a try may be caught there
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func))
        waiting += ast.iter_child_nodes(node)
    return {one for one in found if one.endswith("Error")} - {"AssertionError"}


def function_faults(function: Any, name: str) -> Iterator[str]:
    docstring = inspect.getdoc(function) or ""
    for error in raised(function):
        if f"`{error}`" not in docstring:
            yield f"{name}: Raises: lacks {error}"
    if not docstring:
        yield f"{name} has no docstring"
    for missing in [one for one in parameters(function) if one not in documented(docstring)]:
        yield f"{name}: Args: lacks {missing}"
    for unknown in documented(docstring) - set(parameters(function)):
        yield f"{name}: Args: has {unknown}, which is no parameter"
    returned = inspect.signature(function).return_annotation
    gives = returned not in (None, "None", "NoReturn", inspect.Signature.empty)
    is_block = hasattr(inspect.unwrap(function), "__code__") and inspect.unwrap(function) is not function
    if gives and not is_block and section(docstring, "Returns", "Yields") is None:
        yield f"{name}: no Returns:"


def class_faults(cls: type, name: str) -> Iterator[str]:
    docstring = cls.__dict__.get("__doc__") or ""
    if not docstring or docstring.startswith(f"{cls.__name__}("):  # written by @dataclass
        yield f"{name} has no docstring"
    taken = []
    if "__dataclass_fields__" in cls.__dict__:
        own = [one for one in dataclasses.fields(cls) if one.name in inspect.get_annotations(cls)]
        taken = [one.name for one in own if one.init and "help" not in one.metadata]
    elif getattr(cls.__dict__.get("__init__"), "__module__", None) == cls.__module__:
        taken = parameters(cls.__init__)
    for missing in [one for one in taken if one not in documented(inspect.cleandoc(docstring))]:
        yield f"{name}: Args: lacks {missing}"
    for attribute, value in cls.__dict__.items():
        overrides = any(attribute in base.__dict__ for base in cls.__mro__[1:])
        if attribute.startswith("_") or overrides:
            continue
        if isinstance(value, property):
            if not value.__doc__:
                yield f"{name}.{attribute} has no docstring"
        elif isinstance(value, classmethod | staticmethod):
            yield from function_faults(value.__func__, f"{name}.{attribute}")
        elif inspect.isfunction(value) and value.__module__ == cls.__module__:
            yield from function_faults(value, f"{name}.{attribute}")


def faults(module: ModuleType) -> list[str]:
    found = [] if module.__doc__ else [f"{module.__name__} has no docstring"]
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value) and value.__name__ == name:
            found += class_faults(value, name)
        elif inspect.isfunction(inspect.unwrap(value) if callable(value) else value):
            found += function_faults(value, name)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_documented(module):
    assert faults(import_module(module)) == []


GOOD = '''
"""A module."""

class Box:
    """A box.

    Args:
        size (`int`):
            Its size.
    """

    def __init__(self, size: int) -> None: ...

    @property
    def half(self) -> int:
        """Half of its size."""

    def grow(self, by: int = 1) -> int:
        """Grow.

        Args:
            by (`int`, defaults to 1):
                How much.

        Returns:
            `int`: the new size.
        """
'''


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("", "", None),
        ('"""A module."""', "", "made has no docstring"),
        ("        size (`int`):\n            Its size.\n", "        none\n", "Box: Args: lacks size"),
        ('        """Half of its size."""', "        pass", "Box.half has no docstring"),
        ("            by (`int`, defaults to 1):", "            to:", "Box.grow: Args: lacks by"),
        ("by: int = 1", "", "Box.grow: Args: has by, which is no parameter"),
        ("Returns:", "It gives:", "Box.grow: no Returns:"),
    ],
)
def test_a_fault_is_found(before, after, fault):
    made = ModuleType("made")
    text = GOOD.replace(before, after, 1)
    assert (text == GOOD) == (fault is None)
    exec(text, vars(made))
    found = faults(made)
    assert found == [] if fault is None else fault in found


def raises(number: int) -> None:
    """Do nothing else.

    Args:
        number (`int`):
            Not used.
    """
    if number:
        raise ValueError("documented nowhere")


def test_an_error_that_is_not_documented_is_found():
    assert list(function_faults(raises, "raises")) == ["raises: Raises: lacks ValueError"]


def test_every_module_is_in_the_reference():
    pages = (Path(__file__).parents[1] / "docs" / "api").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}
    rooms = {one.name for one in pkgutil.iter_modules(hf_slt.__path__, "hf_slt.") if one.ispkg}
    assert {*MODULES} - rooms <= shown
    for name in hf_slt.__all__:
        home = f"hf_slt.{hf_slt._HOMES[name]}"
        assert {home, f"{home}.{name}"} & shown
