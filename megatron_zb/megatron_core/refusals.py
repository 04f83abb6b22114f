"""Refusals: what cannot be combined with a schedule, by the rows of ``refusals.yaml``.

The same rows serve the start of a job, ``megatron-zb check``, the configs of a step, and
``docs/support.md``. Importing this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_zb.errors import Refusal, UsageError
from megatron_zb.job.settings import STREAMS_FLAG, choice_of, placement_of
from megatron_zb.megatron_core import versions
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule

START, STEP = "start", "step"
COPIES = "pipeline_adapter_copies"
"""Argument, set from the file of adapters: whether one of them trains all weights."""
OVERLAP, POST_VALIDATION = "overlap_moe_expert_parallel_comm", "enable_optimizer_post_validation"


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
        if name == "graphs":
            return versions.graphs_of(self.args).value
        if name == "graphs_leave_experts_out":
            return versions.graphs_leave_experts_out(self.args)
        if name == "precision":
            return "16 bits" if self.value("bf16") or self.value("fp16") else "float32"
        if name == "draws_by_layer":
            return self.draws_by_layer
        return self.facts.get(name, getattr(self.args, name, None))

    def known(self, placements: Collection[Placement], *, draws_by_layer: bool) -> Asked:
        """Return the same run with what is known once its schedule is built."""
        return replace(self, placements=placements, draws_by_layer=draws_by_layer)


_FACTS = ("graphs", "graphs_leave_experts_out", "precision", "draws_by_layer")
STEP_CONDITIONS = ("any", "v")
"""Those that are looked at before a step; post-validation and the warm-up look at their own."""


def conditions(asked: Asked) -> dict[str, str]:
    """Return the conditions of ``with`` that hold, each with what refusals call it.

    A condition without an entry is that of a flag: ``verify`` holds if ``--pipeline-verify`` is
    given.
    """
    value, choice, table, placements = asked.value, asked.choice, asked.table, asked.placements
    # both ends of the model are on one rank, or one of its copies begins where another one ends
    in_a_v = [each.mirrored or each.copies > 1 for each in placements]
    chosen = f"{STREAMS_FLAG} layer"
    if value("pipeline_random_streams") != "layer":
        chosen = f"{chosen}, which {choice} brings,"
    found: dict[str, tuple[Any, str]] = {
        "any": (True, choice),
        "one_chunk": (placements and all(each.chunks == 1 for each in placements), choice),
        "chunks": (placements and all(each.chunks > 1 for each in placements), choice),
        "inner_stages": (placements and all(each.num_stages > 2 for each in placements), choice),
        "v": (in_a_v and all(in_a_v), choice),
        "two_ways": (placements and all(each.copies > 1 for each in placements), choice),
        "split": (asked.splits, choice),
        "fixed_order": (asked.has_fixed_order, choice),
        "graphs": (value("graphs") != "none", f"CUDA graphs ({value('graphs')})"),
        "overlap": (value(OVERLAP), flag_of(OVERLAP)),
        "vocabulary": (value("pipeline_vocabulary") == "on", "--pipeline-vocabulary on"),
        "warm_up": (value("pipeline_warm_up") == "on", "--pipeline-warm-up on"),
        "layer_streams": (asked.draws_by_layer, chosen),
        "post_validation": (value(POST_VALIDATION), flag_of(POST_VALIDATION)),
        "file": (value("pipeline_schedule_file"), "--pipeline-schedule-file"),
        "named": (value("pipeline_schedule"), choice),
        "copies": (value(COPIES), "weights: all of --pipeline-adapters"),
    }
    file = f"--pipeline-schedule-file {value('pipeline_schedule_file')}, which has"
    for name, has, passes in (
        ("recompute", table is not None and table.recomputed, "R"),
        ("offload", table is not None and table.offloaded, "D and H"),
    ):
        is_asked = value(f"pipeline_{name}") == "auto"
        found[name] = (
            is_asked or has,
            f"--pipeline-{name} auto" if is_asked else f"{file} {passes}",
        )
    for name in {name for row in rows() for name in row.with_} - found.keys():
        flag = f"pipeline_{name}"
        found[name] = (value(flag), flag_of(flag))
    return {name: said for name, (holds, said) in found.items() if holds}


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
        if value is not None and all(_passes(test, value, w, asked) for test, w in wanted.items()):
            yield name


def _passes(test: str, value: Any, wanted: Any, asked: Asked) -> bool:
    """Return whether a value passes a test; ``above`` may name arguments that have its limit."""
    match test:
        case "given":
            passes = bool(value) is wanted
        case "is":
            passes = value == wanted
        case "not":
            passes = value not in wanted
        case "contains":
            passes = wanted in value
        case "above":
            named = isinstance(wanted, list)
            passes = value > (next(filter(None, map(asked.value, wanted))) if named else wanted)
        case "below":
            passes = value < wanted
        case "finite":
            passes = math.isfinite(value) is wanted
        case _:
            raise ValueError(f"refusals.yaml has no test {test}")
    return bool(passes)


@cache
def rows() -> tuple[RefusalRow, ...]:
    """Return the rows of ``refusals.yaml``."""
    found = []
    for given in yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text("utf-8")):
        row: dict[str, Any] = {
            "with_" if name == "with" else name: it for name, it in given.items()
        }
        for name in ("when", "if_any", "unless"):
            if isinstance(row.get(name), str):
                row[name] = {each: {"given": True} for each in row[name].split()}
        for name in ("since", "until"):
            if name in row:
                row[name] = getattr(versions, row[name])
        for name in ("with_", "stage"):
            if name in row:
                row[name] = tuple(row[name].split())
        found.append(RefusalRow(**row))
    return tuple(found)


def refusals(asked: Asked, stage: str = START, only: Collection[str] = ()) -> Iterator[Refusal]:
    """Yield what cannot be combined, in the order of the rows.

    Args:
        only: conditions to look at; without any, all.
    """
    held = conditions(asked)
    for row in rows():
        others = [held[name] for name in row.with_ if name in held and (not only or name in only)]
        if stage not in row.stage or not others:
            continue
        for name in row.subjects(asked):
            is_setting = stage == STEP and name not in _FACTS
            flag = name if is_setting else said(name, asked.value(name))
            for other in others:
                sentence = row.says.format(
                    flag=said_flag(name), value=asked.value(name), other=other
                )
                yield Refusal(flag, other, row.why, sentence)


def check(asked: Asked, stage: str = START, only: Collection[str] = ()) -> None:
    """Refuse what cannot be combined.

    Raises:
        UsageError: names both sides of the conflict and the reason.
    """
    for refusal in refusals(asked, stage, only):
        raise refusal.error


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
    adjusts = {"adjust_tensor_shapes_fn": adjust_tensor_shapes_fn is not None}
    asked = Asked(
        args=config,
        choice=f"the pipeline schedule {schedule}",
        placements=[] if placement is None else [placement],
        draws_by_layer=(facts or {}).get("draws_by_layer", False),
        facts={**(facts or {}), **adjusts},
    )
    check(asked, STEP, only=STEP_CONDITIONS)


def check_steps_taken_back(config: Any) -> None:
    """Refuse settings of Megatron's configs with which no optimizer step can be undone.

    Raises:
        UsageError: names the setting and the reason.
    """
    asked = Asked(args=config, choice="", facts={POST_VALIDATION: True})
    for refusal in refusals(asked, STEP, only=("post_validation",)):
        raise replace(refusal, other="optimizer post-validation").error


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
