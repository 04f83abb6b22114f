"""Check of a run's arguments before it starts: what is refused, and what has never been seen.

Megatron is imported, which takes seconds, once the arguments are known to be well formed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron_zb.errors import Refusal, UsageError
from megatron_zb.job import settings
from megatron_zb.job.settings import choice_of
from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_lm import argument_table, own_process
from megatron_zb.megatron_lm.argument_table import Judgement, Verdict
from megatron_zb.schedules import catalog
from megatron_zb.schedules.catalog import Build


@dataclass(frozen=True)
class Checked:
    """An argument as the user gave it, with the finding on it."""

    flag: str
    finding: Judgement


@dataclass(frozen=True)
class CheckReport:
    """The findings on all arguments of a run that differ from their defaults.

    ``validated`` is the version of the Megatron-LM whose own validation was run, if any was.
    """

    choice: str
    checked: tuple[Checked, ...]
    validated: str | None = None

    @property
    def runs(self) -> bool:
        """Whether nothing is refused."""
        return not self.of(Verdict.REFUSED)

    def of(self, verdict: Verdict) -> list[Checked]:
        """Return the arguments with a verdict."""
        return [each for each in self.checked if each.finding.verdict is verdict]


def parse(words: Sequence[str], version: str, gpus: int | None = None) -> argparse.Namespace:
    """Parse a command line of Megatron-LM's pretrain scripts with our flags, without Megatron-LM.

    ``gpus`` is the number of ranks, without it those of one replica of the model.

    Raises:
        UsageError: an argument or the schedule is not known in that version, or is wrong.
    """
    args = _parser(version).parse_args(list(words))
    ranks = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    args.world_size = ranks if gpus is None else gpus
    settings.translate_older(args)
    if settings.chosen_flag(args) is None:
        raise UsageError("no schedule is chosen: add --pipeline-schedule, such as v-half")
    if args.pipeline_schedule is not None:
        catalog.family(args.pipeline_schedule)
    return args


@cache
def _parser(version: str) -> argparse.ArgumentParser:
    return settings.add_megatron_lm_arguments(argument_table.parser_of(version))


def validate(report: CheckReport, root: Path, words: Sequence[str], world_size: int) -> CheckReport:
    """Add to a report what the validation of the Megatron-LM in a folder says.

    Raises:
        UsageError: it cannot be run.
    """
    outcome = own_process.validate(root, words, world_size)
    checked = report.checked
    if outcome.refusal is not None:
        finding = Judgement(Verdict.REFUSED, outcome.refusal)
        checked = (Checked(f"Megatron-LM {outcome.version} itself", finding), *checked)
    return replace(report, checked=checked, validated=outcome.version)


def check(
    args: argparse.Namespace, version: str, *, build: Build | None = catalog.build
) -> CheckReport:
    """Check parsed arguments as the start of the job does.

    Args:
        build: builds the schedule, whose sizes may be wrong; None builds none.

    Raises:
        UsageError: the schedule does not exist, or its placement has not enough sizes.
    """
    from megatron_zb.megatron_lm import adapter_run
    from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of, asked_of

    choice = choice_of(args)
    found = [*refusals.refusals(asked_of(args, _series(version)))]
    found += _stored_refusals(args, choice)
    refused = [Checked(r.flag, Judgement(Verdict.REFUSED, _reason(r, choice))) for r in found]
    checked = [*refused, *_others(args, version, {r.flag.split()[0] for r in found})]
    if build is not None and not refused:
        try:
            run = adapter_run.prepare(args)
            adapters = None if run is None else run.adapters
            adapter_of(args, build, series=_series(version), adapters=adapters)
        except UsageError as error:
            checked.insert(0, Checked(choice, Judgement(Verdict.REFUSED, str(error))))
    return CheckReport(choice, tuple(checked))


def _stored_refusals(args: argparse.Namespace, choice: str) -> Iterator[Refusal]:
    """Yield what is wrong with the checkpoint to load, where this machine has it."""
    from megatron_zb.megatron_lm import stored_placement

    try:
        path = stored_placement.latest(args)
        if path is not None:
            stored_placement.check_states(args, path)
    except UsageError as error:
        yield Refusal("--load", choice, str(error))


def _series(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _reason(refusal: Refusal, choice: str) -> str:
    if refusal.sentence:
        return refusal.sentence
    return refusal.why if refusal.other == choice else f"with {refusal.other}: {refusal.why}"


def _others(args: argparse.Namespace, version: str, refused: set[str]) -> Iterator[Checked]:
    for argument, value in argument_table.given(args, version):
        flag = argument.flags[0]
        if flag not in refused:
            said = flag if isinstance(value, bool) else f"{flag} {_words(value)}"
            yield Checked(said, argument_table.finding(argument.name, value))


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
