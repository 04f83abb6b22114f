"""Draw a schedule in the terminal.

A row of a schedule is a rank, a coloured cell a pass. A cell starts with the kind of its pass, F,
B, W or, for a fused backward, D, as capital letter for even and small letter for odd model chunks,
so that a drawing without colours can be read as well. The line below its title compares the
schedule with the lower bound; at the end is the activation memory of each rank over time, in as
many columns as the schedule, or as fit. A relay of blockwise distillation has T, S and U, as small
letters in odd steps, and how busy each rank is at the end. A pair is one block: its forward, a
plus, and its backward. Of a drawing that would fill many screens, the beginning and the end are
shown, and in between a line that names what is left out: a schedule repeats itself there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.text import Text

from megatron_zb.drawing.chart import (
    MEMORY_COLOUR,
    Bar,
    MemoryLine,
    bars_of,
    colour_of,
    legend_of,
    memory_lines,
    one_f_one_b_peak,
    ranks_of_job,
    report_of,
    text_colour_on,
    title_of,
    variants_of,
    worst_of,
)
from megatron_zb.schedules import PassKind, Report, Timeline
from megatron_zb.schedules.stage_costs import HostCopies

LETTERS = {PassKind.BW: "D"}
"""Letters of kinds in a drawing, where they are not their names."""
IDLE = "·"
LEVELS = " ▁▂▃▄▅▆▇█"
MOST = "◀"
PAIRED = "+"
_MOST_LINES = 240  # of bars; what is above is left out in the middle
_MOST_CELLS = 10  # for each pass of a rank and each of the first and last microbatch's way


def print_schedule(timeline: Timeline, report: Report, console: Console) -> None:
    """Draw a schedule as wide as the terminal, in as many bands one below the other as it takes."""
    label_width = len(f"rank {timeline.schedule.placement.pipeline_size - 1} ")
    cell_width = _cell_width(timeline)
    bars = list(bars_of(timeline))
    scale = cell_width / _usual_seconds(timeline, bars)
    length = max(round(bar.end * scale) for bar in bars)
    cells = max((console.width - label_width) // cell_width, 1)
    band = min(cells * cell_width, length)
    _print_line(console, Text(title_of(timeline), style="bold"))
    for sentence in (report_of(report), timeline.schedule.reason, ranks_of_job(timeline)):
        if sentence:
            console.print(Text(sentence), highlight=False)
    left_out = _left_out(timeline, length, band)
    first = _rows(timeline, bars, scale, range(left_out.start))
    _print_bands(console, timeline, first, band)
    if left_out:
        console.print()
        console.print(Text(_describe(left_out, bars, scale, timeline)), highlight=False)
        _print_bands(
            console, timeline, _rows(timeline, bars, scale, range(left_out.stop, length)), band
        )
    console.print()
    for line in _legend(timeline):
        console.print(line, highlight=False)
    console.print()
    if timeline.schedule.rules.has_steps:
        _print_utilisation(timeline, console, label_width)
        return
    _print_memory(timeline, console, band, label_width)


def _left_out(timeline: Timeline, length: int, band: int) -> range:
    """Return the columns in the middle that are not drawn; none if the drawing has room."""
    bands = -(-length // band)
    kept = max(_MOST_LINES // (2 * (len(timeline.schedule.ranks) + 1)), 1)
    if bands <= 2 * kept + 1:
        return range(length, length)
    return range(kept * band, (bands - kept) * band)


def _describe(left_out: range, bars: Sequence[Bar], scale: float, timeline: Timeline) -> str:
    """Describe the columns that are not drawn."""
    drawn = {
        bar.microbatch
        for bar in bars
        if round(bar.start * scale) < left_out.start or round(bar.end * scale) > left_out.stop
    }
    absent = sorted({bar.microbatch for bar in bars} - drawn)
    if timeline.schedule.rules.has_steps or not absent:
        what = f"{len(left_out)} columns"
    else:
        what = f"{len(absent)} microbatches, {absent[0]} to {absent[-1]},"
    return f"... {what} are left out here, where the schedule repeats itself; export writes all ..."


def _print_bands(console: Console, timeline: Timeline, rows: Sequence[Text], band: int) -> None:
    """Print rows of bars, cut into bands one below the other."""
    label_width = len(f"rank {len(rows) - 1} ")
    for bands in zip(*(row.divide(range(band, len(row), band)) for row in rows), strict=True):
        console.print()
        for rank, part in enumerate(bands):
            label = Text(f"rank {timeline.number(rank)} ".ljust(label_width))
            _print_line(console, label + part)


def _print_utilisation(timeline: Timeline, console: Console, label_width: int) -> None:
    """Print a row for each rank, as long as the share of the time in which it computes."""
    console.print(Text("share of the time in which each rank computes"), highlight=False)
    columns = max(console.width - label_width - len(" 100.0 %"), 1)
    for rank, share in enumerate(timeline.utilisation):
        row = Text(f"rank {timeline.number(rank)} ".ljust(label_width))
        row.append(LEVELS[-1] * round(share * columns))
        _print_line(console, row.append(f" {share:.1%}"))


def _print_memory(timeline: Timeline, console: Console, columns: int, label_width: int) -> None:
    """Print a row for each rank, as high as the memory that it holds, with its peak at the end."""
    lines = memory_lines(timeline)
    worst, baseline = worst_of(lines), one_f_one_b_peak(timeline)
    top = max(worst.peak, baseline)
    said = "1F1B's peak" if top == baseline else f"1F1B's peak is {baseline:g}"
    console.print(
        Text(f"activation memory over time, in microbatches; {LEVELS[-1]} is {top:.4g}, {said}"),
        highlight=False,
    )
    columns = max(columns - len(f" {top:.4g} {MOST}"), 1)
    for line in lines:
        row = Text(f"rank {timeline.number(line.rank)} ".ljust(label_width))
        row.append(_sparkline(line, timeline, columns, top), style=MEMORY_COLOUR)
        row.append(f" {line.peak:.4g}", style="bold" if line is worst else "")
        _print_line(console, row.append(f" {MOST}" if line is worst else ""))
    if timeline.copies:
        console.print(Text(_copies_in_words(timeline)), highlight=False)


def _copies_in_words(timeline: Timeline) -> str:
    """Describe the offload: how many forwards, how much, and the busiest copy engine."""
    copies = timeline.costs.copies or HostCopies(())
    first = 1 if copies.full_duplex else 2
    busy = max(
        sum(copy.end - copy.start for copy in of_rank if copy.to_host)
        for of_rank in timeline.copies
    )
    forwards = timeline.schedule.placement.num_stages * timeline.schedule.num_microbatches
    held = max(timeline.peak_host)
    limit = f" of {copies.limit:g}" if math.isfinite(copies.limit) else ""
    return (
        f"{len(timeline.schedule.offloaded)} of {forwards} forwards are offloaded to the host, "
        f"which holds {held:.4g}{limit} microbatches of one rank at most; the busiest copy engine "
        f"runs {first * busy / timeline.makespan:.0%} of the time"
    )


def _sparkline(line: MemoryLine, timeline: Timeline, columns: int, top: float) -> str:
    """Return one character per interval of equal length: the most that the rank holds in it."""
    seconds = timeline.makespan / columns
    begin = min(times[0] for times in timeline.start if times)
    most = [0.0] * columns
    for i, (start, held) in enumerate(zip(line.times, line.held, strict=True)):
        end = line.times[i + 1] if i + 1 < len(line.times) else start
        first = int((start - begin) / seconds + 1e-9)
        after_last = math.ceil((end - begin) / seconds - 1e-9)
        for column in range(first, min(after_last, columns)):
            most[column] = max(most[column], held)
    return "".join(LEVELS[math.ceil(held / top * (len(LEVELS) - 1) - 1e-9)] for held in most)


def _print_line(console: Console, line: Text) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _cell_width(timeline: Timeline) -> int:
    """Count the columns of a usual pass: a letter, the largest microbatch number and a gap."""
    return len(str(timeline.schedule.num_microbatches - 1)) + 2


def _usual_seconds(timeline: Timeline, bars: Sequence[Bar]) -> float:
    """Return the seconds of a cell: the median pass, or more where others take far longer."""
    widths = ((bar.end - bar.start) / (1 if bar.half is None else 2) for bar in bars)
    usual = median(width for width in widths if width > 0)
    placement, busiest = timeline.schedule.placement, max(map(len, timeline.schedule.ranks))
    cells = _MOST_CELLS * (busiest + len(PassKind.all()) * placement.num_stages)
    return max(usual, timeline.makespan / cells)


def _rows(timeline: Timeline, bars: Sequence[Bar], scale: float, columns: range) -> list[Text]:
    """Return the row of every rank, in these columns of the drawing."""
    rows = [Text() for _ in timeline.schedule.ranks]
    for bar in bars:
        start, end = (round(time * scale) for time in (bar.start, bar.end))
        if bar.half is not None:
            start, end = ((start + end) // 2, end) if bar.half else (start, (start + end) // 2)
        if end <= columns.start or start >= columns.stop:
            continue
        row, cell = rows[bar.rank], _cell(bar, end - start)
        row.append(IDLE * (start - columns.start - len(row)), style="dim")
        if start < columns.start or end > columns.stop:
            cell = cell[max(columns.start - start, 0) : columns.stop - start]
        row.append(cell)
    for row in rows:
        row.append(IDLE * (len(columns) - len(row)), style="dim")
    return rows


def _cell(bar: Bar, width: int) -> Text:
    letter = _letter(bar.kind, bar.chunk)
    whole = f"{letter}{bar.microbatch}"
    # Part of a number would be a wrong number.
    text = whole if len(whole) <= width else letter[:width]
    if bar.half == 0 and width > 1:
        text = (whole if len(whole) < width else letter).ljust(width - 1) + PAIRED
    return Text(text.ljust(width), style=_style(bar.colour))


def _letter(kind: PassKind, chunk: int) -> str:
    letter = LETTERS.get(kind, kind.value)
    return letter if chunk % 2 == 0 else letter.lower()


def _style(colour: str) -> str:
    return f"{text_colour_on(colour)} on {colour}"


def _legend(timeline: Timeline) -> list[Text]:
    """Return a line for each kind that occurs, with its letters, and one for the rest."""
    chunks = variants_of(timeline.schedule)
    found: dict[PassKind, list[int]] = {}
    for kind, chunk, _ in legend_of(timeline):
        found.setdefault(kind, []).append(chunk)
    width = 4 * chunks
    lines = []
    for kind, its_chunks in found.items():
        line = Text()
        for chunk in its_chunks:
            style = _style(colour_of(kind, chunk, chunks))
            line.append(f" {_letter(kind, chunk)} ", style=style).append(" ")
        line.append(" " * (width - len(line)) + kind.words)
        lines.append(line)
    if timeline.schedule.rules.has_steps:
        number = timeline.schedule.rules.number_word
        numbers = f"capital letter: even steps, small: odd; number: {number}"
        if PassKind.U in found:
            numbers += ", of an update its step"
        return [*lines, Text(f"{numbers}; {IDLE} idle", style="dim")]
    paired = f"{PAIRED} joins a pair; " if timeline.schedule.pairs else ""
    rules = timeline.schedule.rules
    if rules.owners and not rules.owner_word:
        letters = "capital letter: {}, small: {}; ".format(*rules.owners)
    else:
        letters = _letters(chunks, rules.owner_word if rules.owners else "chunk")
    numbers = f"{letters}number: microbatch; {paired}{IDLE} idle"
    return [*lines, Text(numbers, style="dim")]


def _letters(chunks: int, what: str) -> str:
    if chunks == 1:
        return ""
    if chunks == 2:
        return f"capital letter: {what} 0, small: 1; "
    even, odd = (", ".join(map(str, range(start, chunks, 2))) for start in (0, 1))
    return f"capital letter: {what}s {even}, small: {odd}, darkest first; "
