"""What is requested of a schedule, by twos: the schedule has both, or one sentence refuses them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any

import drawn_sizes
import pytest
from brief_searches import at_length
from checkpoint_pass import PART, N

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_core.refusals import Asked
from megatron_zb.schedules import conflicts
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features import offload, recomputation
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.part import Part
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.slices import Slicing
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import wave
from megatron_zb.schedules.request import LimitTooSmall, Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import placement_search

pytestmark = pytest.mark.usefixtures("brief_searches", "briefer")

P, M = 2, 4


@pytest.fixture
def briefer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "SECONDS", 0.05)
    monkeypatch.setattr(offload, "_POLISHED", 0)


@dataclass(frozen=True)
class Feature:
    """A request: what it changes, and whether a schedule has it.

    Args:
        has: whether a schedule for these costs has the feature.
        costs: the change of the costs.
        more: further arguments of ``build``.
        of: fields of :data:`CLASSES` that belong to it.
        limited: whether the feature has passes under a memory limit alone.
    """

    has: Callable[[Schedule, Costs], bool]
    of: str
    costs: Callable[[Costs], Costs] = lambda costs: costs
    more: dict[str, Any] = field(default_factory=dict)
    limited: bool = False


def has_kind(kind: PassKind) -> Callable[[Schedule, Costs], bool]:
    return lambda schedule, costs: any(p.kind is kind for rank in schedule.ranks for p in rank)


def is_cut(schedule: Schedule, **choices: Any) -> bool:
    slicing = getattr(schedule.rules, "slicing", Slicing.equal(1))
    return slicing.slices == 2 and all(getattr(slicing, n) == v for n, v in choices.items())


def runs_in_pairs(schedule: Schedule, costs: Costs) -> bool:
    """With one chunk on a rank, no two passes of different stages can be one."""
    return bool(schedule.pairs) or schedule.placement.chunks == 1 or schedule.name == "1f1b-v"


FEATURES: dict[str, Feature] = {
    "recomputation": Feature(
        has_kind(PassKind.R),
        "kept_input seconds",
        lambda costs: costs.having(Recomputation(kept_input=0.05, seconds=(0.01, 0.01))),
        limited=True,
    ),
    "offload": Feature(
        has_kind(PassKind.D),
        "seconds full_duplex host_limit",
        lambda costs: costs.having(Offload(seconds=0.02)),
        limited=True,
    ),
    "vocabulary": Feature(
        has_kind(PassKind.O),
        "output weight loss held scatter gather shares",
        lambda costs: costs.having(Vocabulary(output=1.0, weight=0.5)),
    ),
    "embedding": Feature(
        has_kind(PassKind.E),
        "lookup",
        lambda costs: costs.having(Vocabulary(output=1.0, weight=0.5, lookup=0.1)),
    ),
    "prediction": Feature(
        has_kind(PassKind.M),
        "predicts",
        lambda costs: costs.having(Vocabulary(output=1.0, weight=0.5, lookup=0.1, predicts=True)),
    ),
    "communication": Feature(
        runs_in_pairs,
        "forward backward pair_loss",
        lambda costs: costs.having(Communication(forward=0.5, backward=0.5)),
    ),
    "part": Feature(has_kind(N), "kind seconds memory until", lambda costs: costs.having(PART)),
    "lengths": Feature(
        lambda schedule, costs: (
            schedules.simulate(schedule, costs).makespan
            > 1.2 * schedules.simulate(schedule, replace(costs, microbatches=())).makespan
        ),
        "microbatches",
        lambda costs: costs.of_lengths((1.5, 1.0, 2.0, 1.0)),
    ),
    "slices": Feature(
        lambda schedule, costs: is_cut(schedule),
        "slices lengths",
        more={"slices": 2},
    ),
    "joined": Feature(
        lambda schedule, costs: (
            is_cut(schedule, joins_weight=True)
            and schedule.num_microbatches * schedule.placement.num_stages
            == 2 * sum(p.kind in (PassKind.W, PassKind.BW) for rank in schedule.ranks for p in rank)
        ),
        "joins_weight weight_loss",
        more={"slices": Slicing.equal(2, joins_weight=True, weight_loss=0.1)},
    ),
    "attention": Feature(
        lambda schedule, costs: is_cut(schedule, attention=0.5),
        "attention attention_backward kept",
        more={"slices": Slicing.equal(2, attention=0.5)},
    ),
    "chunks": Feature(
        lambda schedule, costs: schedule.placement.chunks == 4, "chunks", more={"chunks": 4}
    ),
    "group": Feature(
        lambda schedule, costs: {p.stage for p in schedule.ranks[0][:4]} == {0},
        "group_size",
        more={"group_size": 4},
    ),
    "placement": Feature(
        lambda schedule, costs: schedule.placement == wave(P, 4),
        "placement num_layers",
        more={"placement": wave(P, 4)},
    ),
    "back to back": Feature(
        lambda schedule, costs: schedule.report is not None and schedule.report.period is not None,
        "back_to_back",
        more={"back_to_back": True},
    ),
}
ALWAYS = "pipeline_size seconds memory p2p slowdown fixed features"
"""Fields of costs that every schedule has."""
OTHERS = {
    "num_microbatches": "a size",
    "costs": "by field",
    "limit": "checked by every schedule: see tests of limits",
    "quick": "the effort of a search",
    "rules": "those of slices, which follow from a Slicing",
}


CLASSES = (Costs, Recomputation, Offload, Vocabulary, Communication, Part, Request, Slicing)


def test_every_field_belongs_to_a_feature() -> None:
    """A new field of a request has to be tried beside all others, or be named with its reason."""
    known = {*ALWAYS.split(), *OTHERS}.union(*(it.of.split() for it in FEATURES.values()))
    found = {it.name for kind in CLASSES for it in fields(kind)}
    assert found <= known


EITHER = (
    {"recomputation", "offload"},  # a search takes what is faster
    {"offload", "back to back"},  # without a barrier, ranks wait too little for offload to pay
    {"vocabulary", "embedding", "prediction"},
    {"slices", "joined", "attention"},
    {"chunks", "placement"},
)
"""Values of one argument, and two of which a schedule may have one."""
PAIRS = [pair for pair in combinations(FEATURES, 2) if not any({*pair} <= it for it in EITHER)]
FIRST = ["v-half", "interleaved", "1f1b"]
NAMES = drawn_sizes.first(3, [*FIRST, *(name for name in schedules.names() if name not in FIRST)])


LIMITS = (0.7, 0.6, 0.55, 0.45, 0.35)
"""Memory limits; at which of them recomputation and offload pay, depends on the schedule."""


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_has_both_or_refuses(name: str, pair: tuple[str, str]) -> None:
    found = [FEATURES[each] for each in pair]
    costs = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0)
    for feature in sorted(found, key=lambda it: it.of == "microbatches"):  # given last
        costs = feature.costs(costs)
    # where few pairs pay, a brief search may miss them
    few = "communication" in pair and not {"lengths", "chunks", "placement"}.isdisjoint(pair)
    effort = at_length() if few else nullcontext()
    missing: tuple[str, ...] = pair
    for limit in LIMITS if any(it.limited for it in found) else (None,):
        try:
            with effort:
                schedule = schedules.build(
                    name,
                    pipeline_size=P,
                    num_microbatches=M,
                    costs=costs,
                    memory_limit=limit,
                    **found[0].more,
                    **found[1].more,
                )
        except LimitTooSmall:
            break
        except UsageError:
            return
        missing = tuple(
            each
            for each, feature in zip(pair, found, strict=True)
            if not feature.has(schedule, costs)
        )
        if not missing:
            return
    pytest.fail(f"neither refused nor there: {' and '.join(missing)}")


def test_a_conflict_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_search, "search", None)
    costs = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0)
    for feature in ("recomputation", "offload", "vocabulary"):
        costs = FEATURES[feature].costs(costs)
    words = "recomputation cannot be combined with vocabulary parallelism: .*; leave one out"
    for name in schedules.names():
        with pytest.raises(UsageError, match=words):
            schedules.build(name, pipeline_size=P, num_microbatches=M, costs=costs)


FLAGS: dict[str, dict[str, Any]] = {
    conflicts.RECOMPUTATION: {"pipeline_recompute": "auto"},
    conflicts.OFFLOAD: {"pipeline_offload": "auto"},
    conflicts.VOCABULARY: {"pipeline_vocabulary": "on"},
    conflicts.COMMUNICATION: {"overlap_moe_expert_parallel_comm": True, "bf16": True},
    conflicts.SLICES: {"pipeline_slices": 4},
    conflicts.FIXED_ORDER: {},
}
"""Features that arguments of a run request."""


@pytest.mark.parametrize("pair", list(combinations(FLAGS, 2)), ids=" and ".join)
def test_a_run_refuses_the_same(pair: tuple[str, str]) -> None:
    given = {"expert_model_parallel_size": 2, **FLAGS[pair[0]], **FLAGS[pair[1]]}
    fixed = conflicts.FIXED_ORDER in pair
    asked = Asked(args=argparse.Namespace(**given), choice="1f1b", has_fixed_order=fixed)
    in_run = bool(list(refusals.refusals(asked)))
    of_whole = [conflicts.FIXED_WHOLE] * (fixed and conflicts.SLICES not in pair)
    in_table = bool(list(conflicts.refusals({it: it for it in [*pair, *of_whole]})))
    assert in_run is in_table
