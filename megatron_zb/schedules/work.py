"""Work of unequal microbatches: their tokens, and what attention takes beside its linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs, Scale

BACKWARD_OF_ATTENTION = 2.5
"""Work of attention's backward, in that of its forward: five products of matrices for two."""


@dataclass(frozen=True)
class AttentionWork:
    """Work of attention in a model.

    Args:
        forward: the tokens of linear layers that take as long as attention to one pair of a query
            and a key, in F. It is what F of ``squares`` takes beside that of ``tokens``.
        backward: the same in B.
    """

    forward: float
    backward: float

    @classmethod
    def counted(cls, scores: float, linear: float) -> AttentionWork:
        """Return the work of a layer by its operations for a pair, and in F for a token."""
        share = scores / linear
        return cls(share, BACKWARD_OF_ATTENTION * share)


NO_ATTENTION = AttentionWork(0.0, 0.0)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the microbatches of a step, in the order in which they run.

    Args:
        tokens: of each microbatch, all of its sequences together.
        squares: the sum of the squares of its sequences' lengths.
        shapes: sequence length and batch size that the model computes with, if they are given.
    """

    tokens: tuple[float, ...]
    squares: tuple[float, ...]
    shapes: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[float],
        squares: Sequence[float] | None = None,
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> Lengths:
        """Check lengths; without squares, each microbatch is one sequence.

        Raises:
            UsageError: a number is not positive, or there are not as many of each as tokens.
        """
        if squares is None:
            squares = [float(t) * float(t) for t in tokens]
        if len(squares) != len(tokens):
            raise UsageError(
                f"lengths: {len(tokens)} tokens and {len(squares)} squares: give one of each for "
                "every microbatch"
            )
        if not tokens or not all(isfinite(x) and x > 0 for x in (*tokens, *squares)):
            raise UsageError(
                f"lengths: tokens are {list(tokens)} and squares {list(squares)}: give positive "
                "numbers, and leave out microbatches that have no tokens"
            )
        found = None if shapes is None else tuple((int(s), int(b)) for s, b in shapes)
        if found is not None and (len(found) != len(tokens) or min(map(min, found)) < 1):
            raise UsageError(
                f"lengths: {len(tokens)} tokens and the shapes {list(found)}: give a sequence "
                "length and a batch size of at least 1 for every microbatch"
            )
        return cls(tuple(map(float, tokens)), tuple(map(float, squares)), found)

    def __len__(self) -> int:
        return len(self.tokens)

    def in_order(self, order: Sequence[int]) -> Lengths:
        """Return the lengths of the microbatches in another order."""
        tokens, squares = (tuple(of[j] for j in order) for of in (self.tokens, self.squares))
        shapes = None if self.shapes is None else tuple(self.shapes[j] for j in order)
        return Lengths(tokens, squares, shapes)


def together(of_all: Sequence[Lengths]) -> Lengths:
    """Return the lengths of several ranks' microbatches as those of one."""
    tokens = [of_one for lengths in of_all for of_one in lengths.tokens]
    return Lengths.of(tokens, [of_one for lengths in of_all for of_one in lengths.squares])


def costs_of_work(
    costs: Costs,
    lengths: Lengths,
    attention: AttentionWork = NO_ATTENTION,
    mean: Lengths | None = None,
) -> Costs:
    """Return the costs of microbatches of some lengths, of which a mean one has the given costs.

    F and B grow with the tokens and with the work of attention, W, messages and memory with the
    tokens alone. The mean is over ``mean``, or over the lengths themselves if it is left out.
    """

    def shares(of_pair: float) -> list[float]:
        work = _work(lengths, of_pair)
        of = work if mean is None else _work(mean, of_pair)
        average = sum(of) / len(of)
        return [each / average for each in work]

    scales = list(map(Scale, shares(0.0), shares(attention.forward), shares(attention.backward)))
    rows = {scale: costs.scaled(scale) for scale in scales}
    return replace(costs, microbatches=tuple(rows[scale] for scale in scales))


def _work(lengths: Lengths, of_pair: float) -> list[float]:
    return [t + of_pair * q for t, q in zip(lengths.tokens, lengths.squares, strict=True)]
