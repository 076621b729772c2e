"""Which version this is, and how it is installed.

The address of the repository stands in one place, `[project.urls]` of pyproject.toml. Error messages and cards take it
from there, through the metadata of the installed package. If it is empty, they describe an installation from a clone.
"""

from importlib.util import find_spec

from .errors import SLTError

__version__ = "0.2.0"


def repository() -> str | None:
    """Return the address of the repository.

    Returns:
        `str` or `None`: the address, or None if pyproject.toml names none or the package is not installed.
    """
    from importlib.metadata import PackageNotFoundError, metadata  # slow, and rarely needed

    try:
        urls = metadata("hf_slt").get_all("Project-URL") or []
    except PackageNotFoundError:  # not installed: the folder is on Python's path
        return None
    named = dict(one.split(", ", 1) for one in urls)
    return named.get("Repository")


def install_command(extra: str | None = None) -> str:
    """Return the command that installs hf_slt, in words for an error message.

    Args:
        extra (`str`, *optional*):
            An extra of pyproject.toml that is needed, such as `"llama"`.

    Returns:
        `str`: the command. If no address of the repository is known, the command is for a clone.

    Example:

    >>> install_command("llama").startswith("pip install ")
    True
    """
    brackets = f"[{extra}]" if extra else ""
    address = repository()
    if address is None:
        return f'pip install -e ".{brackets}" (in a clone of hf_slt)'
    return f'pip install "hf_slt{brackets} @ git+{address}"'


def require_packages(purpose: str, *modules: str, extra: str | None = None) -> None:
    """Raise `SLTError` unless these modules are installed. Nothing is imported.

    Long work calls this before it begins.

    Args:
        purpose (`str`):
            What needs them, such as `"GGUF files"`.
        modules (`str`):
            Names of modules.
        extra (`str`, *optional*):
            The extra of pyproject.toml that installs them. Default: none, a plain installation has them.

    Raises:
        [`SLTError`]: if a module is missing. The message says what to install.

    Example:

    >>> require_packages("a table", "csv")
    >>> require_packages("a table", "cvs")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    hf_slt.errors.SLTError: a table: the package cvs is not installed; pip install ...
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        named = f"package {missing[0]} is" if len(missing) == 1 else f"packages {', '.join(missing)} are"
        raise SLTError(f"{purpose}: the {named} not installed; {install_command(extra)}")
