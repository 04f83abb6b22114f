"""Tables of torch.distributed.pipelining in and out, and Chrome traces."""

from __future__ import annotations

import functools
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import drawn_sizes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import interchange
from megatron_zb.schedules.families import dualpipe_v_order
from megatron_zb.schedules.interchange import from_csv, to_csv, write_csv
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule

pytestmark = pytest.mark.usefixtures("brief_searches")

ONE_EACH = "0F0,0B0\n1F0,1B0\n"


@functools.cache
def build(name: str, p: int = 4, m: int = 6) -> Schedule:
    return schedules.build(name, pipeline_size=p, num_microbatches=m)


@pytest.mark.parametrize("name", schedules.names())
@settings(max_examples=8, deadline=None)
@given(p=st.integers(2, 6), m=st.integers(1, 12))
def test_a_schedule_comes_back_as_it_went(name: str, p: int, m: int) -> None:
    schedule = build(name, p, m)
    assert from_csv(to_csv(schedule), name=name) == schedule


def test_every_kind_has_the_letter_that_torch_gives_it() -> None:
    ranks = (
        (Pass(PassKind.F, 0, 0), Pass(PassKind.BW, 0, 0)),
        (Pass(PassKind.F, 1, 0), Pass(PassKind.B, 1, 0), Pass(PassKind.W, 1, 0)),
    )
    schedule = Schedule("all kinds", looped(2), 1, ranks).validate()
    assert to_csv(schedule) == "0F0,0B0\n1F0,1I0,1W0\n"


def test_a_pair_is_one_cell_as_in_torchs_dualpipe_v() -> None:
    """Torch builds the same order with the same pairs, and writes them so."""
    ours = dualpipe_v_order(4, 9).validate()
    rows = get_schedule_ops("DualPipeV", 4, 9)
    theirs = "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows) + "\n"
    assert "(4F4;3B0)OVERLAP_F_B" in theirs
    assert from_csv(theirs, name=ours.name) == ours
    assert to_csv(ours) == theirs
    assert interchange.digest(ours) != interchange.digest(ours.without_pairs())


def test_a_pair_is_one_event_of_a_trace() -> None:
    ours = dualpipe_v_order(2, 4)
    costs = schedules.Costs.uniform(pipeline_size=2, forward=1, backward=1, weight=1)
    events = json.loads(interchange.to_chrome_trace(schedules.simulate(ours, costs)))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert len(names) == sum(map(len, ours.ranks)) - len(ours.pairs)
    assert sum(name.startswith("(") for name in names) == len(ours.pairs)


def test_idle_cells_spaces_and_empty_lines_at_the_end_do_not_matter() -> None:
    padded = "0F0,,, 0B0 ,\r\n,1F0,1B0\r\n\r\n,,\n"
    assert from_csv(padded).ranks == from_csv(ONE_EACH).ranks


