"""The commands of a combination: what a user types for upstream's own schedule, and for ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from linked_checkouts import EXTERNAL_DATA

from fuzzing.space import OURS, UPSTREAM, Combination, Space

ITERATIONS = 4
_CHUNKS = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "zb-h2": 1, "zb-1p": 1, "zb-2p": 1, "wave": 4}
_PLACEHOLDER = re.compile(r"<(\w+)>")


@dataclass(frozen=True)
class Commands:
    """The words of both sides, and what they have in common; ``layers`` are those of the model."""

    script: str
    ranks: int
    layers: int
    upstream: tuple[str, ...]
    ours: tuple[str, ...]

    def typed(self, checkout: Path, words: tuple[str, ...], *more: str) -> str:
        """One of the commands as a user types it."""
        started = f"torchrun --nproc-per-node {self.ranks} -m megatron_zb.launch --cpu"
        return f"{started} {checkout / self.script} {shlex.join([*words, *more])}"


def commands_of(space: Space, combination: Combination, layers: int | None = None) -> Commands:
    """Write the commands of a combination, with the usual number of layers if none is given."""
    sizes = Sizes(combination, 0)
    sizes = replace(sizes, layers=layers or sizes.usual_layers)
    known = sizes.as_words()

    def words(side: str) -> tuple[str, ...]:
        said = [space.common]
        said += [space.settings[n].words[v].get(side, "") for n, v in combination.items()]
        return tuple(_PLACEHOLDER.sub(lambda found: known[found[1]], " ".join(said)).split())

    script = "pretrain_hybrid.py" if combination["model"] == "hybrid" else "pretrain_gpt.py"
    if combination["loader"] == "external":
        script = EXTERNAL_DATA
    return Commands(script, sizes.ranks, sizes.layers, words(UPSTREAM), words(OURS))


def under_another(space: Space, combination: Combination) -> dict[str, str]:
    """The same training under another schedule, with nothing that is a choice of ours besides."""
    other = {
        name: s.default if s.is_ours else combination[name] for name, s in space.settings.items()
    }
    known = ["zb-h1", "v-half", "v-zb", "1f1b"]
    if combination["layers"] in ("first-last", "accounted"):  # too few layers for a V
        known = ["zb-h1", "1f1b"]
    others = [name for name in known if name != combination["schedule"]]
    return {**other, "schedule": others[int(combination["pipeline"]) % len(others)]}


@dataclass(frozen=True)
class Sizes:
    """The sizes that follow from the values of a combination."""

    values: Combination
    layers: int

    @property
    def pipeline(self) -> int:
        return int(self.values["pipeline"])

    @property
    def ranks(self) -> int:
        return self.pipeline * int(self.values["tensor"]) * int(self.values["data"])

    @property
    def chunks(self) -> int:
        if self.values["chunks"] == "three":
            return 3
        return _CHUNKS.get(self.values["schedule"], 2)

    @property
    def usual_layers(self) -> int:
        stages = self.pipeline * max(2, self.chunks)
        first_last = 2 + 2 * (self.pipeline - 2)
        others = {"uneven": stages + 1, "layout": stages + 1, "first-last": first_last}
        return others.get(
            self.values["layers"], stages - 2 * (self.values["layers"] == "accounted")
        )

    @property
    def microbatches(self) -> int:
        p = self.pipeline
        sizes = {"one": 1, "fewer": p - 1, "equal": p, "odd": 2 * p - 1, "more": 2 * p + 1}
        return sizes[self.values["microbatches"]]

    @property
    def step(self) -> int:
        """The smallest global batch."""
        return int(self.values["micro-batch-size"]) * int(self.values["data"])

    def as_words(self) -> dict[str, str]:
        """The text of every placeholder."""
        batch, is_hybrid = self.step * self.microbatches, self.values["model"] == "hybrid"
        return {
            "pipeline": str(self.pipeline),
            "batch": str(batch),
            "layers": "" if is_hybrid else f"--num-layers {self.layers}",
            "layout": self._layout(self.pipeline),
            "layout_of_ours": self._layout(self.pipeline * self.chunks),
            "pattern": self._pattern(),
            "mtp": "" if is_hybrid else f"--mtp-num-layers {self.values['mtp']}",
            "experts": " ".join(self._experts()),
            "expert_parallel": " ".join(self._expert_parallel()),
            "expert_layers": f"([0]+[1]*{self.layers - 1})",
            "iterations": str(ITERATIONS),
            "samples": str(100 * batch),
            "ramp": f"{self.step} {self.step} {2 * (batch - self.step)}",
            "unit": "samples" if self.values["ramp-up"] == "with" else "iters",
            "evaluated": str(3 * int(self.values["data"])),
        }

    def _layout(self, parts: int) -> str:
        cuts = [round(self.layers * i / parts) for i in range(parts + 1)]
        layers = ["t" * (end - begin) for begin, end in pairwise(cuts)]
        return "E" + "|".join(layers) + "m" * int(self.values["mtp"]) + "L"

    def _pattern(self) -> str:
        layers = "*E*-" if self.values["experts"] != "without" else "*-*-"
        return (layers * self.layers)[: self.layers] + "/*-" * int(self.values["mtp"])

    def _experts(self) -> Iterator[str]:
        yield f"--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk {self.values['topk']}"
        yield f"--moe-token-dispatcher-type {self.values['dispatcher']}"

    def _expert_parallel(self) -> Iterator[str]:
        yield "--expert-model-parallel-size 2"
        if self.values["tensor"] == "2":
            yield "--expert-tensor-parallel-size 1"
