"""Whatever a file or a command line holds: an answer or one sentence, never a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import drawn_sizes
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traced_steps import profile, ran

from megatron_zb.cli import main as cli
from megatron_zb.distill.flags import parse as parse_distillation
from megatron_zb.distill.place import parse_distribution
from megatron_zb.distill.student import TeacherShape
from megatron_zb.distill.student_files import library_of, read_student
from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import Profile, read_profile, write_profile
from megatron_zb.measured.trace import compare, trace_path, write_trace
from megatron_zb.plan.request import read as read_job
from megatron_zb.train.arguments import parse

pytestmark = pytest.mark.usefixtures("brief_searches")

STUDENTS = Path(__file__).resolve().parents[2] / "configs" / "students"
_SHIPPED = sorted(path.name for path in STUDENTS.glob("*.yaml"))
_FUZZ = settings(
    max_examples=300 if drawn_sizes.IS_FULL else 50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "!!python/object/apply:os.system ['true']", "E", "Ett", "*a"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def changed(data: st.DataObject, value: Any) -> Any:
    """A tree with another value, one more field or one less, somewhere in it."""
    tree = copy.deepcopy(value)
    at = tree
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return data.draw(_VALUES)
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and data.draw(st.integers(0, 3)):
            at = at[key]
            continue
        if data.draw(st.booleans()):
            at[key] = data.draw(_VALUES)
        elif isinstance(at, dict):
            at[data.draw(st.text(max_size=8))] = at.pop(key)
        else:
            at.insert(key, at[key])
        return tree


def one_sentence(error: UsageError) -> None:
    assert str(error)
    assert "\n" not in str(error)


@_FUZZ
@given(data=st.data())
def test_profiles(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(changed(data, profile().model_dump())), encoding="utf-8", errors="replace"
    )
    try:
        assert isinstance(read_profile(path), Profile)
    except UsageError as error:
        one_sentence(error)


@_FUZZ
@given(raw=st.binary(max_size=200))
def test_bytes_as_profiles_and_traces(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(raw)
    with pytest.raises(UsageError) as refused:
        read_profile(path)
    one_sentence(refused.value)
    write_profile(profile(), path)
    trace_path(path).write_bytes(raw)
    with pytest.raises(UsageError) as refused:
        compare(path)
    one_sentence(refused.value)


@_FUZZ
@given(data=st.data())
def test_traces(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "run.yaml"
    write_profile(profile(), path)
    write_trace(ran(), path)
    valid = json.loads(trace_path(path).read_text(encoding="utf-8"))
    text = json.dumps(changed(data, valid))
    trace_path(path).write_text(text, encoding="utf-8", errors="replace")
    try:
        found = compare(path)
    except UsageError as error:
        one_sentence(error)
    else:
        assert found.measured.schedule.validate()


_FLAGS = st.sampled_from(
    [
        "--pipeline-schedule",
        "--pipeline-memory-limit",
        "--pipeline-profile",
        "--pipeline-replan-every",
        "--pipeline-timeout",
        "--pipeline-layer-layout",
        "--pipeline-model-parallel-size",
        "--tensor-model-parallel-size",
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--seq-length",
        "--micro-batch-size",
        "--global-batch-size",
        "--train-iters",
        "--lr",
        "--clip-grad",
        "--split",
        "--cpu",
        "--bf16",
    ]
)
_WORDS = st.one_of(
    st.sampled_from(["v-half", "auto", "0", "-1", "2", "4", "0.5", "nan", "inf", "1e400", "E|tL"]),
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
_VALID = (
    "--cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 0.01 --data-path corpus "
    "--pipeline-model-parallel-size 2"
).split()


@_FUZZ
@given(more=st.lists(st.tuples(_FLAGS, _WORDS), max_size=4), world_size=st.integers(1, 8))
def test_command_lines_of_training(
    capsys: pytest.CaptureFixture[str], more: list[tuple[str, str]], world_size: int
) -> None:
    argv = _VALID + [word for pair in more for word in pair]
    try:
        parse(argv, world_size)
    except UsageError as error:
        one_sentence(error)
    except SystemExit as end:  # argparse has printed its sentence, or the help
        assert end.code in (0, 2)
    capsys.readouterr()


_OF_DISTILLATION = st.sampled_from(
    "--teacher-load --student-config --candidate --loss --distribution --run-ahead --lr --bf16 "
    "--micro-batch-size --global-batch-size --train-iters --save-interval --eval-iters "
    "--pipeline-timeout --seq-length --split".split()
)


@_FUZZ
@given(more=st.lists(st.tuples(_OF_DISTILLATION, _WORDS), max_size=4))
def test_command_lines_of_distillation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[tuple[str, str]]
) -> None:
    valid = f"--cpu --teacher-load {tmp_path} --student-config half_mlp --micro-batch-size 1"
    rest = "--global-batch-size 4 --train-iters 2 --lr 0.01 --data-path corpus"
    argv = [*valid.split(), *rest.split(), *(word for pair in more for word in pair)]
    try:
        parse_distillation(argv)
    except UsageError as error:
        one_sentence(error)
    except SystemExit as end:
        assert end.code in (0, 2)
    capsys.readouterr()


@_FUZZ
@given(data=st.data())
def test_students(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "student.yaml"
    valid = yaml.safe_load((STUDENTS / data.draw(st.sampled_from(_SHIPPED))).read_text())
    path.write_text(yaml.safe_dump(changed(data, valid)), encoding="utf-8", errors="replace")
    teacher = TeacherShape(
        num_layers=8,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=256,
    )
    try:
        assert len(library_of(read_student(path), teacher)) == 8
    except UsageError as error:
        one_sentence(error)


@_FUZZ
@given(text=st.text(max_size=12) | st.text("0123456789-,:", max_size=16))
def test_distributions(text: str) -> None:
    try:
        found = parse_distribution(text, num_blocks=8, world_size=None)
    except UsageError as error:
        one_sentence(error)
    else:
        assert found.num_blocks == 8


_OF_PLAN = (
    "--gpus --device --gpu-memory --global-batch-size --seq-length --tensor --pipeline "
    "--micro-batch-size --recompute --schedules --vocabulary --tries --top --microbatches "
    "--memory-limit"
).split()


@_FUZZ
@given(more=st.lists(st.tuples(st.sampled_from(_OF_PLAN), _WORDS), max_size=4))
def test_command_lines_of_plan(
    capsys: pytest.CaptureFixture[str], more: list[tuple[str, str]]
) -> None:
    argv = ["plan", "--config", "gpt_1_5b", "--gpus", "8", *(w for pair in more for w in pair)]
    try:
        job, candidates = read_job(cli.parser().parse_args(argv))
    except UsageError as error:
        one_sentence(error)
    except SystemExit as end:
        assert end.code in (0, 2)
    else:
        assert job.gpus > 0
        assert candidates
    capsys.readouterr()


_OF_SHOW = (
    "--ranks -p -m --microbatches --chunks --group-size --memory-limit --forward --backward "
    "--weight --p2p --blocks --steps --run-ahead --teacher --student --distribution --patches "
    "--time-steps"
).split()


@_FUZZ
@given(
    name=st.sampled_from(["v-half", "zb-h1", "interleaved", "wave", "pipe-bd", "pipefusion"])
    | st.text(max_size=8),
    more=st.lists(
        st.tuples(
            st.sampled_from(_OF_SHOW),
            st.sampled_from(
                [*"0 1 2 3 4 -1 0.3 nan inf 1e999 x 0-1:1 99999999 10000000000000".split(), ""]
            ),
        ),
        max_size=4,
    ),
)
def test_command_lines_of_show(
    capsys: pytest.CaptureFixture[str], name: str, more: list[tuple[str, str]]
) -> None:
    argv = ["show", name, "-p", "2", "-m", "4", *(word for pair in more for word in pair)]
    try:
        code = cli.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert code in (0, 2)
    assert "Traceback" not in captured.err
    assert code == 0 or captured.err.strip()
