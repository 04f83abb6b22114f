"""Whether this environment has the trainers that tests/trainers is about."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("megatron-bridge", "verl")


def missing_trainers() -> str:
    """Return why tests of them are skipped, nothing if they are installed."""
    for name in PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            return (
                "MEGATRON-BRIDGE AND VERL ARE NOT TESTED: this environment has no "
                f"{name}; scripts/test.sh --trainers makes one that has"
            )
    return ""
