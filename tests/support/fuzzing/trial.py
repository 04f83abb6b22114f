"""One combination, run by upstream's own schedule and by ours, and judged."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from jobs import Ended, try_job
from linked_checkouts import EXTERNAL_DATA, with_script
from rank_process import Kind

from fuzzing.command import Commands, commands_of, under_another
from fuzzing.comparison import compare, logged
from fuzzing.space import Combination, Space

_CHECKED = Path(__file__).with_name("checked.py")
_OURS = re.compile(r"^megatron(?:_zb|-zb): error: (.*)", re.MULTILINE)
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)
_WIDEST_CLIPPED = 1e-2
_LOST = "has lost the connection to another rank"  # a consequence, and no refusal
_OF_STORED_STATES = "has the parameter groups of the rank that wrote it"
_OF_ANOTHER_RANK = "gloo/transport"
_FRAME = re.compile(r'File "(?:.*/)?(\S+)", line (\d+)')
_USAGE = re.compile(r"^\S+: error: (.*)", re.MULTILINE)


class Verdict(Enum):
    """What has become of a combination."""

    EQUAL = "equal"
    REFUSED = "refused by ours, as check says"
    REFUSED_BY_BOTH = "refused by both"
    CRASHED_BY_BOTH = "crashed by both"
    DIFFERENT = "different numbers"
    CRASHED = "crashed"
    HUNG = "hung"
    DISAGREED = "check and start disagree"

    @property
    def is_failure(self) -> bool:
        return self in (Verdict.DIFFERENT, Verdict.CRASHED, Verdict.HUNG, Verdict.DISAGREED)


@dataclass(frozen=True)
class Bench:
    """Where trials run: a checkout of Megatron-LM, and the seconds that a job may take."""

    space: Space
    checkout: Path
    seconds: float = 120.0


@dataclass
class Trial:
    """The outcome of one combination, as it is written down."""

    verdict: Verdict
    why: str = ""
    losses: float = 0.0
    norms: float = 0.0
    seconds: float = 0.0
    jobs: list[float] = field(default_factory=list)

    @property
    def kind(self) -> tuple[Verdict, str]:
        """What failures of one cause are likely to have in common: no numbers, and no values."""
        return self.verdict, re.sub(r"[-+]?\d[\d.E+-]*", "#", self.why.partition(": ")[0])[:60]

    def as_json(self, **more: object) -> str:
        return json.dumps({**more, **asdict(self), "verdict": self.verdict.value})


class _Ended(Exception):
    """The trial has its verdict."""

    def __init__(self, verdict: Verdict, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


def judge(bench: Bench, combination: Combination) -> Trial:
    """Run a combination and compare; checkpoints are left nowhere.

    Where the norm clips gradients, its last bit is in every weight, and in half precision it may
    send a token to another expert. A small difference under clipping is judged without clipping.
    """
    trial = _judged(bench, combination)
    widest = max(trial.losses, trial.norms)
    is_clipped = combination["clip"] == "0.3" and combination["experts"] != "without"
    if trial.verdict is not Verdict.DIFFERENT or not is_clipped or widest > _WIDEST_CLIPPED:
        return trial
    unclipped = _judged(bench, {**combination, "clip": "0"})
    unclipped.why = unclipped.why or f"without clipping; with it {trial.why}"
    return unclipped


def _judged(bench: Bench, combination: Combination) -> Trial:
    start = time.monotonic()
    trial = Trial(Verdict.EQUAL)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        _Run(bench, combination, trial, folder).compared()
    except _Ended as ended:
        trial.verdict, trial.why = ended.verdict, str(ended)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trial.seconds = round(time.monotonic() - start, 1)
    return trial


class _Run:
    """The jobs of one trial."""

    def __init__(self, bench: Bench, combination: Combination, trial: Trial, folder: Path) -> None:
        self._bench, self._combination, self._trial = bench, combination, trial
        self._folder = folder
        self._commands = commands_of(bench.space, combination)

    def compared(self) -> None:
        """Raise what is wrong with the combination."""
        both, load = self._commands, []
        refusal = self._checked()
        if self._combination["start"] == "checkpoint":
            saving = ["--save", str(self._folder / "start"), "--save-interval", "1"]
            self._upstream([*saving, "--exit-interval", "1"], refusal)
            load = ["--load", str(self._folder / "start")]
            refusal = refusal or self._checked(load)  # of what is in the checkpoint
        upstream = self._upstream([*load, *self._keeping("upstream")], refusal)
        ours = self._job(both, [*both.ours, *load, *self._keeping("ours")])
        self._judge_start(ours, refusal)
        self._same(upstream, ours)
        if self._combination["continued"] != "without":
            self._continued()

    def _continued(self) -> None:
        upstream = self._job(self._commands, self._from("upstream", self._commands.upstream))
        if upstream.code:
            return  # upstream cannot load what it has saved
        commands, words, other = self._commands, self._commands.upstream, self._combination
        if self._combination["continued"] == "by-ours":
            words = commands.ours
        elif self._combination["continued"] == "by-another":
            other = under_another(self._bench.space, self._combination)
            commands = commands_of(self._bench.space, other, self._commands.layers)
            words = commands.ours
        ours = self._job(commands, self._from("ours", words))
        self._judge_start(ours, None, "going on: ")
        if "--dist-ckpt-optim-fully-reshardable" in words and self._goes_on(ours, other):
            return  # upstream may load other states than it saved, so it is no measure
        self._same(upstream, ours, "going on: ", other)

    def _goes_on(self, ours: Ended, other: Combination) -> bool:
        """Whether a run that was interrupted prints what upstream prints without interruption."""
        if self._combination["start"] != "fresh":
            return False
        whole, part = (
            logged(self._job(self._commands, self._commands.upstream).stdout),
            logged(ours.stdout),
        )
        return not compare(
            {key: whole.get(key, "") for key in part}, part, self._combination, other
        ).first

    def _keeping(self, name: str) -> list[str]:
        if self._combination["continued"] == "without":
            return []
        folder = str(self._folder / name)
        return ["--save", folder, "--save-interval", "3", "--exit-interval", "3"]

    def _from(self, name: str, words: Sequence[str]) -> list[str]:
        return [*words, "--load", str(self._folder / name)]

    def _upstream(self, more: Sequence[str], refusal: str | None) -> Ended:
        """Run upstream's own schedule; where it does not run, ours may not hang on the same."""
        both = self._commands
        ended = self._job(both, [*both.upstream, *more])
        if ended.code:
            ours = self._job(both, [*both.ours, *more])
            if ours.hung and not ended.hung:
                raise _Ended(Verdict.HUNG, f"where upstream says {_error(ended)}")
            if refusal is None and ours.code and not _said(ours):
                raise _Ended(Verdict.CRASHED_BY_BOTH, _error(ended))
            foreseen = refusal is not None or _OF_STORED_STATES in _said(ours)
            if foreseen != bool(ours.code):
                why = f"check: {refusal or 'runs'}; start: {_error(ours) if ours.code else 'runs'}"
                raise _Ended(Verdict.DISAGREED, why)
            raise _Ended(Verdict.REFUSED_BY_BOTH, _error(ended))
        return ended

    def _judge_start(self, ours: Ended, refusal: str | None, when: str = "") -> None:
        if ours.hung:
            raise _Ended(Verdict.HUNG, when + _error(ours))
        said = _said(ours)
        if _OF_STORED_STATES in said:  # check sees no checkpoint of a model that is not built
            raise _Ended(Verdict.REFUSED, when + said)
        if ours.code and (not said or "Traceback (most recent" in ours.stderr):
            raise _Ended(Verdict.CRASHED, when + _error(ours))
        if ((said or None) is None and refusal is not None) or (said and refusal is None):
            raise _Ended(Verdict.DISAGREED, f"{when}check: {refusal}; start: {said or 'runs'}")
        if said:
            raise _Ended(Verdict.REFUSED, when + said)

    def _same(self, upstream: Ended, ours: Ended, when: str = "", *others: Combination) -> None:
        logs = logged(upstream.stdout), logged(ours.stdout)
        found = compare(*logs, self._combination, *others)
        self._trial.losses = max(self._trial.losses, found.losses)
        self._trial.norms = max(self._trial.norms, found.norms)
        if found.first:
            raise _Ended(Verdict.DIFFERENT, when + found.first)

    def _checked(self, load: Sequence[str] = ()) -> str | None:
        """Why megatron-zb check refuses the command of ours, None if it does not."""
        commands, root = self._commands, str(self._bench.checkout)
        words = ["--megatron-lm", root, "--gpus", str(commands.ranks), "--json", "--"]
        program = str(_CHECKED)
        ended = try_job(
            None,
            program,
            ["check", *words, *commands.ours, *load],
            self._bench.seconds,
            Kind.MEGATRON_LM,
        )
        self._trial.jobs.append(round(ended.seconds, 1))
        if "Traceback (most recent" in ended.stderr:
            raise _Ended(Verdict.CRASHED, f"check: {_error(ended)}")
        report = next((line for line in ended.stdout.splitlines() if line.startswith("{")), "")
        if report:
            found = json.loads(report)["arguments"]
            why = [f"{a['argument']}: {a['why']}" for a in found if a["verdict"] == "refused"]
            return "; ".join(why) or None
        return _said(ended) or _error(ended) if ended.code else None

    def _checkout(self, script: str) -> Path:
        """The checkout, or one with links to it that also has the script of this project."""
        if script != EXTERNAL_DATA:
            return self._bench.checkout
        return with_script(self._bench.checkout, script, self._folder)

    def _job(self, commands: Commands, words: Sequence[str]) -> Ended:
        script = str(self._checkout(commands.script) / commands.script)
        given = [script, "--cpu", *words]
        limit = self._bench.seconds
        ended = try_job(commands.ranks, "megatron_zb.launch", given, limit, Kind.MEGATRON_LM)
        self._trial.jobs.append(round(ended.seconds, 1))
        return ended


def _said(ended: Ended) -> str:
    """The sentence of this package, if it has refused something."""
    found = next((f for f in _OURS.finditer(ended.stderr) if _LOST not in f[1]), None)
    return found[1][:500] if found else ""


def _error(ended: Ended) -> str:
    """The sentence of this package, or the first exception, and where it was raised."""
    if said := _said(ended):
        return said
    errors = (found for found in _ERROR.finditer(ended.stderr) if _OF_ANOTHER_RANK not in found[1])
    found = next(errors, None) or _USAGE.search(ended.stderr)
    if found is None:
        return ended.stderr[-200:]
    frames = _FRAME.findall(ended.stderr, 0, found.start())
    return f"{found[1][:300]} ({':'.join(frames[-1]) if frames else 'no traceback'})"
