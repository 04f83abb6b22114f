"""Commands in bad surroundings: narrow terminals, poor encodings, closed or full streams, signals.

    python tests/support/surroundings.py [--draw N] [--seed S]

runs every command in every surrounding, or N drawn pairs, and prints a table of what was wrong. No
surrounding may lead to a traceback or a warning of Python's, to an empty answer with exit code 0,
to a damaged file where an older one stood, or to a process that lives on.
"""

from __future__ import annotations

import argparse
import os
import pty
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from itertools import product
from pathlib import Path
from struct import pack
from termios import TIOCSWINSZ

import yaml
from live_processes import left_by
from traced_steps import profile, ran

from megatron_zb.measured.profile import write_profile
from megatron_zb.measured.trace import write_trace

ROOT = Path(__file__).resolve().parents[2]
SIZES = "-p 4 -m 8"
OLD = b"an older file\n"
BAD = ("Traceback", "Exception ignored", "resource_tracker", "leaked", "KeyboardInterrupt")
LONGEST = 300.0

COMMANDS = {
    "show": f"show v-half {SIZES}",
    "picture": f"show zb-h1 {SIZES} --output FOLDER/out.png",
    "page": f"show zb-h1 {SIZES} --output FOLDER/out.html",
    "csv": f"export zb-h1 {SIZES} --format csv --output FOLDER/out.csv",
    "export": f"export zb-h1 {SIZES} --format chrome-trace --output -",
    "plan": "plan --config gpt_1_5b --gpus 8 --tries 1 --schedules v-zb,zb-h1 --chart",
    "plan page": "plan --config gpt_1_5b --gpus 4 --tries 1 --schedules zb-h1 "
    "--html FOLDER/out.html",
    "flags": "flags --config gpt_1_5b",
    "trace": "trace FOLDER/run.yaml",
    "trace json": "trace FOLDER/run.yaml --output FOLDER/out.json",
    "help": "show --help",
    "check": "check -- --pipeline-schedule v-haf",
}
_OUTPUT = {
    name: words.split("FOLDER/out")[1] for name, words in COMMANDS.items() if "/out" in words
}


@dataclass(frozen=True)
class Surrounding:
    """What a command is started in.

    ``closed`` and ``full`` are numbers of streams; ``most`` is the size at which a file is as on a
    full disk; ``number`` is a signal, sent after ``seconds``.
    """

    environment: dict[str, str] = field(default_factory=dict)
    columns: int | None = None
    closed: tuple[int, ...] = ()
    full: tuple[int, ...] = ()
    reads: bool = True
    most: int | None = None
    number: int = 0
    seconds: float = 0.0


def _plain(**environment: str) -> Surrounding:
    return Surrounding(environment)


_C = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
_MOMENTS = (0.02, 0.1, 0.4, 1.0, 2.5)
SURROUNDINGS = {
    "COLUMNS=0": _plain(COLUMNS="0"),
    "COLUMNS=1": _plain(COLUMNS="1"),
    "COLUMNS=40": _plain(COLUMNS="40"),
    "COLUMNS=": _plain(COLUMNS=""),
    "LINES=0": _plain(LINES="0", COLUMNS="0"),
    "terminal of 0 columns": Surrounding(columns=0),
    "terminal of 1 column": Surrounding(columns=1),
    "terminal of 40 columns": Surrounding(columns=40),
    "TERM=dumb": Surrounding({"TERM": "dumb"}, columns=80),
    "ASCII": _plain(PYTHONIOENCODING="ascii"),
    "ASCII, 40 columns": _plain(PYTHONIOENCODING="ascii", COLUMNS="40"),
    "ASCII terminal": Surrounding({"PYTHONIOENCODING": "ascii"}, columns=40),
    "Latin-1": _plain(PYTHONIOENCODING="latin-1"),
    "Latin-1, 1 column": _plain(PYTHONIOENCODING="latin-1", COLUMNS="1"),
    "C locale": Surrounding(_C),
    "C locale, 0 columns": Surrounding({**_C, "COLUMNS": "0"}),
    "POSIX locale": _plain(LC_ALL="POSIX"),
    "unbuffered": _plain(PYTHONUNBUFFERED="1"),
    "no input": Surrounding(closed=(0,)),
    "no output": Surrounding(closed=(1,)),
    "no errors": Surrounding(closed=(2,)),
    "no output, no errors": Surrounding(closed=(1, 2)),
    "no streams": Surrounding(closed=(0, 1, 2)),
    "full output": Surrounding(full=(1,)),
    "full output, unbuffered": Surrounding({"PYTHONUNBUFFERED": "1"}, full=(1,)),
    "full errors": Surrounding(full=(2,)),
    "full output and errors": Surrounding(full=(1, 2)),
    "nobody reads": Surrounding(reads=False),
    "full disk": Surrounding(most=0),
    "nearly full disk": Surrounding(most=256),
    **{f"SIGINT after {s} s": Surrounding(number=signal.SIGINT, seconds=s) for s in _MOMENTS},
    **{f"SIGTERM after {s} s": Surrounding(number=signal.SIGTERM, seconds=s) for s in _MOMENTS},
    "SIGKILL after 2.5 s": Surrounding(number=signal.SIGKILL, seconds=2.5),
}


def problems_of(command: str, surrounding: str) -> list[str]:
    """Run a command in a surrounding and return what is wrong with its end."""
    with tempfile.TemporaryDirectory() as folder:
        return list(_problems(command, SURROUNDINGS[surrounding], Path(folder)))


