"""Two generations of the weights of a rank, one of which is selected before each pass.

Where an update comes one step late, the passes of one group of microbatches compute with the
weights before it, and those of the next group with the weights behind it. The parameters are the
same objects throughout: their data is exchanged. Passes may also compute with predicted weights,
which are further along than the parameters.

A backward needs the generation of its forward, in two ways. What autograd has saved of a weight as
a view lies in the storage of that generation, which no update changes. What it has saved as the
parameter itself is what the parameter points to now, so a backward has its generation selected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class WeightBanks:
    """Generations of some parameters: after so many updates, and after one fewer.

    Args:
        parameters: all that a rank computes with.
        keeps_home: both generations are copies. Needed where an update can write only where the
            parameters lie at the beginning, as with an optimizer whose parameters are views of one
            buffer; and where passes compute with predicted weights.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, keeps_home: bool = False
    ) -> None:
        self._parameters = list(parameters)
        self._home = [it.data for it in self._parameters]
        self._keeps_home = keeps_home
        first = [it.clone() for it in self._home] if keeps_home else self._home
        self._banks = (first, [it.clone() for it in self._home])
        self._arrive: Callable[[], None] | None = None
        self.updates = 0
        """Updates that have been applied."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the generations take beside the parameters themselves."""
        of_one = sum(it.numel() * it.element_size() for it in self._home)
        return of_one * (1 + self._keeps_home)

    @property
    def are_arriving(self) -> bool:
        """Whether the newest parameters are on their way."""
        return self._arrive is not None

    def select(self, updates: int) -> None:
        """Let the parameters be those after a number of updates.

        Raises:
            ValueError: that generation is not there.
        """
        if not self.updates - 1 <= updates <= self.updates or updates < 0:
            raise ValueError(
                f"the weights after {updates} updates are not kept: there have been {self.updates}"
            )
        if updates == self.updates:
            self._take_arrived()
        self._point_to(self._banks[updates % 2])

    def rest(self) -> None:
        """Let the parameters be the newest ones, where everybody else expects them."""
        self._take_arrived()
        self._point_to(self._home if self._keeps_home else self._banks[self.updates % 2])

    def update(
        self,
        step: Callable[[], None],
        ahead: Callable[[], AbstractContextManager[None]] = nullcontext,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        """Make a new generation by a function that changes the newest parameters in place.

        The oldest one is given up: no pass may need it any more.

        Args:
            step: changes the parameters.
            ahead: within it the parameters are those to compute with; for banks that keep a home.
            arrive: waits for parameters that ``step`` has not written yet, such as those that come
                from other ranks. It is called before they are needed; for banks that keep a home
                and predict nothing.
        """
        self._take_arrived()
        newest, new = (self._banks[n % 2] for n in (self.updates, self.updates + 1))
        if self._keeps_home:
            self._point_to(self._home)
        else:
            _copy(newest, new)
            self._point_to(new)
        # autograd compares versions of what it has saved, which has not changed
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters)):
            step()
            if self._keeps_home and arrive is None:
                with ahead():
                    _copy(self._home, new)
        self._arrive = arrive
        self.updates += 1

    def _take_arrived(self) -> None:
        """Wait for the newest parameters, if some are on their way."""
        if self._arrive is None:
            return
        self._arrive()
        self._arrive = None
        _copy(self._home, self._banks[self.updates % 2])

    def forget_older(self) -> None:
        """Let both generations be the newest parameters."""
        self._take_arrived()
        newest = self._home if self._keeps_home else self._banks[self.updates % 2]
        for bank in self._banks:
            if bank is not newest:
                _copy(newest, bank)

    def _point_to(self, data: Sequence[torch.Tensor]) -> None:
        for parameter, own in zip(self._parameters, data, strict=True):
            parameter.data = own


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for of, to in zip(source, target, strict=True):
            to.copy_(of)
