"""Plans of hybrid models: weights, work and bytes of each kind of layer, and their layouts."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from brief_searches import briefly
from gpt_cases import VOCABULARY, GPTCase, built
from pydantic import ValidationError
from ranks import RankPools
from small_models import ROOT, SMALL, a100, load, small

from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.parsing import flag_of
from megatron_zb.plan import byte_counts, mixers
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.model_flags import model_flags
from megatron_zb.plan.operators import all_weights, model_flops, weights_of
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.strategy import Choices, candidates_of, strategies
from megatron_zb.plan.table import flags
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import pattern_kinds
from megatron_zb.schedules.placement import Placement, looped, v_shape

EXPERTS = {"experts": 8, "top_k": 2, "ffn_hidden_size": 512}
MODELS = ROOT / "configs" / "models"

# Sizes of NVIDIA's recipe for Megatron-LM (examples/post_training/modelopt), and its vocabulary.
NEMOTRON_H_8B = """\
name: Nemotron-H 8B
source: arXiv 2504.03624
layers: 52
hidden_size: 4096
attention_heads: 32
query_groups: 8
ffn_hidden_size: 21504
squared_relu: true
hybrid_layer_pattern: M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-
mamba: {heads: 128, head_dim: 64, groups: 8, state_dim: 128}
vocabulary: 131072
sequence_length: 8192
global_batch_size: 768
"""


def parsed(text: str) -> ModelConfig:
    return config.parse(text.encode(), "x.yaml", ModelConfig)


def hybrid(pattern: str, **changes: Any) -> ModelConfig:
    layers = len(pattern.split("/")[0])
    return small(hybrid_layer_pattern=pattern, layers=layers, **changes)


def test_nemotron_h_8b_has_the_weights_of_its_published_checkpoint() -> None:
    """8 100 852 736 parameters; the planner leaves out what is no matrix."""
    inner, shared, heads, hidden = 128 * 64, 2 * 8 * 128, 128, 4096
    convolution = 5 * (inner + shared)
    mamba = convolution + 3 * heads + inner  # decays, time steps, skips; gated norm
    norms = 53 * hidden
    assert all_weights(parsed(NEMOTRON_H_8B)) + 24 * mamba + norms == 8_100_852_736


def test_the_shipped_hybrid_models_have_the_weights_that_are_published() -> None:
    """Numbers of the checkpoints, of Qwen3-Next without its layers of prediction.

    The planner leaves out what is no matrix, and the shared experts' gate.
    """
    nano, big, qwen = (
        read_model(MODELS / f"{name}_like.yaml")
        for name in ("nemotron_3_nano", "nemotron_3_super", "qwen3_next")
    )
    for model, pattern, published in (
        (nano, nano.hybrid_layer_pattern, 31_577_940_288),
        (big, f"{pattern_kinds(big.hybrid_layer_pattern or '')}/*E", 123_611_033_088),
    ):
        model = model.model_copy(
            update={"hybrid_layer_pattern": pattern, "prediction_layers": "/" in str(pattern)}
        )
        inner, experts = (model.mamba.heads or 0) * 64 if model.mamba else 0, model.experts
        mamba = 5 * (inner + 2 * 8 * 128) + 3 * inner // 64 + inner
        norms = (model.layers + 1 + 5 * model.prediction_layers) * model.hidden_size
        biases = model.kinds.count("E") * (experts.experts if experts else 0)
        small = model.kinds.count("M") * mamba + norms + biases
        assert all_weights(model) + small == published
    alone = qwen.model_copy(
        update={
            "hybrid_layer_pattern": pattern_kinds(qwen.hybrid_layer_pattern or ""),
            "prediction_layers": 0,
        }
    )
    convolution, heads = 4 * (2 * 2048 + 4096), 2 * 32 + 128
    norms = (2 * 48 + 1) * 2048 + 12 * 2 * 256
    gates = 48 * 2048
    assert all_weights(alone) + 36 * (convolution + heads) + norms + gates == 79_674_391_296


def weights_of_rank(case: GPTCase) -> dict[str, int]:
    """Elements of the matrices of Megatron's modules on a rank, by layer, or else by parameter."""
    found: dict[str, int] = {}
    with built(case, "zb-h1", 2) as (_, chunks):
        for chunk in chunks:
            for name, weight in global_parameters(chunk).items():
                name = name.replace("module.", "")
                part = ".".join(name.split(".")[:3]) if name.startswith("decoder.layers") else name
                found[part] = found.get(part, 0) + weight.numel() * (weight.dim() == 2)
    return found


