"""Blockwise distillation: what each block learns, and what it begins with."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_cases import (
    EMPTY,
    GPT,
    HALF,
    LAYERS,
    LINEAR,
    LLAMA,
    SEQUENCE,
    SLOW,
    Key,
    Learnt,
    differences,
    enter,
    fresh,
    job_of,
    learnt_alone,
    learnt_in_pipeline,
    whole_model,
)
from prepared_text import prepared
from ranks import RankPools

from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.place import parse_distribution
from megatron_zb.distill.student import StudentConfig, TeacherShape, library
from megatron_zb.distill.student_block import cosine, mse, normalised_mse
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.train.checkpoint_contents import check_contents

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"gpt": GPT, "llama": LLAMA}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(tmp_path_factory.mktemp("text"), most_bytes=100_000)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks write their teachers, and find those of earlier cases."""
    return tmp_path_factory.mktemp("teachers")


def case_of(model: str, text: str, teachers: Path) -> dict[str, Any]:
    """What the functions that ranks run are given."""
    return {"corpus": text, "teacher": str(teachers / model), "model": MODELS[model]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "candidates", "distribution", "shares"),
    [
        ("gpt", [HALF, SLOW], "0-1:1,2-3:1", [1, 1, 1, 1]),
        ("gpt", [HALF], "0-3:2", [2, 2, 2, 2]),
        ("gpt", [HALF, SLOW], "0:1,1:2,2-3:1", [1, 2, 1, 1]),
        ("llama", [HALF, LINEAR, EMPTY], "0:2,1-3:2", [2, 2, 2, 2]),
        ("llama", [SLOW], "0:1,1:1,2:1,3:1", [1, 1, 1, 1]),
    ],
)
def test_blocks_learn_in_the_pipeline_what_they_learn_alone(
    model: str,
    candidates: Sequence[Mapping[str, Any]],
    distribution: str,
    shares: list[int],
    ranks: RankPools,
    text: str,
    teachers: Path,
) -> None:
    """Gradients and weights to the last bit, with every rank as far ahead as it likes."""
    size = sum(int(part.partition(":")[2]) for part in distribution.split(","))
    teacher = str(teachers / model)
    case: dict[str, Any] = {
        "corpus": text,
        "teacher": teacher,
        "model": MODELS[model],
        "candidates": candidates,
    }
    (alone,) = ranks(1).run(learnt_alone, **case, shares=shares)
    flags = ["--distribution", distribution]
    seen: set[Key] = set()
    for learnt in ranks(size).run(learnt_in_pipeline, **case, flags=flags):
        assert differences(learnt, alone) == []
        seen |= set(learnt)
    assert seen == {(block, c["name"]) for block in range(LAYERS) for c in candidates}
    _check_learning(alone)


def _check_learning(alone: Mapping[Key, Learnt]) -> None:
    """Parity of what does not move would prove little."""
    for learnt in alone.values():
        first, last = learnt.gradients[0], learnt.gradients[-1]
        assert any(bool((a != b).any()) for a, b in zip(first, last, strict=True))


def first_outputs(corpus: str, teacher: str, model: Mapping[str, Any]) -> dict[str, float]:
    """How far fresh candidates of block 1 are from the teacher's, of its mean square."""
    from distillation_cases import _recorded_lessons, _rotary

    enter(model, teacher)
    candidates: list[Mapping[str, Any]] = [{"name": "same"}, HALF, SLOW, LINEAR, EMPTY]
    job = job_of(corpus, teacher, candidates)
    given, wanted = _recorded_lessons(job)[0][1]
    found = {}
    for shape in job.library[1]:
        with torch.no_grad():
            said, _ = fresh(job, 1, shape)(given, attention_mask=None, rotary_pos_emb=_rotary(job))
        found[shape.name] = float(normalised_mse(said, wanted))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_candidates_begin_as_what_is_left_of_the_teacher(
    model: str, ranks: RankPools, text: str, teachers: Path
) -> None:
    (distances,) = ranks(1).run(first_outputs, **case_of(model, text, teachers))
    assert distances["same"] == 0.0
    assert all(0 < distances[name] < 1 for name in ("half", "slow", "linear", "empty"))


