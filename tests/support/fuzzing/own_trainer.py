"""Combinations of settings of this package's own trainer: Megatron's own 1F1B against schedules."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from jobs import try_job

from fuzzing.command import Commands, commands_of
from fuzzing.comparison import compare
from fuzzing.space import Combination, Space, without_unknown
from megatron_zb.train import flags

_SECONDS = 120.0
_LEAST = re.compile(
    r"cannot keep the memory limit of (\S+) of 1F1B: .* needs at least (\S+) of 1F1B"
)
_COMPARED = ("lm_loss", "eval_loss", "grad_norm", "loss_scale", "learning_rate", "skipped")


def own_space(space: Space) -> Space:
    """The settings that the trainer knows."""
    return without_unknown(space, set(flags.parser()._option_string_actions))


class OwnTrainer:
    """Runs combinations on one data set, with checkpoints and logs in a folder."""

    def __init__(self, space: Space, corpus: str, folder: Path) -> None:
        self._space = space
        self._data = ["--data-path", corpus, "--data-cache-path", str(folder / "cache")]
        self._folder = folder
        self._jobs = 0

    def why_different(self, combination: Combination) -> str:
        """Train with both; the first number that differs, or the error, or nothing.

        A memory limit that no order of the passes keeps is refused. Then the limit that the refusal
        names is a larger one, and trains.
        """
        both, load = commands_of(self._space, combination), []
        if combination["start"] == "checkpoint":
            saved = str(self._folder / f"checkpoint-{self._jobs}")
            saving = ["--save", saved, "--save-interval", "1", "--exit-interval", "1"]
            self._train(both, [*both.upstream, *saving])
            load = ["--load", saved]
        try:
            ours = self._train(both, [*both.ours, *load])
        except RefusedError as refused:
            limit = _LEAST.search(str(refused))
            if limit is None or float(limit[2]) <= float(limit[1]):
                return f"refused: {refused}"
            asked = both.ours.index("--pipeline-memory-limit") + 1
            larger = [*both.ours[:asked], limit[2], *both.ours[asked + 1 :]]
            ours = self._train(both, [*larger, *load])
        return compare(self._train(both, [*both.upstream, *load]), ours, combination).first

    def _train(self, commands: Commands, words: Sequence[str]) -> dict[str, str]:
        self._jobs += 1
        log = self._folder / f"{self._jobs}.jsonl"
        given = [*words, *self._data, "--log-file", str(log)]
        ended = try_job(commands.ranks, "megatron_zb.train", given, _SECONDS)
        said = [line for line in ended.stderr.splitlines() if "megatron_zb: error: " in line]
        if said and ended.code:
            raise RefusedError(said[0])
        assert ended.code == 0 and not ended.hung, f"{given}\n{ended.stdout}\n{ended.stderr}"
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        return {
            f"{record['iteration']} {name.replace('_', ' ')}": repr(record[name])
            for record in records
            for name in _COMPARED
            if name in record and "iteration" in record
        }


class RefusedError(Exception):
    """The trainer has said in one sentence what is wrong."""
