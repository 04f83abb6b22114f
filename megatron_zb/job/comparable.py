"""Values that two processes can compare: equal text where the same is meant, on every host."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

from megatron_zb.parsing import flag_of
from megatron_zb.schedules.request import Limit

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def comparable(value: Any) -> Any:
    """Return a value as JSON can hold it, without what differs between two processes.

    Numbers, texts and truth values stay what they are. A class or a function becomes its name, and
    any other object its type with its attributes, or its ``repr`` without an address in memory.
    """
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # NaN is not equal to itself
    if isinstance(value, Mapping):
        return {str(comparable(k)): comparable(v) for k, v in sorted(value.items(), key=_text)}
    if isinstance(value, set | frozenset):
        return sorted(map(comparable, value), key=str)
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    if isinstance(value, PurePath | Limit):
        return str(value)
    return _described(value)


def _text(item: tuple[Any, Any]) -> str:
    return str(comparable(item[0]))


def _described(value: Any) -> Any:
    if isinstance(value, partial):
        return [_described(value.func), comparable(value.args), comparable(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        attributes = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif isinstance(value, argparse.Namespace):
        attributes = vars(value)
    else:
        return _ADDRESS.sub("", repr(value))
    return [type(value).__qualname__, comparable(attributes)]


def named_arguments(
    args: argparse.Namespace,
    *,
    of_rank: Collection[str] = (),
    local: Collection[str] = (),
    flags: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the comparable values of parsed arguments by the names that a message uses.

    Args:
        of_rank: attributes that are left out, because every rank has its own.
        local: those that each host may have another value of, such as a folder for its log: it
            counts only whether there is one.
        flags: those of the parser, where they are known; what is called otherwise on the command
            line, such as ``--no-bias-gelu-fusion``, then goes by the name of its attribute.
    """
    found = {}
    for name, value in vars(args).items():
        if name not in of_rank:
            flag = flag_of(name)
            said = flag if flags is None or flag in flags else name
            found[said] = value is not None if name in local else comparable(value)
    return found