def test_a_placement_of_no_known_shape_is_custom() -> None:
    found = from_csv("1F0,1B0\n0F0,0B0\n").placement
    assert found == Placement("custom", 2, (1, 0))
    backwards = to_csv(build("v-half")).splitlines()[::-1]
    assert from_csv("\n".join(backwards)).placement.rank_of == (3, 2, 1, 0, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'completeness': the table has no passes"),
        ("\n\n", "'completeness': the table has no passes"),
        ("0F0,0B0\n", "'placement': the table has one row"),
        ("0F0,0B0\n1F0,,hello\n", "row 2, column 3: 'hello' is no pass: .*such as 2F0"),
        ("0F0,0B0\n1F0,1B\n", "row 2, column 2: '1B' is no pass"),
        ("0F0,0B0\n1F0,1B0x\n", "row 2, column 2: '1B0x' is no pass"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "row 1, column 2: '0SEND_F0' is a message"),
        ("0F0,0B0\n1F0,1B" + 5000 * "0", "row 2, column 2: '1B0000.*' has a number of more than 7"),
        ("0F0,0B0\n0F0,1B0\n", "row 2, column 1, pass 0F0: rule 'placement': .* on row 1"),
        ("0F0,0B0\n2F0,2B0\n", "'completeness': no row runs stage 1, but stage 2"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2: rule 'placement': it runs 0 stages and row 3 runs 1"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "row 2: rule 'placement': it runs 1 stages and row 1 "),
        ("0F0,,0F0,0B0\n1F0,1B0\n", "row 1, column 3, '0F0': .*'microbatch order'"),
        ("0F0,0B0\n,,1I0,1F0,1W0\n", "row 2, column 3, '1I0': .*'order': its F has not run yet"),
        ("0F0,0I0\n1F0,1B0\n", "rank 0, stage 0: rule 'completeness': 0 of 1 W passes"),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n", "row 1, column 3, '0B1': .*'microbatch order'"),
        ("0F0,3F0,3B0,0B0\n2F0,1F0,2B0,1B0\n", r"row \d, column \d, '\dF0': .*'progress'"),
        ("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n", "row 1, column 1, '0F0': .*rule 'pair': 0BW0 needs"),
        ("(0B0;0F0)OVERLAP_F_B\n1F0,1B0\n", "row 1, column 1, '0B0': .*'order'"),
        ("(0F0;0W0)OVERLAP_F_B\n1F0,1B0\n", "row 1, column 1, '0W0': .*'order'"),
        ("(0F0;0Z0)OVERLAP_F_B\n1F0,1B0\n", "row 1, column 1: '0Z0' is no pass"),
        ("(0F0;0B0;0F1)OVERLAP_F_B\n1F0,1B0\n", r"row 1, column 1: '\(0F0;0B0;0F1.*is no pass"),
        ("0F0,(0F1;0B0)\n1F0,1B0\n", r"row 1, column 2: '\(0F1;0B0\)' is no pass"),
        ('"0F0', "'placement': the table has one row"),
        ("0F0," + "9" * 200_000, "the text is no CSV: field larger than"),
    ],
)
def test_a_broken_table_is_told_where_and_why(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_csv(text)


def test_a_broken_rule_has_its_place() -> None:
    f, bw = PassKind.F, PassKind.BW
    last = (Pass(f, 1, 0), Pass(bw, 1, 0))

    def error_of(*ranks: tuple[Pass, ...]) -> InvalidSchedule:
        with pytest.raises(InvalidSchedule) as raised:
            Schedule("broken", looped(2), 1, ranks).validate()
        return raised.value

    early = error_of((Pass(f, 0, 0), Pass(bw, 0, 0)), last[::-1])
    assert (early.rank, early.position) == (1, 0)
    missing = error_of((Pass(f, 0, 0),), last)
    assert (missing.rank, missing.position) == (0, None)
    listed = error_of(last)
    assert (listed.rank, listed.position) == (None, None)
    assert (pickle.loads(pickle.dumps(early)).rank, str(early)) == (1, str(early))


def test_a_table_of_a_million_microbatches_costs_nothing() -> None:
    with pytest.raises(InvalidSchedule, match="row 1, column 1, '0F9999999'"):
        from_csv("0F9999999,0B0\n1F0,1B0\n")
    with pytest.raises(InvalidSchedule, match="no row runs stage 1"):
        from_csv("0F0,0B0\n9999999F0,9999999B0\n")


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interchange, "_MOST_CELLS", 5)
    with pytest.raises(UsageError, match="row 2: a table may have 5 cells at most"):
        from_csv("0F0,,0B0\n,1F0,1B0\n")
    monkeypatch.setattr(interchange, "_MOST_STAGES", 1)
    with pytest.raises(UsageError, match="2 stages: a table may have 1 at most"):
        from_csv(ONE_EACH)
    monkeypatch.setattr(interchange, "_MOST_BYTES", 4)
    (tmp_path / "large.csv").write_text(ONE_EACH)
    with pytest.raises(UsageError, match="larger than"):
        from_csv(tmp_path / "large.csv")


_PAIR = "(0F1;0B0)OVERLAP_F_B"
_FRAGMENTS = st.sampled_from(
    [
        *("0F0", "1F0", "0B0", "1B0", _PAIR, "0I0", "0W0", "2F1", ",", "\n", '"', "\r", " ", "\0"),
        *("é", "٣F٣"),
    ]
)


