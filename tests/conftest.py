"""Fixtures that every test can ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPools


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """`ranks(4).run(function, **arguments)` calls a function on 4 gloo ranks; see ranks.py.

    The tests of a module share the ranks. Not those of all modules: ranks that have made many
    process groups have a thousand threads, which slow down everything that comes after.
    """
    pools = RankPools()
    yield pools
    pools.close()
