"""Training as a user runs it: the command line, logs, checkpoints and mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
from jobs import run_job
from training_jobs import (
    MODULE,
    REPORT,
    SECONDS_TO_REPORT,
    SECONDS_TO_TRAIN,
    Flags,
    Record,
    check_report,
    checkpoint_of,
    end_of,
    script,
    torchrun,
    written,
)

from megatron_zb.errors import UsageError
from megatron_zb.train import arguments as training_arguments

ITERATIONS = 6
SAVED = 3
TRAINING: Flags = {
    "--cpu": True,
    "--pipeline-model-parallel-size": 2,
    "--num-layers": 4,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--seq-length": 32,
    "--micro-batch-size": 1,
    "--global-batch-size": 5,
    "--train-iters": ITERATIONS,
    "--lr": 1e-2,
    "--clip-grad": 0,
    "--eval-interval": 2,
    "--eval-iters": 2,
    "--split": "90,10,0",
}


# Rank r gets the r-th of the lists of arguments that come first.
DIFFERENT_ARGUMENTS = """
import json, os, sys
own = json.loads(sys.argv[1])[int(os.environ["RANK"])]
sys.argv[1:] = [*sys.argv[2:], *own]
from megatron_zb.train.__main__ import main
main()
"""


# Rank 1 stops, or sleeps, when it comes to the pass of that number.
STOPS = """
import os, signal, sys, time
from megatron_zb.runtime import executor
how, number = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = sys.argv[3:]
passes = []

def stopping(compute):
    def stop_at_last(*arguments):
        passes.append(1)
        if os.environ["RANK"] == "1" and len(passes) == number:
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                time.sleep(1000)
        return compute(*arguments)

    return stop_at_last

executor.TRAINING.update({kind: stopping(each) for kind, each in executor.TRAINING.items()})
from megatron_zb.train.__main__ import main
main()
"""


@dataclass(frozen=True)
class Run:
    """The log of a run that went well."""

    records: list[Record]
    printed: str

    def by_iteration(self, key: str, after: int = 0) -> dict[int, float]:
        """Values of the iterations that have one, such as `lm_loss` or `eval_loss`."""
        found = {record["iteration"]: record[key] for record in self.records if key in record}
        return {iteration: value for iteration, value in found.items() if iteration > after}

    @property
    def peaks(self) -> list[int]:
        peaks: list[int] = self.records[-1]["peak_activation_bytes"]
        return peaks


def trained(folder: Path, flags: Flags, *, program: Sequence[str] | None = None) -> Run:
    """Train with `flags` in place of TRAINING's, and read the log.

    With a program, on ranks of torchrun's.
    """
    log = folder / f"{len(list(folder.iterdir()))}.jsonl"
    flags = {**TRAINING, "--log-file": log, **flags}
    ranks = flags["--pipeline-model-parallel-size"] * flags.get("--tensor-model-parallel-size", 1)
    words = written(flags)
    if program is None:
        ended = run_job(ranks, MODULE, words, SECONDS_TO_TRAIN)
    else:
        ended = end_of(torchrun(ranks, *program, *words), SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return Run(records, ended.stdout)


Whole = Callable[[str | None], tuple[Run, Path]]


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An uninterrupted run of a schedule, measured, and where its checkpoints are."""
    done: dict[str | None, tuple[Run, Path]] = {}

    def run(schedule: str | None) -> tuple[Run, Path]:
        if schedule not in done:
            folder = tmp_path_factory.mktemp(schedule or "upstream")
            flags = {
                "--pipeline-schedule": schedule,
                "--data-path": corpus,
                "--measure-activation-memory": True,
                "--save": folder / "checkpoints",
                "--save-interval": SAVED,
            }
            done[schedule] = trained(folder, flags), folder / "checkpoints"
        return done[schedule]

    return run


