"""Attention of a model's layers: all that the planner counts of it, and its arguments.

Each kind of attention is a class; ``ModelConfig.attention`` chooses that of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


class Attention(ABC):
    """Attention of one layer; sizes in elements, those of activations for one token."""

    name: ClassVar[str]
    """Its name in messages."""

    @property
    @abstractmethod
    def weights(self) -> int:
        """Weights of one layer."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Keys and values, as the products with the scores read them."""

    @property
    @abstractmethod
    def projected(self) -> int:
        """Queries, keys and values, with what they are projected from if it is narrow."""

    @property
    @abstractmethod
    def attended(self) -> int:
        """Input of the output projection."""

    @property
    @abstractmethod
    def score_width(self) -> int:
        """Sizes of a head in both products with the scores: a query, and a value."""

    @property
    @abstractmethod
    def divided(self) -> tuple[int, ...]:
        """Numbers that tensor-parallel ranks divide among one another."""

    @abstractmethod
    def flags(self) -> list[str]:
        """Return the words of Megatron-LM's command line for it."""

    def rotary_flags(self) -> list[str]:
        """Return the words for rotary positions that are not stretched by YaRN."""
        return []


@dataclass(frozen=True)
class GroupedAttention(Attention):
    """Attention whose heads share keys and values in groups; as many groups as heads share none."""

    name = "grouped attention"

    hidden: int
    heads: int
    groups: int
    head: int

    @property
    def weights(self) -> int:
        queries_and_out = 2 * self.hidden * self.heads * self.head
        return queries_and_out + 2 * self.hidden * self.groups * self.head

    @property
    def kept(self) -> int:
        return 2 * self.groups * self.head

    @property
    def projected(self) -> int:
        return (self.heads + 2 * self.groups) * self.head

    @property
    def attended(self) -> int:
        return self.heads * self.head

    @property
    def score_width(self) -> int:
        return 2 * self.head

    @property
    def divided(self) -> tuple[int, ...]:
        return (self.heads, self.groups)

    def flags(self) -> list[str]:
        if self.groups == self.heads:
            return []
        return ["--group-query-attention", "--num-query-groups", str(self.groups)]
