"""Count the functions and files of the package between `--pipeline-schedule` and its schedule.

Run it with:

  python benchmarks/flag_to_schedule.py                          # a table, for v-half
  python benchmarks/flag_to_schedule.py --schedule zb-h1 --stops # with every stop

One process parses the arguments of a training, and calls what the hooks in Megatron-LM call on the
first of its ranks. A stop is a function that is called, counted once: a reader who follows the flag
has to visit it. A comprehension is part of its function, and imports do not count. The path has
three parts: up to `schedules.build`, in it up to the search, and from there to the adapter.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGE = f"{Path(__file__).resolve().parents[1] / 'megatron_zb'}{os.sep}"
BEFORE, BUILD, SEARCH = PARTS = ("flag to build", "build to search", "search to adapter")
BUILD_FUNCTION, SEARCH_FOLDER = ("schedules/catalog.py", "build"), "schedules/search/"
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
MODULE = "<module>"
SIZES = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --lr 1e-3 --train-iters 10"
)


class Stops:
    """The functions that are called in :meth:`followed`, in the order of their first calls."""

    def __init__(self) -> None:
        self._part = BEFORE
        self._found: dict[CodeType, str] = {}
        self._imports = 0

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Note the calls that are made in this context."""
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def of(self, *parts: str) -> list[CodeType]:
        """Return the functions that were first called in some parts of the path."""
        return [code for code, part in self._found.items() if part in parts]

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == MODULE:
            self._imports += 1 if event == "call" else -1
        if event == "return" or self._imports or code.co_name in COMPREHENSIONS:
            return
        if self._part == BEFORE and (file_of(code), code.co_name) == BUILD_FUNCTION:
            self._part = BUILD
        elif self._part == BUILD and file_of(code).startswith(SEARCH_FOLDER):
            self._part = SEARCH
        self._found.setdefault(code, self._part)


def file_of(code: CodeType) -> str:
    """Return the file of a function, in the package."""
    return code.co_filename.removeprefix(PACKAGE)


def path_of(schedule: str, pipeline_size: int, num_microbatches: int) -> Stops:
    """Follow the arguments of a training to the adapter, as the hooks do on rank 0."""
    from megatron.core import package_info
    from torch.distributed import HashStore

    from megatron_zb.job import settings
    from megatron_zb.job.agreement import Rendezvous
    from megatron_zb.megatron_lm import argument_table, hooks

    version = f"{package_info.MAJOR}.{package_info.MINOR}"
    parser = argparse.ArgumentParser(allow_abbrev=False)  # as Megatron-LM's own
    for each in argument_table.arguments():
        if version in each.versions:
            each.add_to(parser)
    settings.add_megatron_lm_arguments(parser)
    line = (
        f"{SIZES} --pipeline-model-parallel-size {pipeline_size} --global-batch-size "
        f"{num_microbatches} --pipeline-schedule {schedule}"
    )
    installed = hooks._Hooks()
    rendezvous = Rendezvous(0, pipeline_size, seconds=60.0, store=HashStore())
    stops = Stops()
    with stops.followed():
        args = parser.parse_args(line.split())
        args.rank, args.world_size = 0, pipeline_size
        installed._scheduled_run(args, rendezvous)
    return stops


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="v-half", metavar="NAME")
    parser.add_argument("--pipeline-size", "-p", type=int, default=4, metavar="P")
    parser.add_argument("--num-microbatches", "-m", type=int, default=8, metavar="M")
    parser.add_argument("--stops", action="store_true", help="name every stop")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of Megatron's imports
    stops = path_of(arguments.schedule, arguments.pipeline_size, arguments.num_microbatches)
    console = Console()
    if arguments.stops:
        for part in PARTS:
            console.print(f"\n{part}:", style="bold")
            for code in stops.of(part):
                console.print(f"  {file_of(code)}:{code.co_firstlineno} {code.co_name}")
    table = Table(title=f"{arguments.schedule}, p={arguments.pipeline_size}")
    for title in ("part", "stops", "files"):
        table.add_column(title, justify="left" if title == "part" else "right")
    for name, parts in {**{it: (it,) for it in PARTS}, "flag to search": (BEFORE, BUILD)}.items():
        found = stops.of(*parts)
        table.add_row(name, str(len(found)), str(len(set(map(file_of, found)))))
    console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
