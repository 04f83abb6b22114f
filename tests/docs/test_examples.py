"""The examples: what runs here runs; what needs a cluster or an image is parsed and tried dry."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import run_job
from project import project
from small_trees import checkout_tree
from training_jobs import end_of, torchrun

from megatron_zb import schedules

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LOOP = EXAMPLES / "training_loop.py"
TRAINER = EXAMPLES / "rl_trainer.py"
SAMPLER = EXAMPLES / "pipefusion.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = checkout_tree(tmp_path_factory.mktemp("checkout"), "0.16.1")
    (root / "pretrain_gpt.py").touch()
    return root


def losses_of(schedule: str, *, of_torchrun: bool = False, script: Path = LOOP) -> list[float]:
    """The second word of each line that a script prints."""
    if of_torchrun:
        job = end_of(torchrun(2, str(script), schedule), 500)
    else:
        job = run_job(2, str(script), [schedule], 500)
    assert job.code == 0, job.stderr
    return [float(line.split()[1]) for line in job.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("of_torchrun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_loop_of_ones_own_trains_alike_under_every_schedule(of_torchrun: bool) -> None:
    losses = losses_of("v-half", of_torchrun=of_torchrun)
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 4  # counting is learnt
    assert losses_of("1f1b") == losses


@pytest.mark.full
@pytest.mark.parametrize("of_torchrun", [False, True])
def test_a_trainer_for_reinforcement_learning_learns_alike_under_every_schedule(
    of_torchrun: bool,
) -> None:
    learnt = losses_of("v-half", of_torchrun=of_torchrun, script=TRAINER)
    assert len(learnt) == 20
    assert learnt[-1] > 4 * learnt[0]  # counting is what is rewarded
    assert losses_of("1f1b", script=TRAINER) == learnt


def sampled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of the sampler, in a process that forks off its ranks."""
    return subprocess.run(
        [sys.executable, str(SAMPLER), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_an_image_sampled_on_ranks_is_that_of_one_process() -> None:
    done = sampled()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal, to the last bit, to one process") == 2
    assert "idle share: 5.08% simulated, 5.08% by formula" in done.stdout  # p = 4, M = 8, T = 7
    errors = [float(error) for error in re.findall(r"at once: (\S+)", done.stdout)]
    page = " ".join((ROOT / "docs" / "schedules.md").read_text(encoding="utf-8").split())
    found = re.search(r"is ([\d.]+) % with 8 time steps and ([\d.]+) % with 32", page)
    assert found is not None
    assert [100 * error for error in errors] == pytest.approx(
        [*map(float, found.groups())], rel=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        "--pipeline-size 3 --patches 2 --time-steps 4 --warm-up 2",
        pytest.param("--pipeline-size 1 --time-steps 3 6", marks=pytest.mark.full),
        pytest.param("--pipeline-size 2 --patches 1 --time-steps 3", marks=pytest.mark.full),
    ],
)
def test_images_of_other_sizes_are_those_of_one_process(sizes: str) -> None:
    done = sampled(*sizes.split())
    assert done.returncode == 0, done.stderr
    assert "equal, to the last bit, to one process" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--patches 7", "--patches is 7: the image has 256 tokens, give a divisor such as 8"),
        ("--pipeline-size 9", "--pipeline-size is 9: there are 8 blocks, give at most 8"),
        ("--time-steps 1 8", "--time-steps is 1: give more than the 1 of the warm-up"),
        ("--time-steps x", "--time-steps: 'x' is not a whole number of 1 or more"),
    ],
)
def test_wrong_sizes_of_the_sampler_end_with_one_sentence(arguments: str, words: str) -> None:
    done = sampled(*arguments.split())
    assert done.returncode == 1
    assert done.stderr == f"pipefusion.py: error: {words}\n"


@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=lambda path: path.name)
def test_an_example_redirects_calls_before_megatron_is_imported(script: Path) -> None:
    """Ranks of the tests have done so already."""
    source = script.read_text(encoding="utf-8")
    assert source.index("\nrun_on_cpu()") < source.index("\nfrom megatron.core ")


@pytest.mark.parametrize(("script", "most"), [(LOOP, 60), (TRAINER, 80)])
def test_an_example_is_short(script: Path, most: int) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= most


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "draw_schedules.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    kept = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in kept)  # what it prints belongs to who runs it
    return ["".join(cell["source"]) for cell in kept]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [4, pytest.param(8, marks=pytest.mark.full)])
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    microbatches: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    namespace: dict[str, Any] = {}
    drawn = 0
    first, *others = cells()
    assert first.count("P, M = 4, 8") == 1
    for cell in (first.replace("P, M = 4, 8", f"P, M = 4, {microbatches}"), *others):
        *lines, last = cell.splitlines()
        if last.startswith("draw("):  # what a notebook shows below the cell
            exec("\n".join(lines), namespace)
            drawn += isinstance(eval(last, namespace), Figure)
        else:
            exec(cell, namespace)
    assert drawn == 2
    said = capsys.readouterr().out
    assert all(re.search(rf"^{re.escape(name)} ", said, re.M) for name in schedules.names())


