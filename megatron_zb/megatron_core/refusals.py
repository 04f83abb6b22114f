"""Refusals: what cannot be combined with a schedule, by the rows of ``refusals.yaml``.

The same rows serve the start of a job, ``megatron-zb check``, the configs of a step, and
``docs/support.md``. Importing this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_zb.errors import Refusal, UsageError, raise_first
from megatron_zb.job.settings import STREAMS_FLAG, choice_of, placement_of
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.versions import Graphs
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule

START, STEP = "start", "step"
OVERLAP = "overlap_moe_expert_parallel_comm"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run, or a step, whose arguments are compared with the rows.

    Args:
        args: arguments of Megatron-LM or of the trainer; at a step, one of Megatron's configs.
        choice: the schedule as messages name it.
        placements: those that the schedule may have. A condition on the placement holds if it
            holds for all of them.
        splits: whether the schedule splits the backward.
        has_fixed_order: whether no search looks for the order of the schedule.
        table: the schedule of a file, whose passes count like the flags that request them.
        draws_by_layer: whether layers have random streams of their own.
        series: the series of Megatron-LM, such as (0, 19); None is the one installed.
        facts: further facts of a step by name, such as ``is_measured``.
    """

    args: Any
    choice: str
    placements: Collection[Placement] = ()
    splits: bool = True
    has_fixed_order: bool = False
    table: Schedule | None = None
    draws_by_layer: bool = False
    series: tuple[int, int] | None = None
    facts: Mapping[str, bool] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return the value of an argument, a setting or a fact; None where there is none."""
        if name in _FACTS:
            return _FACTS[name](self)
        return self.facts.get(name, getattr(self.args, name, None))

    def known(self, placements: Collection[Placement], *, draws_by_layer: bool) -> Asked:
        """Return the same run with what is known once its schedule is built."""
        return replace(self, placements=placements, draws_by_layer=draws_by_layer)

    def for_all(self, holds: Callable[[Placement], bool]) -> str | None:
        """Return :attr:`choice` if a condition holds for every possible placement."""
        return self.choice if self.placements and all(map(holds, self.placements)) else None


_FACTS: dict[str, Callable[[Asked], Any]] = {
    "graphs": lambda asked: versions.graphs_of(asked.args).value,
    "graphs_leave_experts_out": lambda asked: versions.graphs_leave_experts_out(asked.args),
    "precision": lambda asked: (
        "float32" if not (asked.value("bf16") or asked.value("fp16")) else "16 bits"
    ),
    "draws_by_layer": lambda asked: asked.draws_by_layer,
}


def _is_mirrored(placement: Placement) -> bool:
    """Return whether both ends of the model are on one rank."""
    return placement.rank_of[-1] != placement.pipeline_size - 1


def _graphs(asked: Asked) -> str | None:
    kind = versions.graphs_of(asked.args)
    return None if kind is Graphs.NONE else f"CUDA graphs ({kind.value})"


def _layer_streams(asked: Asked) -> str | None:
    if not asked.draws_by_layer:
        return None
    chosen = f"{STREAMS_FLAG} layer"
    is_given = asked.value("pipeline_random_streams") == "layer"
    return chosen if is_given else f"{chosen}, which {asked.choice} brings,"


def _flag(name: str, value: str = "") -> Callable[[Asked], str | None]:
    """Return the condition that an argument is given, or has a value."""

    def condition(asked: Asked) -> str | None:
        given = asked.value(name)
        holds = given == value if value else bool(given)
        return f"{flag_of(name)} {value}".strip() if holds else None

    return condition


def _state(
    name: str, has: Callable[[Schedule], bool], passes: str
) -> Callable[[Asked], str | None]:
    """Return the condition that passes have a state, by a flag or in the schedule of a file.

    Args:
        has: whether the schedule of a file has the state.
        passes: the passes by which it has it.
    """

    def condition(asked: Asked) -> str | None:
        if getattr(asked.args, name, None) == "auto":
            return f"{flag_of(name)} auto"
        if asked.table is None or not has(asked.table):
            return None
        return f"--pipeline-schedule-file {asked.args.pipeline_schedule_file}, which has {passes}"

    return condition


CONDITIONS: dict[str, Callable[[Asked], str | None]] = {
    "any": lambda asked: asked.choice,
    "one_chunk": lambda asked: asked.for_all(lambda placement: placement.chunks == 1),
    "chunks": lambda asked: asked.for_all(lambda placement: placement.chunks > 1),
    "inner_stages": lambda asked: asked.for_all(lambda placement: placement.num_stages > 2),
    "v": lambda asked: asked.for_all(_is_mirrored),
    "split": lambda asked: asked.choice if asked.splits else None,
    "fixed_order": lambda asked: asked.choice if asked.has_fixed_order else None,
    "graphs": _graphs,
    "recompute": _state("pipeline_recompute", lambda table: bool(table.recomputed), "R"),
    "offload": _state("pipeline_offload", lambda table: bool(table.offloaded), "D and H"),
    "overlap": _flag(OVERLAP),
    "vocabulary": _flag("pipeline_vocabulary", "on"),
    "warm_up": _flag("pipeline_warm_up", "on"),
    "layer_streams": _layer_streams,
    "post_validation": _flag("enable_optimizer_post_validation"),
    "file": lambda asked: (
        "--pipeline-schedule-file" if asked.value("pipeline_schedule_file") else None
    ),
    "named": lambda asked: asked.choice if asked.value("pipeline_schedule") else None,
}
"""Return, by the name of a condition, what refusals call it while it holds, and None otherwise.

