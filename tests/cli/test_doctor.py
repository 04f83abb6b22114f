"""The doctor: one clear sentence for each part, whatever state it is in."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement as Parsed
from project import project
from small_trees import checkout_tree, write

from megatron_zb.cli import doctor, doctor_packages
from megatron_zb.cli import main as cli
from megatron_zb.cli.doctor import Torch
from megatron_zb.cli.doctor_packages import Finding, Installed, Requirement
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm.checkout import Checkout, checkout_at

ON_GPUS = Torch(
    "2.13.0+cu130", cuda="13.0", gpus=("H200", "H200"), capability=9, nccl=True, gloo=True
)
ON_BLACKWELL = Torch("2.13.0", cuda="13.0", gpus=("B200",), capability=10)
ON_CPU = Torch("2.13.0+cpu", gloo=True)


def only(findings: Any, part: str) -> Finding:
    [finding] = [finding for finding in findings if finding.part == part]
    assert isinstance(finding, Finding)
    return finding


def assert_sentences(findings: list[Finding]) -> None:
    for finding in findings:
        assert finding.found
        assert finding.advice.endswith(".")
        assert "\n" not in finding.advice


@pytest.fixture
def core_016(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run with either served version; most of these want one of them."""
    monkeypatch.setattr(doctor, "core_version", lambda: "0.16.1")


# --- packages

TOOL = Requirement("tool", "tool_module", "everything needs it", "<3,>=1.10")
EXTRA = Requirement("extra", "extra", "pictures", ">=2.0", "draw by hand", "[more]")


@pytest.mark.parametrize(
    ("requirement", "installed", "finding"),
    [
        (TOOL, Installed("1.10.0", True), Finding("tool", "1.10.0", "ok", "everything needs it.")),
        (TOOL, Installed(None, True), Finding("tool", "yes", "ok", "everything needs it.")),
        (
            TOOL,
            Installed(None, False),
            Finding(
                "tool",
                "not installed",
                "missing",
                "run pip install 'tool<3,>=1.10': everything needs it.",
                "tool<3,>=1.10",
            ),
        ),
        *(
            (
                TOOL,
                Installed(version, True),
                Finding(
                    "tool",
                    f"{version}, but <3,>=1.10 is needed",
                    "wrong",
                    "run pip install 'tool<3,>=1.10': everything needs it.",
                    "tool<3,>=1.10",
                ),
            )
            for version in ("1.9.4", "3.0")
        ),
        (
            TOOL,
            Installed("1.11", False),
            Finding(
                "tool",
                "1.11, but broken: it has no module tool_module",
                "wrong",
                "run pip install --force-reinstall 'tool<3,>=1.10': everything needs it.",
                "tool<3,>=1.10",
                again=True,
            ),
        ),
        (
            EXTRA,
            Installed(None, False),
            Finding(
                "extra",
                "not installed",
                "optional",
                "run pip install 'extra[more]>=2.0'; without it, draw by hand.",
                "extra[more]>=2.0",
            ),
        ),
        (EXTRA, Installed("2.0.0rc1", True), Finding("extra", "2.0.0rc1", "ok", "pictures.")),
    ],
)
def test_a_package(requirement: Requirement, installed: Installed, finding: Finding) -> None:
    assert doctor_packages.about_package(requirement, installed) == finding


METADATA = [
    "torch>=2.6",
    "pydantic<3,>=2.7",
    "newcomer>=1",
    'numba>=0.60; extra == "fast"',
    'transformer-engine[pytorch]>=2.3; extra == "te"',
    'pytest>=8.0; extra == "test"',
]


def test_what_is_required_is_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [r.name for r in doctor_packages.required(METADATA)]
    assert names == ["torch", "pydantic", "newcomer"]
    assert doctor_packages.required(METADATA)[1].versions == "<3,>=2.7"
    [engine] = doctor_packages.required(METADATA, "te")
    assert engine.install == "transformer-engine[pytorch]>=2.3"
    assert engine.without
    monkeypatch.setattr(
        doctor_packages, "look_at", lambda r: Installed(None, r.name == "packaging")
    )
    states = {f.part: f.state for f in doctor_packages.about_packages(METADATA, on_gpus=False)}
    assert states == {
        "pydantic": "missing",
        "newcomer": "missing",
        "numba": "optional",
        "transformer-engine": "optional",
    }


def test_what_nothing_here_runs_on_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_packages, "look_at", lambda r: Installed(None, r.name == "packaging")
    )
    for on_gpus, said in ((False, ""), (True, "transformer-engine[pytorch]>=2.3")):
        found = doctor_packages.about_packages(METADATA, on_gpus=on_gpus)
        assert only(found, "transformer-engine").install == said