@pytest.mark.slow
def test_losses_are_upstreams_while_memory_is_measured(whole: Whole) -> None:
    (upstream, _), (ours, _) = whole(None), whole("v-half")
    assert list(upstream.by_iteration("lm_loss")) == list(range(1, ITERATIONS + 1))
    assert list(upstream.by_iteration("eval_loss")) == [2, 4, 6]
    for key in ("lm_loss", "eval_loss"):
        assert ours.by_iteration(key) == upstream.by_iteration(key)
    assert ours.by_iteration("grad_norm") == pytest.approx(
        upstream.by_iteration("grad_norm"), rel=1e-6, abs=0
    )
    losses = upstream.by_iteration("lm_loss")
    assert losses[ITERATIONS] < losses[1] - 0.3, "a model that does not learn proves little"
    assert all(peak > 0 for peak in (*upstream.peaks, *ours.peaks))


@pytest.mark.slow
def test_mock_data_needs_no_file(tmp_path: Path) -> None:
    data = {"--mock-data": True, "--vocab-size": 64}
    flags = {**data, "--split": None, "--train-iters": 3}
    own, ours = (trained(tmp_path, {**flags, "--pipeline-schedule": s}) for s in (None, "v-half"))
    assert list(own.by_iteration("lm_loss")) == [1, 2, 3]
    for key in ("lm_loss", "eval_loss"):
        assert ours.by_iteration(key) == own.by_iteration(key)
    cut = {**flags, "--pipeline-schedule": "v-half", "--pipeline-slices": 4}
    cut["--measure-activation-memory"] = True
    sliced = trained(tmp_path, cut)
    assert "microbatches of 4 slices, expected bubble" in sliced.printed
    assert "1.25 microbatches (0.62 of 1F1B's first rank)" in sliced.printed
    for key in ("lm_loss", "eval_loss"):
        assert sliced.by_iteration(key) == pytest.approx(own.by_iteration(key), rel=1e-6, abs=0)
    state = {"--pipeline-recompute": "auto", "--pipeline-memory-limit": 0.55}
    dropped = trained(tmp_path, {**cut, **state})
    assert re.search(r"[1-9]\d* of \d+ forwards keep their input alone", dropped.printed)
    assert max(dropped.peaks) < max(sliced.peaks)
    for key in ("lm_loss", "eval_loss"):
        assert dropped.by_iteration(key) == sliced.by_iteration(key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("v-half", "v-half"), (None, "v-half"), ("v-half", None)]
)
def test_training_continues_from_a_checkpoint(
    before: str | None, after: str | None, whole: Whole, corpus: str, tmp_path: Path
) -> None:
    """Bit-identical under the same schedule; equal losses where the schedule changes."""
    uninterrupted, checkpoints = whole(before)
    load = checkpoint_of(checkpoints, SAVED, tmp_path / "load")
    flags = {"--pipeline-schedule": after, "--data-path": corpus, "--load": load}
    continued = trained(tmp_path, flags)
    assert list(continued.by_iteration("lm_loss")) == list(range(SAVED + 1, ITERATIONS + 1))
    for key in ("lm_loss", "eval_loss"):
        assert continued.by_iteration(key) == uninterrupted.by_iteration(key, after=SAVED)
    norms = uninterrupted.by_iteration("grad_norm", after=SAVED)
    tolerance = 0 if before == after else 1e-6
    assert continued.by_iteration("grad_norm") == pytest.approx(norms, rel=tolerance, abs=0)