Any other name is that of a flag: ``verify`` is the condition that ``--pipeline-verify`` is given.
"""
STEP_CONDITIONS = ("any", "v")
"""Those that are looked at before a step; post-validation and the warm-up look at their own."""


def _condition(name: str) -> Callable[[Asked], str | None]:
    return CONDITIONS.get(name) or _flag(f"pipeline_{name}")


def _is_above(value: Any, limit: int | list[str], asked: Asked) -> bool:
    if isinstance(limit, list):
        limit = next(size for name in limit if (size := asked.value(name)))
    return bool(value > limit)


TESTS: dict[str, Callable[[Any, Any, Asked], bool]] = {
    "given": lambda value, wanted, asked: bool(value) is wanted,
    "is": lambda value, wanted, asked: bool(value == wanted),
    "not": lambda value, wanted, asked: value not in wanted,
    "contains": lambda value, wanted, asked: wanted in value,
    "above": _is_above,
    "below": lambda value, wanted, asked: bool(value < wanted),
    "finite": lambda value, wanted, asked: math.isfinite(value) is wanted,
}

Tests = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RefusalRow:
    """One row of ``refusals.yaml``."""

    when: Tests
    with_: tuple[str, ...]
    why: str = ""
    says: str = ""
    if_any: Tests = field(default_factory=dict)
    unless: Tests = field(default_factory=dict)
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (99, 0)
    stage: tuple[str, ...] = (START,)

    def subjects(self, asked: Asked) -> Iterator[str]:
        """Yield the names that pass their tests, if the row counts for this run."""
        found = list(passing(self.when, asked))
        if not found or (self.if_any and not any(passing(self.if_any, asked))):
            return
        if any(passing(self.unless, asked)):
            return
        if self.since <= (asked.series or versions.core_series()) <= self.until:
            yield from found


def passing(tests: Tests, asked: Asked) -> Iterator[str]:
    """Yield the names whose value passes its tests; None never does."""
    for name, wanted in tests.items():
        value = asked.value(name)
        if value is not None and all(TESTS[t](value, want, asked) for t, want in wanted.items()):
            yield name


@cache
def rows() -> tuple[RefusalRow, ...]:
    """Return the rows of ``refusals.yaml``."""
    text = Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8")
    return tuple(map(_row, yaml.safe_load(text)))


def _row(given: dict[str, Any]) -> RefusalRow:
    fields: dict[str, Any] = {**given, "with_": tuple(given["with"].split())}
    del fields["with"]
    for name in ("when", "if_any", "unless"):
        if isinstance(given.get(name), str):
            fields[name] = {each: {"given": True} for each in given[name].split()}
    for name in ("since", "until"):
        if name in given:
            fields[name] = getattr(versions, given[name])
    if "stage" in given:
        fields["stage"] = tuple(given["stage"].split())
    return RefusalRow(**fields)


def refusals(asked: Asked, stage: str = START, only: Collection[str] = ()) -> Iterator[Refusal]:
    """Yield what cannot be combined, in the order of the rows.

    Args:
        only: conditions to look at; without any, all.
    """
    names = only or {name for row in rows() for name in row.with_}
    held = {name: _condition(name)(asked) for name in names}
    for row in rows():
        others = [text for name in row.with_ if (text := held.get(name)) is not None]
        if stage not in row.stage or not others:
            continue
        for name in row.subjects(asked):
            flag = said(name, asked.value(name)) if stage == START else setting(name, asked)
            for other in others:
                sentence = row.says.format(flag=said_flag(name), other=other)
                yield Refusal(flag, other, row.why, sentence)


def check(asked: Asked, stage: str = START) -> None:
    """Refuse what cannot be combined.

    Raises:
        UsageError: names both sides of the conflict and the reason.
    """
    raise_first(refusals(asked, stage))


def check_step(
    config: Any,
    schedule: str,
    adjust_tensor_shapes_fn: Any = None,
    placement: Placement | None = None,
    facts: Mapping[str, bool] | None = None,
) -> None:
    """Refuse settings of Megatron's config that would give wrong results silently.

    Args:
        config: of Megatron, or arguments with the same names.
        schedule: its name.
        adjust_tensor_shapes_fn: the argument of Megatron's schedules.
        placement: of its stages, for rows about placements.
        facts: what else is true of the step by its name, such as ``is_measured``.

    Raises:
        UsageError: names the setting and the reason.
    """
    choice = f"the pipeline schedule {schedule}"
    if adjust_tensor_shapes_fn is not None and not config.variable_seq_lengths:
        raise UsageError(
            f"adjust_tensor_shapes_fn cannot be combined with {choice}: set variable_seq_lengths, "
            "with which every message tells its shape"
        )
    facts = dict(facts or {})
    draws = facts.get("draws_by_layer", False)
    asked = Asked(args=config, choice=choice, facts=facts, draws_by_layer=draws)
    asked = replace(asked, placements=[] if placement is None else [placement])
    raise_first(refusals(asked, STEP, only=STEP_CONDITIONS))


def check_steps_taken_back(config: Any) -> None:
    """Refuse settings of Megatron's configs with which no optimizer step can be undone.

    Raises:
        UsageError: names the setting and the reason.
    """
    asked = Asked(args=config, choice="", facts={"enable_optimizer_post_validation": True})
    for refusal in refusals(asked, STEP, only=("post_validation",)):
        raise_first([Refusal(refusal.flag, "optimizer post-validation", refusal.why)])


def why_whole(args: argparse.Namespace) -> str | None:
    """Return why no output layer can be vocabulary parallel for such arguments, if so."""
    asked = Asked(args=args, choice="", facts={"pipeline_vocabulary": "on"})  # type: ignore[dict-item]
    found = next(refusals(asked, only=("vocabulary",)), None)
    return None if found is None else f"{found.flag}: {found.why}"


def why_cold(config: Any, facts: Mapping[str, bool]) -> str | None:
    """Return why a step cannot have a warm-up before it, if so.

    Args:
        config: of Megatron.
        facts: what else is true of the step, such as ``is_sliced``.
    """
    known: Any = {**facts, "pipeline_warm_up": "on"}
    found = next(
        refusals(Asked(args=config, choice="", facts=known), STEP, only=("warm_up",)), None
    )
    return None if found is None else f"{found.flag}: {found.why}"


def of_arguments(
    args: argparse.Namespace, *, chunks: int | None = None, num_layers: int | None = None
) -> Asked:
    """Return the run that arguments request, as far as it is known before a schedule is built.

    Args:
        chunks: per rank, where arguments choose a number.
        num_layers: that are spread evenly over the stages; None where they are not.

    Raises:
        UsageError: there is no such schedule, no such file, or nothing to schedule.
    """
    choice = choice_of(args)
    if args.pipeline_schedule_file is not None:
        asked = Asked(args=args, choice=choice)
        if next(refusals(asked, only=("file",)), None) is not None:
            return asked  # the file makes no difference
        table = interchange.from_csv(Path(args.pipeline_schedule_file))
        splits = any(each.kind is PassKind.W for rank in table.ranks for each in rank)
        return Asked(
            args=args, choice=choice, placements=(table.placement,), splits=splits, table=table
        )
    family, size = catalog.family(args.pipeline_schedule), args.pipeline_model_parallel_size
    if size < 2:
        raise UsageError(
            f"--pipeline-schedule {family.name} needs a pipeline: give "
            "--pipeline-model-parallel-size of 2 or more"
        )
    bound, chunks = placement_of(args, size), chunks if family.takes_chunks else None
    possible: Collection[Placement] = () if bound is None else (bound,)
    if bound is None:
        with suppress(UsageError):  # the sizes are wrong, as building will report
            possible = catalog.possible_placements(family, size, chunks, num_layers)
    return Asked(
        args=args,
        choice=choice,
        placements=possible,
        splits=family.splits_backward,
        # slices may be recomputed in any order; building refuses what they do not go with
        has_fixed_order=not family.searches and getattr(args, "pipeline_slices", None) is None,
    )


def reason(name: str, condition: str) -> str:
    """Return the reason for which an argument cannot be combined with a condition."""
    return next(row.why for row in rows() if name in row.when and condition in row.with_)


_OTHER_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}


def said_flag(name: str) -> str:
    """Return the flag of an argument."""
    return _OTHER_FLAGS.get(name) or flag_of(name)


def said(name: str, value: object) -> str:
    """Return an argument, or a fact, as a user wrote it."""
    if name == "graphs":
        return f"CUDA graphs ({value})"
    if name == "precision":
        return str(value)
    if isinstance(value, bool):
        return said_flag(name)
    return f"{said_flag(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def setting(name: str, asked: Asked) -> str:
    """Return the name of a setting of Megatron's config."""
    return said(name, asked.value(name)) if name in _FACTS else name