def dry_run(command: str, checkout: Path, **variables: str) -> list[str]:
    """The words of the command that a shell command would start at last."""
    done = subprocess.run(
        ["bash", "-c", command],
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "PYTHON": sys.executable,
            "MEGATRON_LM_PATH": str(checkout),
            **variables,
        },
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout.splitlines()[-1])


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.slow
def test_the_kubernetes_job_starts_each_host_with_its_rank(checkout: Path) -> None:
    text = (EXAMPLES / "kubernetes_job.yaml").read_text(encoding="utf-8")
    service, job = yaml.safe_load_all(text)
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert all(isinstance(given, str) for given in variables.values())  # numbers are refused
    # the names of the pods come from the job, the subdomain and a service without an address
    assert spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert str(service["spec"]["ports"][0]["port"]) == variables["MASTER_PORT"]
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == int(variables["GPUS_PER_NODE"])
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    # what it runs, in the folder in which the image leaves it
    assert container["command"] == ["bash", "-c"]
    (command,) = container["args"]
    for index in range(spec["completions"]):
        index_of = {"JOB_COMPLETION_INDEX": str(index)}
        words = dry_run(f"{command} --dry-run", checkout, **variables, **index_of)
        assert value(words, "--node-rank") == str(index)
        assert value(words, "--nnodes") == variables["NNODES"]
        assert value(words, "--pipeline-model-parallel-size") == variables["PP"]


def test_the_slurm_job_prints_its_command(checkout: Path) -> None:
    script = EXAMPLES / "slurm_job.sh"
    subprocess.run(["bash", "-n", script], check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.M))
    assert options["ntasks-per-node"] == "1"
    hosts = {"NNODES": options["nodes"], "GPUS_PER_NODE": options["gpus-per-node"]}
    words = dry_run("examples/slurm_job.sh --dry-run", checkout, **hosts)
    assert value(words, "--nnodes") == options["nodes"]
    assert value(words, "--nproc-per-node") == options["gpus-per-node"]
    assert value(words, "--pipeline-timeout") == "300"
    assert "--save" in words


def test_the_check_of_gpus_runs_as_a_slurm_job_on_one_host(tmp_path: Path) -> None:
    script = EXAMPLES / "slurm_gpu_check.sh"
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.M))
    assert (options["nodes"], options["ntasks-per-node"]) == ("1", "1")
    spooled = tmp_path / "slurm_script"  # Slurm runs a copy
    spooled.write_text(script.read_text())
    done = subprocess.run(
        ["bash", spooled, "--help"],
        cwd=tmp_path,
        env={**os.environ, "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("usage: scripts/gpu_check.sh"), done.stderr


INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    """Every instruction of the Dockerfile, its lines joined."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", text)
    return [
        (n, rest.strip()) for n, _, rest in (x.partition(" ") for x in joined.splitlines()) if n
    ]


def requirements() -> set[str]:
    """Return the names of all dependencies, and of those for pictures and a fast search."""
    table = project()
    extras = table["optional-dependencies"]
    listed = (*table["dependencies"], *extras["plots"], *extras["fast"])
    return {requirement.split(" ")[0] for requirement in listed}


def test_the_dockerfile_can_be_read_and_copies_what_is_there() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    copied = set()
    for name, rest in found:
        if name == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            assert target == "./" or target == sources[0]  # a folder is copied as its contents
            copied |= set(sources)
        elif name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
        elif name == "CMD":
            assert json.loads(rest)[0] == "megatron-zb"
    packages = {path.name for path in ROOT.glob("megatron_zb*") if path.is_dir()}
    needed = {"setup.py", "pyproject.toml", "README.md", "configs", "scripts", *packages}
    assert needed <= copied
    (install,) = [rest for name, rest in found if name == "RUN" and "--no-deps . " in rest]
    of_the_base = {"torch", "megatron-core"}
    for package in requirements() - of_the_base:
        assert re.search(rf'[ "]{re.escape(package)}[ "]|{re.escape(package)}$', install), package
    checkout_of = re.search(r"^ARG MEGATRON_LM=core_v(\S+)$", "\n".join(map(" ".join, found)), re.M)
    assert checkout_of is not None
    pinned = (ROOT / "constraints" / "py311.txt").read_text(encoding="utf-8")
    assert f"megatron-core=={checkout_of.group(1)}\n" in pinned
