"""``megatron-zb verify``: a training with and without its schedule, from one checkpoint."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zb.children import ending_with_this
from megatron_zb.cli.ending import report_if_slow
from megatron_zb.errors import UsageError
from megatron_zb.parsing import positive, values_of_flags

HELP = """\
Run a training of Megatron-LM for a few iterations with and without its --pipeline-schedule, from
one checkpoint, and compare what it logs. COMMAND is the training as you start it on one host:
torchrun, its arguments, the script, and the script's arguments with --pipeline-schedule.

The checkpoint is that of --load, or else one of an iteration without the schedule. Dropout is
turned off, since layers that move draw other random numbers. --save, --tensorboard-dir and
--wandb-project are left out, so nothing of yours is written to. On a GPU, add --deterministic-mode
to COMMAND: kernels must add up in the same order every time.

Losses have to be equal in every printed digit. Gradient norms are sums over ranks in another order,
and may differ by one in the last digit.

exit code: 0 if equal, 1 if something differs, 2 if a run could not be made.

examples:
  megatron-zb verify -- torchrun --nproc-per-node 4 -m megatron_zb.launch --cpu \\
      Megatron-LM/pretrain_gpt.py $MY_ARGUMENTS --pipeline-schedule v-half
  megatron-zb verify --without "--pipeline-model-parallel-layout Ett|tttL" -- $MY_COMMAND
"""

# Arguments of Megatron-LM that runs go without, each with the number of its values: they write
# files, end a run, or are set here.
_LEFT_OUT = {
    "--save": 1,
    "--save-interval": 1,
    "--save-retain-interval": 1,
    "--non-persistent-save-interval": 1,
    "--async-save": 0,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--wandb-exp-name": 1,
    "--wandb-save-dir": 1,
    "--exit-interval": 1,
    "--exit-duration-in-mins": 1,
    "--log-interval": 1,
    "--hidden-dropout": 1,
    "--attention-dropout": 1,
}
# Those that describe chunks, which the run without a schedule has none of.
_OF_CHUNKS = {
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--microbatch-group-size-per-vp-stage": 1,
}
_COMPARED = "--log-interval 1 --hidden-dropout 0 --attention-dropout 0".split()
_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")
_FIELD = re.compile(r" ([a-z0-9_ ]*(?:loss|norm)[a-z0-9_ ]*): +([-+.0-9EeNnAaIiFf]+) *(?=\||$)")
_NUMBER = re.compile(r"[-+.0-9Ee]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    parser.add_argument(
        "--iterations", type=positive, default=3, metavar="N", help="to compare (default: 3)"
    )
    parser.add_argument(
        "--without",
        default="",
        metavar="ARGUMENTS",
        help="more arguments for the run without a schedule, in one word, such as a "
        "--pipeline-model-parallel-layout where its layers do not divide",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="folder for the checkpoint and the logs, which are kept (default: a temporary one)",
    )
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="the training, after --")


def run(arguments: argparse.Namespace) -> int:
    """Make the runs and print what is found; return the exit code.

    Raises:
        UsageError: the command chooses no schedule, or a run fails.
    """
    if arguments.directory is not None:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        return _run(arguments, arguments.directory)
    with tempfile.TemporaryDirectory(prefix="megatron-zb-verify-") as folder:
        return _run(arguments, Path(folder))


def _run(arguments: argparse.Namespace, folder: Path) -> int:
    command = Command.of(arguments.words, arguments.without.split())
    number, last = command.start(folder), 0
    if number is None:
        _say("1 iteration without the schedule, for a checkpoint to start from")
        command.save(folder)
        number = 1
    last = number + arguments.iterations
    logs = {}
    for name, words in (("without", command.without), ("with", command.scheduled)):
        _say(f"iterations {number + 1} to {last} {name} {command.choice}")
        logs[name] = logged(_output([*words, *command.resume(folder, last)], folder, name))
    return _compare(logs["without"], logs["with"], command.choice)


@dataclass(frozen=True)
class Command:
    """A training command with its schedule, and the same without it."""

    scheduled: list[str]
    without: list[str]
    choice: str
    load: Path | None

    @classmethod
    def of(cls, words: Sequence[str], more: Sequence[str]) -> Command:
        """Return both commands.

        Raises:
            UsageError: the words choose no schedule.
        """
        from megatron_zb.job import settings

        choice = settings.chosen_flag_in(words)
        if choice is None:
            raise UsageError(
                "the command chooses no schedule: give the training as it is started, with "
                "--pipeline-schedule among its arguments, such as -- torchrun --nproc-per-node 8 "
                "-m megatron_zb.launch Megatron-LM/pretrain_gpt.py ... --pipeline-schedule v-half"
            )
        load = _value(words, "--load")
        kept = left_out(words, _LEFT_OUT)
        without = left_out(kept, _own_flags() | _OF_CHUNKS)
        return cls(kept, [*without, *more], choice, None if load is None else Path(load))

    def start(self, folder: Path) -> int | None:
        """Return the iteration of the checkpoint that the command loads, None if it loads none."""
        if self.load is None:
            return None
        tracker = self.load / "latest_checkpointed_iteration.txt"
        text = tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else ""
        if not text.isdecimal():
            raise UsageError(
                f"--load {self.load} has no checkpoint of an iteration to start from: give the "
                "folder of one, or leave --load out"
            )
        return int(text)

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the first iteration without the schedule."""
        words = [*self.without, *_COMPARED, "--save", str(_checkpoint(folder))]
        words += ["--save-interval", "1", "--exit-interval", "1", "--ckpt-format", "torch_dist"]
        _output([*words, *self._reshardable()], folder, "checkpoint")

    def resume(self, folder: Path, last: int) -> list[str]:
        """Return the arguments with which a run goes on from the checkpoint to an iteration."""
        words = [*_COMPARED, "--exit-interval", str(last)]
        if self.load:
            return words
        words += ["--load", str(_checkpoint(folder)), "--ckpt-format", "torch_dist"]
        return [*words, *self._reshardable()]

    def _reshardable(self) -> list[str]:
        """Return what lets a distributed optimizer's state move between placements."""
        distributed = "--use-distributed-optimizer" in self.without
        return ["--dist-ckpt-optim-fully-reshardable"] if distributed else []


