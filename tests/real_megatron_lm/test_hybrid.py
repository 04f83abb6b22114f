"""The real pretrain_hybrid.py: attention, MLP and expert layers, wherever a schedule has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.runs import MODEL, Logged, check_equal, check_near, pretrain

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
FOUR = "--pipeline-model-parallel-size 4"


LONGER = "--train-iters 14 --override-opt_param-scheduler"
EVALUATION = "--eval-interval 4"
PATHS = {"PYTHONPATH": f"{SUPPORT}:{Path(__file__).parents[2]}"}
UNEQUAL = Path(__file__).with_name("run_unequal.py")


def train(checkout: Path, *flags: str, script: str = "pretrain_hybrid.py", **more: Any) -> Logged:
    how: dict[str, Any] = {"ranks": 2, "script": script, "environment": PATHS, **more}
    run = pretrain(checkout, HYBRID, *flags, **how)
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


@dataclass(frozen=True)
class Start:
    """Two iterations of Megatron's own 1F1B, and what it logs after them."""

    checkout: Path
    flags: str
    folder: Path
    upstream: Logged

    def go_on(self, schedule: str, ranks: int = 2) -> Logged:
        load = f"--load {self.folder} --pipeline-schedule {schedule}"
        return train(self.checkout, self.flags, load, ranks=ranks)


def start_of(checkout: Path, folder: Path, flags: str) -> Start:
    train(checkout, flags, f"--exit-interval 2 --save {folder} --save-interval 2")
    return Start(checkout, flags, folder, train(checkout, flags, f"--load {folder}"))


@pytest.fixture(scope="module")
def start(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("start")
    found = start_of(checkout, folder, f"{PLAIN} {EVALUATION}")
    assert list(found.upstream.losses) == [3, 4, 5, 6, 7]
    assert found.upstream.evaluations
    return found


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("v-half --pipeline-recompute auto --pipeline-memory-limit 0.45", 2),
        ("auto --pipeline-offload auto --pipeline-memory-limit 0.5 --pipeline-verify", 2),
        ("v-half --pipeline-layer-layout auto", 2),
        (f"v-half --pipeline-recompute auto --pipeline-memory-limit 0.4 {FOUR}", 4),
        (f"v-zb --pipeline-offload auto --pipeline-memory-limit 0.5 {FOUR}", 4),
    ],
)
def test_a_gpt_as_a_pattern_logs_what_upstream_logs(
    start: Start, schedule: str, ranks: int
) -> None:
    check_equal(start.go_on(schedule, ranks), start.upstream)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("v-half --pipeline-vocabulary on", 2),
        ("zb-h1 --pipeline-slices 12,12,8", 2),
        ("v-zb --pipeline-slices 4 --pipeline-vocabulary on", 2),
        (f"v-half --pipeline-vocabulary on {FOUR}", 4),
        (f"v-half --pipeline-slices 4 {FOUR}", 4),
        (f"zb-h1 --pipeline-slices 4 --pipeline-vocabulary on {FOUR}", 4),
    ],
)
def test_shards_and_slices_log_it_up_to_rounding(start: Start, schedule: str, ranks: int) -> None:
    check_near(start.go_on(schedule, ranks), start.upstream)


def test_a_profile_measures_layers_and_their_recomputation_by_megatron(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    run = start.go_on(f"v-half --pipeline-profile {path} {recompute} {LONGER}")
    assert {n: run.losses[n] for n in start.upstream.losses} == start.upstream.losses
    profile = read_profile(path)
    parts = profile.parts
    assert parts is not None and parts.layer.forward > 0 and parts.output.forward > 0
    assert profile.model.pattern == "*-*-*-*-" and set(parts.letters) == {"*", "-"}
    for seconds in parts.letters.values():
        assert min(seconds.forward, seconds.backward, seconds.weight, seconds.whole) > 0
    assert profile.attention is not None
    # it is the mean over all letters, of which every second one has attention
    assert 2 * profile.attention.forward < parts.letters["*"].forward
    balanced = start.go_on(f"v-half --pipeline-layer-layout {path}")
    check_equal(balanced, start.upstream)
    assert f"(measured, {path})" in " ".join(balanced.output.split())


def test_a_profile_tells_experts_apart_with_prediction(checkout: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    train(checkout, EXPERTS, f"{V_HALF} --pipeline-profile {path} {LONGER}")
    profile = read_profile(path)
    assert profile.model.pattern == "*-*E*E*-/*-/*-" and profile.multi_token == 2
    parts = profile.parts
    assert parts is not None and set(parts.letters) == {"*", "-", "E"}
    assert min(parts.letters["E"].forward, parts.letters["E"].weight) > 0
    assert parts.multi_token.forward > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_samples_of_unequal_lengths(checkout: Path, tmp_path: Path, ranks: int) -> None:
    """Their checkpoint is one of equal lengths, as lengths change no weight's shape."""
    flags = f"{PLAIN} --moe-token-dispatcher-type alltoall"
    train(checkout, flags, f"--exit-interval 2 --save {tmp_path} --save-interval 2")
    load = f"{flags} --load {tmp_path}"
    size = f"--pipeline-model-parallel-size {ranks}"
    equal, upstream, ours = (
        train(checkout, load, *more, size, program=program, ranks=ranks)
        for program, *more in ((None,), (UNEQUAL,), (UNEQUAL, V_HALF))
    )
    check_equal(ours, upstream)
    assert upstream.losses != equal.losses


def test_shards_with_prediction_and_experts_save_what_upstream_loads(
    checkout: Path, tmp_path: Path
) -> None:
    start = start_of(checkout, tmp_path / "start", EXPERTS)
    saved = tmp_path / "shards"
    sharded = f"v-half --pipeline-vocabulary on --save {saved} --save-interval 4"
    check_near(start.go_on(sharded), start.upstream)
    back = train(checkout, EXPERTS, f"--load {saved} --ckpt-step 4")
    assert list(back.norms) == [5, 6, 7]
    for n, norm in back.norms.items():
        assert float(norm) == pytest.approx(float(start.upstream.norms[n]), abs=1.01e-3)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*-*Q*-*-", "no kind of layer is written 'Q': use .*"),
        ("*-*-|*-*-", r"it has 2 segments \('\|'\) and the schedule has 4 stages: .*"),
    ],
)
def test_a_wrong_pattern_is_refused_in_one_sentence(
    checkout: Path, pattern: str, said: str
) -> None:
    flags = f"--hybrid-layer-pattern {pattern} {V_HALF}"
    run = pretrain(checkout, HYBRID, flags, ranks=2, script="pretrain_hybrid.py", environment=PATHS)
    assert run.code != 0
    assert re.fullmatch(f"megatron_zb: error: hybrid layer pattern '.*': {said}", run.error)
