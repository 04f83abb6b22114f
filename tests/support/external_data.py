"""A user's script in a checkout of Megatron-LM, beside its pretrain_gpt.py, with other iterators.

``--dataloader-type external`` passes them through. They read the arguments for every batch, as a
user's iterator may.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

_usual = training.build_pretraining_data_loader


class Batches:
    """Batches of Megatron's data set without an end, cut to the length that the arguments say."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._batches = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        length = get_args().seq_length
        return {n: t[:, :length] if t.ndim == 2 else t for n, t in batch.items()}


def _batches(dataset: Any, consumed: int, *more: Any, **named: Any) -> Batches | None:
    args = get_args()
    args.dataloader_type = "single"
    try:
        loader = _usual(dataset, consumed, *more, **named)
    finally:
        args.dataloader_type = "external"
    return None if loader is None else Batches(loader)


if __name__ == "__main__":
    training.build_pretraining_data_loader = _batches
    runpy.run_path(str(Path(__file__).with_name("pretrain_gpt.py")), run_name="__main__")
