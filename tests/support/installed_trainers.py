"""Whether this environment has the trainers that tests/trainers is about."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("megatron-bridge", "verl", "ms-swift")


def missing_trainers() -> str:
    """Return why tests of them are skipped, nothing if they are installed."""
    for name in PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            return (
                "THE REAL TRAINERS ARE NOT TESTED: this environment has no "
                f"{name}; scripts/test.sh --trainers makes one that has"
            )
    return ""
