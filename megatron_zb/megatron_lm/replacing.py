"""Replacement of Megatron's functions by hooks that receive the original."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")

_HOLDERS = ("megatron", "__main__")


def hooked(original: Any, hook: Any) -> Any:
    """Return a function that calls ``hook(original, ...)``."""

    @wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        return hook(original, *args, **keywords)

    return call


def replace(module: Any, name: str, hook: Any) -> None:
    """Replace a function in its module, in Megatron's that imported it, and in the script's."""
    original = getattr(module, name)
    replacement = hooked(original, hook)
    for other in [m for key, m in sys.modules.items() if key.split(".")[0] in _HOLDERS]:
        for attribute, value in list(vars(other).items()):
            if value is original:
                setattr(other, attribute, replacement)


def replace_method(cls: Any, name: str, hook: Any) -> None:
    setattr(cls, name, hooked(getattr(cls, name), hook))


def replace_static(cls: Any, name: str, hook: Any) -> None:
    setattr(cls, name, staticmethod(hooked(getattr(cls, name), hook)))


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
