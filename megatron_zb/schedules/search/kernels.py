"""The search's inner loops, compiled if numba is installed, plain Python otherwise.

Both give the same numbers to the last bit; but plain Python has time for less. Numba keeps what it
compiled in ``__pycache__`` beside the inner loops, or in the user's cache where that cannot be
written, so that the seconds of compiling are spent once for a clone. In a job the first rank
searches for all, so that it is enough to have numba there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from megatron_zb.schedules.search.inner_loops import local_search, run_list_scheduler


def available() -> bool:
    """Return whether the inner loops can be compiled here."""
    return importlib.util.find_spec("numba") is not None


class Plain:
    """The inner loops as plain Python on lists."""

    run_list_scheduler: Callable[..., float] = staticmethod(run_list_scheduler)
    local_search: Callable[..., float] = staticmethod(local_search)

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

        self._numpy = numpy
        self.run_list_scheduler: Callable[..., float] = numba.njit(cache=True)(run_list_scheduler)
        self.local_search: Callable[..., float] = numba.njit(cache=True)(local_search)

    def floats(self, values: Sequence[float]) -> Any:
        return self._numpy.array(values, dtype=self._numpy.float64)

    def integers(self, values: Sequence[int]) -> Any:
        return self._numpy.array(values, dtype=self._numpy.int64)


Engine = Plain | Compiled


@cache
def _compiled() -> Compiled:
    return Compiled()


def engine(passes: float) -> Engine:
    """Return the faster engine for so many passes: small jobs do not wait for a compiler."""
    return _compiled() if passes > _WORTH_COMPILING and available() else Plain()


_WORTH_COMPILING = 2e5  # about a second of plain Python
