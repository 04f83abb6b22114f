"""Replacement of Megatron's functions by hooks that receive the original."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

T = TypeVar("T")

Undo = Callable[[], None]


def is_megatrons(module: str) -> bool:
    """Return whether a module is of Megatron, or the script."""
    return module.split(".")[0] in ("megatron", "__main__")


def is_anybodys(module: str) -> bool:
    """Return whether a module may hold replacements: any but those that call the originals."""
    return not module.startswith("megatron_zb")


def hooked(original: Any, hook: Any) -> Any:
    """Return a function that calls ``hook(original, ...)``."""

    @wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        return hook(original, *args, **keywords)

    return call


def replace(module: Any, name: str, hook: Any, holds: Callable[[str], bool] = is_megatrons) -> Undo:
    """Replace a function in its module and in all others that hold it; return what undoes that.

    Args:
        holds: returns whether a module, by its name, is to hold the replacement.
    """
    original = getattr(module, name)
    replacement = hooked(original, hook)
    _exchange(original, replacement, holds)
    return partial(_exchange, replacement, original, lambda module: True)


def _exchange(old: Any, new: Any, holds: Callable[[str], bool]) -> None:
    for module in [module for name, module in sys.modules.items() if holds(name)]:
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, attribute, new)


def replace_method(cls: Any, name: str, hook: Any) -> Undo:
    """Replace a method of a class; return what undoes that."""
    original = getattr(cls, name)
    setattr(cls, name, hooked(original, hook))
    return partial(setattr, cls, name, original)


def replace_static(cls: Any, name: str, hook: Any) -> Undo:
    """Replace a static method of a class; return what undoes that."""
    original = getattr(cls, name)
    setattr(cls, name, staticmethod(hooked(original, hook)))
    return partial(setattr, cls, name, staticmethod(original))


def always(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for :func:`when` that calls ``function(original, ...)`` for any subject."""
    return lambda subject, original, *args, **keywords: function(original, *args, **keywords)


def when(subject: Callable[[], T | None], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls the original as long as there is no subject.

    Afterwards it calls ``method(subject, original, ...)``, such as a method of the subject's class.
    """

    def hook(original: Any, *args: Any, **keywords: Any) -> Any:
        found = subject()
        if found is None:
            return original(*args, **keywords)
        return method(found, original, *args, **keywords)

    return hook