def inherited_exactly(corpus: str, teacher: str, model: Mapping[str, Any]) -> list[float]:
    """The largest error of candidates for a teacher that they can imitate from the start."""
    from distillation_cases import student_layer, teacher_layer

    from megatron_zb.distill.initialisation import inherit

    enter(model, teacher)
    job = job_of(corpus, teacher, [HALF, SLOW, LINEAR])
    sizes = job.teacher.shape
    taught = teacher_layer(job.args, 0)
    with torch.no_grad():
        for name, parameter in taught.named_parameters():
            parameter.normal_(std=0.5)
            if "fc2.weight" in name:  # every other channel says nothing
                parameter[:, ::2] = 0
            elif "linear_qkv" in name:  # neighbouring groups have the same key and value
                rows = parameter.view(sizes.num_query_groups, 3, -1)
                rows[1::2, 1:] = rows[::2, 1:]
    errors = []
    for shape in job.library[0]:
        layer = student_layer(job.args, shape, 0)
        inherit(layer, taught, shape, sizes)
        # one token attends to itself alone, which is linear
        given = torch.randn(1 if shape.name == "linear" else SEQUENCE, 2, sizes.hidden_size)
        with torch.no_grad():
            if shape.name == "linear":
                attended, bias = taught.self_attention(given, attention_mask=None)
                expected = attended + (0 if bias is None else bias)
                said = layer.self_attention(given)[0]
            else:
                expected, _ = taught(given, attention_mask=None)
                said, _ = layer(given, attention_mask=None)
        errors.append(float((said - expected).abs().max() / expected.abs().max()))
        if shape.name == "linear" and not job.args.swiglu:
            small = 1e-5 * given  # where GELU is half its input
            with torch.no_grad():
                for parameter in (taught.mlp.linear_fc1.bias, layer.mlp.bias):
                    parameter.zero_()
                taught.mlp.linear_fc2.bias.zero_()
                expected, _ = taught.mlp(small)
                said, _ = layer.mlp(small)
            errors[-1] += float((said - expected).abs().max() / expected.abs().max()) / 100
    return errors


@pytest.mark.parametrize("model", MODELS)
def test_what_the_teacher_does_not_use_is_not_missed(
    model: str, ranks: RankPools, text: str, teachers: Path
) -> None:
    """Pruned channels, merged heads and a linear layer, each where it can be exact."""
    (errors,) = ranks(1).run(inherited_exactly, **case_of(model, text, teachers))
    assert len(errors) == 3
    assert max(errors) < 1e-5


def merged_heads(corpus: str, teacher: str, model: Mapping[str, Any]) -> tuple[Any, Any]:
    """Keys and values of a teacher's four groups, and of a student's two: (groups, 2, ...)."""
    from distillation_cases import student_layer, teacher_layer

    from megatron_zb.distill.initialisation import inherit

    enter(model, teacher)
    job = job_of(corpus, teacher, [SLOW])
    taught = teacher_layer(job.args, 0)
    with torch.no_grad():
        for parameter in taught.parameters():
            parameter.normal_()
    (shape,) = job.library[0]
    learner = student_layer(job.args, shape, 0)
    inherit(learner, taught, shape, job.teacher.shape)
    head = job.args.hidden_size // job.args.num_attention_heads

    def keys_and_values(layer: Any, groups: int) -> Any:
        weight = layer.self_attention.linear_qkv.weight.detach()
        return weight.view(groups, -1, head, job.args.hidden_size)[:, -2:].tolist()

    return keys_and_values(taught, 4), keys_and_values(learner, 2)


def test_fewer_heads_of_keys_and_values_are_means_of_the_teachers(
    ranks: RankPools, text: str, teachers: Path
) -> None:
    """GQA, arXiv 2305.13245, section 2.1."""
    ((taught, learnt),) = ranks(1).run(merged_heads, **case_of("llama", text, teachers))
    four = torch.tensor(taught)
    assert torch.allclose(torch.tensor(learnt), (four[::2] + four[1::2]) / 2)


