"""Schedules by name, and the function that builds one of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import add
from typing import Any, Protocol, TypeAlias

from megatron_zb.errors import UsageError, raise_first
from megatron_zb.schedules import conflicts, families, interchange
from megatron_zb.schedules import placement as placements
from megatron_zb.schedules.auto import auto, candidates, candidates_with_vocabulary
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs, check_number
from megatron_zb.schedules.features import two_directions
from megatron_zb.schedules.features.adapters import Adapters, adapter_request, of_adapters
from megatron_zb.schedules.features.part import Part
from megatron_zb.schedules.features.patches import check_trained
from megatron_zb.schedules.features.recompute_or_offload import in_its_order
from megatron_zb.schedules.features.second_model import SecondModel, beside_second_model
from megatron_zb.schedules.features.second_model_orders import Base, with_second_model
from megatron_zb.schedules.features.slices import Slicing, of_table, sliced_requests
from megatron_zb.schedules.features.update_delay import (
    BUILT,
    check_delay,
    in_groups,
    with_delay,
)
from megatron_zb.schedules.features.vocabulary import Vocabulary, fastest_with_vocabulary
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.request import (
    Limit,
    LimitTooSmall,
    Request,
    check_size,
    least_refused,
)
from megatron_zb.schedules.schedule import Report, Schedule
from megatron_zb.schedules.search.repeating_block import modulo_orders
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.units import Updates

_ZERO_BUBBLE = "Zero Bubble Pipeline Parallelism, arXiv 2401.10241"
_CONTROLLABLE = "Pipeline Parallelism with Controllable Memory, arXiv 2405.15362"


class RankSeconds(Protocol):
    """Seconds of the passes of one microbatch on one rank, all of its chunks together."""

    @property
    def forward(self) -> float: ...

    @property
    def backward(self) -> float: ...

    @property
    def weight(self) -> float: ...

    @property
    def total(self) -> float: ...


Bubble: TypeAlias = Callable[[int, RankSeconds, int], float]
"""Seconds that no rank can fill, from p, the seconds of a rank, and the chunks of a rank."""


def _whole_passes(p: int, rank: RankSeconds, chunks: int) -> float:
    return (p - 1) * rank.total


def _whole_passes_of_chunks(p: int, rank: RankSeconds, chunks: int) -> float:
    return (p - 1) * rank.total / chunks


def _fills_with_w(p: int, rank: RankSeconds, chunks: int) -> float:
    return (p - 1) * (rank.forward + rank.backward - rank.weight)


def _fills_with_more_forwards(p: int, rank: RankSeconds, chunks: int) -> float:
    after_w = rank.forward + rank.backward - 2 * rank.weight
    return (p - 1) * max(rank.forward, after_w)


def _fill_of_chunks(p: int, rank: RankSeconds, chunks: int) -> float:
    return (p - 1) * rank.forward / chunks


def _fill_of_v_half(p: int, rank: RankSeconds, chunks: int) -> float:
    return max(p - 1, 6 * p - 1 - 6 * ((p + 2) // 2)) * rank.forward / 2


def _fill_of_v_min(p: int, rank: RankSeconds, chunks: int) -> float:
    return max(p - 1, 6 * p - 1 - 6 * ((p + 4) // 3)) * rank.forward / 2


def _turns_of_both_ways(p: int, rank: RankSeconds, chunks: int) -> float:
    whole = rank.total - rank.forward
    return (p - 2) * max(rank.forward, whole) * 2 / chunks


def _interval_of_v_half(rank: RankSeconds) -> float:
    return max(2 * rank.backward + rank.weight / 2, 2 * rank.forward + rank.weight / 2)


def _interval_of_v_min(rank: RankSeconds) -> float:
    return 3 * max(rank.forward, rank.backward)


@dataclass(frozen=True)
class Family:
    """One named schedule.

    ``placement(p, chunks)`` places its stages, with its own number of chunks for None; it is None
    where the costs decide. ``peak(p, m)`` bounds the activations of the worst rank in microbatches
    of a whole rank, None where the limit alone decides. ``takes_chunks`` and ``takes_group_size``
    tell which choices it leaves to the user; ``peak`` is for the default ones. ``bubble`` is the
    formula of ``docs/schedules.md``; ``interval`` the least seconds between two microbatches, where
    they can be more than a rank computes: the V schedules with little memory lose in each one where
    F, B and W are unequal. ``searches`` tells that building takes a search. ``copies`` are those of
    the model: only a schedule with one can be run. ``prepare`` completes a request.
    """

    name: str
    build: Callable[[Request], Schedule]
    peak: Callable[[int, int], float] | None
    summary: str
    source: str
    placement: Callable[[int, int | None], Placement] | None = None
    bubble: Bubble = _whole_passes
    interval: Callable[[RankSeconds], float] = lambda rank: 0.0
    splits_backward: bool = True
    searches: bool = True
    takes_chunks: bool = False
    takes_group_size: bool = False
    chunk_step: int = 1
    aliases: tuple[str, ...] = ()
    copies: int = 1
    prepare: Callable[[Request], Request] = lambda request: request

    @property
    def chooses_placement(self) -> bool:
        """Whether the costs also decide on the placement."""
        return self.placement is None

    @property
    def follows_costs(self) -> bool:
        """Whether other costs can give another order."""
        return self.splits_backward or self.searches

    def peak_microbatches(self, p: int, m: int) -> float:
        """Return the bound with the default choices; p for ``auto``, its limit if none is given."""
        return self.peak(p, m) if self.peak else p


def _one_chunk(p: int, chunks: int | None) -> Placement:
    return looped(p)


def _v(p: int, chunks: int | None) -> Placement:
    return placements.v_shape(p)


def _loop(p: int, chunks: int | None) -> Placement:
    return looped(p, chunks or families.INTERLEAVED_CHUNKS)


def _zigzag(p: int, chunks: int | None) -> Placement:
    return placements.wave(p, chunks or families.WAVE_CHUNKS)


def _two_ways(p: int, chunks: int | None) -> Placement:
    return two_directions.both_ways(p, 1)


def _two_vs(p: int, chunks: int | None) -> Placement:
    return two_directions.both_ways(p, 2)


_FAMILIES = (
    Family(
        "gpipe",
        families.gpipe,
        lambda p, m: m,
        "all forwards, then all backwards; the reference for small models",
        "GPipe, arXiv 1811.06965",
        splits_backward=False,
        placement=_one_chunk,
        searches=False,
    ),
    Family(
        "1f1b",
        families.one_f_one_b,
        lambda p, m: min(p, m),
        "Megatron's own order, run by this package",
        "PipeDream-Flush, arXiv 2006.09503",
        splits_backward=False,
        placement=_one_chunk,
        searches=False,
    ),
    Family(
        "interleaved",
        families.interleaved,
        families.interleaved_peak,
        "smaller bubble than 1F1B for more memory and more messages",
        "Narayanan et al., arXiv 2104.04473",
        splits_backward=False,
        takes_chunks=True,
        takes_group_size=True,
        placement=_loop,
        bubble=_whole_passes_of_chunks,
        searches=False,
    ),
    Family(
        "1f1b-v",
        families.one_f_one_b_v,
        lambda p, m: families.one_f_one_b_v_peak(p),
        "three quarters of 1F1B's memory without splitting the backward",
        _CONTROLLABLE,
        splits_backward=False,
        placement=_v,
    ),
    Family(
        "zb-h1",
        families.zb_h1,
        lambda p, m: p,
        "1F1B's placement and memory, a third of its bubble",
        _ZERO_BUBBLE,
        placement=_one_chunk,
        bubble=_fills_with_w,
        searches=False,
    ),
    Family(
        "zb-h2",
        families.zb_h2,
        lambda p, m: 2 * p - 1,
        "a smaller bubble than zb-h1 for twice the memory, in a fixed order",
        _ZERO_BUBBLE,
        placement=_one_chunk,
        bubble=_fills_with_more_forwards,
        searches=False,
    ),
    Family(
        "zb-1p",
        families.zb_1p,
        lambda p, m: p,
        "the best order found with one chunk per rank in 1F1B's memory",
        _ZERO_BUBBLE,
        placement=_one_chunk,
        bubble=_fills_with_w,
    ),
    Family(
        "zb-2p",
        families.zb_2p,
        lambda p, m: 2 * p,
        "the best order found with one chunk per rank in twice 1F1B's memory",
        _ZERO_BUBBLE,
        placement=_one_chunk,
        bubble=_fills_with_more_forwards,
    ),
    Family(
        "v-zb",
        families.v_zb,
        lambda p, m: p,
        "1F1B's memory, almost no bubble",
        _CONTROLLABLE,
        aliases=("zbv",),
        placement=_v,
        bubble=_fill_of_chunks,
    ),
    Family(
        "v-half",
        families.v_half,
        lambda p, m: families.v_half_peak(p),
        "half of 1F1B's memory, half its bubble",
        _CONTROLLABLE,
        placement=_v,
        bubble=_fill_of_v_half,
        interval=_interval_of_v_half,
    ),
    Family(
        "v-min",
        families.v_min,
        lambda p, m: families.v_min_peak(p),
        "a third of 1F1B's memory",
        _CONTROLLABLE,
        placement=_v,
        bubble=_fill_of_v_min,
        interval=_interval_of_v_min,
    ),
    Family(
        "wave",
        families.wave,
        lambda p, m: p,
        "more than two chunks in a zig-zag: a shorter fill for more messages",
        "Hanayo, arXiv 2308.15762",
        takes_chunks=True,
        placement=_zigzag,
        bubble=_fill_of_chunks,
        chunk_step=2,
    ),
    Family(
        "dualpipe-v",
        families.dualpipe_v,
        lambda p, m: families.dualpipe_v_peak(p),
        "DualPipe's order on a V",
        "DeepSeek-V3, arXiv 2412.19437",
        placement=_v,
        bubble=_fill_of_chunks,
    ),
    Family(
        "auto",
        auto,
        None,
        "the fastest of everything under the memory limit, by a longer search",
        "this package",
        takes_chunks=True,
    ),
    Family(
        "chimera",
        two_directions.chimera,
        min,
        "half of the microbatches from each end, with two copies of the weights",
        "Chimera, arXiv 2107.06925",
        splits_backward=False,
        placement=_two_ways,
        bubble=_turns_of_both_ways,
        copies=2,
        prepare=partial(two_directions.directed, chunks=1),
    ),
    Family(
        "bitpipe",
        two_directions.bitpipe,
        min,
        "two Vs, one in mirror image of the other, with two copies of the weights",
        "BitPipe, arXiv 2410.19367",
        splits_backward=False,
        placement=_two_vs,
        bubble=_turns_of_both_ways,
        copies=2,
        prepare=partial(two_directions.directed, chunks=2),
    ),
)

_BY_NAME = {name: f for f in _FAMILIES for name in (f.name, *f.aliases)}


def names() -> list[str]:
    """Return the names of schedules with one copy of the model, without aliases."""
    return [f.name for f in _FAMILIES if f.copies == 1]


def all_names() -> list[str]:
    """Return the names that :func:`build` takes, without aliases."""
    return [f.name for f in _FAMILIES]


def suggest(name: str) -> list[str]:
    """Return the known names nearest to a misspelt one, best first."""
    return difflib.get_close_matches(name.lower(), _BY_NAME, n=3, cutoff=0.3)


def family(name: str) -> Family:
    """Look up a schedule by its name or alias.

    Raises:
        UsageError: there is no such schedule; the nearest names are given. Or it trains nothing.
    """
    check_trained(name)
    found = _BY_NAME.get(name.lower())
    if found is None:
        near = suggest(name)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"unknown pipeline schedule '{name}': {hint}known are {', '.join(names())}"
        )
    return found


def family_of_one_copy(name: str) -> Family:
    """Look up a schedule for a training.

    Raises:
        UsageError: there is no such schedule, or it needs several copies of the model.
    """
    found = family(name)
    two_directions.check_one_copy(found.name, found.copies)
    return found


Build: TypeAlias = Callable[..., Schedule]
"""Type of :func:`build`, or of a function with the same arguments."""


def build(
    name: str,
    *,
    pipeline_size: int,
    num_microbatches: int | None = None,
    costs: Costs | None = None,
    memory_limit: Limit | float | None = None,
    chunks: int | None = None,
    group_size: int | None = None,
    num_layers: int | None = None,
    placement: Placement | None = None,
    back_to_back: bool = False,
    quick: bool = False,
    slices: int | Slicing = 1,
    adapters: Adapters | None = None,
    second_model: SecondModel | None = None,
    update_delay: int = 0,
    updates: Updates | None = None,
) -> Schedule:
    """Build a named schedule for the given costs.

    Args:
        name: one of :func:`all_names`, or ``zbv``.
        pipeline_size: pipeline ranks p, 2 or more.
        num_microbatches: microbatches m per iteration, 1 or more; with adapters, theirs.
        costs: of passes and messages; equal ones (1, 1, 1, no p2p) when left out.
        memory_limit: the most activation memory a rank may hold, as a fraction of 1F1B's peak,
            which is p microbatches on the first rank; or ``Limit(bytes=...)``, the most of all
            memory, in the unit of ``activation`` and ``costs.fixed``, for every rank or for each.
            None leaves the schedule its own peak.
        chunks, group_size: model chunks per rank (interleaved, wave, auto) and microbatches that
            pass a chunk together (interleaved).
        num_layers: lets ``auto`` leave out placements that cannot hold them evenly.
        placement: binds ``auto`` to a placement, such as a built model's.
        back_to_back: make iterations short that follow one another with no barrier between them, as
            with optimizer post-validation: the next one fills the waits at the ends of this one.
        quick: let ``auto`` look at its ``placement`` for only half a second; without it the
            result is as fast or faster.
        slices: of each microbatch along its sequence, of equal lengths if a number; passes then
            count slices (:mod:`slices`).
        adapters: trainings that share the pipeline; passes then count the microbatches of all their
            steps (:mod:`adapters`).
        second_model: an encoder or a teacher that runs beside the trained model; its microbatches
            are further units (:mod:`second_model`).
        update_delay: steps by which the update of a step comes late, 0 or 1; with 1 the schedule
            has several consecutive steps with no flush between them, and its report has the
            ``period`` of one (:mod:`update_delay`).
        updates: costs of an update on a rank, with ``update_delay``; nothing when left out.

    Returns:
        The schedule, validated, with its :class:`Report`.

    Raises:
        UsageError: unknown name, sizes out of range, costs of other sizes, what cannot be combined
            (:mod:`conflicts`), or a limit below what the schedule needs.
    """
    chosen = family(name)
    num_microbatches = _checked_number(chosen, pipeline_size, num_microbatches, adapters)
    check_size(chosen.name, pipeline_size * max(chunks or 1, 1), num_microbatches)
    check_delay(update_delay, updates := updates or Updates(0.0))
    _check_choice(chosen, "chunks", chunks, chosen.takes_chunks)
    _check_choice(chosen, "group_size", group_size, chosen.takes_group_size)
    if costs is None:
        costs = Costs.uniform(pipeline_size=pipeline_size, forward=1, backward=1, weight=1)
    check_number(costs, num_microbatches)
    slicing = Slicing.equal(slices) if isinstance(slices, int) else slices
    request = chosen.prepare(
        Request(
            pipeline_size,
            num_microbatches,
            costs,
            Limit.of(memory_limit, pipeline_size),
            chunks=chunks,
            group_size=group_size,
            num_layers=num_layers,
            placement=placement,
            back_to_back=back_to_back,
            quick=quick,
        )
    )
    further: dict[str, object] = {
        conflicts.ADAPTERS: adapters,
        conflicts.SECOND_MODEL: second_model,
        conflicts.BACK_TO_BACK: back_to_back or None,
        conflicts.UPDATE_DELAY: update_delay or None,
    }
    _check_combined(chosen, request, slicing, further)
    _check_placement(chosen, placement, pipeline_size, chunks)
    if update_delay:
        return _with_delay(chosen, replace(request, costs=costs.having(updates)))
    if second_model is not None:
        return with_second_model(request, second_model, partial(_base, chosen))
    requests = [request]
    if slicing.slices > 1:
        requests = sliced_requests(request, slicing, may_join=chosen.searches)
    if adapters is not None:
        requests = [adapter_request(request, adapters)]
    return _fastest(chosen, requests)


def _checked_number(
    chosen: Family, pipeline_size: int, num_microbatches: int | None, adapters: Adapters | None
) -> int:
    """Return the number of microbatches.

    Raises:
        UsageError: it is missing or out of range, or so is the pipeline size.
    """
    if pipeline_size < 2:
        raise UsageError(
            f"pipeline size {pipeline_size} has nothing to schedule: "
            "pipeline schedules need at least 2 pipeline ranks"
        )
    if adapters is not None:
        num_microbatches = _units_of(adapters, num_microbatches)
    if num_microbatches is None:
        raise UsageError(f"{chosen.name}: give the number of microbatches, or adapters")
    if num_microbatches < 1:
        raise UsageError(f"{num_microbatches} microbatches were asked for: give 1 or more")
    return num_microbatches


def _check_combined(
    chosen: Family, request: Request, slicing: Slicing, further: Mapping[str, object]
) -> None:
    """Refuse what cannot be combined.

    Args:
        further: features by their names in the table of :mod:`conflicts`, None if not given.

    Raises:
        UsageError: names two of them.
    """
    words = conflicts.requested(
        chosen.name,
        request.costs,
        has_fixed_order=not chosen.searches,
        is_sliced=slicing.slices > 1,
        group_size=request.group_size,
        also=[feature for feature, given in further.items() if given is not None],
    )
    raise_first(conflicts.refusals(words))


def _units_of(adapters: Adapters, num_microbatches: int | None) -> int:
    """Return the microbatches of all steps of adapters.

    Raises:
        UsageError: another number is given.
    """
    if num_microbatches not in (None, adapters.num_units):
        raise UsageError(
            f"{num_microbatches} microbatches were asked for, and the adapters have "
            f"{adapters.num_units} in all their steps: leave the number out"
        )
    return adapters.num_units


def _fastest(chosen: Family, requests: Sequence[Request]) -> Schedule:
    """Build the fastest schedule of requests that differ in how W of a microbatch is cut.

    Raises:
        UsageError: none of them can be built.
    """
    found: list[tuple[float, Schedule]] = []
    refused: list[UsageError] = []
    for request in requests:
        try:
            schedule = _built(chosen, request)
        except LimitTooSmall as error:
            refused.append(error)
        else:
            assert schedule.report is not None
            found.append((schedule.report.period or schedule.report.makespan, schedule))
    if not found:
        raise least_refused(refused)
    return min(found, key=lambda entry: entry[0])[1]


def _built(chosen: Family, request: Request) -> Schedule:
    """Build a schedule with the passes of all features of its costs, and its report."""
    costs = searched = request.costs
    for feature in costs.features:
        searched = feature.folded(searched)
    schedule = _builder(chosen, searched)(replace(request, costs=searched))
    for feature in costs.features:
        schedule = feature.added_to(schedule, costs)
    schedule = replace(schedule, name=chosen.name)
    schedule.check_ranks()
    return _reported(schedule, request)


def from_table(name: str, table: str, request: Mapping[str, Any]) -> Schedule:
    """Read the table of a schedule that :func:`build` has returned for a request, its arguments.

    Raises:
        UsageError: there is no such schedule, or see :func:`interchange.from_csv`.
    """
    slicing = Slicing.given(request.get("slices") or 1)
    change = None if slicing.slices == 1 else partial(of_table, slicing=slicing)
    if adapters := request.get("adapters"):
        change = partial(of_adapters, adapters=adapters)
    if second := request.get("second_model"):
        m = request["num_microbatches"]
        change = partial(beside_second_model, second=second, num_microbatches=m)
    if request.get("update_delay"):
        change = partial(in_groups, group=request["num_microbatches"])
    costs = request.get("costs")
    parts = [it for it in costs.features if isinstance(it, Part)] if costs is not None else []
    return interchange.from_csv(table, name=family(name).name, change=change, parts=parts)


def _check_placement(
    chosen: Family, placement: Placement | None, pipeline_size: int, chunks: int | None
) -> None:
    """Refuse another placement than that of a schedule that has its own.

    Raises:
        UsageError: names both.
    """
    if placement is None or chosen.placement is None:
        return
    own = chosen.placement(pipeline_size, chunks)
    if placement.rank_of != own.rank_of:
        raise UsageError(
            f"{chosen.name} has its own placement ({own.name} with {own.chunks} chunks), not "
            f"{placement.name} with {placement.chunks}: leave the placement out, or give auto"
        )


def _with_delay(chosen: Family, request: Request) -> Schedule:
    """Build a schedule of consecutive steps whose updates come one step late.

    Raises:
        UsageError: no order of it repeats, a step has too few microbatches, or the limit is too
            small.
    """
    m, costs = request.num_microbatches, request.costs
    long = replace(
        request, num_microbatches=BUILT * m, costs=costs.without(lambda it: isinstance(it, Updates))
    )

    def most(placement: Placement) -> Sequence[float]:
        """Return the memory of each rank; without a limit, what the rank that has most may have."""
        peak = chosen.peak_microbatches(request.pipeline_size, BUILT * m)
        own = request.limits(placement, peak)
        if request.limit.per_rank(costs) is not None:
            return own
        total = max(map(add, own, costs.fixed))
        return [total - fixed for fixed in costs.fixed]

    orders = families.repeating_orders(chosen.name, long)
    if chosen.chooses_placement:
        allowed = {it.rank_of for it in candidates(long)}
        orders = [order for order in orders if order.placement.rank_of in allowed]
    if not orders:
        raise UsageError(
            f"{chosen.name}: its order does not repeat from step to step, which an update delay "
            "needs: give 1f1b, interleaved, auto, or a schedule whose name begins with v- or zb-"
        )
    may_search = request.group_size is None  # which asks for one order
    places = dict.fromkeys(order.placement for order in orders if may_search)
    searched = (
        order
        for place in places
        for order in modulo_orders(
            chosen.name,
            place,
            long.costs.for_placement(place),
            long.num_microbatches,
            splits_backward=chosen.splits_backward,
        )
    )
    return with_delay(chosen.name, request, chain(orders, searched), most)


def _base(chosen: Family, request: Request) -> Base:
    """Build the schedule of a model beside which another one runs."""
    schedule = _built(chosen, request)
    peaks = simulate(schedule, request.costs).peak_memory
    return Base(schedule, tuple(_allowed(schedule, request, peaks)))


def _builder(chosen: Family, costs: Costs) -> Callable[[Request], Schedule]:
    """Return the builder of a schedule for some costs."""
    if costs.feature(Vocabulary) is not None:
        return _with_vocabulary(chosen)
    if not costs.keeps_all and not chosen.searches:
        return partial(in_its_order, chosen.build)
    return chosen.build


def _with_vocabulary(chosen: Family) -> Callable[[Request], Schedule]:
    """Return the builder of a family whose output layer is vocabulary parallel.

    Its order is found by a search in every case, with room for one microbatch more: the last stage
    waits for all ranks between F and B.
    """

    def build(request: Request) -> Schedule:
        p, m = request.pipeline_size, request.num_microbatches
        peak, splits = request.peak(chosen.peak_microbatches(p, m)) + 1, chosen.splits_backward
        if chosen.placement is None:
            if request.rules.units_at_once > 1:
                request, peak = request.within_one_f_one_b(), m + 1.0
            places = candidates_with_vocabulary(request)
        else:
            places = [chosen.placement(p, request.chunks)]
        return fastest_with_vocabulary(chosen.name, places, request, peak, split=splits)

    return build


def possible_placements(
    chosen: Family, pipeline_size: int, chunks: int | None, num_layers: int | None
) -> list[Placement]:
    """Return the placements that a schedule may have; several only where the costs decide.

    Raises:
        UsageError: there are too few layers for any, or the chunks that are requested are wrong.
    """
    if chosen.placement is not None:
        return [chosen.placement(pipeline_size, chunks)]
    costs = Costs.uniform(pipeline_size=pipeline_size, forward=1.0, backward=1.0, weight=1.0)
    return candidates(
        Request(pipeline_size, 1, costs, Limit(), chunks=chunks, num_layers=num_layers)
    )


def _check_choice(chosen: Family, choice: str, value: int | None, takes_it: bool) -> None:
    if value is not None and not takes_it:
        able = [f.name for f in _FAMILIES if getattr(f, f"takes_{choice}")]
        *first, last = able
        named = f"{', '.join(first)} and {last} have" if first else f"{last} has"
        raise UsageError(f"{chosen.name} has no choice of {choice}: {named}")


def _allowed(schedule: Schedule, request: Request, peaks: tuple[float, ...]) -> tuple[float, ...]:
    """Return the memory that a schedule may hold on each rank, from what it holds."""
    peak = family(schedule.name).peak
    if peak is None:
        return request.limit.per_rank(request.costs) or peaks
    most = request.peak(peak(request.pipeline_size, request.num_microbatches))
    return tuple(map(max, peaks, request.limits(schedule.placement, most)))


def _reported(schedule: Schedule, request: Request) -> Schedule:
    """Check progress and the user's limit, and compare with the lower bound at that memory."""
    timeline = simulate(schedule, request.costs)
    users = request.limit.per_rank(request.costs)
    if users is not None:
        request.check_feasible(schedule.name, schedule.placement, users, timeline.peak_memory)
    allowed = _allowed(schedule, request, timeline.peak_memory)
    m, grain = schedule.num_microbatches, request.rules.grain
    bound = max(
        lower_bound(schedule.placement, m, timeline.costs, allowed, grain),
        request.rules.least_seconds(schedule.placement, timeline.costs),
    )
    period = timeline.period if request.back_to_back else None
    return replace(schedule, report=Report(timeline.makespan, bound, period))
