"""The file of adapters: what a user leaves out, and what a user gets wrong."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.lora.adapter_file import AdapterJob, jobs_of
from megatron_zb.lora.checkpoint import steps_saved


def arguments(path: Path, **given: Any) -> argparse.Namespace:
    usual = {
        "pipeline_adapters": str(path),
        "micro_batch_size": 2,
        "mock_data": False,
        "data_path": ["/data/all"],
        "global_batch_size": 16,
        "train_iters": 100,
        "lr": 1e-3,
        "min_lr": None,
        "lr_warmup_iters": 0,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "seed": 1234,
    }
    return argparse.Namespace(**{**usual, **given})


def jobs(path: Path, text: str, **given: Any) -> list[AdapterJob]:
    path.write_text(text, encoding="utf-8")
    return jobs_of(arguments(path, **given), replicas=2)


def test_what_is_left_out_has_the_value_of_its_flag(tmp_path: Path) -> None:
    text = """
adapters:
  - {name: french, data: 0.3 /data/fr 0.7 /data/fr2, batch: 32, steps: 5, learning_rate: 1e-4}
  - {name: german, weight_decay: 0.1, seed: 7, rank: 4, alpha: 8, modules: [linear_proj]}
"""
    french, german = jobs(tmp_path / "a.yaml", text)
    assert (french.steps, french.batch, french.microbatches) == (5, 32, 8)
    assert french.arguments["data_path"] == ["0.3", "/data/fr", "0.7", "/data/fr2"]
    assert french.arguments["lr"] == 1e-4
    assert french.arguments["seed"] == 1234
    assert "weight_decay" not in french.arguments  # Megatron-LM's own counts
    assert (german.steps, german.batch, german.microbatches) == (100, 16, 4)
    assert "data_path" not in german.arguments
    assert german.arguments["lr"] == 1e-3
    assert german.arguments["seed"] == 7
    of_decay = {name: it for name, it in german.arguments.items() if name.endswith("weight_decay")}
    assert of_decay == dict.fromkeys(
        ("weight_decay", "start_weight_decay", "end_weight_decay"), 0.1
    )
    assert german.shape == {
        "weights": "lora",
        "rank": 4,
        "alpha": 8.0,
        "modules": ["linear_proj"],
    }


ONE = "adapters: [{name: a, %s}]"
MALFORMED = {
    "": "has no fields",
    "- name: a": "has no fields",
    "adapters: 3": "'adapters' is 3: input should be a valid list",
    "adapters: []": "'adapters' is a list: list should have at least 1 item",
    "adapters: [a]": "'adapters.0' is 'a': input should be a valid dictionary",
    "adapter: [{name: a}]": "'adapters' is missing: give, for example, adapters: [{name: f",
    "adapters: [{name: a}": "breaks off",
    "adapters: [{name: a}]]": "is not YAML",
    "adapters: &x [*x]": "has an alias",
    "adapters: !!python/object:os.system [a]": "is not YAML",
    "adapters: [{name: a, weights: all, rank: 4, alpha: 2}]": "a has weights: all, and so no alpha "
    "or rank: leave it out",
    "adapters: [{name: a, weights: half}]": "'adapters.0.weights' is 'half'",
    "adapters: [{nam: a}]": "'adapters.0.name' is missing: give, for example, name: french",
    "adapters: [{name: a, ranks: 4}]": "'adapters.0.ranks' is no field here: did you mean rank",
    "adapters: [{name: a}, {name: A}]": "two adapters are called a",
    "adapters: [{name: ../b}]": "cannot name a folder",
    "adapters: [{name: ''}]": "cannot name a folder",
    "adapters: [{name: .hidden}]": "cannot name a folder",
    "adapters: [{name: 3}]": "'adapters.0.name' is 3: input should be a valid string",
    ONE % "rank: 0": "'adapters.0.rank' is 0: input should be greater than 0",
    ONE % "rank: 4.5": "'adapters.0.rank' is 4.5: input should be a valid integer",
    ONE % "rank: on": "'adapters.0.rank' is true: input should be a valid integer",
    ONE % "alpha: -1": "'adapters.0.alpha' is -1: input should be greater than 0",
    ONE % "alpha: .nan": "'adapters.0.alpha' is nan: input should be a finite number",
    ONE % "batch: 6": "a batch of 6 samples cannot be dealt out in microbatches of 2 over 2",
    ONE % "batch: 2": "give a multiple of 4",
    ONE % "steps: -5": "'adapters.0.steps' is -5",
    ONE % "learning_rate: fast": "'adapters.0.learning_rate' is 'fast'",
    ONE % "learning_rate: 0": "input should be greater than 0; give, for example, learning_rate",
    ONE % "min_learning_rate: 1": "falls to 1, which is above 0.001",
    ONE % "warmup_steps: 100": "100 warmup_steps of 100 steps leave none",
    ONE % "modules: []": "list should have at least 1 item",
    ONE % "modules: [q_proj]": "'adapters.0.modules.0' is 'q_proj'",
    ONE % "modules: [linear_fc1, linear_fc1]": "linear_fc1 is listed twice",
    ONE % "data: ''": "it is empty: give a prefix",
    ONE % "seed: -1": "'adapters.0.seed' is -1",
    ONE % "clip: many": "'adapters.0.clip' is 'many'",
    "adapters: " + "[" * 60 + "]" * 60: "brackets within brackets 60 deep",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_mistake_is_told_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(UsageError) as error:
        jobs(path, text)
    said = str(error.value)
    assert said.startswith(str(path))
    assert MALFORMED[text] in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"lr": None}, "has no learning_rate: give it, such as learning_rate: 1e-4, or --lr"),
        ({"train_iters": None}, "has no steps: give it, such as steps: 500, or --train-iters"),
        ({"global_batch_size": None}, "has no batch: give it, such as batch: 32, or --global-"),
        ({"data_path": None}, "has no data: give it, or --data-path for all"),
    ],
)
def test_a_value_that_nothing_gives_is_named(
    tmp_path: Path, missing: dict[str, None], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        jobs(tmp_path / "a.yaml", "adapters: [{name: a}]", **missing)


@pytest.mark.parametrize("kind", ["missing", "folder", "large", "bytes"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_text("#" * (1 << 21))
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe\x00adapters")
    with pytest.raises(UsageError) as error:
        jobs_of(arguments(path), replicas=2)
    assert str(path) in str(error.value)


def saved(folder: Path, job: AdapterJob, step: str, *, folder_of_step: bool = True) -> None:
    """What a checkpoint of an adapter has beside its tensors."""
    own = folder / job.name
    own.mkdir(parents=True)
    (own / "latest_checkpointed_iteration.txt").write_text(step)
    (own / "adapter.json").write_text(json.dumps({**job.shape, "tensor_model_parallel_size": 1}))
    if folder_of_step:
        (own / "iter_0000003").mkdir()


@pytest.mark.parametrize(
    ("step", "is_there", "entry", "ranks", "said"),
    [
        ("3", True, "name: a", 1, None),
        ("3", False, "name: a", 1, "names step 3, but there is no"),
        ("three", True, "name: a", 1, "has 'three', which is no number of steps"),
        ("3", True, "name: a, rank: 4", 1, "has rank 4, but .* was trained with 16: give that in"),
        ("3", True, "name: a", 2, "trained with 1: give that as --tensor-model-parallel-size"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, step: str, is_there: bool, entry: str, ranks: int, said: str | None
) -> None:
    file = tmp_path / "a.yaml"
    [of_folder] = jobs(file, "adapters: [{name: a}]")
    saved(tmp_path / "save", of_folder, step, folder_of_step=is_there)
    [job] = jobs(file, f"adapters: [{{{entry}}}]")
    if said is None:
        assert steps_saved(tmp_path / "save", job, ranks) == 3
        return
    with pytest.raises(UsageError, match=said):
        steps_saved(tmp_path / "save", job, ranks)
