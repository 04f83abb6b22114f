"""Arguments of an older zero-bubble code, translated, and the schedule in a command line."""

from __future__ import annotations

import pytest
from megatron_arguments import parsed

from megatron_zb.errors import UsageError
from megatron_zb.job import settings
from megatron_zb.schedules.request import Limit


@pytest.mark.parametrize(
    ("older", "schedule", "limit"),
    [
        ("--enable-zero-bubble", "zb-1p", None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward auto", "zb-1p", None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", "zb-1p", None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 2", "zb-1p", 0.5),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 6", "zb-2p", 1.5),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 8", "zb-2p", None),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 9", "zb-2p", None),
        ("--zero-bubble-v-schedule", "v-zb", None),
        ("--zero-bubble-v-schedule-mem-setup min", "v-min", None),
        ("--zero-bubble-v-schedule-mem-setup half", "v-half", None),
        ("--zero-bubble-v-schedule-mem-setup zb", "v-zb", None),
        (
            "--enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half",
            "v-half",
            None,
        ),
    ],
)
def test_older_arguments_choose_a_schedule(older: str, schedule: str, limit: float | None) -> None:
    args = parsed(older)
    [line] = settings.translate_older(args)
    expected = None if limit is None else Limit(limit)
    assert (args.pipeline_schedule, args.pipeline_memory_limit) == (schedule, expected)
    limited = "" if limit is None else f" --pipeline-memory-limit {limit:g}"
    assert line.endswith(f" is taken as --pipeline-schedule {schedule}{limited}")
    for flag in older.split():
        if flag.startswith("--") and "pending" not in flag:
            assert flag in line.split(" is taken as ")[0]


def test_a_memory_limit_of_ones_own_stays() -> None:
    older = "--enable-zero-bubble --zero-bubble-max-pending-backward 2"
    args = parsed(f"{older} --pipeline-memory-limit 0.75")
    settings.translate_older(args)
    assert (args.pipeline_schedule, args.pipeline_memory_limit) == ("zb-1p", Limit(0.75))


@pytest.mark.parametrize(
    "flag",
    [
        "--zero-bubble-pipeline-timers-start-iter 0",
        "--zero-bubble-pipeline-timers-end-iter 110",
        "--zero-bubble-adaptive-memory-limit-percentile 85",
        "--allow-padding-num-layers",
        "--zero-bubble-max-pending-backward 4",
        "--zero-bubble-max-pending-backward auto --zero-bubble-v-schedule",
    ],
)
def test_what_is_ignored_is_told(flag: str) -> None:
    args = parsed(flag)
    first = settings.translate_older(args)[0]
    assert first.startswith(flag.split()[0])
    assert "is ignored" in first
    assert args.pipeline_memory_limit is None


def test_without_older_arguments_nothing_is_told() -> None:
    args = parsed()
    before = vars(args).copy()
    assert settings.translate_older(args) == []
    assert vars(args) == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--enable-zero-bubble --pipeline-schedule v-half",
            "--enable-zero-bubble and --pipeline-schedule both choose a schedule",
        ),
        (
            "--zero-bubble-v-schedule --pipeline-schedule-file x.csv",
            "--zero-bubble-v-schedule and --pipeline-schedule-file both choose a schedule",
        ),
        (
            "--zero-bubble-v-schedule-mem-setup min --pipeline-schedule v-min",
            "leave --zero-bubble-v-schedule-mem-setup out",
        ),
        *(
            (
                f"--enable-zero-bubble --zero-bubble-max-pending-backward {number}",
                f"--zero-bubble-max-pending-backward {number}: give a number of microbatches",
            )
            for number in ("many", "0", "-1", "1.5")
        ),
    ],
)
def test_contradictions_are_refused(line: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        settings.translate_older(parsed(line))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("line", "schedule"),
    [
        ("--num-layers 8 --lr 1e-3", None),
        ("--num-layers 8 --pipeline-schedule v-half", "--pipeline-schedule v-half"),
        ("--pipeline-schedule=zb-h1 --unknown", "--pipeline-schedule zb-h1"),
        ("--pipeline-schedule-file x.csv", "--pipeline-schedule-file x.csv"),
        ("--enable-zero-bubble", "--enable-zero-bubble"),
    ],
)
def test_the_schedule_in_a_command_line(line: str, schedule: str | None) -> None:
    assert settings.chosen_flag_in(line.split()) == schedule
