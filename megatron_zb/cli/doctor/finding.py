"""The result of checking one part of the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "optional", "wrong"]

NOT_INSTALLED = "not installed"
FORCED = "--force-reinstall "
"""Option of pip install for a package that is installed and broken."""


@dataclass(frozen=True)
class Finding:
    """Result of checking one part, with one sentence on its purpose or on what to do."""

    part: str
    found: str
    state: State
    advice: str
    install: str = ""
    """Argument of pip install that fixes it; empty where pip cannot."""
    again: bool = False
    """Whether pip must reinstall a package that is already installed."""
    commands: tuple[str, ...] = ()
    """Commands to run, ready to paste."""

    @property
    def stops(self) -> bool:
        """Whether training cannot start until it is fixed."""
        return self.state in ("missing", "wrong")
