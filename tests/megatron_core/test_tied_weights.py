"""Both copies of tied weights on the rank at the end of a V: equal, or training is refused."""

from __future__ import annotations

import pytest
from gpt_cases import GPTCase, built
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import model_ends


def refused_where_they_differ() -> list[str]:
    """Results of the checks: of equal copies, and where an importer has left one out."""
    said = []
    with built(GPTCase(tied=True), "v-half", 4) as (_, chunks):
        pair = model_ends.tied_weights(chunks)
        model_ends.check_tied(chunks)
        said.append("equal")
        if pair is None:
            return said
        pair[1].data.add_(1e-3)
        model_ends.check_tied(chunks)
        said.append("not looked at again")
        delattr(pair[1], model_ends._CHECKED)
        for check in (model_ends.check_tied, model_ends.finalize_with_tied_weights):
            with pytest.raises(UsageError, match="the output layer is tied to the embedding") as e:
                check(chunks)
            assert "load the embedding into both chunks" in str(e.value)
        said.append("refused twice")
    return said


@pytest.mark.long
def test_copies_that_differ_are_refused(ranks: RankPools) -> None:
    both = ["equal", "not looked at again", "refused twice"]
    assert sorted(ranks(2).run(refused_where_they_differ), key=len) == [["equal"], both]
