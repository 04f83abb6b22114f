"""Contents allowed in a torch_dist checkpoint: tensors and their places, and no code to execute.

PyTorch keeps the places of tensors in a pickle, which could call anything when it is read; so the
names in it are read first.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.train.checkpoint_directory import TRACKER

_INDEX = ".metadata"
_MODULES = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
)
_TORCH = ("Size", "device", "dtype", "layout", "memory_format", "strided")
_NAMES = {
    *(("torch", name) for name in _TORCH),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


def check_contents(path: Path, flag: str) -> None:
    """Check that a checkpoint's index names only records of places, without calling anything else.

    Raises:
        UsageError: it names something else, or cannot be read; `flag` named the checkpoint.
    """
    try:
        with (path / _INDEX).open("rb") as file:
            _Reader(file).load()
    except _Forbidden as error:
        raise UsageError(
            f"{flag}: {path / _INDEX} would call {error}, which no checkpoint of Megatron does: do "
            "not load it"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{flag}: {path / _INDEX} cannot be read ({error.strerror}): give a checkpoint of "
            "format torch_dist"
        ) from error
    except Exception as error:
        raise UsageError(
            f"{flag}: {path / _INDEX} is damaged: to load an earlier checkpoint, write its "
            f"iteration into {path.parent / TRACKER}"
        ) from error


class _Forbidden(Exception):
    """An error with the name of a function that a pickle would call."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Find only the classes that PyTorch writes into an index."""
        import torch

        if (module, name) == ("builtins", "getattr"):
            return _member  # with which Python 3.11.2 pickles a member of an Enum
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # a name with a dot in it would reach through a record into what its module has imported
        is_record = module in _MODULES and "." not in name and _is_own(module, name)
        if not (is_type or is_record or (module, name) in _NAMES):
            raise _Forbidden(f"{module}.{name}")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an Enum, in place of any attribute of anything."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise _Forbidden("builtins.getattr")


def _is_own(module: str, name: str) -> bool:
    """Return whether a module defines a class itself instead of importing it."""
    from importlib import import_module

    found = getattr(import_module(module), name, None)
    return isinstance(found, type) and found.__module__ == module
