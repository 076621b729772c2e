"""The one file of code in a ticket: it imports hf_slt, and holds nothing else.

`import hf_slt` registers the model classes with transformers. Tools that never import it (lm-eval and others)
can pass `trust_remote_code=True`: transformers then runs this file, which imports hf_slt. If the package is
missing, transformers says which package to install.
"""

from pathlib import Path
from typing import Any

from ..sharing.hub import REMOTE_FILE, REMOTE_TEXT


def auto_map(config: Any) -> dict[str, str]:
    """Return the `auto_map` of a configuration: which class of the file each Auto class uses.

    Args:
        config:
            A supermask configuration.

    Returns:
        `dict[str, str]`: `"module.Class"` by Auto class.
    """
    module = REMOTE_FILE.removesuffix(".py")
    return {auto: f"{module}.{name}" for auto, name in config.auto_classes().items()}


def add_remote_code(folder: Path, config: Any) -> None:
    """Write the file into a (staged) folder.

    Args:
        folder (`Path`):
            The folder.
        config:
            The supermask configuration whose classes the file imports.
    """
    names = ", ".join(sorted(set(config.auto_classes().values())))
    (folder / REMOTE_FILE).write_text(REMOTE_TEXT.format(names=names))
