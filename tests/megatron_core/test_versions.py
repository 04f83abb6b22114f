"""A Megatron that is older than all that are known is refused, a newer one brings a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapters import scheduled
from megatron.core import package_info
from small_trees import checkout_tree

import megatron_zb
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.adapter import Layers, PipelineAdapter


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    versions.warn_of_core.cache_clear()
    yield
    versions.warn_of_core.cache_clear()


def adapter() -> PipelineAdapter:
    return scheduled("1f1b", pipeline_size=2, num_microbatches=4, layers=Layers(4))


def test_the_series_have_no_gap() -> None:
    """Whatever is neither older nor newer than all has been checked."""
    numbers = [series.number for series in versions.SERIES]
    assert numbers == [(0, minor) for minor in range(numbers[0][1], numbers[-1][1] + 1)]


def test_what_was_checked_is_no_matter() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert adapter().chunks == 1


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_a_newer_one_brings_one_warning_on_one_rank(
    rank: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_info, "MINOR", versions.SERIES[-1].number[1] + 1)
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        versions.warn_of_core()  # by the launcher and install(), before all else
        assert adapter().chunks == 1
    words = f"newer than {versions.NEWEST}, the newest that was checked"
    assert sum(words in str(each.message) for each in said) == times


def test_an_older_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(checkout_tree(tmp_path, "0.15.0")))
    monkeypatch.setattr(package_info, "MINOR", versions.SERIES[0].number[1] - 1)
    for ask in (adapter, megatron_zb.install):
        with pytest.raises(UsageError, match=r"older than all that are known here: known are"):
            ask()
