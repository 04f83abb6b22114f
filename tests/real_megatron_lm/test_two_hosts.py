"""scripts/pretrain_gpt.sh on two hosts with addresses of their own: it trains, and resumes."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from real_megatron_lm.hosts import SECONDS, Host, NotPermitted, Running, two_hosts

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.sh"
MODEL = """
name: GPT tiny
source: made up for this test
layers: 8
hidden_size: 64
ffn_hidden_size: 256
attention_heads: 4
vocabulary: 32000
sequence_length: 32
global_batch_size: 8
"""
_LOSS = re.compile(r"iteration +(\d+)/ +\d+ .* lm loss: (\S+) ")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except NotPermitted as why:
        pytest.skip(f"NOT RUN on two hosts: network namespaces are not permitted here: {why}")


def variables(checkout: Path, folder: Path) -> dict[str, str]:
    config = folder / "model.yaml"
    config.write_text(MODEL, encoding="utf-8")
    return {
        "MEGATRON_LM_PATH": str(checkout),
        "CONFIG": str(config),
        "SCHEDULE": "v-half",
        "DATA_PATH": "mock",
        "PP": "4",
        "PYTHON": sys.executable,
        "TRAIN_ITERS": "6",
        "OMP_NUM_THREADS": "1",
    }


FLAGS = ["--cpu", "--lr-decay-iters", "10", "--eval-iters", "1"]


def losses(output: str) -> dict[int, str]:
    return {int(found[1]): found[2] for found in _LOSS.finditer(output)}


def train(hosts: tuple[Host, Host], environment: Mapping[str, str], *more: str) -> dict[int, str]:
    """Two ranks on each host; the losses that the last rank has logged."""
    first, second = hosts
    of_job = {
        **environment,
        "NNODES": "2",
        "GPUS_PER_NODE": "2",
        "MASTER_ADDR": first.address,
        "MASTER_PORT": "29517",
    }
    running = [
        Running(host, [str(SCRIPT), *FLAGS, *more], {**of_job, "NODE_RANK": str(number)})
        for number, host in enumerate((first, second))
    ]
    ended = [host.end() for host in running]
    assert [code for code, _ in ended] == [0, 0], "\n".join(text for _, text in ended)
    return losses(ended[1][1])


def alone(environment: Mapping[str, str]) -> dict[int, str]:
    """The same on one host."""
    done = subprocess.run(
        [str(SCRIPT), *FLAGS],
        env={**environment, "GPUS_PER_NODE": "4", "PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tempfile.gettempdir(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(done.stdout)


def test_two_hosts_train_and_resume(
    hosts: tuple[Host, Host], checkout: Path, tmp_path: Path
) -> None:
    of_job = variables(checkout, tmp_path)
    expected = alone(of_job)
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    save = {"SAVE": str(tmp_path / "checkpoint")}
    begun = train(hosts, {**of_job, **save}, "--exit-interval", "3")
    load = {"LOAD": save["SAVE"]}
    resumed = train(hosts, {**of_job, **load})
    assert sorted(resumed) == [4, 5, 6]
    mean = 5  # Megatron logs the mean of its first two losses as the second one of a run
    for iteration, loss in (begun | resumed).items():
        assert iteration == mean or loss == expected[iteration]
