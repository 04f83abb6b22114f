"""The hook of Megatron-LM's validation of arguments. tests/real_megatron_lm runs all hooks."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron_zb.errors import UsageError
from megatron_zb.job import settings
from megatron_zb.megatron_lm import hooks


def arguments(*given: str) -> argparse.Namespace:
    parser = settings.add_megatron_lm_arguments(argparse.ArgumentParser())
    args: argparse.Namespace = parser.parse_args(given)
    args.rank, args.world_size, args.distributed_timeout_minutes = 0, 1, 1
    return args


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What a meeting of the ranks is asked for, in order."""
    asked: list[tuple[str, ...]] = []

    class Rendezvous:
        def __init__(
            self, rank: int, world_size: int, seconds: float, *, end: Any, store: Any
        ) -> None:
            assert store is None, "no restart has left one"
            asked.append(("made", str(rank), str(world_size), str(seconds)))

        def agree(self, where: str, values: Any, failure: Exception | None) -> bool:
            asked.append(("agree", where))
            return True

        def stay_away(self, where: str, values: Any) -> None:
            asked.append(("stay away", where))

    monkeypatch.setattr(hooks, "Rendezvous", Rendezvous)
    return asked


def test_without_a_schedule_megatron_validates_and_nothing_runs(met: list[tuple[str, ...]]) -> None:
    given = hooks._Hooks()
    args = arguments()
    validated = given._validate_args(lambda args, *rest, **more: (args, rest, more), args, 1, a=2)
    assert validated == (args, (1,), {"a": 2})
    assert met == [("made", "0", "1", "60"), ("stay away", "arguments")]
    assert given._run is None


def test_an_argument_that_needs_a_schedule_ends_a_run_without_one(
    met: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(error: UsageError, rank: int) -> None:
        raise error

    monkeypatch.setattr(hooks, "end_with", end)  # which ends the process
    args = arguments("--pipeline-memory-limit", "0.5")
    with pytest.raises(UsageError, match="--pipeline-memory-limit needs --pipeline-schedule"):
        hooks._Hooks()._validate_args(lambda args: "validated", args)


def test_with_a_schedule_the_ranks_agree_before_and_after_megatron_validates(
    met: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, args = hooks._Hooks(), arguments("--pipeline-schedule", "v-half")
    adapter = SimpleNamespace(describe=lambda: "the schedule")
    run: Any = SimpleNamespace(adapter=adapter)
    monkeypatch.setattr(given, "_scheduled_run", lambda args, rendezvous: run)
    monkeypatch.setattr(hooks.fingerprint, "data_of", lambda args: "contents")
    monkeypatch.setattr(hooks.fingerprint, "of_run", lambda args, adapter, data: {"data": data})
    monkeypatch.setattr(hooks.stored_placement, "mark", lambda args, adapter: None)

    def validate(args: Any) -> str:
        met.append(("validate",))
        return "validated"

    assert given._validate_args(validate, args) == "validated"
    assert met[1:] == [("agree", "arguments"), ("validate",), ("agree", hooks.START)]
    assert vars(given)["_run"] is run
    assert run.data == getattr(args, hooks.data_contents.RECORD) == "contents"
    assert run.not_agreed is None
    assert "the schedule" in capsys.readouterr().out


class Abandoned:
    """A run whose adapter only counts how often it is abandoned."""

    def __init__(self) -> None:
        self.adapter = self
        self.times = 0

    def abandon(self) -> None:
        self.times += 1


def test_a_restart_in_the_process_forgets_the_run_and_meets_apart_from_it() -> None:
    given, job = hooks._Hooks(), HashStore()
    failed: Any = Abandoned()

    def datasets(samples: Any, vp_stage: int | None = None) -> None: ...

    def pretrain(
        train_valid_test_dataset_provider: Any,
        fails: bool,
        store: Any = None,
        inprocess_call_wrapper: Any = None,
    ) -> Any:
        assert given._store is not None
        given._store.set("verdict", str(inprocess_call_wrapper.iteration))
        given._run = failed if fails else None
        if fails:
            raise KeyboardInterrupt  # no Exception, as what interrupts the other ranks
        return given._store.get("verdict")

    def call(iteration: int) -> Any:
        again = SimpleNamespace(iteration=iteration)
        fails = iteration == 0
        return given._pretrain(pretrain, datasets, fails, store=job, inprocess_call_wrapper=again)

    with pytest.raises(KeyboardInterrupt):
        call(0)
    assert failed.times == 1
    assert call(1) == b"1"
    assert failed.times == 1
    assert job.get("megatron_zb/restart/0/verdict") == b"0"


@pytest.mark.parametrize("chosen", [True, False])
def test_a_job_that_has_lost_its_schedule_ends(
    monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    given = hooks._Hooks()
    args = arguments(*(["--pipeline-schedule", "v-half"] if chosen else []))

    def end(error: UsageError, rank: int) -> None:
        raise error

    module = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(hooks, "end_with", end)
    if chosen:
        with pytest.raises(UsageError, match=r"--pipeline-schedule v-half was given, but .* lost"):
            given._get_forward_backward_func(lambda: "Megatron's")
        run: Any = SimpleNamespace(get_forward_backward_func=lambda original: "ours")
        given._run = run
        assert given._get_forward_backward_func(lambda: "Megatron's") == "ours"
    else:
        assert given._get_forward_backward_func(lambda: "Megatron's") == "Megatron's"


def test_the_states_of_a_checkpoint_are_checked_where_it_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[tuple[Any, ...]] = []
    given, args = hooks._Hooks(), argparse.Namespace(rank=0, finetune=True, skip_train=False)
    run: Any = SimpleNamespace(
        adapter="adapter", data={}, check_states=lambda *of: checked.append(of)
    )
    given._run = run
    monkeypatch.setattr(hooks.stored_placement, "check", lambda *of: checked.append(of))
    loaded = ({"args": args}, "the folder", False)
    assert given._load_base_checkpoint(lambda *of: loaded, "from", args) is loaded
    assert checked == [(loaded, args, "adapter"), (args, "the folder")]


def test_a_run_whose_arguments_were_parsed_before_pretrain_is_kept() -> None:
    """As from Megatron-LM 0.18 on: without its run, a V would train with the stages of 1F1B."""
    given = hooks._Hooks()
    run: Any = SimpleNamespace(adapter=SimpleNamespace(missing_profile=lambda: None))
    given._run = run

    def pretrain(train_valid_test_dataset_provider: Any, inprocess_call_wrapper: Any = None) -> Any:
        return given._run

    assert given._pretrain(pretrain, lambda samples, vp_stage=None: None) is run
