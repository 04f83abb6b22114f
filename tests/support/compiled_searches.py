"""Compile the inner loops of all searches, which numba keeps for the tests: a program."""

from __future__ import annotations

from brief_searches import briefly

from megatron_zb import schedules
from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.search import kernels


def main() -> None:
    if not kernels.available():
        return
    kernels.fastest()
    plain = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    pairs = plain.having(Communication(forward=0.5, backward=0.5, pair_loss=0.03))
    recomputed = [costs.having(Recomputation(kept_input=0.05)) for costs in (plain, pairs)]
    with briefly():
        for costs in (plain, pairs, *recomputed):
            schedules.build(
                "v-half", pipeline_size=4, num_microbatches=8, costs=costs, memory_limit=0.7
            )
        # units of adapters have edges that microbatches have not
        schedules.build("v-half", pipeline_size=4, adapters=Adapters.equal(2, microbatches=4))


if __name__ == "__main__":
    main()
