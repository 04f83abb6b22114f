"""Groups of parameters that a rank has none of, in what it saves and in what it asks for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_zb.megatron_core.empty_groups import MASTERS, leave_out


def of_three_groups(_optimizer: Any, state: Any, _is_loading: bool, **more: Any) -> dict[str, Any]:
    return {MASTERS: [["a"], [], ["b"]], "state": state, **more}


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_empty_group_is_not_saved(is_loading: bool) -> None:
    """What is asked for in a load has a list for each group of the optimizer."""
    found = leave_out(of_three_groups, None, "model", is_loading, metadata="m")
    groups = [["a"], [], ["b"]] if is_loading else [["a"], ["b"]]
    assert found == {MASTERS: groups, "state": "model", "metadata": "m"}


def test_an_optimizer_without_masters_is_as_it_was() -> None:
    assert leave_out(lambda *_: {"state": {}}, None, None) == {"state": {}}
