"""An index of a checkpoint may have members of an Enum, and no other attribute of anything."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron_zb.errors import UsageError
from megatron_zb.train.checkpoint_contents import check_contents

FORMAT: Any = next(
    member
    for kind in vars(metadata).values()
    if isinstance(kind, type) and issubclass(kind, Enum) and kind.__module__ == metadata.__name__
    for member in kind
)


class Attribute:
    """What a pickle asks of an object by its name."""

    def __init__(self, of: Any, name: str) -> None:
        self._of, self._name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._of, self._name)


def checked(folder: Path, content: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    check_contents(folder, "--load")


def test_a_member_of_an_enum_is_read_as_each_python_writes_it(tmp_path: Path) -> None:
    checked(tmp_path, [FORMAT])
    checked(tmp_path, [Attribute(type(FORMAT), FORMAT.name)])  # Python 3.11.2


@pytest.mark.parametrize(
    "content",
    [
        Attribute(type(FORMAT), "mro"),
        Attribute(type(FORMAT), "__class__"),
        Attribute(TensorProperties, "create_from_tensor"),
        Attribute([], "append"),
        Attribute(Attribute(type(FORMAT), FORMAT.name), "name"),
    ],
    ids=["method", "class", "record", "list", "of a member"],
)
def test_another_attribute_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(UsageError, match=r"would call builtins\.getattr, .*: do not load it"):
        checked(tmp_path, [content])