@settings(max_examples=300 if drawn_sizes.IS_FULL else 100, deadline=None)
@given(st.text() | st.lists(_FRAGMENTS).map("".join))
def test_any_text_is_a_valid_schedule_or_a_usage_error(text: str) -> None:
    try:
        schedule = from_csv(text)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert schedule.validate() is schedule


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(schedules.names()))
def test_mutated_tables_are_valid_or_named_by_a_rule(data: st.DataObject, name: str) -> None:
    """Cells swapped, lost, doubled, or changed by a character."""
    rows = [line.split(",") for line in to_csv(build(name, 3, 3)).splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(rows))
        at = data.draw(st.integers(0, len(row) - 1))
        other_row = data.draw(st.sampled_from(rows))
        other = data.draw(st.integers(0, len(other_row) - 1))
        match data.draw(st.sampled_from(["swap", "lose", "double", "change"])):
            case "swap":
                row[at], other_row[other] = other_row[other], row[at]
            case "lose":
                row[at] = ""
            case "double":
                row.insert(at, other_row[other])
            case "change":
                index = data.draw(st.integers(0, max(len(row[at]) - 1, 0)))
                new = data.draw(st.sampled_from(list("0123456789FIBWx,")))
                row[at] = row[at][:index] + new + row[at][index + 1 :]
    try:
        schedule = from_csv("\n".join(map(",".join, rows)))
    except UsageError as error:
        assert "rule '" in str(error) or "is no pass" in str(error)
    else:
        costs = schedules.Costs.uniform(
            pipeline_size=schedule.placement.pipeline_size, forward=1, backward=1, weight=1
        )
        assert schedules.simulate(schedule, costs).makespan > 0


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.csv"
    schedule = build("v-min")
    write_csv(schedule, path)
    assert from_csv(path) == replace(schedule, name="mine.csv")
    assert from_csv(path, name="v-min") == schedule
    with pytest.raises(UsageError, match=r"cannot read '.*none\.csv': No such file"):
        from_csv(tmp_path / "none.csv")
    with pytest.raises(UsageError, match=r"cannot read '.*': Is a directory"):
        from_csv(tmp_path)
    with pytest.raises(UsageError, match=r"cannot write '.*mine\.csv/x"):
        write_csv(schedule, path / "x.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text in UTF-8"):
        from_csv(path)
    path.write_bytes(b"\xef\xbb\xbf" + ONE_EACH.encode())
    assert from_csv(path).ranks == from_csv(ONE_EACH).ranks


def test_a_forward_only_schedule_is_no_table() -> None:
    with pytest.raises(UsageError, match="v-half has forward passes alone"):
        to_csv(build("v-half").forwards())


def trace_of(schedule: Schedule, costs: schedules.Costs) -> list[dict[str, Any]]:
    loaded = json.loads(interchange.to_chrome_trace(schedules.simulate(schedule, costs)))
    events = loaded["traceEvents"]
    assert isinstance(events, list)
    return events


def test_a_trace_has_every_pass_at_its_time() -> None:
    costs = schedules.Costs.uniform(pipeline_size=3, forward=0.002, backward=0.004, weight=0.001)
    schedule = schedules.build("v-half", pipeline_size=3, num_microbatches=4, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    events = trace_of(schedule, costs)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    for rank, passes in enumerate(schedule.ranks):
        complete = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        assert [e["name"] for e in complete] == [str(p) for p in passes]
        assert [e["ts"] for e in complete] == [pytest.approx(t * 1e6) for t in timeline.start[rank]]
        ends = [e["ts"] + e["dur"] for e in complete]
        assert ends == [pytest.approx(t * 1e6) for t in timeline.end[rank]]
    assert min(e["dur"] for e in events if e["ph"] == "X") == pytest.approx(500)  # half of 1 ms


def test_a_trace_has_the_memory_of_each_rank() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    events = trace_of(build("1f1b"), costs)
    for rank in range(4):
        name = f"activation memory, rank {rank}"
        held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["name"] == name]
        assert max(held) == 4 - rank
        assert held[-1] == 0


def test_a_trace_has_its_memory_at_the_times_of_its_passes() -> None:
    """A change at the start of each pass, and the end after the last: in microseconds, too."""
    costs = schedules.Costs.uniform(pipeline_size=3, forward=0.002, backward=0.004, weight=0.001)
    events = trace_of(build("v-half", 3), costs)
    for rank in range(3):
        passes = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        name = f"activation memory, rank {rank}"
        counted = [e["ts"] for e in events if e["ph"] == "C" and e["name"] == name]
        assert len(passes) > 10
        assert counted[:-1] == pytest.approx([e["ts"] for e in passes])
        assert counted[-1] == pytest.approx(passes[-1]["ts"] + passes[-1]["dur"])


def test_a_trace_tells_forwards_and_backwards_apart_by_their_colours() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    colours: dict[str, set[str]] = {}
    for event in trace_of(build("zb-h1"), costs):
        if event["ph"] == "X":
            colours.setdefault(event["name"].strip("0123456789"), set()).add(event["cname"])
    assert colours == {"F": {"rail_response"}, "B": {"bad"}, "W": {"good"}, "BW": {"terrible"}}