def test_without_metadata_the_package_itself_is_a_finding() -> None:
    [finding] = doctor_packages.about_packages([], on_gpus=False)
    assert (finding.part, finding.state) == ("megatron-zb", "optional")


def test_every_requirement_of_the_packaging_has_its_purpose() -> None:
    """Of a new one it would be said that megatron_zb needs it, which helps nobody."""
    texts = doctor_packages.own_requirements()
    assert texts
    for extra in ("", *doctor_packages.OPTIONAL):
        for requirement in doctor_packages.required(texts, extra):
            assert requirement.name in (*doctor_packages.USES, "megatron-core")


def test_the_packaging_has_all_that_a_training_loop_imports() -> None:
    table = project()
    listed = [*table["dependencies"], *table["optional-dependencies"]["megatron-lm"]]
    for series in versions.SERIES:
        for _, package in series.packages:
            assert package in {requirement.split(" ")[0] for requirement in listed}
    assert f"megatron-core >= {versions.SERIES[0].text}" in listed  # newer ones bring a warning


@pytest.mark.parametrize(
    "error", [KeyError("Version"), OSError("disk"), metadata.PackageNotFoundError]
)
def test_damaged_metadata_is_no_traceback(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(metadata, "version", fail)
    for looking in (doctor_packages, doctor):
        monkeypatch.setattr(looking, "find_spec", fail)
    assert doctor_packages.look_at(TOOL) == Installed(None, False)
    assert doctor.core_version() is None


def test_looking_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numba.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    assert doctor_packages.look_at(doctor_packages.USES["numba"]).there


def test_apex_and_its_kernel() -> None:
    both = list(doctor_packages.about_apex(True, True))
    assert [finding.state for finding in both] == ["ok", "ok"]
    neither = list(doctor_packages.about_apex(False, False))
    assert [finding.state for finding in neither] == ["optional", "optional"]
    assert "--no-gradient-accumulation-fusion" in neither[1].advice
    assert "--sequence-parallel" in neither[0].advice
    assert_sentences([*both, *neither])


# --- Python, torch, GPUs


def test_python() -> None:
    assert doctor.about_python((3, 11), ">=3.10", None).state == "ok"
    assert doctor.about_python((3, 9), ">=3.10", None).state == "wrong"
    assert doctor.about_python((3, 10), ">=3.10", Checkout(Path(), (0, 16, 1))).state == "ok"
    assert doctor.about_python((3, 9), "", None).state == "ok"  # nothing is known
    assert (
        doctor.about_python(sys.version_info[:2], doctor_packages.own_python(), None).state == "ok"
    )
    assert doctor_packages.own_python() == ">=3.10"
    newer = doctor.about_python((3, 11), ">=3.10", Checkout(Path(), (0, 19, 1)))
    assert newer.state == "wrong"
    assert "Python 3.12 or newer: Megatron-LM 0.19.1 needs it" in newer.advice
    assert doctor.about_python((3, 12), ">=3.10", Checkout(Path(), (0, 19, 1))).state == "ok"


@pytest.mark.parametrize(
    ("torch", "states"),
    [
        (ON_GPUS, {"torch": "ok", "GPUs": "ok", "NCCL": "ok", "gloo": "ok"}),
        (
            ON_CPU,
            {"torch": "optional", "GPUs": "optional", "NCCL": "optional", "gloo": "ok"},
        ),
        (
            Torch("2.13.0", cuda="13.0", nccl=True, gloo=True),
            {"torch": "ok", "GPUs": "optional", "NCCL": "ok", "gloo": "ok"},
        ),
        (
            Torch("2.13.0", driver="the driver is too old", cuda="13.0", nccl=True, gloo=True),
            {"torch": "ok", "GPUs": "wrong", "NCCL": "ok", "gloo": "ok"},
        ),
        (
            Torch("2.13.0", cuda="13.0", gpus=("H200",), capability=9),
            {"torch": "ok", "GPUs": "ok", "NCCL": "wrong", "gloo": "optional"},
        ),
        (
            Torch("2.13.0"),
            {"torch": "optional", "GPUs": "optional", "NCCL": "optional", "gloo": "wrong"},
        ),
        (Torch(), {"torch": "missing"}),
        (Torch("2.13.0", broken="libcudart.so.13: cannot open"), {"torch": "wrong"}),
    ],
)
def test_torch_and_what_it_sees(torch: Torch, states: dict[str, str]) -> None:
    findings = list(doctor.about_torch(torch))
    assert {finding.part: finding.state for finding in findings} == states
    assert_sentences(findings)


def test_a_torch_that_is_too_old() -> None:
    [needed] = doctor_packages.required(["torch>=2.6"])
    [finding] = doctor.about_torch(Torch("2.5.1", gloo=True), needed)
    assert (finding.state, finding.install) == ("wrong", "torch>=2.6")


def test_what_torch_complains_about_is_told() -> None:
    [finding] = doctor.about_torch(Torch("2.13.0", broken="libcudart.so.13: cannot open"))
    assert "libcudart.so.13: cannot open" in finding.advice
    gpus = only(doctor.about_torch(Torch("2.13.0", driver="too old", cuda="13.0")), "GPUs")
    assert "too old" in gpus.advice
    two = only(doctor.about_torch(ON_GPUS), "GPUs")
    assert two.found == "2: H200"
    assert "--nproc-per-node 2" in two.advice


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: ModuleSpec(name, None))
    torch = doctor.look_at_torch()
    assert torch.version == metadata.version("torch")
    assert "torch" in torch.broken
    [finding] = doctor.about_torch(torch)
    assert finding.state == "wrong"


