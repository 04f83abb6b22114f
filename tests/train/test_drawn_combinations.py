"""Drawn combinations of settings with this package's trainer: equal to Megatron's own 1F1B.

What is drawn changes with the commit; ``TESTS_SEED`` draws that of another one.
"""

from __future__ import annotations

import drawn_sizes
import pytest
from fuzzing.drawing import draw
from fuzzing.own_trainer import OwnTrainer, own_space
from fuzzing.seed import seed_of_commit
from fuzzing.space import space_of

from megatron_zb.megatron_core.versions import core_series

SPACE = own_space(space_of(".".join(map(str, core_series()))))


@pytest.fixture(scope="module")
def trainer(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> OwnTrainer:
    return OwnTrainer(SPACE, corpus, tmp_path_factory.mktemp("drawn"))


@pytest.mark.long
@pytest.mark.parametrize("number", drawn_sizes.first(2, range(30)))
def test_a_drawn_combination_trains_as_megatron_does(trainer: OwnTrainer, number: int) -> None:
    combination = draw(SPACE, f"{seed_of_commit()}/{number}")
    assert trainer.why_different(combination) == "", SPACE.unusual(combination)
