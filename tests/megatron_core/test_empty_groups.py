"""Groups of parameters that a rank has none of, in what it saves and in what it asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_zb.megatron_core.checkpoints import MASTERS, leave_out_empty_groups, load_empty_groups


def of_three_groups(_optimizer: Any, state: Any, _is_loading: bool, **more: Any) -> dict[str, Any]:
    return {MASTERS: [["a"], [], ["b"]], "state": state, **more}


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_empty_group_is_not_saved(is_loading: bool) -> None:
    """What is asked for in a load has a list for each group of the optimizer."""
    found = leave_out_empty_groups(of_three_groups, None, "model", is_loading, metadata="m")
    groups = [["a"], [], ["b"]] if is_loading else [["a"], ["b"]]
    assert found == {MASTERS: groups, "state": "model", "metadata": "m"}


def test_an_optimizer_without_masters_is_as_it_was() -> None:
    assert leave_out_empty_groups(lambda *_: {"state": {}}, None, None) == {"state": {}}


@pytest.mark.parametrize(
    ("groups", "state", "loaded"),
    [
        ([[], []], {}, {MASTERS: []}),
        ([[], []], {MASTERS: [[]]}, {MASTERS: [[]]}),
        ([["a"]], {"fp32_from_fp16": [["a"]]}, {"fp32_from_fp16": [["a"]]}),
    ],
    ids=["without weights", "without weights, with a list", "an older checkpoint"],
)
def test_an_optimizer_without_weights_is_loaded(
    groups: list[list[str]], state: dict[str, Any], loaded: dict[str, Any]
) -> None:
    given: list[dict[str, Any]] = []
    optimizer = SimpleNamespace(fp32_from_float16_groups=groups)
    load_empty_groups(lambda _, found: given.append(found), optimizer, state)
    assert given == [loaded]