def counted_times(corpus: str, teacher: str, model: Mapping[str, Any]) -> list[Any]:
    """Times of two blocks by a clock that stands still but where a part of the work is done."""
    from unittest import mock

    from megatron_zb.distill import block_times
    from megatron_zb.distill.student_block import StudentBlock

    enter(model, teacher)
    job = job_of(corpus, teacher, [{"name": "same"}, HALF])
    same, half = job.library[0]
    now = 0.0

    def moves(seconds: float, function: Any) -> Any:
        def moved(*arguments: Any, **keywords: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*arguments, **keywords)

        return moved

    def layer(*arguments: Any) -> Any:
        built = teacher_layer(*arguments)
        built.forward = moves(1, built.forward)
        return built

    teacher_layer = block_times.teacher_layer
    with (
        mock.patch.object(block_times.time, "perf_counter", lambda: now),
        mock.patch.object(block_times, "teacher_layer", layer),
        mock.patch.object(block_times, "seconds_over_a_link", lambda *_: 6.0),
        mock.patch.object(StudentBlock, "study", moves(10, StudentBlock.study)),
        mock.patch.object(StudentBlock, "update", moves(100, StudentBlock.update)),
    ):
        times = block_times.measure(job.args, [(0, [same, half]), (1, [same])], job.teacher.shape)
    return [(time.teacher, time.student, time.update, time.reduce) for time in times]


def test_the_times_of_a_block_are_those_of_its_parts(
    ranks: RankPools, text: str, teachers: Path
) -> None:
    """All its candidates count; gradients take the time of a link by their number."""
    (times,) = ranks(1).run(counted_times, **case_of("llama", text, teachers))
    qkv, projection, norms, channel = 3 * 32 * 32, 32 * 32, 2 * 32, 3 * 32
    whole, half = (qkv + projection + norms + width * channel for width in (64, 32))
    assert times == [(1, 20, 200, 6.0), (1, 10, 100, pytest.approx(6.0 * whole / (whole + half)))]


