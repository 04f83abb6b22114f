"""Fixtures that every test can ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPools
from texts import prepared


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """`ranks(4).run(function, **arguments)` calls a function on 4 gloo ranks; see ranks.py.

    The tests of a module share the ranks. Not those of all modules: ranks that have made many
    process groups have a thousand threads, which slow down everything that comes after.
    """
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a data set in Megatron's format: 400 kB of real text, a byte a token."""
    return prepared(tmp_path_factory.mktemp("corpus"), most_bytes=400_000)
