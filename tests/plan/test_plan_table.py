"""The printed table of a plan: rows told apart, reasons and the margin of memory in sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from small_models import WHOLE, a100, small

from megatron_zb.parsing import GIB
from megatron_zb.plan import table
from megatron_zb.plan.reasons import is_named_too, margin, reason
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.strategy import Choices, candidates_of

SNAPSHOTS = Path(__file__).with_name("snapshots")

pytestmark = pytest.mark.usefixtures("brief_searches")


@pytest.fixture(scope="module")
def plan() -> Plan:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1, 2), recompute=("none",))
    job = PlanJob(small(), a100(), 4, 20 * GIB, 32, 1024, choices, features=WHOLE)
    return search(job, candidates_of(["zb-h1", "v-zb", "v-half"]))


def with_auto(plan: Plan) -> Plan:
    """The plan with a row of auto that is the run of its first row."""
    first = plan.ranked[0]
    return replace(plan, ranked=(first, replace(first, candidate="auto"), *plan.ranked[1:]))


def printed(plan: Plan, width: int = 200) -> str:
    console = Console(record=True, width=width)
    table.print_plan(plan, console, 8)
    return console.export_text()


@pytest.fixture(scope="module")
def unsearched() -> Plan:
    """A plan whose orders follow from formulas: the same on every machine."""
    choices = Choices(tensor=(1,), pipeline=(2, 4), microbatch=(1, 2), recompute=("none", "full"))
    job = PlanJob(small(), a100(), 4, 20 * GIB, 32, 1024, choices, features=WHOLE)
    return search(job, candidates_of(["zb-h1", "zb-h2"]))


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_at_a_width_is_the_one_that_was_looked_at(unsearched: Plan, width: int) -> None:
    """Where a change is meant, delete the file, run the test once and look at the new one."""
    path, text = SNAPSHOTS / f"plan_{width}.txt", printed(unsearched, width)
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was missing and has been written")
    assert text == path.read_text(encoding="utf-8")
    tables = text[text.index("# schedule") : text.index(" 1  ")]
    assert max(map(len, tables.splitlines())) <= width


def test_a_row_of_auto_that_is_another_rows_run_is_merged_with_it(plan: Plan) -> None:
    both = with_auto(plan)
    assert is_named_too(both, both.ranked[1])
    places = table.places(both)
    assert [place for place, _ in places] == list(range(1, len(plan.ranked) + 1))
    assert 1 not in [index for _, index in places]
    assert table.name_in(both, both.ranked[0]).endswith(" (auto)")
    assert not table.name_in(plan, plan.ranked[0]).endswith(" (auto)")
    assert printed(both).count(" (auto)") == 1


def test_a_row_of_auto_of_another_order_stays(plan: Plan) -> None:
    first = plan.ranked[0]
    other = replace(first, candidate="auto", layout=(*first.layout[:-1], 99))
    both = replace(plan, ranked=(first, other, *plan.ranked[1:]))
    assert not is_named_too(both, other)
    assert len(table.places(both)) == len(both.ranked)


@pytest.mark.parametrize(("left", "is_little"), [(0.01, True), (0.05, False)])
def test_the_margin_of_memory_is_told(plan: Plan, left: float, is_little: bool) -> None:
    first = plan.ranked[0]
    memory = first.memory.total / (1 - left)
    rows = (first, *(row for row in plan.ranked[1:] if row.memory.total < first.memory.total))
    said = margin(replace(plan, job=replace(plan.job, memory=memory), ranked=rows))
    assert f"({left:.1%}) free" in said
    assert ("may exceed" in said or "no row leaves 3%" in said) is is_little


def test_a_safer_row_is_named_where_little_memory_is_left(plan: Plan) -> None:
    first, other = plan.ranked[0], plan.ranked[-1]
    small_one = replace(other, memory=replace(other.memory, activations=0.0))
    assert small_one.memory.total < 0.9 * first.memory.total
    tight = replace(plan.job, memory=first.memory.total * 1.001)
    said = margin(replace(plan, job=tight, ranked=(first, small_one)))
    slower = first.tokens_per_gpu / small_one.tokens_per_gpu - 1
    assert f"{small_one.candidate} ({small_one.load.strategy}) leaves" in said
    assert f"is {slower:.1%} slower" in said


def test_reasons_are_sentences(plan: Plan) -> None:
    for index in range(len(plan.ranked)):
        said = reason(plan, index)
        assert not re.search(r"; TP\d", said)
        if "needs" in said:
            assert re.search(r"a faster setting, TP\d.*, needs [\d.]+ GiB and does not fit", said)


@pytest.mark.parametrize("width", [80, 120])
def test_no_row_of_the_table_is_wrapped_in_a_word(plan: Plan, width: int) -> None:
    lines = printed(with_auto(plan), width).splitlines()
    whole = set(printed(with_auto(plan), 400).split())
    rows = [line for line in lines if re.match(r" ?\d+ ", line)]
    assert rows
    assert {word for line in rows for word in line.split()} <= whole