def stitched(corpus: str, teacher: str, folder: str, mixed: bool) -> tuple[float, float]:
    """The loss that the student had in the pipeline, and in one piece from its checkpoint."""
    import argparse

    import torch.distributed as dist
    from distillation_cases import _store
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )

    from megatron_zb.distill.evaluation import compare
    from megatron_zb.distill.flags import BEST
    from megatron_zb.distill.loop import distribution_of, open_job
    from megatron_zb.distill.stitching import choose, save_student
    from megatron_zb.train import data

    enter(LLAMA, teacher)
    job = job_of(
        corpus,
        teacher,
        [HALF, LINEAR, EMPTY],
        *("--distribution", "0-1:1,2-3:1", "--eval-iters", "1", "--split", "80,20,0"),
        *("--save-student", folder),
    )
    run = open_job(job, distribution_of(job), _store())
    order = [0, 1, 2, 0] if mixed else [0, 0, 0, 0]
    losses = {
        (candidate.block, candidate.shape.name): float(number != order[candidate.block])
        for candidates in run.stage_blocks.student_blocks
        for number, candidate in enumerate(candidates)
    }
    chosen = choose(BEST, run.stage_blocks, losses)
    loss = compare(job.args, run.distribution, run.stage_blocks, chosen, run.held_out).student
    save_student(job.args, run.stage_blocks, chosen, 1)
    run.close()

    path = f"{folder}/iter_0000001"
    saved = dist_checkpointing.load_common_state_dict(path)["args"]
    if mixed:
        config = HeterogeneousTransformerConfig(
            num_layers=LAYERS,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=4,
            ffn_hidden_size=64,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            heterogeneous_layers_config_encoded_json=saved.heterogeneous_layers_config_encoded_json,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_heterogeneous_layer_spec(config),
            vocab_size=384,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
    else:
        model = whole_model(argparse.Namespace(**vars(job.args)), saved.ffn_hidden_size)
    state = {"model": model.sharded_state_dict()}
    model.load_state_dict(dist_checkpointing.load(state, path)["model"])
    model.eval()
    total = tokens = 0.0
    with torch.no_grad():
        for number in range(job.args.num_microbatches):
            batch = data.microbatch(run.held_out, job.args, 2 * number)
            losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            total += float((losses * batch["loss_mask"]).sum())
            tokens += float(batch["loss_mask"].sum())
    dist.barrier()
    return loss, total / tokens


@pytest.mark.parametrize("mixed", [False, True], ids=["uniform", "heterogeneous"])
def test_the_stitched_student_is_megatrons(
    mixed: bool, ranks: RankPools, text: str, teachers: Path, tmp_path: Path
) -> None:
    """A GPTModel, heterogeneous where it must be, loads it and has the loss of the pipeline."""
    case: dict[str, Any] = {
        "corpus": text,
        "teacher": str(teachers / "llama"),
        "folder": str(tmp_path / "s"),
    }
    for in_pipeline, in_one_piece in ranks(2).run(stitched, **case, mixed=mixed):
        assert in_pipeline == pytest.approx(in_one_piece, rel=1e-6)
        assert in_pipeline > 1


def test_losses() -> None:
    teacher = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    student = torch.tensor([[[4.0, -3.0]], [[2.0, 0.0]]])
    assert mse(student, teacher).item() == pytest.approx((1 + 49 + 1) / 4)
    assert normalised_mse(student, teacher).item() == pytest.approx((1 + 49 + 1) / 26)
    assert cosine(student, teacher).item() == pytest.approx((1 - 0 + 1 - 1) / 2)
    assert normalised_mse(torch.zeros_like(teacher), teacher).item() == 1


def steps_in_low_precision() -> tuple[list[float], float]:
    """What bfloat16 weights become under steps that are too small for them, and their sum."""
    import argparse

    from megatron_zb.distill.student_block import BlockOptimizer
    from megatron_zb.train import flags

    known = flags.parser().defaults() | {"expert_model_parallel_size": 1}
    known |= {"lr": 1e-4, "train_iters": 100, "lr_decay_iters": 100, "clip_grad": 0.0}
    known |= {"global_batch_size": 1, "lr_decay_style": "constant", "weight_decay": 0.0}
    weight = torch.nn.Parameter(torch.ones(2, 1, dtype=torch.bfloat16))
    optimizer = BlockOptimizer(argparse.Namespace(**known), {"weight": weight}, None)
    seen = []
    for _ in range(60):
        for _ in range(256):
            weight.grad = torch.full_like(weight, 1 / 256)
            optimizer.collect()
        summed = float(optimizer.gradients()["weight"][0])
        optimizer.step(None)
        seen.append(float(weight[0]))
    return seen, summed


def test_small_steps_of_low_precision_add_up(ranks: RankPools) -> None:
    ((seen, summed),) = ranks(1).run(steps_in_low_precision)
    assert summed == 1.0, "in bfloat16 a sum of 256 parts stops growing early"
    assert seen[0] == 1.0, "one step is too small for bfloat16"
    assert seen[-1] < 0.996, "sixty are not"


TEACHER = TeacherShape(4, 32, 4, 4, 64)


def _student(text: str) -> StudentConfig:
    return config.parse(text.encode(), "student.yaml", StudentConfig)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: a", "'candidates' is missing: give, for example, candidates: .*half"),
        ("name: a\ncandidates: []", "'candidates' is a list: .* at least 1 item"),
        ("name: a\ncandidates: [{name: h, mpl: {}}]", "'candidates.0.mpl' is no .* mean mlp"),
        ("name: a\ncandidates: [{name: h, mlp: {kind: moe}}]", "'candidates.0.mlp.kind' is 'moe'"),
        (
            "name: a\ncandidates: [{name: h, mlp: {kind: linear, ffn_hidden_size: 3}}]",
            "ffn_hidden_size is for kind: mlp, not for kind: linear; leave it out",
        ),
        (
            "name: a\ncandidates: [{name: h, mlp: {ffn_hidden_size: 3, ffn_fraction: 0.5}}]",
            "ffn_hidden_size and ffn_fraction say the same",
        ),
        (
            "name: a\ncandidates: [{name: h, attention: {kind: no_op, query_groups: 1}}]",
            "query_groups is for kind: attention, not for kind: no_op",
        ),
        ("name: a\ncandidates: [{name: h}, {name: h}]", "two candidates are called h"),
        ("name: a\ncandidates: [{name: a/b}]", "'candidates.0.name' is 'a/b'"),
        (
            "name: a\ncandidates: [{name: h}]\n"
            "exceptions:\n- {blocks: [4], candidates: [{name: h}]}",
            "exceptions name block 4, but the teacher has blocks 0 to 3",
        ),
        (
            "name: a\ncandidates: [{name: h}]\n"
            "exceptions:\n- {blocks: [1, 1], candidates: [{name: h}]}",
            "exceptions name block 1 twice",
        ),
        (
            "name: a\ncandidates: [{name: h, attention: {query_groups: 3}}]",
            "query_groups 3 does not divide the teacher's 4, .* query_groups: 2",
        ),
        (
            "name: a\ncandidates: [{name: h, mlp: {ffn_hidden_size: 65}}]",
            "ffn_hidden_size 65 is more than the teacher's 64, .* ffn_hidden_size: 32",
        ),
    ],
)
def test_a_student_that_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        library(_student(text), TEACHER)


