"""The search's inner loops, compiled if numba is installed, plain Python otherwise.

Both give the same numbers to the last bit; but plain Python has time for less. Numba keeps what it
compiled in ``__pycache__`` beside the inner loops, or in the user's cache where that cannot be
written, so that the seconds of compiling are spent once for a clone. In a job the first rank
searches for all, so that it is enough to have numba there.
"""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_zb.schedules.search import inner_loops


def available() -> bool:
    """Return whether the inner loops can be compiled here."""
    return importlib.util.find_spec("numba") is not None


class Plain:
    """The inner loops as plain Python on lists."""

    run_list_scheduler: Callable[..., float] = staticmethod(inner_loops.run_list_scheduler)
    local_search: Callable[..., float] = staticmethod(inner_loops.local_search)
    fill_gaps: Callable[..., int] = staticmethod(inner_loops.fill_gaps)

    @staticmethod
    def floats(values: Sequence[float]) -> Any:
        return list(values)

    @staticmethod
    def integers(values: Sequence[int]) -> Any:
        return list(values)


class Compiled:
    """The inner loops compiled by numba, on numpy arrays; compiling takes seconds, once."""

    def __init__(self) -> None:
        import numba
        import numpy

        # a copy of the module, in which each function calls the compiled others
        source = Path(inner_loops.__file__)
        spec = importlib.util.spec_from_file_location(f"{inner_loops.__name__}_compiled", source)
        assert spec is not None
        assert spec.loader is not None
        loops = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loops
        spec.loader.exec_module(loops)
        for name, function in inspect.getmembers(loops, inspect.isfunction):
            if function.__module__ != loops.__name__:
                continue  # of the standard library
            options: dict[str, Any] = {"cache": True}
            if name not in _ALLOCATING:
                # counting references to arrays takes most of the time of a small function; one
                # that creates no array can do without (numba's own extensions use this, too)
                options["_nrt"] = False
                options["inline"] = "never" if name in _ENTRIES else "always"
            found = numba.njit(**options)(function)
            if kept_in := found.stats.cache_path:
                forget_unreadable(Path(kept_in), function)
            setattr(loops, name, found)
        self._numpy = numpy
        self.run_list_scheduler: Callable[..., float] = loops.run_list_scheduler
        self.local_search: Callable[..., float] = loops.local_search
        self.fill_gaps: Callable[..., int] = loops.fill_gaps

    def floats(self, values: Sequence[float]) -> Any:
        return self._numpy.array(values, dtype=self._numpy.float64)

    def integers(self, values: Sequence[int]) -> Any:
        return self._numpy.array(values, dtype=self._numpy.int64)


def forget_unreadable(folder: Path, function: Callable[..., object]) -> None:
    """Remove the index of what numba has kept of a function if it cannot be read any more.

    Numba reads all of an index before it looks whether it is up to date, and fails where that is
    damaged, or names a class that another version of this package had.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    line = function.__code__.co_firstlineno
    for index in folder.glob(f"*.{function.__name__}-{line}.{python}*.nbi"):
        try:
            with index.open("rb") as file:
                pickle.load(file)
                pickle.loads(file.read())
        except Exception:
            index.unlink(missing_ok=True)


Engine = Plain | Compiled
_ENTRIES = "local_search", "run_list_scheduler"
_ALLOCATING = ("sum_of", "choose", "hand_on", "fill_gaps", "partner_in_gaps")


@cache
def _compiled() -> Compiled:
    return Compiled()


def engine(passes: float) -> Engine:
    """Return the faster engine for a number of passes: small jobs do not wait for a compiler."""
    is_ready = _compiled.cache_info().currsize > 0
    least = _WORTH_LOADING if is_ready else _WORTH_COMPILING
    return _compiled() if passes > least and available() else Plain()


def fastest() -> Engine:
    """Return the compiled loops where they can be had: for many small jobs, one after another."""
    return _compiled() if available() else Plain()


_WORTH_COMPILING = 2e5  # about a second of plain Python
_WORTH_LOADING = 2e4  # where numba has been imported for another search
