"""Fixtures that every test can ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(4).run(function, **arguments)` calls a function on 4 gloo ranks; see ranks.py."""
    pools = RankPools()
    yield pools
    pools.close()
