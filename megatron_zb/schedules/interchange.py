"""Schedules as tables of torch.distributed.pipelining (CSV), and timelines as Chrome traces.

The table is the *compute-only* one that torch's pipeline runtime loads and dumps: a row for each
rank, a cell for each pass, ``<stage><letter><microbatch>``. Its letters are F, I for the input
gradient (our B), W, and B for a full backward (our BW). Empty cells are idle steps. Cells of
torch's reductions of gradients over replicas, such as ``0REDUCE_GRAD``, are no passes and left out.
Four things torch does not know: R, where activations are recomputed, O, P and V of schedules with
a sharded output layer, in which the shard of rank r counts as stage S + r, U, the update of a
stage, of schedules whose units have owners, and X and Y of schedules in two directions, in which
the copy of stage s counts as stage S + s.

A pair is one cell, such as ``(0F1;2B0)OVERLAP_F_B``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.schedules.features import two_directions
from megatron_zb.schedules.features.part import Part
from megatron_zb.schedules.features.vocabulary import (
    PREDICTION_KINDS,
    EmbeddingRules,
    PredictionRules,
    VocabularyRules,
)
from megatron_zb.schedules.kinds import Home
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, placement_of
from megatron_zb.schedules.request import MOST_FORWARDS
from megatron_zb.schedules.rules import (
    TRAINING,
    LastFirstRules,
    TrainingRules,
)
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import Timeline
from megatron_zb.schedules.units import UPDATE

_KINDS = (*PREDICTION_KINDS, UPDATE, *two_directions.EXCHANGE)
_LETTER = {it.kind: it.letter or str(it.kind) for it in _KINDS}
_KIND = {letter: kind for kind, letter in _LETTER.items()}
_OF_SHARDS = {it.kind for it in PREDICTION_KINDS if it.home not in (Home.STAGES, Home.INNER)}
_CELL = re.compile(r"([0-9]+)([A-Z])([0-9]+)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_REDUCTION = re.compile(r"[0-9]+REDUCE_GRAD")
_COMMUNICATION = re.compile(r"[0-9]+(SEND|RECV)_[FB][0-9]+")

# Far above what any cluster needs; a file beyond them is no schedule.
_MOST_BYTES = 64 * 2**20
_MOST_CELLS = 4 * MOST_FORWARDS
_MOST_STAGES = 16_384
_MOST_DIGITS = 7


class _Cell(NamedTuple):
    """A pass and its column in the table, counted from 1; a pair has two, its F is ``paired``."""

    work: Pass
    column: int
    paired: bool = False


def to_csv(schedule: Schedule) -> str:
    """Return the schedule as a compute-only table.

    Raises:
        UsageError: a forward-only schedule, or kinds of passes that a table has no letters for.
    """
    if schedule.forward_only:
        raise UsageError(f"{schedule.name} has forward passes alone: a table is for training")
    others = {p.kind for rank in schedule.ranks for p in rank} - _LETTER.keys()
    others -= {it.kind for it in getattr(schedule.rules, "more", ())}
    if others:
        raise UsageError(
            f"{schedule.name} has passes {', '.join(sorted(others))}: a table has those of a "
            "training step alone"
        )
    out = io.StringIO()
    ranks = range(len(schedule.ranks))
    csv.writer(out, lineterminator="\n").writerows(_row(schedule, rank) for rank in ranks)
    return out.getvalue()


def _row(schedule: Schedule, rank: int) -> Iterator[str]:
    before = None
    for position, p in enumerate(schedule.ranks[rank]):
        pair = schedule.pair_at(rank, position)
        if pair is not None:
            yield f"({';'.join(map(_cell_text, pair))})OVERLAP_F_B"
        elif before is None:
            yield _cell_text(p)
        before = pair


def _cell_text(p: Pass) -> str:
    return f"{p.stage}{_LETTER.get(p.kind, p.kind)}{int(p.microbatch)}"


def digest(schedule: Schedule) -> str:
    """Return a digest of the schedule's table, of 12 hexadecimal digits."""
    return hashlib.sha256(to_csv(schedule).encode()).hexdigest()[:12]


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write :func:`to_csv` into a file.

    Raises:
        UsageError: the file cannot be written, or see :func:`to_csv`.
    """
    files.write_text(path, to_csv(schedule))


def from_csv(
    source: str | Path,
    *,
    name: str | None = None,
    change: Callable[[Schedule], Schedule] | None = None,
    parts: Sequence[Part] = (),
) -> Schedule:
    """Read a compute-only table, from a text (str) or a file (Path), and validate it.

    The rank of a stage is the row that runs it; every row must run equally many stages. The name
    is that of the file when left out, the rules are those of its passes. ``change`` makes what is
    validated of that, where a table says less than its schedule. ``parts`` are further kinds of
    passes that the table has.

    Raises:
        UsageError: the file cannot be read, or the table breaks a rule (InvalidSchedule); the
            message names the rule and, where one cell is the cause, its row and column.
    """
    if isinstance(source, Path):
        text, name = _read(source), name or source.name
    else:
        text, name = source, name or "table"
    kinds = _KIND | {part.letter: part.kind.kind for part in parts}
    rows = _cells(name, text, kinds)
    placement = _infer_placement(name, rows)
    num_microbatches = 1 + max(cell.work.microbatch for row in rows for cell in row)
    ranks = tuple(tuple(cell.work for cell in row) for row in rows)
    pairs = frozenset(cell.work for row in rows for cell in row if cell.paired)
    rules = rules_of(ranks)
    schedule = Schedule(name, placement, num_microbatches, ranks, rules=rules, pairs=pairs)
    if any(p.kind is two_directions.Y for row in ranks for p in row):
        schedule = two_directions.of_table(schedule)
    for part in parts:
        schedule = part.ruled(schedule)
    if change is not None:
        schedule = change(schedule)
    try:
        return schedule.validate()
    except InvalidSchedule as error:
        _point_at_cell(schedule, rows, error)


def rules_of(ranks: Sequence[Sequence[Pass]]) -> TrainingRules:
    """Return the rules of passes by their kinds."""
    kinds = [{p.kind for p in row} for row in ranks]
    holders = tuple(rank for rank, row in enumerate(kinds) if PassKind.O in row)
    if not holders:
        return LastFirstRules() if _begins_with_the_last(ranks) else TRAINING
    found = set().union(*kinds)
    if PassKind.M in found:
        return PredictionRules(holders)
    return (EmbeddingRules if PassKind.E in found else VocabularyRules)(holders)


def _begins_with_the_last(ranks: Sequence[Sequence[Pass]]) -> bool:
    """Return whether the backwards of every stage take its microbatches from the last one on."""
    found: dict[int, list[int]] = {}
    for p in (p for rank in ranks for p in rank if p.kind in (PassKind.B, PassKind.BW)):
        found.setdefault(p.stage, []).append(p.microbatch)
    return bool(found) and all(
        len(units) > 1 and units == sorted(units, reverse=True) for units in found.values()
    )


def _read(path: Path) -> str:
    try:
        return files.read_bytes(path, _MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read '{path}': it is no text in UTF-8") from error


def _cells(name: str, text: str, kinds: Mapping[str, PassKind]) -> list[list[_Cell]]:
    """Return the passes of every row; empty lines at the end of the text are no rows."""
    rows: list[list[_Cell]] = []
    left = _MOST_CELLS
    for row, texts in _split(name, text):
        left -= max(len(texts), 1)
        if left < 0:
            raise UsageError(f"{name}: row {row}: a table may have {_MOST_CELLS:,} cells at most")
        rows.append(
            [
                cell
                for column, text in enumerate(texts, start=1)
                if text.strip() and not _REDUCTION.fullmatch(text.strip())
                for cell in _parse((name, row, column), text.strip(), kinds)
            ]
        )
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise InvalidSchedule(f"{name}: rule 'completeness': the table has no passes")
    return rows


def _split(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    try:
        yield from enumerate(csv.reader(io.StringIO(text, newline="")), start=1)
    except csv.Error as error:
        raise UsageError(f"{name}: the text is no CSV: {error}") from error


def _parse(at: tuple[str, int, int], text: str, kinds: Mapping[str, PassKind]) -> Iterator[_Cell]:
    match, column = _PAIR.fullmatch(text), at[-1]
    if match is None:
        yield _Cell(_parse_pass(at, text, kinds), column)
        return
    forward, backward = (_parse_pass(at, part.strip(), kinds) for part in match.groups())
    yield _Cell(forward, column, paired=True)
    yield _Cell(backward, column)


def _parse_pass(at: tuple[str, int, int], text: str, kinds: Mapping[str, PassKind]) -> Pass:
    name, row, column = at
    shown = repr(text if len(text) <= 24 else text[:21] + "...")
    where = f"{name}: row {row}, column {column}"
    match = _CELL.fullmatch(text)
    if match is None or match[2] not in kinds:
        if _COMMUNICATION.fullmatch(text):
            raise UsageError(f"{where}: {shown} is a message: give the compute-only table")
        raise UsageError(
            f"{where}: {shown} is no pass: write stage, F, I, W or B, and microbatch, such as 2F0"
        )
    stage, letter, microbatch = match.groups()
    if max(len(stage), len(microbatch)) > _MOST_DIGITS:
        raise UsageError(f"{where}: {shown} has a number of more than {_MOST_DIGITS} digits")
    return Pass(kinds[letter], int(stage), int(microbatch))


def _infer_placement(name: str, rows: Sequence[Sequence[_Cell]]) -> Placement:
    if len(rows) < 2:
        raise InvalidSchedule(
            f"{name}: rule 'placement': the table has one row: a pipeline has a row for each of "
            "its 2 or more ranks"
        )
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for work, column, _ in row:
            if work.kind in _OF_SHARDS:
                continue
            if rank_of.setdefault(work.stage, rank) != rank:
                raise InvalidSchedule(
                    f"{name}: row {rank + 1}, column {column}, pass {_cell_text(work)}: rule "
                    f"'placement': stage {work.stage} lives on row {rank_of[work.stage] + 1}"
                )
    if not rank_of:
        raise InvalidSchedule(f"{name}: rule 'completeness': the table has no F")
    stages = len(rank_of)
    missing = next(s for s in range(stages + 1) if s not in rank_of)
    if missing < stages:
        raise InvalidSchedule(
            f"{name}: rule 'completeness': no row runs stage {missing}, but stage {max(rank_of)} "
            "is there"
        )
    if stages > _MOST_STAGES:
        raise UsageError(f"{name}: {stages} stages: a table may have {_MOST_STAGES} at most")
    return _placement(name, len(rows), tuple(rank_of[stage] for stage in range(stages)))


def _placement(name: str, pipeline_size: int, rank_of: tuple[int, ...]) -> Placement:
    counts = Counter(rank_of)
    fewest, *_, most = sorted(range(pipeline_size), key=lambda rank: counts[rank])
    if counts[fewest] != counts[most]:
        raise InvalidSchedule(
            f"{name}: row {fewest + 1}: rule 'placement': it runs {counts[fewest]} stages and row "
            f"{most + 1} runs {counts[most]}: every row must run equally many"
        )
    return placement_of(pipeline_size, rank_of)


def _point_at_cell(
    schedule: Schedule, rows: Sequence[Sequence[_Cell]], error: InvalidSchedule
) -> NoReturn:
    """Raise the error with its place in the table, which counts from 1 and has idle cells."""
    if error.rank is None or error.position is None:
        raise error
    work, column, _ = rows[error.rank][error.position]
    where = f"{schedule.name}: row {error.rank + 1}, column {column}, '{_cell_text(work)}'"
    what = str(error).removeprefix(f"{schedule.name}: ")
    raise InvalidSchedule(f"{where}: {what}") from error


# Names from the fixed palette of the trace viewers.
_TRACE_COLOUR = {
    PassKind.F: "rail_response",
    PassKind.B: "bad",
    PassKind.W: "good",
    PassKind.BW: "terrible",
    PassKind.T: "rail_response",
    PassKind.S: "rail_animation",
    PassKind.U: "good",
}
_OTHER_COLOUR = "generic_work"


def to_chrome_trace(timelines: Timeline | Mapping[str, Timeline]) -> str:
    """Return timelines in the Trace Event Format, for Perfetto or chrome://tracing.

    A process for each timeline, named if there are several, with a thread and a memory counter for
    every rank; times are microseconds, memory is in the unit of the costs.
    """
    if isinstance(timelines, Timeline):
        timelines = {timelines.schedule.name: timelines}
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        own: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": name}}]
        for rank in range(len(timeline.schedule.ranks)):
            own += _thread_names(timeline.number(rank))
            own += _pass_events(timeline, rank)
            own += _memory_events(timeline, rank)
        events += [{"pid": pid, **event} for event in own]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


def _thread_names(rank: int) -> list[dict[str, Any]]:
    thread = {"ph": "M", "tid": rank}
    return [
        {**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}},
        {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}},
    ]


def _pass_events(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    schedule, placement = timeline.schedule, timeline.schedule.placement
    times = zip(timeline.start[rank], timeline.end[rank], strict=True)
    pair = None
    for position, (start, end) in enumerate(times):
        if pair is not None:  # its event is there already
            pair = None
            continue
        p, pair = schedule.ranks[rank][position], schedule.pair_at(rank, position)
        yield {
            "ph": "X",
            "tid": timeline.number(rank),
            "name": str(pair or p),
            "cat": p.kind.value,
            "cname": _TRACE_COLOUR.get(p.kind, _OTHER_COLOUR),
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": {
                "stage": p.stage,
                "chunk": placement.chunk_of(p.stage) if p.stage < placement.num_stages else 0,
                "microbatch": p.microbatch,
            },
        }


def _memory_events(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the memory that a rank holds, from the start of each pass and after its last one."""
    if not timeline.start[rank]:
        return
    times = (*timeline.start[rank], timeline.end[rank][-1])
    for time, held in zip(times, (*timeline.memory_curve(rank), 0.0), strict=True):
        yield {
            "ph": "C",
            "name": f"activation memory, rank {timeline.number(rank)}",
            "ts": time * 1e6,
            "args": {"held": held},
        }
