"""Every argument that is said to be harmless, tried: it logs what upstream logs with it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from harmless_trials import TRIALS, Trial

from megatron_zb.megatron_lm.checkout import checkout_at
from real_megatron_lm.flag_runs import Logged, check_same, make_texts, train

SCHEDULES = ("v-half", "zb-h1", "v-half --pipeline-vocabulary on")
FEW = 4


def _version() -> str:
    found = os.environ.get("MEGATRON_LM_PATH")
    numbers = (0, 19, 0) if found is None else checkout_at(Path(found).resolve()).version
    return f"{numbers[0]}.{numbers[1]}"


VERSION = _version()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sets of texts, and the files that name them."""
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def start(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of the usual model."""
    folder = tmp_path_factory.mktemp("start")
    save(checkout, folder)
    return folder


def save(checkout: Path, folder: Path, flags: str = "", left_out: str = "") -> None:
    saving = f"{flags} --save {folder} --save-interval 2 --exit-interval 2"
    saved = train(checkout, saving, left_out=left_out)
    assert saved.ended.code == 0, saved.error


def flags_of(trial: Trial, start: Path, folder: Path, texts: Path | None) -> str:
    words = " ".join([*trial.words(VERSION), trial.beside])
    filled = words.format(start=start, folder=folder, texts=texts)
    return filled if "--load" in trial.without else f"{filled} --load {start}"


def run(checkout: Path, trial: Trial, schedule: str, places: dict[str, Any]) -> Logged:
    folder = places["folder"] / (schedule.replace(" ", "") or "upstream")
    folder.mkdir()
    chosen = f"--pipeline-schedule {schedule}" if schedule else ""
    flags = flags_of(trial, places["start"], folder, places["texts"])
    return train(checkout, f"{flags} {chosen}", left_out=trial.without)


def started(checkout: Path, trial: Trial, places: dict[str, Any]) -> Path:
    """The checkpoint that a trial goes on from."""
    if not trial.own_start:
        return Path(places["start"])
    own: Path = places["folder"] / "own_start"
    flags = trial.prepared or " ".join(trial.words(VERSION))
    save(checkout, own, f"{flags} {trial.beside}".format(**places), trial.without)
    return own


def check_trial(
    checkout: Path, trial: Trial, start: Path, folder: Path, texts: Path | None
) -> None:
    places = {"start": start, "folder": folder, "texts": texts}
    places["start"] = started(checkout, trial, places)
    upstream = run(checkout, trial, "", places)
    assert upstream.ended.code == 0, upstream.error
    assert upstream.losses or upstream.evaluations
    for schedule in SCHEDULES[:2] if trial.keeps_vocabulary else SCHEDULES:
        check_same(run(checkout, trial, schedule, places), upstream)


def trials() -> list[Trial]:
    return [trial for trial in TRIALS if trial.words(VERSION)]


def drawn(full: bool) -> list[Trial]:
    """All trials, or a few by the seed in the variable TRIALS_SEED."""
    seed = os.environ.get("TRIALS_SEED", "1")
    return trials() if full else random.Random(seed).sample(trials(), FEW)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trial" in metafunc.fixturenames:
        found = drawn(metafunc.config.getoption("--full"))
        metafunc.parametrize("trial", found, ids=[trial.tried.split()[0][2:] for trial in found])


def test_a_harmless_argument_is_harmless(
    checkout: Path,
    start: Path,
    tmp_path: Path,
    texts: Path,
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # which --deterministic-mode needs
    check_trial(checkout, trial, start, tmp_path, texts)
