"""The shape of a student block, and the sizes of the teacher that it must fit. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["attention", "linear", "no_op"]
MlpKind = Literal["mlp", "linear", "no_op"]


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of a teacher, in elements."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int


@dataclass(frozen=True)
class BlockShape:
    """The shape of one candidate for one block; width and heads are the teacher's."""

    name: str
    attention: AttentionKind
    num_query_groups: int
    """Number of heads of keys and values; the teacher's where there is no attention."""
    mlp: MlpKind
    ffn_hidden_size: int
    """Width of the MLP; the teacher's where there is no MLP."""
    learning_rate: float | None
    """Peak learning rate; None for the run's."""

    @property
    def is_layer(self) -> bool:
        """Whether the block has attention and an MLP, as every layer of a GPTModel has."""
        return self.attention == "attention" and self.mlp == "mlp"

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes that must be equal in all layers of a GPTModel: query groups and MLP width."""
        return self.num_query_groups, self.ffn_hidden_size
