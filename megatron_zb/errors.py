"""Errors for everything that the user can correct."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
