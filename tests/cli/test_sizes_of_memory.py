"""Sizes of memory on the command line."""

from __future__ import annotations

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.parsing import GIB, size_in_bytes
from megatron_zb.schedules.request import Limit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7B", 7),
        ("2kB", 2_000),
        ("2 MB", 2_000_000),
        ("2GB", 2_000_000_000),
        ("2tb", 2_000_000_000_000),
        ("2KiB", 2_048),
        ("2MiB", 2_097_152),
        ("1.5GiB", 1_610_612_736),
        ("2TiB", 2_199_023_255_552),
    ],
)
def test_a_size_is_read_in_its_unit(text: str, size: float) -> None:
    assert size_in_bytes(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["40GiB", "40 GiB", "40gib", "42949672960B"])
def test_a_limit_of_memory_is_a_size_as_well(text: str) -> None:
    assert Limit.parse(text).bytes == 40 * GIB == size_in_bytes(text, "--gpu-memory")


@pytest.mark.parametrize("text", ["80", "80 XB", "0GiB", "-1GiB", "many", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu-memory"):
        size_in_bytes(text, "--gpu-memory")
