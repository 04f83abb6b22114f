"""The names of Transformer-Engine, for trainers that import it whether they use it or not.

This is a stand-in: every name is an empty class, nothing can be computed, and a model must have
layers without Transformer-Engine. Unlike ``te_stand_in``, it comes after megatron-core has been
imported and has found that there is no Transformer-Engine.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_VERSION = "2.20.2"
_MODULES = "transformer_engine transformer_engine.pytorch transformer_engine.pytorch.ops".split()
# They decide while they are imported whether there is a Transformer-Engine.
_DECIDE = (
    "extensions.transformer_engine models.gpt.gpt_layer_specs optimizer transformer.moe.experts"
).split()


class NamesOnly(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__version__ = _VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


def install() -> None:
    """Let this process import the names; megatron-core keeps to what it has without them."""
    for name in _DECIDE:
        import_module(f"megatron.core.{name}")
    for name in _MODULES:
        module = sys.modules[name] = NamesOnly(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
