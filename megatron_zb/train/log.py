"""The log of a run: Megatron's line per iteration, and the same as lines of JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zb import files
from megatron_zb.errors import UsageError


class RunLog:
    """The log of a run: it prints and writes on one rank, and does nothing on the others."""

    def __init__(self, args: argparse.Namespace, *, enabled: bool, append: bool) -> None:
        """Open the log.

        Args:
            args: the arguments of the run.
            enabled: whether this rank is the one that logs.
            append: keep what is there, as after a resume.

        Raises:
            UsageError: the file cannot be written.
        """
        self._args, self._enabled = args, enabled
        self._records = Records(args.log_file, append) if enabled and args.log_file else None

    def say(self, text: str) -> None:
        """Print text as it is."""
        if self._enabled:
            print(text, flush=True)

    def iteration(self, record: dict[str, Any]) -> None:
        """Log one iteration; `record` has the keys that the printed line shows."""
        self.write(record)
        if record["iteration"] % self._args.log_interval == 0:
            line = line_of(record, self._args.train_iters)
            self.say(f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] {line}")

    def evaluation(self, iteration: int, loss: float) -> None:
        """Log the loss on the evaluation split after an iteration."""
        self.write({"iteration": iteration, "eval_loss": loss})
        self.say(f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record, without printing it."""
        if self._records is not None:
            self._records.write(record)


def line_of(record: Mapping[str, Any], last_iteration: int) -> str:
    """Return the line of an iteration, in Megatron's words: ``iteration 3/ 30 | ...``."""
    width = max(8, len(str(last_iteration)))
    parts = [
        f"iteration {record['iteration']:{width}d}/{last_iteration:{width}d}",
        f"consumed samples: {record['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {record['seconds'] * 1000:.1f}",
        f"learning rate: {record['learning_rate']:.6E}",
        f"global batch size: {record['global_batch_size']:5d}",
        f"lm loss: {record['lm_loss']:.6E}",
        f"loss scale: {record['loss_scale']:.1f}",
        f"grad norm: {record['grad_norm']:.3f}",
        f"number of skipped iterations: {int(record['skipped']):3d}",
    ]
    return " | ".join(parts) + " |"


class Records:
    """A file of lines of JSON; an older one stays until the first line is on the disk."""

    def __init__(self, path: str, append: bool) -> None:
        """Create the folder of the file.

        Raises:
            UsageError: it cannot be created.
        """
        self._path, self._append = Path(path), append
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._failure(error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a line.

        Raises:
            UsageError: it cannot be written.
        """
        line = json.dumps(record) + "\n"
        if not self._append:
            files.write_text(self._path, line)
            self._append = True
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> UsageError:
        return UsageError(f"--log-file {self._path} cannot be written: {error.strerror}")
