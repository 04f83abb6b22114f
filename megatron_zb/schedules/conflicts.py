"""What a schedule cannot combine: one table for every entrance.

:func:`catalog.build` checks its arguments, and ``megatron-zb show`` its flags. A training run has
rows of its own flags in ``megatron_core/refusals.yaml``: a test compares them with this table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_zb.errors import Refusal
from megatron_zb.schedules.costs import Costs

RECOMPUTATION, OFFLOAD = "recomputation", "offload"
VOCABULARY = "vocabulary"
COMMUNICATION = "communication"
PARTS, HOLDING_PARTS = "parts", "parts that hold memory"
SLICES, GROUPS = "slices", "groups"
ADAPTERS = "adapters"
DIRECTIONS = "two directions"
SECOND_MODEL = "second model"
BACK_TO_BACK = "back to back"
UPDATE_DELAY = "update delay"
UNEQUAL = "unequal microbatches"
FIXED_ORDER, FIXED_WHOLE = "fixed order", "fixed order of whole microbatches"


@dataclass(frozen=True)
class Conflict:
    """Two features that no schedule has together.

    Args:
        one: a feature.
        other: another one.
        why: the reason, then what to do.
        says: the whole sentence, where the usual one does not fit.
    """

    one: str
    other: str
    why: str = ""
    says: str = ""

    def refusal(self, words: Mapping[str, str]) -> Refusal:
        """Return the refusal of both features, by what their user calls them."""
        one, other = words[self.one], words[self.other]
        return Refusal(one, other, self.why, self.says.format(one=one, other=other))


_ALL_KEPT = "its passes and those of the stages keep every activation; leave one out"
_FIXED = (
    "{one}: {other} has a fixed order, which keeps every activation: leave {one} out, or give a "
    "schedule that is searched for, such as v-half"
)
_HELD = (
    "{other} hold memory that neither recomputation nor offload frees: give the part no memory, or "
    "costs that keep every activation"
)

_BESIDE = "its passes run beside F, B and W of whole microbatches alone; leave one out"
_OF_ONE = "its order is that of one training; leave one out"
_IN_PERIODS = "its steps repeat one order of F, B and W that keeps every activation; leave one out"
_BOTH_WAYS = "its passes are those of whole microbatches that keep every activation; leave one out"

_FEATURES = (RECOMPUTATION, OFFLOAD, VOCABULARY, COMMUNICATION, PARTS, SLICES)


def _with_each(one: str, others: Iterable[str], why: str) -> Iterator[Conflict]:
    return (Conflict(one, other, why) for other in others)


CONFLICTS = (
    Conflict(RECOMPUTATION, VOCABULARY, _ALL_KEPT),
    Conflict(OFFLOAD, VOCABULARY, _ALL_KEPT),
    Conflict(OFFLOAD, COMMUNICATION, "pairs of F and B keep every activation; leave one out"),
    Conflict(RECOMPUTATION, FIXED_WHOLE, says=_FIXED),
    Conflict(OFFLOAD, FIXED_ORDER, says=_FIXED),
    Conflict(RECOMPUTATION, HOLDING_PARTS, says=_HELD),
    Conflict(OFFLOAD, HOLDING_PARTS, says=_HELD),
    Conflict(
        COMMUNICATION, SLICES, "communication in F and B is of whole microbatches; leave one out"
    ),
    Conflict(PARTS, SLICES, "further passes are of whole microbatches; leave one out"),
    *_with_each(ADAPTERS, (VOCABULARY, SLICES, PARTS, COMMUNICATION), _OF_ONE),
    *_with_each(SECOND_MODEL, (*_FEATURES, ADAPTERS, BACK_TO_BACK), _BESIDE),
    Conflict(GROUPS, VOCABULARY, "its order is searched for, and has no groups; leave one out"),
    *_with_each(DIRECTIONS, (*_FEATURES, ADAPTERS, SECOND_MODEL), _BOTH_WAYS),
    *_with_each(
        UPDATE_DELAY,
        (*_FEATURES, ADAPTERS, SECOND_MODEL, BACK_TO_BACK, DIRECTIONS, UNEQUAL),
        _IN_PERIODS,
    ),
)


def requested(
    name: str,
    costs: Costs,
    *,
    has_fixed_order: bool,
    is_sliced: bool,
    group_size: int | None = None,
    also: Collection[str] = (),
) -> dict[str, str]:
    """Return the features that are requested of a schedule, and what errors call them.

    Args:
        name: of the schedule.
        costs: for which it is built.
        has_fixed_order: whether no search looks for its order.
        is_sliced: whether microbatches have several slices.
        group_size: microbatches that pass a chunk together, if given.
        also: further features of the table, by their names there.
    """
    found: dict[str, str] = {}
    for feature in costs.features:
        for each, words in feature.said().items():
            found[each] = f"{found[each]} and {words}" if each in found else words
    further = {
        SLICES: (is_sliced, "token slices"),
        ADAPTERS: (ADAPTERS in also, "adapters"),
        SECOND_MODEL: (SECOND_MODEL in also, "a second model"),
        BACK_TO_BACK: (BACK_TO_BACK in also, "back_to_back"),
        UPDATE_DELAY: (UPDATE_DELAY in also, "an update delay"),
        UNEQUAL: (bool(costs.microbatches), "costs of unequal microbatches"),
        GROUPS: (group_size is not None, f"group_size {group_size}"),
        FIXED_ORDER: (has_fixed_order, name),
        FIXED_WHOLE: (has_fixed_order and not is_sliced, name),  # slices are recomputed in any
    }
    return found | {each: words for each, (given, words) in further.items() if given}


def refusals(words: Mapping[str, str]) -> Iterator[Refusal]:
    """Yield what cannot be combined, in the order of the table.

    Args:
        words: features that are requested, and what their user calls them.
    """
    for conflict in CONFLICTS:
        if conflict.one in words and conflict.other in words:
            yield conflict.refusal(words)
