"""Run a training command and watch the lines of JSON that it writes, one for each iteration."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_zb.children import ending_with_this

Record = dict[str, Any]

# A run that writes nothing for so long hangs; starting takes the longest.
LONGEST_SILENCE = 180.0
# torchrun needs time to end its ranks.
TIME_TO_END = 40.0
POLL_INTERVAL = 0.2
SHOWN_LINES = 25
TORCHRUN_REPORT = "torch/distributed/elastic/multiprocessing/api.py"


class RunFailed(Exception):
    """Error of a run that failed or hung; the message has the end of what it printed."""


def run(
    command: Sequence[str],
    *,
    printed: Path,
    records: Path,
    show: Callable[[Record], None],
    longest_silence: float = LONGEST_SILENCE,
) -> None:
    """Run a command to its end and show its records as they come.

    Args:
        command: command to run; it writes lines of JSON to `records`.
        printed: a file for what it prints.
        records: the file that it writes.
        show: called with every record.
        longest_silence: seconds without a record after which it is taken to hang.

    Raises:
        RunFailed: exit status other than 0, or too long a silence.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=ending_with_this(),
        )
        try:
            _watch(process, records, show, longest_silence)
        except TimeoutError as error:
            _end(process)
            raise RunFailed(
                f"nothing was logged for {longest_silence:g} s, so it was ended; {_tail(printed)}"
            ) from error
        finally:
            _end(process)
    if process.returncode != 0:
        raise RunFailed(f"the run ended with exit status {process.returncode}; {_tail(printed)}")


def _watch(
    process: subprocess.Popen[bytes],
    records: Path,
    show: Callable[[Record], None],
    longest_silence: float,
) -> None:
    """Watch the process until it has ended; TimeoutError when it is silent for too long."""
    new_records = NewRecords(records)
    heard = time.monotonic()
    while True:
        # Ask for its end first, so that what it wrote before is still read.
        has_ended = process.poll() is not None
        for record in new_records():
            heard = time.monotonic()
            show(record)
        if has_ended:
            return
        if time.monotonic() - heard > longest_silence:
            raise TimeoutError
        time.sleep(POLL_INTERVAL)


class NewRecords:
    """Callable that returns the records added to a growing file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def __call__(self) -> list[Record]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                # The last line may not be complete yet.
                text = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._read += len(text) + 1 if text else 0
        return [json.loads(line) for line in text.splitlines()]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(TIME_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(printed: Path) -> str:
    """Return the end of what the ranks printed, without the report that torchrun adds to it."""
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    own = itertools.takewhile(lambda line: TORCHRUN_REPORT not in line, lines)
    return "\n".join([f"the end of {printed}:", *list(own)[-SHOWN_LINES:]])
