"""The real pretrain_hybrid.py: attention, MLP and expert layers, wherever a schedule has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.runs import MODEL, Logged, check_equal, pretrain

SUPPORT = Path(__file__).parents[1] / "support"
# On a CPU, the layers of its specification are replaced by Megatron's own local ones.
HYBRID = (
    MODEL.replace("--num-layers 8", "")
    + """
--spec hybrid_layers STACK --position-embedding-type rope --pipeline-model-parallel-size 2
"""
)
PLAIN = "--hybrid-layer-pattern *-*-*-*-"
EXPERTS = """
--hybrid-layer-pattern *-*E*E*-/*-/*- --num-experts 4 --moe-router-topk 2 --disable-bias-linear
--moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights
"""
V_HALF = "--pipeline-schedule v-half"


def train(checkout: Path, *flags: str, script: str = "pretrain_hybrid.py") -> Logged:
    paths = {"PYTHONPATH": f"{SUPPORT}:{Path(__file__).parents[2]}"}
    run = pretrain(checkout, HYBRID, *flags, ranks=2, script=script, environment=paths)
    assert run.code == 0, run.output
    return run


@pytest.fixture(autouse=True, scope="module")
def with_the_script(checkout: Path) -> None:
    if not (checkout / "pretrain_hybrid.py").is_file():
        pytest.skip(f"Megatron-LM {checkout_at(checkout).version_text} has no pretrain_hybrid.py")


@pytest.mark.parametrize("model", [PLAIN, EXPERTS], ids=["tied", "experts-mtp"])
def test_a_checkpoint_goes_on_under_every_schedule(
    checkout: Path, tmp_path: Path, model: str
) -> None:
    """From upstream to V-Half and back, and to ZB-H1."""
    save = f"--save {tmp_path / 'upstream'} --save-interval 2 --exit-interval 2"
    train(checkout, model, save)
    load = f"--load {tmp_path / 'upstream'}"
    upstream = train(checkout, model, load)
    assert list(upstream.losses) == [3, 4, 5, 6, 7]
    moved = f"{load} --save {tmp_path / 'v-half'} --save-interval 4"
    ours = train(checkout, model, moved, V_HALF)
    check_equal(ours, upstream)
    assert "stage 3" in ours.output
    check_equal(train(checkout, model, load, "--pipeline-schedule zb-h1"), upstream)
    back = train(checkout, model, f"--load {tmp_path / 'v-half'} --ckpt-step 4")
    assert back.norms == {n: norm for n, norm in upstream.norms.items() if n > 4}
    for n in (5, 7):  # of the second iteration Megatron-LM prints the mean with the first
        assert back.losses[n] == upstream.losses[n]


def test_segments_of_other_lengths_and_the_older_name_of_the_script(
    checkout: Path, tmp_path: Path
) -> None:
    """From a fresh start, where a layer's weights do not depend on its place."""
    even = train(checkout, PLAIN, V_HALF)
    uneven = train(
        checkout, PLAIN.replace("*-*-*-*-", "*-*|-|*-|*-"), V_HALF, script="pretrain_mamba.py"
    )
    assert "stage 1 (layers 4-4)" in uneven.output
    assert uneven.losses == even.losses


def test_segments_for_another_number_of_stages_are_refused(checkout: Path) -> None:
    pattern = "--hybrid-layer-pattern *-*-|*-*-"
    paths = {"PYTHONPATH": f"{SUPPORT}:{Path(__file__).parents[2]}"}
    run = pretrain(
        checkout, HYBRID, pattern, V_HALF, ranks=2, script="pretrain_hybrid.py", environment=paths
    )
    assert run.code != 0
    assert "'*-*-|*-*-': it has 2 segments ('|') and the schedule has 4 stages" in run.error
