"""The real pretrain_gpt.py under every schedule: it logs what upstream logs, digit for digit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_zb import schedules
from megatron_zb.megatron_core.graphs import pass_order
from megatron_zb.schedules import interchange
from real_megatron_lm.runs import MODEL, PIPELINE, PIPELINE_OF_TWO, Logged, check_equal, pretrain

# 8 layers are 8 stages of a zig-zag with two chunks; its default, four chunks, would need 16.
_MORE = {"wave": "--num-virtual-stages-per-pipeline-rank 2"}


@pytest.mark.parametrize("name", schedules.names())
def test_a_resumed_run_logs_what_upstream_logs(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged, name: str
) -> None:
    run = pretrain(
        checkout,
        MODEL,
        PIPELINE,
        f"--load {upstream_checkpoint} --pipeline-schedule {name}",
        _MORE.get(name, ""),
    )
    check_equal(run, upstream)
    assert f"pipeline schedule {name}: 4 ranks" in run.output
    assert run.output.count("embedding, layers 1") == 1


@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_two_ranks_log_what_upstream_logs(
    checkout: Path, checkpoint_of_two: Path, upstream_of_two: Logged, name: str
) -> None:
    loading = f"--load {checkpoint_of_two} --pipeline-schedule {name}"
    run = pretrain(checkout, MODEL, PIPELINE_OF_TWO, loading, ranks=2)
    check_equal(run, upstream_of_two)
    assert f"pipeline schedule {name}: 2 ranks" in run.output


@pytest.mark.parametrize("name", ["1f1b", "v-half", "auto"])
def test_where_sends_wait_and_hosts_drain_it_logs_the_same(
    checkout: Path,
    upstream_checkpoint: Path,
    upstream: Logged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The rules of a GPU; see hostile.py."""
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))
    flags = f"--load {upstream_checkpoint} --pipeline-schedule {name}"
    hostile = Path(__file__).with_name("run_hostile.py")
    check_equal(pretrain(checkout, MODEL, PIPELINE, flags, program=hostile), upstream)
    assert any((tmp_path / "sent").iterdir())


@pytest.mark.parametrize("name", ["v-half", "zb-h1", "interleaved", ""])
def test_a_patched_checkout_logs_the_same(
    patched: Path, upstream_checkpoint: Path, upstream: Logged, name: str
) -> None:
    schedule = f"--pipeline-schedule {name}" if name else ""
    flags = (MODEL, PIPELINE, f"--load {upstream_checkpoint}", schedule)
    run = pretrain(patched, *flags, launcher=False)
    check_equal(run, upstream)
    assert ("pipeline schedule" in run.output) == bool(name)


def test_a_patched_checkout_runs_on_a_cpu_under_the_launcher(
    patched: Path, upstream_checkpoint: Path, upstream: Logged
) -> None:
    flags = (MODEL, PIPELINE, f"--load {upstream_checkpoint}", "--pipeline-schedule v-half")
    check_equal(pretrain(patched, *flags), upstream)


def test_a_script_that_installs_the_schedules_runs_on_a_cpu(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged, tmp_path: Path
) -> None:
    program = tmp_path / "pretrain.py"
    program.write_text(
        "import runpy, sys\n"
        "script = sys.argv[1]\n"
        "sys.argv = [script, *(word for word in sys.argv[2:] if word != '--cpu')]\n"
        f"sys.path.insert(0, {str(checkout)!r})\n"
        "import megatron_zb\n"
        "megatron_zb.install(cpu=True)\n"
        "runpy.run_path(script, run_name='__main__')\n"
    )
    flags = (MODEL, PIPELINE, f"--load {upstream_checkpoint}", "--pipeline-schedule v-half")
    run = pretrain(checkout, *flags, program=program)
    check_equal(run, upstream)
    assert "pipeline schedule v-half" in run.output