def test_exceptions_are_for_their_blocks() -> None:
    blocks = library(
        _student(
            "name: a\ncandidates: [{name: h, mlp: {ffn_fraction: 0.25}}]\n"
            "exceptions:\n- {blocks: [3, 1], candidates: [{name: x, attention: {kind: no_op}}]}"
        ),
        TEACHER,
    )
    assert [[c.name for c in block] for block in blocks] == [["h"], ["x"], ["h"], ["x"]]
    assert [block[0].ffn_hidden_size for block in blocks] == [16, 64, 16, 64]
    assert blocks[1][0].attention == "no_op"


@pytest.mark.parametrize("path", sorted((ROOT / "configs/students").glob("*.yaml")), ids=str)
def test_the_students_that_come_with_it_fit(path: Path) -> None:
    teacher = TeacherShape(8, 128, 8, 8, 512)
    assert len(library(config.read(path, StudentConfig), teacher)) == 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0-3:all", "--distribution: '0-3:all' .* is no stage: .*; here, for ex.* 0-1:1,2-3:1$"),
        ("0-1:1,3:1", "stage 1 .* has blocks 3 to 3: give blocks from 2 on"),
        ("0-2:1", "ends with block 2, but the last block is 3"),
        ("0-3:1", "is for 1 ranks, but 2 were started: .*--nproc-per-node 1"),
        ("0-3:0", "give every stage 1 or more"),
        ("3-0:2", "stage 0 .* has blocks 3 to 0: give blocks from 0 on"),
        ("0-3", "is for 1 ranks, but 2 were started"),
    ],
)
def test_a_distribution_that_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_distribution(text, 4, 2)


def test_an_example_of_a_distribution_fits_places_of_several_ranks() -> None:
    lanes = Lanes(tensor=4)
    for world_size, example in ((None, "0-1:1,2-3:1"), (12, "0-1:1,2-3:2")):
        with pytest.raises(UsageError, match=f"here, for example, {example}$"):
            parse_distribution("blocks", 4, world_size, lanes=lanes)
        parse_distribution(example, 4, world_size, lanes=lanes)


class _Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _word(text: str) -> bytes:
    """Text as a pickle has it."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


@pytest.mark.parametrize(
    "index",
    [
        lambda mark: pickle.dumps(_Calls(exec, f"open({str(mark)!r}, 'w')")),
        lambda mark: pickle.dumps(_Calls(torch.load, str(mark))),
        # through a record into what its module has imported
        lambda mark: (
            b"\x80\x04"
            + _word("torch.distributed.checkpoint.filesystem")
            + _word("os.system")
            + b"\x93"
            + _word(f"touch {mark}")
            + b"\x85R."
        ),
    ],
    ids=["exec", "torch.load", "through-a-module"],
)
def test_an_index_that_would_call_something_is_refused(index: Any, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(index(tmp_path / "mark"))
    with pytest.raises(UsageError, match=r"--load: .* would call .*: do not load it"):
        check_contents(tmp_path, "--load")
    assert not (tmp_path / "mark").exists()


def test_an_index_that_is_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read .* torch_dist"):
        check_contents(tmp_path, "--load")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04 damaged")
    with pytest.raises(UsageError, match="is damaged"):
        check_contents(tmp_path, "--load")
