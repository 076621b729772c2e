"""Registers supermask models with transformers' Auto classes and with PEFT, without importing torch.

transformers has no entry points for plugins: a plugin must call `AutoConfig.register` with its configuration
class. Importing that class imports torch, which takes longer than all of `import transformers`. Therefore
`import hf_slt` registers a stand-in, as soon as transformers imports its table of configurations. When the
stand-in is first used, it imports the real class, whose module registers configuration and models
(`hf_slt/models/auto.py`).

PEFT has tables of the modules that an adapter targets by default, by `model_type`. A supermask model has the modules
of its stock model, so it gets the same entries as soon as PEFT imports these tables.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def register_when_needed() -> None:
    """Complete the tables of transformers and PEFT now if they are imported, otherwise as soon as they are."""
    for name, complete in {
        "transformers.models.auto.configuration_auto": register_stand_ins,
        "peft.utils.constants": register_adapter_targets,
    }.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            complete(module)
        else:
            sys.meta_path.insert(0, _TableFinder(name, complete))


def register_adapter_targets(tables: Any) -> None:
    """Give every supermask model the default target modules that PEFT has for its stock model.

    Args:
        tables:
            PEFT's module of constants, `peft.utils.constants`.
    """
    for name, table in vars(tables).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            table |= {f"supermask_{stock_type}": modules for stock_type, modules in table.items()}


def register_stand_ins(table: Any) -> None:
    """Register a stand-in for the supermask version of every architecture that transformers has.

    Args:
        table:
            transformers' module of configurations, `transformers.models.auto.configuration_auto`.
    """
    for stock_type, stock_name in list(table.CONFIG_MAPPING_NAMES.items()):
        model_type = f"supermask_{stock_type}"
        if model_type not in table.CONFIG_MAPPING:
            table.CONFIG_MAPPING.register(model_type, _stand_in(model_type, f"Supermask{stock_name}"))


def _stand_in(model_type: str, name: str) -> type:
    """Return a class that behaves as the real configuration where transformers uses one from its table."""

    def real() -> Any:
        return getattr(import_module(".models.architectures", __package__), name)

    class StandIn:
        """Imports the real configuration when it is first used."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return real()(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            """Build a configuration from a dictionary, as in transformers."""
            return real().from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            """Load a configuration, as in transformers."""
            return real().from_pretrained(*args, **kwargs)

    StandIn.__name__ = StandIn.__qualname__ = name
    StandIn.model_type = model_type  # type: ignore[attr-defined]
    return StandIn


class _TableFinder(MetaPathFinder):
    """Finds one module, and completes its tables after its import."""

    def __init__(self, name: str, complete: Callable[[Any], None]) -> None:
        self.name, self.complete = name, complete

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CompletingLoader(spec.loader, self.complete)
        return spec


class _CompletingLoader(Loader):
    """Loads a module as its own loader does, then completes its tables."""

    def __init__(self, loader: Any, complete: Callable[[Any], None]) -> None:
        self.loader, self.complete = loader, complete

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.complete(module)
