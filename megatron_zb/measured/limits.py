"""Limits of memory that the user gives as a share of 1F1B's activation memory, or in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import Profile
from megatron_zb.parsing import Bytes
from megatron_zb.schedules.costs import Costs


@dataclass(frozen=True)
class Limit:
    """A limit of memory for each rank: ``share`` of 1F1B's activations, and ``bytes`` if given."""

    share: float
    bytes: float | None = None

    @classmethod
    def of(
        cls, flag: str, given: float | Bytes | None, profile: Profile | None, scale: float = 1.0
    ) -> Limit | None:
        """Return the limit that a flag gives; None where it is not given.

        Args:
            flag: for errors.
            given: its value.
            profile: of an earlier run, which tells what 1F1B holds; bytes need one.
            scale: what a microbatch of this run holds, as a multiple of the profile's.

        Raises:
            UsageError: bytes without a profile.
        """
        if given is None:
            return None
        if not isinstance(given, Bytes):
            return cls(given)
        if profile is None:
            raise UsageError(
                f"{flag} {given} is in bytes, and only a profile tells how many activations take: "
                "name that of an earlier run with --pipeline-layer-layout FILE.yaml, or give a "
                "share of 1F1B's memory, such as 0.5"
            )
        return cls(given.number / (scale * profile.one_f_one_b_bytes), given.number)

    def in_unit_of(self, costs: Costs, *, is_measured: bool) -> float:
        """Return the limit in the unit of the costs' ``activation``; bytes, if it is measured."""
        if is_measured and self.bytes is not None:
            return self.bytes
        return self.share * costs.one_f_one_b_peak()