@pytest.mark.slow
def test_a_checkpoint_of_other_data_is_refused_or_allowed(
    whole: Whole, corpus: str, tmp_path: Path
) -> None:
    """Where the data lies does not count, what it holds does."""
    _, checkpoints = whole("v-half")
    moved, other = tmp_path / "moved", tmp_path / "other"
    for suffix in (".bin", ".idx"):
        content = Path(corpus + suffix).read_bytes()
        moved.with_suffix(suffix).write_bytes(content)
        backwards = (
            numpy.frombuffer(content, "<u2")[::-1].tobytes() if suffix == ".bin" else content
        )
        other.with_suffix(suffix).write_bytes(backwards)
    load = checkpoint_of(checkpoints, SAVED, tmp_path / "load")
    flags = {"--pipeline-schedule": "v-half", "--load": load, "--data-path": other}
    words = written({**TRAINING, **flags})
    check_report(
        run_job(2, MODULE, words, SECONDS_TO_REPORT),
        f"was trained with --data-path {corpus} (",
        f"but this run has --data-path {other} (",
        "or --pipeline-allow-other-data to go on with other data",
    )
    first = None
    for more in ({"--data-path": moved}, {"--pipeline-allow-other-data": True}):
        (tmp_path / "log").mkdir(exist_ok=True)
        losses = trained(tmp_path / "log", {**flags, **more}).by_iteration("lm_loss")
        assert list(losses) == list(range(SAVED + 1, ITERATIONS + 1))
        assert losses != first
        first = losses


@pytest.mark.slow
def test_dropout_is_that_of_every_other_schedule(corpus: str, tmp_path: Path) -> None:
    """Also after a resume; Megatron's own draws are those of one stream for each rank."""
    flags: Flags = {"--data-path": corpus, "--hidden-dropout": 0.1, "--attention-dropout": 0.1}
    checkpoints = tmp_path / "checkpoints"
    saves = {"--save": checkpoints, "--save-interval": SAVED}
    whole = trained(tmp_path, {**flags, **saves, "--pipeline-schedule": "v-half"})
    load = checkpoint_of(checkpoints, SAVED, tmp_path / "load")
    resumed = trained(tmp_path, {**flags, "--load": load, "--pipeline-schedule": "v-zb"})
    by_rank = {**flags, "--pipeline-schedule": "zb-h1"}
    by_layer = trained(tmp_path, {**by_rank, "--pipeline-random-streams": "layer"})
    upstream_checkpoints = tmp_path / "upstream"
    upstream = trained(tmp_path, {**flags, **saves, "--save": upstream_checkpoints})
    load_upstream = checkpoint_of(upstream_checkpoints, SAVED, tmp_path / "load_upstream")
    upstream_resumed = trained(tmp_path, {**flags, "--load": load_upstream})
    ours = trained(tmp_path, by_rank)
    for key in ("lm_loss", "eval_loss"):
        assert resumed.by_iteration(key) == whole.by_iteration(key, after=SAVED)
        assert by_layer.by_iteration(key) == whole.by_iteration(key)
        assert ours.by_iteration(key) == upstream.by_iteration(key)
        assert upstream_resumed.by_iteration(key) == upstream.by_iteration(key, after=SAVED)
        assert upstream.by_iteration(key) != whole.by_iteration(key)


@pytest.mark.full
def test_tensor_parallel_ranks_continue_with_their_random_states(
    corpus: str, tmp_path: Path
) -> None:
    """Bit for bit on as many ranks; on others it goes on, with other draws of dropout."""
    flags: Flags = {
        "--data-path": corpus,
        "--hidden-dropout": 0.1,
        "--attention-dropout": 0.1,
        "--pipeline-schedule": "zb-h1",
        "--tensor-model-parallel-size": 2,
        "--train-iters": 2 + SAVED,
    }
    checkpoints = tmp_path / "checkpoints"
    saves = {"--save": checkpoints, "--save-interval": SAVED}
    whole = trained(tmp_path, {**flags, **saves})
    load = {"--load": checkpoint_of(checkpoints, SAVED, tmp_path / "load")}
    resumed = trained(tmp_path, {**flags, **load})
    for key in ("lm_loss", "eval_loss", "grad_norm"):
        assert resumed.by_iteration(key) == whole.by_iteration(key, after=SAVED) != {}
    other = trained(tmp_path, {**flags, **load, "--tensor-model-parallel-size": 1})
    assert list(other.by_iteration("lm_loss")) == list(resumed.by_iteration("lm_loss"))
    assert other.by_iteration("lm_loss") != resumed.by_iteration("lm_loss")