def test_torch_that_is_here() -> None:
    import torch

    seen = doctor.look_at_torch()
    assert seen.version == torch.__version__
    assert seen.cuda == torch.version.cuda
    assert seen.gloo
    assert not seen.broken


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def warn() -> bool:
        import warnings

        warnings.warn("CUDA initialization: driver too old\n(more)", stacklevel=1)
        return False

    def fail() -> bool:
        raise RuntimeError("no NVML")

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert doctor._gpus() == ((), 0, "CUDA initialization: driver too old")
    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert doctor._gpus() == ((), 0, "no NVML")


@pytest.mark.parametrize(
    ("torch", "connections", "states"),
    [
        (ON_CPU, None, []),
        (ON_GPUS, None, ["optional", "ok"]),
        (ON_GPUS, "8", ["optional", "ok"]),
        (ON_GPUS, "1", ["ok", "optional"]),
        (ON_BLACKWELL, None, ["ok", "ok"]),
        (ON_BLACKWELL, "1", ["ok", "optional"]),
    ],
)
def test_connections_matter_on_gpus_alone(
    torch: Torch, connections: str | None, states: list[str]
) -> None:
    """Tensor and context parallelism want one, hiding what experts exchange wants more."""
    environment = {} if connections is None else {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    findings = list(doctor.about_connections(torch, environment))
    assert [finding.state for finding in findings] == states
    assert_sentences(findings)
    if states[1:] == ["ok"]:
        assert "--expert-model-parallel-size 2 or more" in findings[1].advice
    elif states:
        assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in findings[1].advice
        assert ("takes other values for tensor" in findings[1].advice) is (torch is ON_GPUS)


# --- Megatron


@pytest.mark.parametrize(
    ("version", "checkout", "state"),
    [
        ("0.16.1", None, "ok"),
        ("0.17.0", None, "ok"),
        ("0.19.2", None, "ok"),
        ("0.20.0", None, "optional"),
        ("0.15.3", None, "wrong"),
        ("unknown version", None, "wrong"),
        (None, None, "missing"),
        (None, Checkout(Path(), (0, 16, 1)), "optional"),
        ("0.15.3", Checkout(Path(), (0, 16, 1)), "optional"),
        ("0.15.3", Finding("Megatron-LM", "not served", "wrong", "x."), "wrong"),
    ],
)
def test_megatron_core(version: str | None, checkout: Any, state: str) -> None:
    finding = doctor.about_core(version, checkout)
    assert finding.state == state
    assert_sentences([finding])


def test_the_core_that_is_installed() -> None:
    assert doctor.core_version() == metadata.version("megatron-core")


def test_a_checkout_on_the_path_hides_the_installed_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("megatron.core", None, is_package=True)
    spec.submodule_search_locations = [str(checkout_tree(tmp_path, "0.19.7") / "megatron/core")]
    monkeypatch.setattr(doctor, "find_spec", lambda name: spec)
    assert doctor.core_version() == "0.19.7"


def test_a_checkout_that_is_newer_than_all_is_no_hindrance(tmp_path: Path) -> None:
    checkout = checkout_at(checkout_tree(tmp_path, "0.20.0"))
    version = next(iter(doctor.about_checkout(checkout)))
    assert (version.found, version.state) == ("0.20.0", "optional")
    assert f"newer than {versions.NEWEST}, the newest that was checked" in version.advice
    assert_sentences([version])


@pytest.mark.slow
def test_arguments_that_no_known_version_has_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the checkout's own parser, which another process imports."""
    checkout = checkout_at(checkout_tree(tmp_path, "0.19.0"))
    findings = [doctor.about_arguments(checkout)]
    write(tmp_path / "megatron/training/arguments.py", PARSER)
    findings.append(doctor.about_arguments(checkout))
    assert (findings[1].found, findings[1].state) == ("1 unknown", "optional")
    assert findings[1].advice.endswith("has not been looked at: --no-such-thing.")
    write(tmp_path / "broken/torch.py", "raise RuntimeError('not on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    findings.append(doctor.about_arguments(checkout))
    assert "RuntimeError: not on this machine" in findings[2].advice
    assert [findings[i].found for i in (0, 2)] == ["not read", "not read"]
    assert_sentences(findings)


PARSER = """\
def add_megatron_arguments(parser):
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--no-such-thing", dest="thing", action="store_false")
    return parser
"""


def test_a_checkout_is_started_by_the_launcher_or_as_ever(tmp_path: Path) -> None:
    checkout = checkout_at(checkout_tree(tmp_path / "with space", "0.16.1"))
    version, start = doctor.about_checkout(checkout)
    assert (version.found, version.state) == ("0.16.1", "ok")
    assert (start.found, start.state) == ("not patched", "ok")
    launch, patch = start.commands
    assert f"-m megatron_zb.launch '{checkout.root}/pretrain_gpt.py'" in launch
    assert patch == f"scripts/apply_patches.sh '{checkout.root}'"
    with (checkout.root / "megatron/training/__init__.py").open("a", encoding="utf-8") as file:
        file.write("import megatron_zb\n\nmegatron_zb.install()  # --pipeline-schedule\n")
    start = list(doctor.about_checkout(checkout))[1]
    assert start.found == "patched"
    [command] = start.commands
    assert "megatron_zb.launch" not in command


def test_the_patches_have_the_mark_that_tells_a_patched_checkout() -> None:
    patches = list((Path(__file__).parents[2] / "patches").glob("*.patch"))
    assert patches
    for patch in patches:
        assert f"+{doctor._MARK}" in patch.read_text(encoding="utf-8")


def test_what_the_training_loop_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = checkout_at(checkout_tree(tmp_path, "0.16.1"))
    gone = {"six", "yaml", "einops"}
    monkeypatch.setattr(doctor, "look_at", lambda r: Installed(None, r.module not in gone))
    findings = list(doctor.about_training_loop(checkout, ON_CPU))
    states = {finding.part: finding.state for finding in findings}
    assert states["six"] == states["pyyaml"] == "missing"
    assert states["einops"] == "optional"
    assert states["transformers"] == states["regex"] == "ok"
    assert only(findings, "pyyaml").advice.startswith("run pip install pyyaml: the training loop")
    assert_sentences(findings)


@pytest.mark.parametrize(
    ("compiled", "missing", "on_gpus", "state"),
    [
        (True, ["make"], True, "ok"),
        (False, [], True, "ok"),
        (False, ["pybind11", "make"], True, "missing"),
        (False, ["pybind11"], False, "optional"),
    ],
)
def test_the_helpers_of_data_sets(
    compiled: bool, missing: list[str], on_gpus: bool, state: str
) -> None:
    finding = doctor.about_helpers(compiled, missing, on_gpus)
    assert finding.state == state
    assert_sentences([finding])
    if state in ("missing", "optional"):
        assert " and ".join(missing) in finding.advice


def test_helpers_of_another_python_are_not_compiled_ones(tmp_path: Path) -> None:
    from sysconfig import get_config_var

    checkout = checkout_at(checkout_tree(tmp_path, "0.16.1"))
    folder = checkout.root / "megatron/core/datasets"
    folder.mkdir()
    (folder / "helpers_cpp.cpython-39-x86_64-linux-gnu.so").touch()
    assert not doctor.is_compiled(checkout)
    (folder / f"helpers_cpp{get_config_var('EXT_SUFFIX')}").touch()
    assert doctor.is_compiled(checkout)


def test_what_compiles_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "look_at", lambda requirement: Installed(None, False))
    assert doctor.missing_to_compile() == ["pybind11", "make", "a C++ compiler"]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor.missing_to_compile() == ["pybind11"]


# --- the command


def test_every_finding_is_a_sentence(core_016: None, tmp_path: Path) -> None:
    alone = doctor.examine()
    assert_sentences(alone)
    assert only(alone, "Megatron-LM").state == "optional"
    together = doctor.examine(checkout_tree(tmp_path, "0.16.1"))
    assert_sentences(together)
    assert len({finding.part for finding in together}) == len(together)
    assert doctor.exit_code(alone) == 0


@pytest.mark.usefixtures("core_016")
def test_findings_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is True
    parts = {one["part"]: one for one in found["findings"]}
    assert parts["numba"]["state"] == "ok"
    assert "first rank" in parts["numba"]["advice"]
    wrong = doctor.as_json(FINDINGS)
    assert wrong["ready"] is False
    assert wrong["command"] == doctor.mending_command(FINDINGS)


@pytest.mark.parametrize("width", [80, 100])
def test_the_command_prints_every_finding(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    table = printed.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= width
    words = " ".join(printed.split())
    for part in ("Python", "torch", "GPUs", "NCCL", "gloo", "megatron-core", "numba", "apex"):
        assert f"{part} " in words
    assert "\nAll that is required is here.\n" in printed


FINDINGS = [
    Finding("part", "[red]", "optional", "run pip install 'name[extra]>=2'.", "name[extra]>=2"),
    Finding("tool", "1.0, but broken", "wrong", "mend it.", "tool<3,>=1", again=True),
    Finding("start", "yes", "ok", "start it.", commands=("torchrun" + " --flag value" * 20,)),
]


def test_what_to_do_is_below_the_table_and_never_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    doctor.print_findings(FINDINGS)
    table, *below = capsys.readouterr().out.split("\n\n")
    assert "[red]" in table
    assert max(map(len, table.splitlines())) <= 80
    lines = "\n".join(below).splitlines()
    assert "part: run pip install 'name[extra]>=2'." in lines
    assert f"  {FINDINGS[2].commands[0]}" in lines
    assert "To be mended before training can start: tool." in lines
    assert lines[-1] == f"  {doctor.mending_command(FINDINGS)}"


def test_one_command_mends_all_that_pip_can() -> None:
    pip = f"{sys.executable} -m pip install"
    assert doctor.mending_command(FINDINGS) == (
        f"{pip} 'name[extra]>=2' && {pip} --force-reinstall 'tool<3,>=1'"
    )
    assert doctor.mending_command(FINDINGS[2:]) == ""


def test_pip_could_read_the_command(
    core_016: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library that pip reads requirements with; nothing is installed."""
    for looking in (doctor_packages, doctor):
        monkeypatch.setattr(looking, "look_at", lambda r: Installed(None, r.name == "packaging"))
    findings = doctor.examine(checkout_tree(tmp_path, "0.16.1"))
    words = shlex.split(doctor.mending_command(findings))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    names = [Parsed(word).name for word in words[4:]]
    assert {"numpy", "six", "matplotlib"} <= set(names)


def test_without_rich_the_findings_are_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    finding = Finding("rich", "not installed", "missing", "run pip install rich.", "rich")
    doctor.print_findings([finding])
    assert capsys.readouterr().out == (
        "rich: not installed (missing): run pip install rich.\n"
        "\nTo be mended before training can start: rich.\n"
        f"What pip can mend, all of it:\n  {sys.executable} -m pip install rich\n"
    )


@pytest.mark.usefixtures("core_016")
def test_a_checkout_that_is_not_served_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    root = checkout_tree(tmp_path, "0.12.0")
    assert cli.main(["doctor", str(root)]) == 1
    printed = capsys.readouterr().out
    known = f"known are {versions.SUPPORTED}."
    assert f"has version 0.12.0, which is older than all that are known here: {known}" in printed
    assert "\nTo be mended before training can start: Megatron-LM.\n" in printed


@pytest.mark.usefixtures("core_016")
@pytest.mark.parametrize("lost", ["megatron/training/training.py", "megatron/core/package_info.py"])
def test_a_path_that_is_no_checkout_is_a_usage_error(
    lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout_tree(tmp_path, "0.16.1")
    (root / lost).unlink()
    assert cli.main(["doctor", str(root)]) == 2
    assert cli.main(["doctor", str(root / "nowhere")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second = printed.err.splitlines()
    assert "is not a Megatron-LM checkout" in first
    assert "there is no folder" in second


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for word in ("ok", "optional", "missing", "wrong", "exit code", "megatron-zb doctor ~/"):
        assert word in printed


def test_it_runs_where_nothing_can_be_imported() -> None:
    """Neither torch nor Megatron nor rich: findings, and exit code 1."""
    program = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'rich'): sys.modules[name] = None\n"
        "from megatron_zb.cli.main import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "To be mended before training can start: torch" in done.stdout
