"""The `slt` command as it is installed: help and wrong words at once, all else by hf_slt.cli.

Importing hf_slt registers the model with transformers, which takes seconds. So this module lies beside the
package, and runs the file that declares the words alone.
"""

import runpy
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """The exit code of the command."""
    package = find_spec("hf_slt")
    assert package is not None
    assert package.origin is not None
    args = runpy.run_path(str(Path(package.origin).with_name("options.py")))["parse_slt"]()
    from hf_slt.cli import run

    return run(args)