@pytest.mark.slow
def test_without_the_flag_megatron_is_as_it_was(corpus: str, tmp_path: Path) -> None:
    """Nothing that carries out schedules is imported, and nothing in Megatron is replaced."""
    report = tmp_path / "report"
    flags = {"--data-path": corpus, "--train-iters": 2}
    trained(tmp_path, flags, program=(script(tmp_path, REPORT), str(report)))
    for rank in range(2):
        found = json.loads(report.with_name(f"report.{rank}").read_text())
        assert "megatron_zb.train.loop" in found["imported"]
        assert [
            name
            for name in found["imported"]
            if re.match(r"megatron_zb\.(runtime|megatron_core)\.", name)
        ] == [
            "megatron_zb.megatron_core.random_streams",
            "megatron_zb.megatron_core.versions",
        ]
        assert found["in_megatron"] == []


@pytest.mark.slow
def test_v_schedules_hold_fewer_activations(corpus: str, tmp_path: Path) -> None:
    """The shapes of the quickstart, a quarter of its width."""
    flags = {
        "--pipeline-model-parallel-size": 4,
        "--num-layers": 8,
        "--hidden-size": 64,
        "--num-attention-heads": 8,
        "--seq-length": 96,
        "--micro-batch-size": 2,
        "--global-batch-size": 16,
        "--train-iters": 2,
        "--eval-iters": 0,
        "--data-path": corpus,
        "--measure-activation-memory": True,
    }
    upstream, half, least = (
        trained(tmp_path, {**flags, "--pipeline-schedule": schedule})
        for schedule in (None, "v-half", "v-min")
    )
    assert max(least.peaks) < max(half.peaks) < max(upstream.peaks)
    assert upstream.by_iteration("lm_loss") == half.by_iteration("lm_loss")
    assert upstream.by_iteration("lm_loss") == least.by_iteration("lm_loss")


@pytest.mark.slow
def test_losses_are_upstreams_with_balanced_layers(corpus: str, tmp_path: Path) -> None:
    """The output layer counts for two and a half layers and stands alone on its stage."""
    flags = {"--data-path": corpus, "--vocab-size": 1024, "--train-iters": 3}
    asked = {"--pipeline-schedule": "v-half", "--pipeline-layer-layout": "auto"}
    upstream, balanced = trained(tmp_path, flags), trained(tmp_path, {**flags, **asked})
    assert upstream.by_iteration("lm_loss") == balanced.by_iteration("lm_loss")
    assert "stage 3 (output layer)" in balanced.printed
    assert "layers are balanced for an embedding that counts for 0.00 layers" in balanced.printed


