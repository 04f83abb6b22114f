"""The file of ``--pipeline-adapters``: which adapters are trained, on what, and how.

A key that an adapter leaves out has the value of the flag that it stands for, such as
``--global-batch-size`` for ``batch``.

Example::

    adapters:
      - name: french
        data: /data/french_text_document
        batch: 32
        steps: 500
        learning_rate: 1.0e-4
        rank: 16
        alpha: 32
      - {name: german, data: /data/german_text_document, batch: 16, steps: 800}
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_zb.errors import UsageError
from megatron_zb.measured.config import Section, optional_size, read, size
from megatron_zb.parsing import flag_of

FLAG = "--pipeline-adapters"
LORA: Literal["lora"] = "lora"
ALL: Literal["all"] = "all"
Module = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
MODULES: tuple[Module, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_EXPONENT = re.compile(r"[0-9]{1,9}[eE][-+]?[0-9]{1,3}")
_LARGEST_RATE = 100.0

STANDS_FOR = {
    "data": "data_path",
    "batch": "global_batch_size",
    "steps": "train_iters",
    "learning_rate": "lr",
    "min_learning_rate": "min_lr",
    "warmup_steps": "lr_warmup_iters",
    "weight_decay": "weight_decay",
    "clip": "clip_grad",
    "seed": "seed",
}
"""Keys of an adapter, and the arguments of Megatron-LM that they take the place of."""

EXAMPLES = {"batch": "32", "steps": "500", "learning_rate": "1e-4"}
"""Keys that each adapter needs, here or by their flag."""


class AdapterEntry(Section):
    """One adapter of the file."""

    name: str = Field(
        description="what the log and the folder of its checkpoints call it", examples=["french"]
    )
    data: str | list[str] | None = Field(
        None,
        description="its training data, in the words of --data-path",
        examples=["/data/french_text_document"],
    )
    batch: int | None = optional_size("samples of a step, over all replicas", 32)
    steps: int | None = optional_size("steps of its optimizer", 500)
    learning_rate: float | None = Field(
        None,
        gt=0,
        le=_LARGEST_RATE,
        description="the largest learning rate",
        examples=["1.0e-4"],
    )
    min_learning_rate: float | None = Field(
        None, ge=0, le=_LARGEST_RATE, description="the learning rate at the end", examples=[0.0]
    )
    warmup_steps: int | None = Field(
        None, ge=0, le=10_000_000, description="steps of warm-up", examples=[10]
    )
    weight_decay: float | None = Field(
        None, ge=0, le=_LARGEST_RATE, description="weight decay", examples=[0.01]
    )
    clip: float | None = Field(
        None,
        ge=0,
        le=1e9,
        description="the largest norm of its gradient; 0 for any",
        examples=[1.0],
    )
    seed: int | None = Field(
        None, ge=0, lt=2**32, description="of its weights and its data", examples=[1234]
    )
    weights: Literal["lora", "all"] = Field(
        LORA,
        description="what it trains: lora, two small matrices for each layer; all, a copy of all "
        "weights of the base",
        examples=[LORA],
    )
    rank: int = size("numbers between the two matrices of a layer", 16, 16)
    alpha: float = Field(
        32.0, gt=0, le=1e6, description="its output counts alpha / rank times", examples=[32.0]
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the numbers of a layer's input that its matrices do not see, drawn "
        "anew for each microbatch",
        examples=[0.05],
    )
    modules: list[Module] = Field(
        list(MODULES),
        min_length=1,
        description="the linear layers that it has matrices on",
        examples=["[linear_qkv, linear_proj]"],
    )

    @field_validator(
        "learning_rate", "min_learning_rate", "weight_decay", "clip", "alpha", mode="before"
    )
    @classmethod
    def _is_number(cls, value: object) -> object:
        """Take ``1e-4`` as a number, which YAML takes as a text: it wants a point in it."""
        return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value

    @field_validator("name")
    @classmethod
    def _is_name_of_folder(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name[:40]!r} cannot name a folder: give letters, digits, and _ . - between "
                "them, at most 64"
            )
        return name

    @field_validator("modules")
    @classmethod
    def _once(cls, modules: list[Module]) -> list[Module]:
        if twice := next((m for m in modules if modules.count(m) > 1), None):
            raise ValueError(f"{twice} is listed twice: list it once")
        return modules

    @field_validator("data")
    @classmethod
    def _has_words(cls, data: str | list[str] | None) -> str | list[str] | None:
        if data is not None and not (data.split() if isinstance(data, str) else data):
            raise ValueError("it is empty: give a prefix of a data set, or leave it out")
        return data

    @model_validator(mode="after")
    def _has_matrices(self) -> AdapterEntry:
        of_matrices = sorted({"rank", "alpha", "modules", "dropout"} & self.model_fields_set)
        if self.weights == ALL and of_matrices:
            raise ValueError(
                f"{self.name} has weights: all, and so no {' or '.join(of_matrices)}: leave it out"
            )
        return self


class AdapterFile(Section):
    """The whole file."""

    adapters: list[AdapterEntry] = Field(
        min_length=1, description="the adapters that share the pipeline"
    )

    @model_validator(mode="after")
    def _have_own_names(self) -> AdapterFile:
        names = [entry.name.lower() for entry in self.adapters]  # folders, on any file system
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two adapters are called {twice}: give each its own name")
        return self


@dataclass(frozen=True)
class AdapterJob:
    """One adapter and the arguments of Megatron-LM with which it is trained.

    Args:
        entry: of the file.
        arguments: values of arguments by name, such as ``global_batch_size``: those that the file
            gives, and those that stand for the whole run in Megatron-LM's own arguments.
        microbatches: of one step.
    """

    entry: AdapterEntry
    arguments: dict[str, Any]
    microbatches: int

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def steps(self) -> int:
        return int(self.arguments["train_iters"])

    @property
    def batch(self) -> int:
        return int(self.arguments["global_batch_size"])

    @property
    def is_whole(self) -> bool:
        """Whether all weights of the base are trained, in a copy."""
        return self.entry.weights == ALL

    @property
    def shape(self) -> dict[str, Any]:
        """What its weights are made by, which a checkpoint must agree with."""
        entry = self.entry
        if self.is_whole:
            return {"weights": ALL}
        return {
            "weights": LORA,
            "rank": entry.rank,
            "alpha": entry.alpha,
            "modules": [module for module in MODULES if module in entry.modules],
        }


def jobs_of(args: argparse.Namespace, replicas: int) -> list[AdapterJob]:
    """Return the adapters that the arguments of a run ask for.

    Args:
        args: arguments of Megatron-LM, with ``pipeline_adapters``.
        replicas: data-parallel ranks.

    Raises:
        UsageError: the file is wrong, or a key is in neither the file nor a flag.
    """
    path = Path(args.pipeline_adapters)
    found = read(path, AdapterFile)
    return [_job(entry, args, replicas, path) for entry in found.adapters]


def _job(entry: AdapterEntry, args: argparse.Namespace, replicas: int, path: Path) -> AdapterJob:
    given = dict(_arguments(entry))
    usual = {name: getattr(args, name, None) for name in STANDS_FOR.values()}
    arguments = {**usual, **given}
    where = f"{path}: adapter {entry.name}"
    for key in EXAMPLES:
        if arguments[STANDS_FOR[key]] is None:
            raise UsageError(
                f"{where} has no {key}: give it, such as {key}: {EXAMPLES[key]}, or "
                f"{flag_of(STANDS_FOR[key])} for all"
            )
    if arguments["data_path"] is None and not getattr(args, "mock_data", False):
        raise UsageError(f"{where} has no data: give it, or --data-path for all")
    if arguments["min_lr"] is not None and arguments["min_lr"] > arguments["lr"]:
        raise UsageError(
            f"{where}: the learning rate falls to {arguments['min_lr']:g}, which is above "
            f"{arguments['lr']:g}, its largest: give a smaller min_learning_rate"
        )
    if arguments["lr_warmup_iters"] and arguments["lr_warmup_iters"] >= arguments["train_iters"]:
        raise UsageError(
            f"{where}: {arguments['lr_warmup_iters']} warmup_steps of {arguments['train_iters']} "
            "steps leave none: give fewer"
        )
    together = args.micro_batch_size * replicas
    microbatches, rest = divmod(arguments["global_batch_size"], together)
    if rest or not microbatches:
        raise UsageError(
            f"{where}: a batch of {arguments['global_batch_size']} samples cannot be dealt out in "
            f"microbatches of {args.micro_batch_size} over {replicas} replicas: give a multiple of "
            f"{together}"
        )
    own = {STANDS_FOR[key]: arguments[STANDS_FOR[key]] for key in EXAMPLES}
    if "weight_decay" in given:
        own |= dict.fromkeys(("start_weight_decay", "end_weight_decay"), given["weight_decay"])
    return AdapterJob(entry, {"seed": usual["seed"], **given, **own}, microbatches)


def _arguments(entry: AdapterEntry) -> Iterator[tuple[str, Any]]:
    for key, argument in STANDS_FOR.items():
        value = getattr(entry, key)
        if value is not None:
            is_text = key == "data" and isinstance(value, str)
            yield argument, value.split() if is_text else value
