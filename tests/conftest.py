"""Fixtures that every test can ask for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import hypothesis
import kept_searches
import pytest
from brief_searches import briefly
from browser import Browser, find_browser
from drawn_tests import left_out
from prepared_text import prepared
from rank_process import Kind, missing_transformer_engine
from ranks import RankPool, RankPools

from megatron_zb.megatron_core.versions import SERIES

ASKED_FOR = {"tests/trainers": " (--trainers)"}
"""Options of scripts/test.sh that run what is skipped elsewhere, by folder."""
LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""How many tests of each mark are left out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the tests marked full, too")
    parser.addoption(
        "--draw",
        metavar="SEED",
        help="of the tests marked long, slow or full those that a seed draws; see drawn_tests.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell modules which sizes to draw, before they are imported; no example has a time limit."""
    hypothesis.settings.register_profile(
        "any load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any load")
    if config.getoption("--full"):
        os.environ["TESTS_FULL"] = "yes"  # drawn_sizes.py reads it when it is imported


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations beyond those that each thing is tried in, and what is not drawn."""
    if config.getoption("--full"):
        return
    by_mark = left_out(items, config.getoption("--draw"))
    others = {id(item) for of_mark in by_mark.values() for item in of_mark}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
        items[:] = [item for item in items if id(item) not in others]
    counts = {mark: len(of_mark) for mark, of_mark in by_mark.items()}
    config.stash[LEFT_OUT] = counts
    if (output := getattr(config, "workeroutput", None)) is not None:
        output["left_out"] = counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker has left out; each of them collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what did not run, and how to run it."""
    config = terminalreporter.config
    counts = config.stash.get(LEFT_OUT, {})
    skipped = terminalreporter.stats.get("skipped", [])
    folders = Counter("/".join(report.nodeid.split("/")[:2]) for report in skipped)
    said = []
    if slow := counts.get("slow", 0) + counts.get("long", 0):
        said.append(f"{slow} slow tests that --draw {config.getoption('--draw')} leaves out")
    if full := counts.get("full"):
        said.append(f"{full} further combinations (--full)")
    for folder, number in sorted(folders.items()):
        said.append(f"{number} skipped of {folder}{ASKED_FOR.get(folder, '')}")
    if said:
        core = metadata.version("megatron-core")
        others = [series.text for series in SERIES if not core.startswith(f"{series.text}.")]
        said.append(f"with megatron-core {', '.join(others)} (--megatron)")
        terminalreporter.write_line(f"NOT RUN: {'; '.join(said)}", yellow=True)
        terminalreporter.write_line("scripts/test.sh --everything runs all of it", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def searches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Searches are kept; see kept_searches.py."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "searches"
    folder.mkdir(exist_ok=True)
    os.environ[kept_searches.FOLDER] = str(folder)
    kept_searches.install()


@pytest.fixture(scope="module")
def brief_searches() -> Iterator[None]:
    """Every search of a module's tests takes little effort, but with --full; not in its ranks."""
    with briefly():
        yield


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """`ranks(4).run(function, **arguments)` calls a function on 4 gloo ranks; see ranks.py.

    The tests of a module share the ranks. Not those of all modules: ranks that have made many
    process groups have a thousand threads, which slow down everything that comes after.
    """
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def te_pool(ranks: RankPools) -> RankPool:
    """Two ranks that have Transformer-Engine."""
    if missing := missing_transformer_engine(Kind.TRANSFORMER_ENGINE):
        pytest.skip(missing)
    return ranks(2, Kind.TRANSFORMER_ENGINE)


@pytest.fixture(scope="module")
def older_te_pool(ranks: RankPools) -> RankPool:
    """Two ranks that have an older Transformer-Engine."""
    if missing := missing_transformer_engine(Kind.OLDER_TRANSFORMER_ENGINE):
        pytest.skip(missing)
    return ranks(2, Kind.OLDER_TRANSFORMER_ENGINE)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a data set in Megatron's format: 400 kB of real text, a byte a token."""
    return prepared(tmp_path_factory.mktemp("corpus"), most_bytes=400_000)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A real browser for the tests of pages; their modules skip where there is none."""
    command = find_browser()
    assert command is not None
    with Browser(command, tmp_path_factory.mktemp("profile")) as opened:
        yield opened