@pytest.mark.skipif(versions.core_series() < (0, 19), reason="its models are tested in 0.19")
def test_every_kind_has_the_weights_of_megatrons_modules(ranks: RankPools) -> None:
    case = GPTCase(
        hybrid="M*-EEMG",
        layers=7,
        multi_token=1,
        rotary=True,
        options=tuple(
            {
                "mamba_state_dim": 8,
                "mamba_head_dim": 16,
                "mamba_num_groups": 2,
                "ffn_hidden_size": 48,
                "num_query_groups": 2,
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": 24,
                "moe_shared_expert_intermediate_size": 40,
                "attention_output_gate": True,
                "deterministic_mode": True,  # without a GPU's kernels for gated delta
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 16,
                "gated_linear_unit": True,
                "add_bias_linear": False,
            }.items()
        ),
    )
    found: dict[str, int] = {}
    for of_rank in ranks(2).run(weights_of_rank, case=case):
        found |= of_rank
    model = hybrid(
        "M*-EEMG/*-",
        hidden_size=32,
        attention_heads=4,
        query_groups=2,
        ffn_hidden_size=48,
        gated_mlp=True,
        vocabulary=VOCABULARY,
        rotary={"base": 10000},
        prediction_layers=1,
        attention_output_gate=True,
        mamba={"head_dim": 16, "groups": 2, "state_dim": 8},
        gated_delta={"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 16},
        experts={"experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 40},
    )
    for layer in range(7):
        counted = sum(weights_of(model, [layer]))
        assert found[f"decoder.layers.{layer}"] == counted, model.kinds[layer]
    assert sum(found.values()) == all_weights(model)


def test_a_transformer_layer_is_one_of_attention_and_one_of_an_mlp() -> None:
    """Whatever is counted of the layer, the two kinds share it out."""
    for changes in (
        {},
        {"dropout": True, "flash_attention": False},
        {"gated_mlp": True},
        {"experts": EXPERTS},
    ):
        whole = small(**changes)
        parts = hybrid("*E" if "experts" in changes else "*-", **changes)
        for strategy in ({}, {"tensor": 4}, {"recompute": "full"}, {"recompute": "selective"}):
            one, two = (load(model, **strategy) for model in (whole, parts))
            work = two.layer(0) + two.layer(1)
            assert (work.forward, work.backward, work.weight) == pytest.approx(
                (one.layer(0).forward, one.layer(0).backward, one.layer(0).weight)
            )
            held = byte_counts.layer_held(two, 0), byte_counts.layer_held(two, 1)
            expected = byte_counts.layer_held(one, 0)
            if "recompute" not in strategy:
                assert sum(h.activation for h in held) == expected.activation
            assert sum(h.for_weight for h in held) == expected.for_weight
            states = [byte_counts.rank_states(of, [0], False, False) for of in (one, two)]
            both = byte_counts.rank_states(two, [0, 1], False, False)
            assert both.parameters == states[0].parameters > states[1].parameters


def test_a_mamba_layer_splits_only_its_two_products() -> None:
    """Sizes by hand for 1024 tokens of width 1024: 32 heads of 64, 2 groups of 16 states."""
    model = hybrid("M", mamba={"groups": 2, "state_dim": 16})
    inner, projected = 2048, 2 * 2048 + 2 * 2 * 16 + 32
    weights = 1024 * (projected + inner)
    assert weights_of(model, [0]) == (weights, 0)
    of, kernels = load(model), 2 * a100().kernels.seconds
    work = of.layer(0)
    product = 2 * 1024 * weights / a100().matrix_products.reached
    assert work.weight == pytest.approx(product + kernels)
    assert work.backward - work.weight > 2 * (work.forward - work.weight) > 0
    held = byte_counts.layer_held(of, 0)
    assert held.for_weight == 1024 * 2 * (2 * 1024 + projected + inner)
    assert held.activation == held.for_weight + 1024 * 2 * inner  # and what the scan gave
    scan = 2 * 128 * (32 + inner) + 4 * inner * 16
    device = a100()
    twice = device.attention.model_copy(update={"peak": 2 * device.attention.peak})
    faster = load(model, device.model_copy(update={"attention": twice})).layer(0)
    assert work.forward - faster.forward == pytest.approx(1024 * scan / twice.reached)
    flops = model_flops(model, 10, 1024) - model_flops(hybrid("-"), 10, 1024)
    assert flops == pytest.approx(
        3 * 10 * (2 * weights + scan - 2 * weights_of(hybrid("-"), [0])[0])
    )


def test_a_gated_delta_layer_splits_only_its_two_products() -> None:
    """Sizes by hand for 1024 tokens of width 1024: 4 heads of 64 keys for 8 of 32 values."""
    sizes = {"key_heads": 4, "value_heads": 8, "key_head_dim": 64, "value_head_dim": 32}
    model = hybrid("G", gated_delta=sizes)
    keys, values = 4 * 64, 8 * 32
    projected = 2 * keys + 2 * values + 2 * 8
    weights = 1024 * (projected + values)
    assert weights_of(model, [0]) == (weights, 0)
    of, device = load(model), a100()
    work = of.layer(0)
    product = 2 * 1024 * weights / device.matrix_products.reached
    assert work.weight == pytest.approx(product + 2 * device.kernels.seconds)
    assert work.backward > work.forward > work.weight
    held = byte_counts.layer_held(of, 0)
    assert held.for_weight == 1024 * 2 * (2 * 1024 + projected + values)
    kept = 2 * keys + 2 * 8 * 64 + 2 * values + 64 * 8  # as convolved and repeated; the inverse
    assert held.activation == held.for_weight + 1024 * 2 * kept
    scan = 8 * (2 * 64 * (3 * 64 + 2 * 32) + 64**2 + 6 * 64 * 32)
    twice = device.attention.model_copy(update={"peak": 2 * device.attention.peak})
    faster = load(model, device.model_copy(update={"attention": twice})).layer(0)
    assert work.forward - faster.forward == pytest.approx(1024 * scan / twice.reached)


def test_experts_behind_a_projection_are_as_narrow_as_it() -> None:
    """512 of 1024 elements are sent, and enter the experts; two products lead there and back."""
    wide, narrow = (hybrid("E", experts={**EXPERTS, **more}) for more in ({}, {"latent_size": 512}))
    router, routed = 1024 * 8, 8 * 2 * 1024 * 512
    assert weights_of(wide, [0]) == (router, routed)
    assert weights_of(narrow, [0]) == (router + 2 * 1024 * 512, routed // 2)
    spread: dict[str, Any] = {"data": 8, "expert": 8, "microbatch": 32}  # hides the latency
    assert load(narrow, **spread).all_to_all(0) < 0.6 * load(wide, **spread).all_to_all(0)
    needed = [byte_counts.layer_held(load(model), 0).for_weight for model in (wide, narrow)]
    assert needed[0] - needed[1] == 1024 * 2 * (2 * 2 * 512 - 2 * 512)


def test_attention_with_a_gate_projects_it_beside_the_queries() -> None:
    plain, gated = (hybrid("*", attention_output_gate=gate) for gate in (False, True))
    assert weights_of(gated, [0])[0] - weights_of(plain, [0])[0] == 1024**2
    held = [byte_counts.layer_held(load(model), 0).for_weight for model in (plain, gated)]
    assert held[1] - held[0] == 1024 * 2 * 1024
    assert "--attention-output-gate" in model_flags(gated)
    latent = {"kv_rank": 64, "nope_head_dim": 32, "rope_head_dim": 16, "value_head_dim": 32}
    with pytest.raises(ValidationError, match=r"output_gate does not go with latent_attention"):
        small(attention_output_gate=True, latent_attention=latent)


def test_layers_of_prediction_have_their_own_kinds() -> None:
    alone = hybrid("M*-", mamba={"groups": 2})
    more = hybrid("M*-/*-/*-", mamba={"groups": 2}, prediction_layers=2)
    predicted = weights_of(more, [1, 2])[0] + 2 * 1024**2
    assert all_weights(more) == all_weights(alone) + 2 * predicted
    output = load(alone).output().weight
    layers = load(more).layer(1).weight + load(more).layer(2).weight
    joined = 2 * 1024 * 2 * 1024**2 / a100().matrix_products.reached
    assert load(more).output().weight == pytest.approx(
        3 * output + 2 * (layers + joined + 4 * a100().kernels.seconds)
    )


def busiest(weights: tuple[float, ...], counts: layout.Layout, placement: Placement) -> float:
    work, layers = [0.5, *[0.0] * (placement.pipeline_size - 1)], iter(weights)
    work[placement.rank_of[-1]] += 1.5
    for rank, count in zip(placement.rank_of, counts, strict=True):
        work[rank] += sum(itertools.islice(layers, count))
    return max(work)


@pytest.mark.parametrize(
    ("placement", "slack"), [(looped(4), 1.0), (v_shape(3), 1.06), (looped(3, 2), 1.06)]
)
@pytest.mark.parametrize("kinds", ["MM*-MM*-MMM-", "------MMMMMM", "-M*--M*--M*-"])
def test_layers_of_unequal_work_are_balanced(
    placement: Placement, slack: float, kinds: str
) -> None:
    weights = tuple({"M": 1.0, "*": 0.7, "-": 1.9}[kind] for kind in kinds)
    found = layout.weighed(weights, placement, 0.5, 1.5)
    assert all(sum(counts) == 12 and min(counts) >= 0 for counts in found)
    every = (
        tuple(after - first for first, after in itertools.pairwise((0, *cuts, 12)))
        for cuts in itertools.combinations(range(1, 12), placement.num_stages - 1)
    )
    best = min(busiest(weights, counts, placement) for counts in every)
    assert min(busiest(weights, c, placement) for c in found) <= best * slack + 1e-9


def test_heavy_layers_in_front_of_a_v_leave_every_rank_as_much() -> None:
    """Several borders have to move at once: a layer goes from the turn of the V to its ends."""
    weights = (*(4.0,) * 4, *(1.0,) * 12)
    found = layout.weighed(weights, v_shape(4), 0.0, 0.0)
    work = [[sum(weights[i] for i in held) for held in _by_rank(counts)] for counts in found]
    assert [7.0] * 4 in work


def _by_rank(counts: layout.Layout) -> list[list[int]]:
    """Layers of each rank of a V."""
    layers = iter(range(sum(counts)))
    stages = [list(itertools.islice(layers, count)) for count in counts]
    return [stages[r] + stages[-1 - r] for r in range(len(stages) // 2)]


def test_stages_cost_what_their_kinds_cost_and_the_flags_say_them() -> None:
    model = hybrid("--------MMMM****", mamba={"groups": 2}, ffn_hidden_size=8192)
    (zb_h1, v_half) = candidates_of(["zb-h1", "v-half"])[2:]
    staged = cut_into_stages(load(model), zb_h1, None)
    assert staged is not None
    even = staged.__class__(staged.load, staged.placement, (4, 4, 4, 4))
    assert staged.interval(in_groups=False) < even.interval(in_groups=False)
    assert len({work.total for work in even.work}) == 4
    for candidate, stages in ((zb_h1, 4), (v_half, 8)):
        staged = cut_into_stages(load(model), candidate, None)
        assert staged is not None
        found = predict(staged, candidate, IterationSettings(8), None)
        words = shlex.split(" ".join(flags(found, 8)))
        segments = words[words.index("--hybrid-layer-pattern") + 1].split("|")
        assert "".join(segments) == model.hybrid_layer_pattern
        assert tuple(map(len, segments)) == staged.layout
        assert len(segments) == stages
        assert not {"--pipeline-model-parallel-layout", "--num-layers"} & set(words)


def test_the_arguments_of_a_hybrid_model() -> None:
    words = model_flags(parsed(NEMOTRON_H_8B))
    for flag, value in (
        ("--hybrid-layer-pattern", "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        ("--mamba-num-heads", "128"),
        ("--mamba-head-dim", "64"),
        ("--mamba-num-groups", "8"),
        ("--mamba-state-dim", "128"),
        ("--position-embedding-type", "none"),
        ("--normalization", "RMSNorm"),
        ("--spec", "megatron.core.models.hybrid.hybrid_layer_specs"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--squared-relu" in words


TRANSFORMERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dense": ({}, "*-" * 8, ""),
    "uneven": ({"layers": 7, "vocabulary": 64000}, "*-" * 7, ""),
    "predicting": ({"prediction_layers": 1, "rotary": {"base": 10000}}, "*-" * 8 + "/*-", ""),
    "sparse": (
        {"experts": {**EXPERTS, "dense_layers": 1}, "ffn_hidden_size": 2048},
        "*-" + "*E" * 7,
        "",
    ),
    "sharded": ({"vocabulary": 256000}, "*-" * 8, "--vocabulary on"),
    "sliced": ({"sequence_length": 16384}, "*-" * 8, "--slices 4 --slice-tokens 1024"),
}


@pytest.mark.long
@pytest.mark.parametrize(("changes", "pattern", "more"), TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_a_transformer_in_a_pattern_gets_its_plan_to_the_digit(
    changes: dict[str, Any], pattern: str, more: str, tmp_path: Path, capsys: Any
) -> None:
    """Only its flags differ: they cut the pattern where they cut the layers of the transformer."""
    alone = {"expert": "1", "expert_tensor": "1"} if "experts" in changes else {}
    sizes = "--gpus 4 --tensor 1 --pipeline 4 --micro-batch-size 1 --recompute none --tries 1"
    words = [*sizes.split(), *more.split(), "--schedules", "zb-h1,v-half", "--format", "json"]
    words += [word for name, n in alone.items() for word in (flag_of(name), n)]
    first = {**yaml.safe_load(SMALL), "global_batch_size": 8, **changes}
    of_pattern = {**first, "hybrid_layer_pattern": pattern, "layers": 2 * first["layers"]}
    if "experts" in changes:
        of_pattern["experts"] = EXPERTS
    found = []
    for name, model in (("gpt", first), ("pattern", of_pattern)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(model))
        with briefly():
            assert cli.main(["plan", "--config", str(path), *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    layouts = [[row.pop("flags") for row in of["ranked"]] for of in found]
    assert found[0] == found[1]
    assert len(found[0]["ranked"]) >= 3
    for gpt, hybrid_flags in zip(*layouts, strict=True):
        (segments,) = (f.split("'")[1] for f in hybrid_flags if f.startswith("--hybrid-layer"))
        assert segments.replace("|", "") == pattern
        counts = [len(s.split("/")[0]) // 2 for s in segments.split("|")]
        for flag in gpt:
            if flag.startswith("--pipeline-model-parallel-layout"):
                letters = layout.unrolled(flag.split("'")[1]).split("|")
                assert [stage.count("t") for stage in letters] == counts
        assert min(counts) >= 0 and sum(counts) == first["layers"]


def test_only_a_transformers_pattern_is_planned_as_one() -> None:
    for pattern, dense, sparse in (("*-*-", 2, 0), ("*-*E*E", 1, 2), ("*E", 0, 1)):
        assert mixers.layers_of_two(pattern) == (dense, sparse)
        assert mixers.layers_of_two(f"{pattern}/{pattern[-2:]}") == (dense, sparse)
    for pattern in ("*-*", "-*-*", "*E*-", "M-*-", "*-*-/*E", "*-/-", "", "*--"):
        assert mixers.layers_of_two(pattern) is None
    plain = hybrid("*-*-M-", mamba={"groups": 2})
    assert plain.as_transformer is plain
    assert plain.pattern == plain.hybrid_layer_pattern
    whole = hybrid("*-*-*-").as_transformer
    assert (whole.layers, whole.kinds, whole.pattern) == (3, "", "*-*-*-")
    assert whole.placed_pattern((1, 0, 2)) == "*-||*-*-"


HYBRID_TRAINING = (
    "--hidden-size 512 --num-attention-heads 8 --seq-length 1024 --global-batch-size 16 "
    "--micro-batch-size 1 --padded-vocab-size 32000 --mamba-num-groups 2 "
    "--untie-embeddings-and-output-weights --swiglu --attention-backend flash"
).split()


def training_words(pattern: str, *more: str) -> list[str]:
    return [*HYBRID_TRAINING, "--hybrid-layer-pattern", pattern, *more]


@pytest.mark.skipif(versions.core_series() < (0, 17), reason="it had another name in 0.16")
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M*|M-|M*", "'M*|M-|M*' has 3 stages, which --pipeline-model-parallel-size 2 does not"),
        ("M*||M-|M*", "'M*||M-|M*': stage 1 of 0 to 3 has no layers: give it one, since only"),
        ("M*QM-", "'M*QM-' has layers of the kind Q, whose costs the planner cannot count"),
        ("M*M-/*/-", "'M*M-/*/-' must have the same layers after each '/'"),
    ],
    ids=["stages", "empty", "letter", "depths"],
)
def test_a_pattern_of_a_training_is_checked_before_a_search(
    pattern: str, words: str, capsys: Any
) -> None:
    args = training_words(pattern, "--pipeline-model-parallel-size", "2")
    with patch("megatron_zb.plan.search.search", side_effect=AssertionError("a search")):
        assert cli.main(["plan", "--gpus", "4", "--", *args]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(versions.core_series() < (0, 17), reason="it had another name in 0.16")
def test_the_run_of_a_training_has_the_stages_that_its_pattern_writes(capsys: Any) -> None:
    """Letters are counted one by one where a stage cuts a layer of a transformer."""
    flags_of_run = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "v-half"]
    for pattern, letters in (
        ("MM-|M*-|M-|*", (3, 3, 2, 1)),
        ("*-*|-*-|*-|*-", (3, 3, 2, 2)),
        ("*-*-|*-|*-|*-/*-", (2, 1, 1, 1)),
    ):
        words = training_words(pattern, *flags_of_run)
        with briefly():
            sizes = ["--gpus", "2", "--schedules", "zb-h1", "--tries", "1", "--format", "json"]
            assert cli.main(["plan", *sizes, "--", *words]) == 0
        given = json.loads(capsys.readouterr().out)["given"]
        (said,) = (flag for flag in given["flags"] if flag.startswith("--hybrid-layer-pattern"))
        assert said.split("'")[1] == pattern
        counts = [len(re.sub("[^t]", "", stage)) for stage in given["layout"].split("|")]
        assert tuple(counts) == letters


def test_sizes_are_divided_by_the_kinds_that_there_are() -> None:
    model = hybrid("MM", mamba={"heads": 24, "groups": 4}, ffn_hidden_size=1023)
    found = list(strategies(model, a100(), 8, 32, Choices(context=(1, 2))))
    assert {s.tensor for s in found} == {1, 2, 4}
    assert {s.context for s in found} == {1}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("hybrid_layer_pattern: MMMM|----", "fixes the layers of each stage.* leave out '|'"),
        ("hybrid_layer_pattern: MMMM---D", "layers of the kind D, whose costs .*give only M"),
        ("hybrid_layer_pattern: M-M-", "has 4 layers, and layers is 8; give as many"),
        ("hybrid_layer_pattern: M-M-M-M-/M-", "same layers after each '/'.* prediction_layers: 1"),
        ("hybrid_layer_pattern: M-M-M-ME", "experts and the layers E .* go together"),
        ("mamba: {groups: 2}", "mamba is for the layers M of a hybrid_layer_pattern"),
        ("hybrid_layer_pattern: M-M-M-M-\nmamba: {groups: 5}", "32 heads .* by mamba.groups 5"),
        ("hybrid_layer_pattern: M-M-M-M-\nmamba: {head_dim: 60}", "mamba.head_dim 60; give mamba"),
        (
            "gated_delta: {key_heads: 2}",
            "gated_delta is for the layers G of a hybrid_layer_pattern",
        ),
        ("gated_delta: {key_heads: 5}", "value_heads 32 cannot be divided by .*key_heads 5; give"),
        ("gated_mlp: true\nsquared_relu: true", "gated_mlp and squared_relu exclude each other"),
    ],
)
def test_a_pattern_that_cannot_be_planned_says_what_to_change(lines: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parsed(SMALL + lines)


def test_a_pattern_repeats_the_same_layers_for_each_token_that_is_predicted() -> None:
    mixers.check_hybrid("M-M-/M-/M-", 4, 2)
    for pattern, tokens in (("M-M-/M-/M-", 1), ("M-M-/M-/MM", 2), ("M-M-", 1)):
        with pytest.raises(ValueError, match="must have the same layers after each '/'"):
            mixers.check_hybrid(pattern, 4, tokens)
