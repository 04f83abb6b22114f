"""Schedules that a plan compares: Megatron's own as the baselines, and the catalog's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.cost_model import Variant
from megatron_zb.schedules import catalog
from megatron_zb.schedules.layout import Layers, Layout, spread
from megatron_zb.schedules.placement import Placement, v_shape

MEGATRON_1F1B = "Megatron 1F1B"
MEGATRON_INTERLEAVED = "Megatron interleaved"
MEGATRON_OVERLAP = "Megatron interleaved, overlap"
NO_PIPELINE = "no pipeline"
MEGATRON_OWN = (MEGATRON_1F1B, MEGATRON_INTERLEAVED, MEGATRON_OVERLAP, NO_PIPELINE)

# Left out unless they are asked for: no user's choice at the sizes of a real job.
_SELDOM = ("gpipe", "zb-h2", "1f1b", "interleaved")


@dataclass(frozen=True)
class ScheduleCandidate(Variant):
    """A schedule to compare, by its name in the table and its family in the catalog.

    Megatron's 1F1B is blocking, and so is its interleaved schedule with
    ``--no-overlap-p2p-communication``.
    """

    name: str
    family: str
    takes_chunks: bool = False
    megatron: bool = False

    def chunk_counts(self, layers: int, pipeline: int) -> Iterator[int | None]:
        """Yield the numbers of chunks per rank that the layers allow; None if it has no choice."""
        if not self.takes_chunks:
            yield None
            return
        step = catalog.family(self.family).chunk_step
        yield from range(2 * step, layers // pipeline + 1, step)

    def placement(self, pipeline: int, chunks: int | None) -> Placement:
        """Return the placement of its stages; ``auto`` has none."""
        place = catalog.family(self.family).placement
        assert place is not None, "auto takes the placements of the others"
        return place(pipeline, chunks)

    @property
    def takes_the_best(self) -> bool:
        """Whether it is ``auto``, which runs the fastest schedule of all."""
        return catalog.family(self.family).chooses_placement

    def has_by_default(self, counts: Layout, placement: Placement) -> bool:
        """Return whether a run has this layout without a flag for it.

        Megatron's own schedules have it where the layers divide. Without a flag, no stage is empty.
        """
        if self.megatron:
            return len(set(counts)) == 1
        return min(counts) > 0 and counts == spread(Layers(sum(counts)), placement)

    @property
    def needs_whole_groups(self) -> bool:
        """Whether the microbatches must be a multiple of the ranks: for Megatron's interleaved."""
        return self.megatron and self.takes_chunks

    @property
    def in_groups(self) -> bool:
        """Whether microbatches pass the chunks of a rank in groups."""
        return catalog.family(self.family).takes_group_size

    @property
    def finds_pairs(self) -> bool:
        """Whether its order with pairs is searched for: that of a V with two stages a rank."""
        family = catalog.family(self.family)
        place = family.placement
        return family.searches and place is not None and place(2, None) == v_shape(2)

    @property
    def splits(self) -> bool:
        return catalog.family(self.family).splits_backward


def candidates_of(names: Sequence[str] | None, *, overlap: bool = True) -> list[ScheduleCandidate]:
    """Return Megatron's own schedules, and those that are named, or else the usual ones.

    Raises:
        UsageError: a name is unknown.
    """
    own = [
        ScheduleCandidate(MEGATRON_1F1B, "1f1b", blocking=True, megatron=True),
        ScheduleCandidate(
            MEGATRON_INTERLEAVED,
            "interleaved",
            takes_chunks=True,
            blocking=not overlap,
            megatron=True,
        ),
    ]
    usual = [name for name in schedules.names() if name not in _SELDOM]
    chosen = dict.fromkeys(catalog.family(name).name for name in names or usual)
    families = [catalog.family(name) for name in chosen]
    return own + [
        ScheduleCandidate(
            family.name, family.name, family.takes_chunks and family.placement is not None
        )
        for family in families
    ]


def of_overlap() -> ScheduleCandidate:
    """Return Megatron's interleaved schedule with ``--overlap-moe-expert-parallel-comm``."""
    return ScheduleCandidate(
        MEGATRON_OVERLAP, "interleaved", takes_chunks=True, megatron=True, overlaps_exchange=True
    )


def with_those_of_auto(chosen: Sequence[ScheduleCandidate]) -> list[ScheduleCandidate]:
    """Return the chosen ones; with ``auto`` also the usual ones, of which it takes the best."""
    if not any(candidate.takes_the_best for candidate in chosen):
        return list(chosen)
    others = [candidate for candidate in candidates_of(None) if not candidate.megatron]
    return list(dict.fromkeys([*chosen, *others]))


def names_in(text: str) -> tuple[str, ...]:
    """Split names that are separated by commas.

    Raises:
        UsageError: there is none.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError(f"--schedules '{text}' names no schedule: give, for example, v-zb,v-half")
    return names