def _checkpoint(folder: Path) -> Path:
    return folder / "checkpoint"


def _own_flags() -> dict[str, int]:
    """Return the flags that this package adds to Megatron-LM's, each with its number of values."""
    from megatron_zb.job import settings

    return values_of_flags(
        settings.add_megatron_lm_arguments(argparse.ArgumentParser(add_help=False))
    )


def left_out(words: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """Return a command line without some flags and their values."""
    found, skip = [], 0
    for word in words:
        if skip:
            skip -= 1
            continue
        flag, equals, _ = word.partition("=")
        if flag not in flags:
            found.append(word)
        elif not equals:
            skip = flags[flag]
    return found


def _value(words: Sequence[str], flag: str) -> str | None:
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _output(words: list[str], folder: Path, name: str) -> str:
    """Run a command; return what it printed, which is kept in ``folder``.

    Raises:
        UsageError: it could not be started, or ended with an error.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as file, report_if_slow(f"training for '{name}'"):
        try:
            ended = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
                preexec_fn=ending_with_this(),
            )
        except OSError as error:
            raise UsageError(f"'{words[0]}' cannot be started: {error.strerror}") from None
    text = log.read_text(encoding="utf-8", errors="replace")
    if ended.returncode:
        raise UsageError(
            f"the run '{name}' ended with exit code {ended.returncode}: {_last_error(text)}; give "
            "--directory to keep its log"
        )
    return text


def _last_error(text: str) -> str:
    """Return the most informative line of a failed run."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in (r"megatron_zb: error: ", r"(\[rank\d+\]: )?\w*(Error|Exception)\b"):
        found = [line for line in lines if re.match(pattern, line)]
        if found:
            return found[0]
    return lines[-1] if lines else "it printed nothing"


def logged(text: str) -> dict[int, dict[str, str]]:
    """Return the losses and norms of each iteration in a log, as they are printed."""
    found: dict[int, dict[str, str]] = {}
    for number, rest in _ITERATION.findall(text):
        found[int(number)] = dict(_FIELD.findall(rest))
    return found


def _compare(without: dict[int, Any], scheduled: dict[int, Any], choice: str) -> int:
    if not without:
        raise UsageError(
            "the run without a schedule logged no iteration: its script has to log as that of "
            "Megatron-LM does; give --directory to keep its log"
        )
    difference = first_difference(without, scheduled)
    if difference is not None:
        iteration, name, (one, other) = difference
        _say(f"different: iteration {iteration}: {name} is {one} without and {other} with {choice}")
        return 1
    names = sorted({name for values in without.values() for name in values})
    _say(f"equal: {', '.join(names)} of iterations {min(without)} to {max(without)}")
    return 0


def first_difference(
    without: Mapping[int, Mapping[str, str]], scheduled: Mapping[int, Mapping[str, str]]
) -> tuple[int, str, tuple[str, str]] | None:
    """Return the first iteration and value that differ, with both texts; None if all are equal."""
    for iteration in sorted(without.keys() | scheduled.keys()):
        one, other = without.get(iteration, {}), scheduled.get(iteration, {})
        for name in sorted(one.keys() | other.keys()) or ["iteration"]:
            pair = one.get(name, "not logged"), other.get(name, "not logged")
            if not _same(name, *pair):
                return iteration, name, pair
    return None


def _same(name: str, one: str, other: str) -> bool:
    """Return whether two printed values are equal; norms may differ by one in the last digit."""
    if one == other:
        return one != "not logged"
    if "norm" not in name or not (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)):
        return False
    digits = len(one.partition(".")[2].partition("E")[0])
    exponent = int(one.partition("E")[2] or 0)
    return abs(float(one) - float(other)) <= 1.5 * 10.0 ** (exponent - digits)


def _say(line: str) -> None:
    print(f"megatron-zb verify: {line}", file=sys.stdout, flush=True)