@pytest.mark.slow
def test_losses_are_upstreams_with_a_sharded_vocabulary(corpus: str, tmp_path: Path) -> None:
    """But for the order of sums; and upstream goes on with the checkpoint."""
    flags = {"--data-path": corpus, "--vocab-size": 1024, "--train-iters": 6}
    cut = {"--pipeline-schedule": "zb-h1", "--pipeline-vocabulary": "on"}
    saving = {"--save": tmp_path / "saved", "--exit-interval": 4}
    upstream = trained(tmp_path, flags)
    ours = trained(tmp_path, {**flags, **cut, **saving})
    further = trained(tmp_path, {**flags, "--load": tmp_path / "saved"})
    assert "every pipeline rank: its rows of the embedding and the output layer" in ours.printed
    for key in ("lm_loss", "eval_loss", "grad_norm"):
        expected, found = upstream.by_iteration(key), ours.by_iteration(key)
        assert list(found) == [i for i in expected if i <= 4]
        assert found == pytest.approx({i: expected[i] for i in found}, rel=1e-5)
    later = upstream.by_iteration("lm_loss", after=4)
    assert further.by_iteration("lm_loss", after=4) == pytest.approx(later, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            {"--pipeline-schedule": "v-halv"},
            ["unknown pipeline schedule 'v-halv'", "did you mean v-half"],
        ),
        (
            {"--pipeline-schedule": "v-half"},
            ["--pipeline-schedule v-half needs a pipeline", "of 2 or more"],
        ),
        ({"--pipeline-scheduel": "v-half"}, ["did you mean --pipeline-schedule?"]),
        ({"--pipeline-vocabulary": "on"}, ["--pipeline-vocabulary needs --pipeline-schedule"]),
        (
            {"--data-path": "/no/text", "--pipeline-schedule": None},
            ["there is no file /no/text.bin", "scripts/prepare_text.py"],
        ),
    ],
)
def test_a_mistake_is_one_sentence(flags: Flags, parts: list[str], corpus: str) -> None:
    one_rank = {**TRAINING, "--pipeline-model-parallel-size": 1, "--data-path": corpus}
    ended = run_job(None, MODULE, written({**one_rank, **flags}), SECONDS_TO_REPORT)
    check_report(ended, *parts)
    assert ended.code == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_layers_that_cannot_be_placed(corpus: str) -> None:
    flags = {"--num-layers": 3, "--pipeline-schedule": "v-half", "--data-path": corpus}
    check_report(
        run_job(2, MODULE, written({**TRAINING, **flags}), SECONDS_TO_REPORT),
        "3 layers cannot be placed on 4 stages with at least one on each",
        "give more layers",
    )


