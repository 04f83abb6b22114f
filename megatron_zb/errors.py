"""Errors for everything that the user can correct, and the end of a job's process with one."""

from __future__ import annotations

import faulthandler
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn


class UsageError(ValueError):
    """Error for a request of the user that cannot be carried out.

    The message is one sentence: what is wrong, where, and what would be right. Commands print it
    without a traceback and exit with code 2. Line ends and control characters of what the user
    wrote stand in it as Python writes them, so that it stays one line.
    """

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


@dataclass(frozen=True)
class Refusal:
    """An argument, as given, that cannot be combined with another."""

    flag: str
    other: str
    why: str
    sentence: str = ""
    """The whole message, where the usual one does not fit."""

    @property
    def error(self) -> UsageError:
        usual = f"{self.flag} cannot be combined with {self.other}: {self.why}"
        return UsageError(self.sentence or usual)


def raise_first(found: Iterable[Refusal]) -> None:
    """Raise the error of the first refusal, if there is one."""
    for refusal in found:
        raise refusal.error


# Where a module is not called as the package that holds it.
_PACKAGES = {
    "megatron": "megatron-core>=0.16",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "transformer_engine": "transformer-engine[pytorch]",
    "yaml": "pyyaml",
}


@contextmanager
def explain_missing_package() -> Iterator[None]:
    """Name a package that is not installed, and how to install it.

    Raises:
        UsageError: in place of the ModuleNotFoundError of such a package. A module that is missing
            in a package that is there keeps its own error: that package has another version.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if not module or _is_there(module):
            raise
        raise UsageError(_describe(module, error)) from error


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # it has been taken out of this process
        return False


def _describe(module: str, error: ModuleNotFoundError) -> str:
    package = _PACKAGES.get(module, module)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<")]
    where = f", which {own[-1].filename} imports in line {own[-1].lineno}" if own else ""
    return (
        f"the package {package} is not installed{where}: run {shlex.quote(sys.executable)} -m pip "
        f"install {shlex.quote(package)}, and megatron-zb doctor, which lists all that is missing"
    )


# --- the end of a process: arguments that cannot run, or another rank that has ended


_TIME_FOR_OTHERS = 4.0  # seconds: to get as far as this rank has
_TIME_FOR_RANK_0 = 20.0
_SAID = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
"""Parts of gloo's errors where another rank has ended."""


def end_with(error: UsageError, rank: int, *, speaks: bool | None = None) -> NoReturn:
    """End this process of a job with code 2, for a mistake that ends every rank.

    One rank prints the error, at once: rank 0 unless ``speaks`` is given. The launcher ends all
    processes as soon as one has failed, and Megatron has them print their stacks then: so that rank
    waits until the others have come here, where they wait silently and print only if they are left
    alone.
    """
    speaks = rank == 0 if speaks is None else speaks
    if not speaks:
        faulthandler.unregister(signal.SIGTERM)
        time.sleep(_TIME_FOR_RANK_0)
    sys.stdout.flush()
    print(f"megatron_zb: error: {error}", file=sys.stderr, flush=True)
    if speaks and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(_TIME_FOR_OTHERS)
    os._exit(2)


def describe_lost_peer(error: BaseException, rank: int) -> str | None:
    """Return one sentence for an error that follows from the end of another rank, else None."""
    if not isinstance(error, RuntimeError) or not any(said in str(error) for said in _SAID):
        return None
    return (
        f"megatron_zb: error: rank {rank} has lost the connection to another rank, which has "
        "ended: what that one said, or torchrun's report, tells why"
    )
