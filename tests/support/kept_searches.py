"""Let a search of ``auto`` run once in a test session, whoever asks for it, ranks included.

The same search on the same placement is asked for by many tests, and takes seconds. The first one
to ask searches; all others are given what it has found. A session begins with nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_zb.schedules import auto
from megatron_zb.schedules.search import placement_search

FOLDER = "TESTS_KEPT_SEARCHES"
"""In the environment: where searches are kept."""
_KEPT = "searches_are_kept"


def install() -> None:
    """Keep the searches of this process, if the environment says where."""
    if FOLDER in os.environ and not hasattr(auto._on, _KEPT):
        auto._on = _kept(auto._on, Path(os.environ[FOLDER]))


def _kept(search: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def found(*arguments: Any) -> Any:
        asked = repr((arguments, _settings(), _asking_file()))
        name = hashlib.sha256(asked.encode()).hexdigest()
        with (folder / name).open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if kept := file.read():
                return pickle.loads(kept)
            result = search(*arguments)
            file.write(pickle.dumps(result))
            return result

    setattr(found, _KEPT, True)
    return found


def _asking_file() -> str:
    """Return the test file while reaching_tests.py records: each file has to search itself then."""
    recorded = "TESTS_REACHED" in os.environ
    return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0] if recorded else ""


def _settings() -> list[tuple[str, object]]:
    """What a test may change, for another search: numbers of the module, and the effort."""
    values = vars(auto).items()
    numbers = sorted((name, value) for name, value in values if isinstance(value, int | float))
    return [*numbers, ("search", placement_search.search.__qualname__)]
