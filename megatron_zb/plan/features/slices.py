"""Token slices in a plan: models that have them, how their costs grow, and what they hold.

A strategy with n slices is counted as follows:

- The scores of a slice go back to the first token: :class:`Slicing` has how they grow. Keys and
  values are copied into a buffer. In B, gradients of all keys up to the slice are added up in 32
  bits, and stay until the slice before takes them.
- Context-parallel ranks have keys and values of whole samples, and their gradients. They gather
  those of a slice in F, and scatter sums of gradients, in 32 bits, in B; nothing hides either.
- Kernels, collectives and messages are n times as many, each with its latency.
- W runs for each slice, as in training. Each but the first reads and writes the gradient of its
  weight once more.
- Every slice visits all experts of a rank, and reads their weights. Products of few tokens take as
  long as that.
- Logits, messages and what B holds while it runs are those of one slice. Activations are those of
  all slices under way, as simulated.

The share of scores is that of the whole model, the same for all stages, as in training. Slices are
equally long, or take equally long, by :attr:`Workload.slicing`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_zb.errors import UsageError, raise_first
from megatron_zb.plan.arguments import numbers, whole_number
from megatron_zb.plan.byte_counts import ActivationBytes, keys_and_values
from megatron_zb.plan.features.feature import (
    CountedRequest,
    Described,
    PlanFeature,
    RankedRows,
)
from megatron_zb.plan.mixers import RECURRENT
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.rows import PlanRow, Prediction
from megatron_zb.plan.strategy import (
    MEGATRON_CONTEXT,
    MEGATRON_FULL,
    SLICE_STEP,
    ScheduleCandidate,
    Strategy,
    of_family,
)
from megatron_zb.plan.units import WholeUnits
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Pass
from megatron_zb.schedules.features.slices import (
    LEAST_TOKENS,
    MOST_SLICES,
    Slicing,
    least_tokens,
    slicing_of,
)

_OF_PAIRS = ("dualpipe-v",)
"""Schedules that differ from others in their pairs, which slices do not have."""


@dataclass(frozen=True)
class SlicedUnits(WholeUnits):
    """Token slices of every microbatch."""

    @property
    def count(self) -> int:
        return self.cut.slices

    @property
    def cut(self) -> Slicing:
        assert self.load.slicing is not None
        return self.load.slicing

    def costs(self, costs: Costs, m: int) -> Costs:
        return self.cut.costs(costs, m)

    def held(self, held: Sequence[ActivationBytes]) -> Sequence[ActivationBytes]:
        """Return the bytes of each slice of each stage."""
        return [of * scale.tokens for of in held for scale in self.cut.scales]

    def passes(self, passes: Sequence[Pass]) -> Sequence[Pass]:
        """Return passes with slice i of stage s as stage s * n + i, as in :meth:`held`."""
        n, found = self.count, []
        for kind, stage, unit in passes:
            j, i = self.cut.microbatch_and_slice(unit)
            found.append(Pass(kind, stage * n + i, j))
        return found

    def kept(self, layers: int) -> float:
        """Count the bytes of prefixes.

        Keys and values have a place for all slices before their F has run. Their gradients, in 32
        bits, are kept until B of the first slice; that of the layer whose B runs has 10 bytes more,
        and with context parallelism, which has two runs of queries, 12.
        """
        if not layers:
            return 0.0
        return keys_and_values(self.load) * (layers * (1 + 2) + 5 + self.load.strategy.gathers)


@dataclass(frozen=True)
class PlanSlices(PlanFeature):
    """Token slices, in schedules of their own beside those of whole microbatches.

    Attributes:
        counts: numbers of slices of a microbatch.
        least: tokens of a slice on each rank that shares them, at least.
        given_by: the user's argument for the numbers.
    """

    counts: tuple[int, ...] = (1,)
    least: int = LEAST_TOKENS
    given_by: str = "--slices"

    field: ClassVar[str] = "is_sliced"
    stands_apart: ClassVar[bool] = True

    @property
    def is_asked(self) -> bool:
        """Whether microbatches may be cut."""
        return max(self.counts) > 1

    # --- of the command line

    def asked(self, arguments: argparse.Namespace, of: Described | None = None) -> PlanSlices:
        if of is None:
            return self
        if arguments.slices == "auto":
            counts = tuple(2**power for power in range(MOST_SLICES.bit_length()))
        else:
            counts = numbers("--slices", arguments.slices) or (1,)
        least = least_tokens(of.model.hidden_size)
        if arguments.slice_tokens is not None:
            least = whole_number("--slice-tokens", arguments.slice_tokens, LEAST_TOKENS)
        given_by = of.flags.get("slices", "--slices")
        return replace(self, counts=counts, least=least, given_by=given_by)

    def check_lengths(self, arguments: argparse.Namespace) -> None:
        if self.is_asked:
            raise UsageError(
                f"--slices {arguments.slices} cannot be combined with --lengths: slices are of "
                "samples of one length: leave one out"
            )

    def check_training(self, args: argparse.Namespace, plans: argparse.Namespace | None) -> None:
        from megatron_zb.megatron_core.refusals import Asked, refusals

        asked = None if plans is None else plans.slices
        if asked not in (None, "1") or args.pipeline_slices is not None:
            facts = {"pipeline_slices": True}
            raise_first(refusals(Asked(args=args, choice="", facts=facts), only=("slices",)))

    def read(self, given: argparse.Namespace) -> dict[str, tuple[str, str]]:
        slicing = getattr(given, "pipeline_slices", None)
        if slicing is not None and str(slicing) != str(slicing.slices):
            raise UsageError(
                f"--pipeline-slices {slicing}: slices of a plan have equal lengths: give their "
                "number"
            )
        return {} if slicing is None else {"slices": (str(slicing), "--pipeline-slices")}

    def given(self, args: argparse.Namespace, candidate: ScheduleCandidate) -> ScheduleCandidate:
        if args.pipeline_slices is None or candidate.megatron:
            return candidate
        return next(iter(self.of_these([candidate], named=True)), candidate)

    def given_strategy(
        self, args: argparse.Namespace, strategy: Strategy, sequence: int
    ) -> Strategy | None:
        if args.pipeline_slices is None or (n := args.pipeline_slices.slices) == 1:
            return strategy
        return next(replace(self, counts=(n,), least=1).strategies(strategy, sequence), None)

    # --- in a setting

    def check(self, job: CountedRequest) -> None:
        why = why_not_sliced(job.model, post_validation=job.post_validation)
        if self.is_asked and why is not None:
            raise UsageError(
                f"{self.given_by}: microbatches cannot be cut, because {why}: leave it out"
            )

    def check_loads(self, loads: Sequence[Workload]) -> None:
        if self.is_asked and all(load.strategy.slices == 1 for load in loads):
            raise UsageError(
                f"{self.given_by} {','.join(map(str, self.counts))}: no sample of "
                f"{loads[0].sequence} tokens can be cut: slices need a pipeline, --precision bf16, "
                f"and {self.least} tokens on every rank of tensor and context parallelism: give "
                "fewer, or --slice-tokens"
            )

    def loads(self, load: Workload) -> Iterator[Workload]:
        """Yield a workload with slices, if each is long enough on a rank that shares it."""
        for strategy in self.strategies(load.strategy, load.sequence):
            cut = replace(load, strategy=strategy)
            if min(SlicedUnits(cut).cut.lengths) >= self.least * strategy.spread:
                yield cut

    def strategies(self, strategy: Strategy, sequence: int) -> Iterator[Strategy]:
        """Yield a strategy with slices, if it has a pipeline and slices that its ranks can share.

        A context-parallel rank has two runs of a slice. The usual scales of fp8 follow whole
        microbatches.
        """
        if strategy.pipeline == 1 or strategy.precision != "bf16":
            return
        spread, context = strategy.spread, strategy.context
        multiple = math.lcm(spread, 2 * context if context > 1 else 1)
        for slices in self.counts:
            length = sequence // (slices * spread)
            if slices > 1 and sequence % (slices * multiple) == 0 and length >= self.least:
                yield replace(strategy, slices=slices)
                if sequence % (SLICE_STEP * spread) == 0 and length >= 4 * SLICE_STEP:
                    yield replace(strategy, slices=slices, by_time=True)

    def units(self, load: Workload) -> WholeUnits | None:
        return None if load.slicing is None else SlicedUnits(load)

    # --- in schedules and rows

    def candidates(self, found: list[ScheduleCandidate], *, named: bool) -> list[ScheduleCandidate]:
        """Return schedules, and those that have slices with them, for these numbers of slices.

        Beside slices stand Megatron's own remedies for long samples.
        """
        if not self.is_asked:
            return found
        own = [candidate for candidate in found if candidate.megatron]
        own += [replace(own[0], name=name) for name in (MEGATRON_CONTEXT, MEGATRON_FULL)]
        others = [candidate for candidate in found if not candidate.megatron]
        whole = others if 1 in self.counts else []
        return [*own, *whole, *self.of_these(others, named=named)]

    def of_these(
        self, found: Iterable[ScheduleCandidate], *, named: bool
    ) -> list[ScheduleCandidate]:
        """Return schedules on slices; unless they are ``named``, also 1F1B and interleaved."""
        more = [] if named else [*map(of_family, ("1f1b", "interleaved"))]
        return [
            replace(candidate, name=f"{candidate.name} sliced", is_sliced=True)
            for candidate in (*more, *found)
            if not candidate.megatron and candidate.family not in _OF_PAIRS
        ]

    def is_in(self, row: PlanRow) -> bool:
        return _slicing(row) is not None

    def flags(self, row: PlanRow) -> list[str]:
        slicing = _slicing(row)
        return [] if slicing is None else [f"--pipeline-slices {slicing}"]

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        """Return the number of slices and their tokens, where slices were requested."""
        lengths = getattr(_slicing(row), "lengths", None)
        found = {"slices": row.load.strategy.slices, "slice_tokens": lengths}
        return found if self.is_asked else {}


def _slicing(row: PlanRow) -> Slicing | None:
    return None if row.schedule is None else slicing_of(row.schedule)


def why_not_sliced(model: ModelConfig, *, post_validation: bool) -> str | None:
    """Return why microbatches of a model cannot be cut into slices; None if they can."""
    recurrent = _named(kind for kind in RECURRENT if kind in model.kinds)
    reasons = {
        f"{model.name} has layers {recurrent}, whose state passes to the next slice": recurrent,
        f"{model.name} has an encoder, whose images are whole": model.encoder,
        f"{model.name} predicts tokens of the next slice": model.prediction_layers,
        f"the masks of dropout in {model.name} are for whole microbatches": model.dropout,
        f"{model.name} stores its scores, which grow with every slice": not model.flash_attention,
        "steps with --post-validation are of whole microbatches": post_validation,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def _named(kinds: Iterable[str]) -> str:
    return " and ".join(f"{kind} ({RECURRENT[kind]})" for kind in kinds)