@pytest.mark.parametrize(
    ("own", "parts"),
    [
        (
            [["--pipeline-schedule", "v-half"], ["--pipeline-schedule", "v-min"]],
            [
                "started with different arguments: --pipeline-schedule v-half on rank 0",
                "but --pipeline-schedule v-min on rank 1; start every rank with the same",
            ],
        ),
        (
            [["--pipeline-schedule", "v-half"], []],
            ["--pipeline-schedule v-half on rank 0, but no --pipeline-schedule on rank 1"],
        ),
        (
            [["--pipeline-schedule", "v-half"], ["--pipeline-schedule", "v-halv"]],
            ["--pipeline-schedule v-half on rank 0, but --pipeline-schedule v-halv on rank 1"],
        ),
    ],
    ids=["another", "none", "unknown"],
)
def test_ranks_with_different_schedules_end(
    own: list[list[str]], parts: list[str], corpus: str, tmp_path: Path
) -> None:
    flags = written({**TRAINING, "--data-path": corpus})
    program = script(tmp_path, DIFFERENT_ARGUMENTS)
    check_report(run_job(2, program, [json.dumps(own), *flags], SECONDS_TO_REPORT), *parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "says"),
    [
        ("stops", 1, "rank 1 holds up all others: it does not answer"),
        ("sleeps", 7, "rank 1 holds up all others: it is in "),
    ],
    ids=["stopped-in-warm-up", "asleep-in-steady-state"],
)
def test_a_rank_that_holds_up_all_others_is_named(
    how: str, number: int, says: str, corpus: str, tmp_path: Path
) -> None:
    timeout = {"--pipeline-timeout": 3, "--pipeline-schedule": "v-half"}
    flags = written({**TRAINING, "--data-path": corpus, **timeout})
    ended = run_job(2, script(tmp_path, STOPS), [how, str(number), *flags], SECONDS_TO_TRAIN)
    assert ended.code != 0
    assert says in ended.stderr
    assert "rank 0 (pipeline rank " in ended.stderr
    assert "waits for the " in ended.stderr
    assert "its last passes: " in ended.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"--pipeline-model-parallel-size": 3}, "2 ranks were started, .* multiple of 3 ranks"),
        ({"--global-batch-size": 7, "--micro-batch-size": 2}, "7 is not a multiple .* 6 or 8"),
        ({"--num-layers": 5}, "5 cannot be placed evenly on 2 pipeline ranks: 4 or 6 can"),
        ({"--hidden-size": 30}, "--hidden-size 30 is not a multiple .* 4: 28 or 32 would be"),
        ({"--num-layers": 0}, "--num-layers is 0: it must be greater than 0"),
        ({"--ffn-hidden-size": 0}, "--ffn-hidden-size is 0: it must be greater than 0"),
        ({"--lr": -1}, "--lr is -1.0: it must be 0 or greater"),
        ({"--min-lr": 1}, "--min-lr 1.0 is above --lr 0.01"),
        ({"--fp16": True}, "unknown argument '--fp16'"),
        ({"--use-distributed-optimizer": True}, "unknown argument '--use-distributed-optimizer'"),
        ({"--pipeline-memory-limit": 0.5}, "--pipeline-memory-limit needs --pipeline-schedule"),
        ({"--pipeline-random-streams": "rank"}, "-random-streams needs --pipeline-schedule"),
        ({"--pipeline-verify": True}, "--pipeline-verify needs --pipeline-schedule"),
        (
            {"--pipeline-schedule": "v-half", "--pipeline-schedule-file": "v-half.csv"},
            "--pipeline-schedule and --pipeline-schedule-file both choose a schedule",
        ),
        (
            {"--pipeline-schedule-file": "v-half.csv", "--pipeline-memory-limit": 0.5},
            "--pipeline-schedule-file is a finished schedule: leave --pipeline-memory-limit out",
        ),
        (
            {
                "--pipeline-schedule-file": "v-half.csv",
                "--pipeline-model-parallel-size": 1,
                "--global-batch-size": 4,
            },
            "--pipeline-schedule-file v-half.csv needs a pipeline",
        ),
        ({"--pipeline-layer-layout": "Et|ttt|L"}, "has 3 stages, but .* write 2 stages"),
        ({"--pipeline-layer-layout": "auto"}, "--pipeline-layer-layout auto needs --pipeline-sch"),
        (
            {"--pipeline-layer-layout": "no.yaml", "--pipeline-schedule": "v-half"},
            "--pipeline-layer-layout no.yaml: there is no such file",
        ),
        ({"--split": "a,b"}, "--split 'a,b' is not understood"),
        ({"--split": "1"}, "--eval-iters 2 needs documents to evaluate on"),
        ({"--save-interval": 2}, "--save-interval needs --save"),
        ({"--load": "/no/checkpoint"}, "--load /no/checkpoint: there is no checkpoint"),
        ({"--log-file": "/dev/null/log"}, "--log-file /dev/null/log: /dev/null is not a directory"),
        ({"--recompute-num-layers": 1}, "unknown argument '--recompute-num-layers'"),
        ({"--num-query-groups": 2}, "--group-query-attention and --num-query-groups"),
        ({"--train-iters": "many"}, "--train-iters: 'many' is not a whole number, such as 8"),
        ({"--num-layers": None}, "--num-layers is missing: give --num-layers N"),
        ({"--max-position-embeddings": 16}, "16 is too few for --seq-length 32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(flags: Flags, sentence: str, corpus: str) -> None:
    argv = written({**TRAINING, "--data-path": corpus, **flags})
    with pytest.raises(UsageError, match=sentence):
        training_arguments.parse(argv, world_size=2)


@pytest.mark.parametrize(
    ("flags", "checked"),
    [
        ({}, True),
        ({"--no-check-for-nan-in-loss-and-grad": True}, False),
        ({"--bf16": True}, True),
    ],
)
def test_numbers_are_checked_as_in_megatron_lm(flags: Flags, checked: bool, corpus: str) -> None:
    args = training_arguments.parse(written({**TRAINING, "--data-path": corpus, **flags}), 2)
    assert args.check_for_nan_in_loss_and_grad is checked