def test_a_table_from_a_file(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    built = schedules.build("v-zb", pipeline_size=4, num_microbatches=8)
    table.write_text(interchange.to_csv(built))
    flags = f"--load {upstream_checkpoint} --pipeline-schedule-file {table}"
    check_equal(pretrain(checkout, MODEL, PIPELINE, flags), upstream)


def test_older_flags_choose_a_schedule(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged
) -> None:
    run = pretrain(
        checkout,
        MODEL,
        PIPELINE,
        f"--load {upstream_checkpoint} --enable-zero-bubble --zero-bubble-v-schedule",
        "--zero-bubble-v-schedule-mem-setup half --zero-bubble-pipeline-timers-start-iter 10",
    )
    check_equal(run, upstream)
    assert any("is taken as --pipeline-schedule v-half" in line for line in run.said)


def test_active_clipping_changes_the_last_digit_at_most(
    checkout: Path, upstream_checkpoint: Path
) -> None:
    flags = (MODEL, PIPELINE, f"--load {upstream_checkpoint} --clip-grad 1")
    upstream = pretrain(checkout, *flags)
    run = pretrain(checkout, *flags, "--pipeline-schedule v-half")
    assert run.code == upstream.code == 0
    for ours, theirs in ((run.losses, upstream.losses), (run.norms, upstream.norms)):
        assert ours.keys() == theirs.keys()
        for iteration, text in ours.items():
            assert _last_digits_apart(text, theirs[iteration]) <= 1


def _last_digits_apart(ours: str, theirs: str) -> int:
    def digits(text: str) -> int:
        return int(text.split("E")[0].replace(".", ""))

    assert ours.partition("E")[2] == theirs.partition("E")[2]
    return abs(digits(ours) - digits(theirs))


def test_tensorboard_has_the_losses(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = f"--load {upstream_checkpoint} --pipeline-schedule v-half --tensorboard-dir {tmp_path}"
    run = pretrain(
        checkout, MODEL, PIPELINE, flags, "--log-interval 1 --tensorboard-log-interval 1"
    )
    check_equal(run, upstream)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars("lm loss")) == 5
    assert any("validation" in tag for tag in events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
        (
            2,
            "--pipeline-model-parallel-size 2 --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
        ),
    ],
    ids=["tp2", "recompute"],
)
def test_parallel_settings(
    checkout: Path, upstream_checkpoint: Path, ranks: int, flags: str
) -> None:
    common = (MODEL, flags, f"--load {upstream_checkpoint}")
    upstream = pretrain(checkout, *common, ranks=ranks)
    run = pretrain(checkout, *common, "--pipeline-schedule v-half", ranks=ranks)
    assert upstream.code == 0, upstream.output
    check_equal(run, upstream)


def test_one_rank_searches_and_a_later_job_finds_the_schedule(
    checkout: Path, upstream_checkpoint: Path, upstream: Logged, tmp_path: Path
) -> None:
    flags = (
        f"--load {upstream_checkpoint} --pipeline-schedule auto --pipeline-placement zigzag "
        "--num-virtual-stages-per-pipeline-rank 2 "
        f"--pipeline-schedule-cache {tmp_path / 'kept'}"
    )
    first = pretrain(checkout, MODEL, PIPELINE, flags)
    check_equal(first, upstream)
    assert "the schedule is taken from" not in first.output
    kept = list((tmp_path / "kept").iterdir())
    assert kept
    assert "4 ranks x 2 chunks" in first.output
    second = pretrain(checkout, MODEL, PIPELINE, flags)
    check_equal(second, upstream)
    assert second.output.count(f"the schedule is taken from {tmp_path / 'kept'}") == len(kept)


def test_what_rank_0_cannot_search_is_one_sentence(checkout: Path) -> None:
    run = pretrain(
        checkout, MODEL, PIPELINE, "--pipeline-schedule auto --pipeline-memory-limit 0.01"
    )
    assert run.code != 0
    assert run.error.count("\n") == 0
    assert "cannot keep the memory limit of 0.01 of 1F1B" in run.error


def test_gathers_run_during_the_optimizers_step(checkout: Path) -> None:
    """Megatron-LM has them with the legacy format of checkpoints alone; none is written here."""
    model = MODEL.replace("torch_dist", "torch")
    flags = (
        "--pipeline-model-parallel-size 2 --bf16 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather"
    )
    gathers = "--overlap-param-gather-with-optimizer-step"
    after, during = (
        pretrain(checkout, model, flags, "--pipeline-schedule v-half", more)
        for more in ("", gathers)
    )
    check_equal(during, after)
    refused = pretrain(checkout, model, flags, "--pipeline-schedule zb-h1", gathers)
    assert refused.code != 0
    assert f"{gathers} cannot be combined with --pipeline-schedule zb-h1" in refused.error


def test_graphs_are_captured_in_the_order_of_the_schedule(checkout: Path) -> None:
    program = Path(__file__).with_name("run_and_capture.py")
    flags = "--pipeline-model-parallel-size 2 --train-iters 1 --pipeline-schedule v-half"
    run = pretrain(checkout, MODEL, flags, ranks=2, program=program)
    assert run.code == 0, run.output
    schedule = schedules.build("v-half", pipeline_size=2, num_microbatches=8)
    for rank in range(2):  # a V is laid onto Megatron's ranks in mirror image
        assert f"rank {rank} captures {pass_order(schedule, 1 - rank)}" in run.output
