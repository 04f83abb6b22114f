"""A mistyped flag of a schedule on Megatron-LM's own command line: one sentence from one rank."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.job import settings
from megatron_zb.megatron_lm import hooks

# What is typed, and a piece of the sentence.
MISTAKES = [
    ("--pipeline-offload onn", "--pipeline-offload 'onn' is unknown: give one of auto, on, off"),
    ("--pipeline-offload=yes", "--pipeline-offload 'yes' is unknown"),
    ("--pipeline-offload", "--pipeline-offload is given without a value: write --pipeline-offload"),
    ("--pipeline-recompute full", "--pipeline-recompute 'full' is unknown: give one of auto, on"),
    ("--pipeline-vocabulary yes", "--pipeline-vocabulary 'yes' is unknown: give one of auto, on"),
    ("--pipeline-random-streams on", "--pipeline-random-streams 'on' is unknown: give one of auto"),
    ("--pipeline-placement v", "--pipeline-placement 'v' is unknown: give one of loop, zigzag"),
    ("--pipeline-memory-limit half", "--pipeline-memory-limit: 'half' is neither a share"),
    ("--pipeline-host-limit 4XB", "--pipeline-host-limit: '4XB' is neither a share"),
    ("--pipeline-slices 2,x", "--pipeline-slices: "),
    ("--pipeline-replan-every ten", "--pipeline-replan-every: 'ten' is not a whole number"),
    ("--pipeline-timeout soon", "--pipeline-timeout: 'soon' is not a number, such as 0.5"),
    ("--pipeline-verify=yes", "--pipeline-verify takes no value"),
    ("--pipeline-ofload on", "unknown argument '--pipeline-ofload': did you mean --pipeline-offl"),
    ("--pipeline-re auto", "--pipeline-re is short for several: write out --pipeline-recompute"),
    ("--post-validation-snapshot cpu", "--post-validation-snapshot 'cpu' is unknown"),
    ("--zero-bubble-v-schedule-mem-setup low", "--zero-bubble-v-schedule-mem-setup 'low' is unkno"),
    ("--pipeline-model-parallel-size four", "--pipeline-model-parallel-size: 'four' is not a who"),
]


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """A parser like Megatron-LM's, with the hook; in place of the process's end, it raises."""

    def end(error: UsageError, rank: int) -> None:
        assert rank == 3
        raise error

    def megatrons(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
        parser.add_argument("--num-layers", type=int)
        return parser

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(hooks, "end_with", end)
    found: Any = hooks._Hooks()._add_arguments(megatrons, argparse.ArgumentParser())
    assert isinstance(found, argparse.ArgumentParser)
    return found


@pytest.mark.parametrize(("typed", "said"), MISTAKES)
def test_a_mistake_is_one_sentence(
    parser: argparse.ArgumentParser, typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as error:
        parser.parse_args(typed.split())
    assert str(error.value).startswith(said)
    assert capsys.readouterr() == ("", "")


def test_mistakes_in_megatrons_own_arguments_are_megatrons(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in ("--num-layers four", "--nothing-known 1"):
        with pytest.raises(SystemExit):
            parser.parse_args(typed.split())
        assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize("flag", ["--pipeline-offload", "--pipeline-recompute"])
def test_on_is_auto(flag: str) -> None:
    parsed = settings.add_megatron_lm_arguments(argparse.ArgumentParser()).parse_args([flag, "on"])
    name = flag[2:].replace("-", "_")
    given: dict[str, Any] = {name: "on"}
    assert getattr(parsed, name) == "auto"
    assert getattr(settings.ScheduleSettings(**given), name) == "auto"