def _problems(command: str, where: Surrounding, folder: Path) -> Iterator[str]:
    write_profile(profile(), folder / "run.yaml")
    write_trace(ran(), folder / "run.yaml")
    output = folder / f"out{_OUTPUT[command].split()[0]}" if command in _OUTPUT else None
    if output is not None:
        output.write_bytes(OLD)
    before = sorted(folder.iterdir())
    code, printed, said = _run(COMMANDS[command].replace("FOLDER", str(folder)).split(), where)
    begun = "/megatron_zb/" in said and "<frozen site>" not in said
    if where.number == signal.SIGINT and "Traceback" in said and not begun:
        return  # the interpreter had not come as far as a line of this package
    yield from (
        f"{word} in what it says: {said[-300:]!r}" for word in BAD if word in said + printed
    )
    if where.number == 0 and sorted(folder.iterdir()) != before:
        yield f"files are left: {sorted(each.name for each in folder.iterdir())}"
    if code not in _codes(command, where):
        yield f"exit code {code}: {said[-300:]!r}"
    if not where.number and where.reads:
        fails = _fails(command, where)
        if fails and 2 not in (*where.closed, *where.full) and "error: " not in said:
            yield "no sentence"
        if not fails and 1 not in where.closed and not printed.strip():
            yield "an empty answer"
    if output is not None and not _is_as_it_should(output, where):
        yield f"{output.name} is damaged, or not the older file"


def _fails(command: str, where: Surrounding) -> bool:
    """Return whether a command should say that something is wrong."""
    full_disk = where.most is not None and command in _OUTPUT
    return command == "check" or 1 in (*where.closed, *where.full) or full_disk


def _codes(command: str, where: Surrounding) -> tuple[int, ...]:
    """Return the exit codes that a command may end with."""
    ordinary = 2 if _fails(command, where) else 0
    if where.number:
        ends = {signal.SIGINT: (130, -2), signal.SIGTERM: (143, -15), signal.SIGKILL: (-9,)}
        return (ordinary, *ends[signal.Signals(where.number)])
    return (ordinary,) if where.reads else (0, 1, ordinary)


def _is_as_it_should(output: Path, where: Surrounding) -> bool:
    """Return whether a file is the older one, where that may be, or whole."""
    is_old = output.read_bytes() == OLD
    if where.most is not None:
        return is_old
    if where.number or not where.reads or 1 in (*where.closed, *where.full):
        return is_old or _is_whole(output)
    return not is_old and _is_whole(output)


def _is_whole(path: Path) -> bool:
    """Return whether a file has its last bytes."""
    ends = {".png": b"IEND\xaeB`\x82", ".html": b"</html>", ".json": b"}", ".csv": b"B7"}
    return path.read_bytes().rstrip().endswith(ends[path.suffix]) or path.suffix == ".csv"


def _run(words: Sequence[str], where: Surrounding) -> tuple[int, str, str]:
    """Run a command; return its exit code, what it printed, and what it said of errors."""
    names = ("PATH", "HOME", "PYTHONPATH", "LANG")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    # a Python older than 3.13 would leave a part of a compiled module on a disk that is nearly full
    plain = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**kept, **plain, **where.environment}
    output: int = subprocess.PIPE
    reader: int | None = None
    if where.columns is not None:
        reader, output = pty.openpty()
        ioctl(output, TIOCSWINSZ, pack("HHHH", 24, where.columns, 0, 0))
    elif not where.reads:
        ours, output = os.pipe()
        os.close(ours)
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_zb.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=_preparing(where),
    )
    if output != subprocess.PIPE:
        os.close(output)
    printed, said = _end(process, where, reader)
    left = left_by([process.pid])
    if left:
        said += f"Traceback of this test: processes {left} live on".encode()
    return process.returncode, printed.decode(errors="replace"), said.decode(errors="replace")


def _preparing(where: Surrounding) -> Callable[[], None]:
    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if where.most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (where.most, where.most))
        for number in where.full:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, number)
            os.close(full)
        for number in where.closed:
            os.close(number)

    return prepare


def _end(
    process: subprocess.Popen[bytes], where: Surrounding, reader: int | None
) -> tuple[bytes, bytes]:
    """Wait for the end of a command, and send it its signal; return what it printed and said."""
    with ThreadPoolExecutor(1) as threads:
        terminal = None if reader is None else threads.submit(_read, reader)
        if where.number:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=where.seconds)
            if process.poll() is None:
                process.send_signal(where.number)
        printed, said = process.communicate(timeout=LONGEST)
        return printed or (b"" if terminal is None else terminal.result()), said


def _read(terminal: int) -> bytes:
    found = b""
    with suppress(OSError):  # its other end is closed
        while more := os.read(terminal, 65536):
            found += more
    os.close(terminal)
    return found


def drawn(count: int | None, seed: str) -> list[tuple[str, str]]:
    """Return pairs of a command and a surrounding: all, or some that a seed draws."""
    pairs = list(product(COMMANDS, SURROUNDINGS))
    return pairs if count is None else random.Random(seed).sample(pairs, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="pairs (default: all)")
    parser.add_argument("--seed", default="0", metavar="S", help="of what is drawn")
    arguments = parser.parse_args()
    counts: Counter[bool] = Counter()
    for command, surrounding in drawn(arguments.draw, arguments.seed):
        found = problems_of(command, surrounding)
        counts[not found] += 1
        print(f"{'ok ' if not found else 'BAD'} {command:11} {surrounding}", flush=True)
        if found:
            print(yaml.safe_dump(found, width=120), flush=True)
    print(f"{counts[True]} of {counts.total()} as they should be")
    return int(counts[False] > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
