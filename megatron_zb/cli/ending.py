"""End of a command: an exit code, and at most one line about what went wrong."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn, TextIO

from megatron_zb.cli import streams
from megatron_zb.errors import UsageError, explain_missing_package

WRONG = 2
INTERRUPTED = 130  # the exit status of shells for a program that Ctrl-C has ended
TERMINATED = 143  # and for one that SIGTERM has ended
_NOBODY_READS = 1  # what Python's documentation and rich end with
PATIENCE = 2.0  # seconds until a slow step is reported
_EVERY = 5.0  # seconds between its further lines


class _Terminated(KeyboardInterrupt):
    """SIGTERM: the command ends what it has started, as after Ctrl-C."""


def ended(program: str, command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    The code is the command's own (0 for None), 2 after a UsageError, 130 after Ctrl-C, 143 after
    SIGTERM, and 1, without a word, where nobody reads the output any more.

    Args:
        program: the name that errors begin with.
        command: function to run.
    """
    streams.prepare()
    try:
        with _interruptible(program):
            return _code_of(program, command)
    except BrokenPipeError:
        _write_no_more(sys.stdout)
        return _NOBODY_READS
    except OSError as error:
        _write_no_more(sys.stdout)
        say(f"{program}: error: {_describe(error)}")
        return WRONG
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _write_no_more(sys.stderr)


def _code_of(program: str, command: Callable[[], int | None]) -> int:
    try:
        with explain_missing_package():
            return command() or 0
    except UsageError as error:
        say(f"{program}: error: {error}")
        return WRONG
    except KeyboardInterrupt as error:
        return _interrupted(program, error)
    finally:
        sys.stdout.flush()


def say(line: str) -> None:
    """Print a line on standard error, if it can be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nor can what others write or flush later
        _write_no_more(sys.stderr)


@contextmanager
def _interruptible(program: str) -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM, where they would end the process at once.

    During an import the signal ends the process: an exception there may be lost in a callback of
    the import system, or leave a module of C code half initialized.
    """
    if current_thread() is not main_thread() or "TORCHELASTIC_RUN_ID" in os.environ:
        yield  # a rank, which may wait for another, is ended at once
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second one is not waited for
        error = _Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if _is_importing(frame):
            os._exit(_interrupted(program, error))
        raise error

    usual = (signal.SIG_DFL, signal.default_int_handler)
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {number: handler for number, handler in found.items() if handler in usual}
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _interrupted(program: str, error: KeyboardInterrupt) -> int:
    """Print that a command was interrupted and return its exit code."""
    terminated = isinstance(error, _Terminated)
    say(f"{program}: {'terminated' if terminated else 'interrupted'}")
    return TERMINATED if terminated else INTERRUPTED


def _describe(error: OSError) -> str:
    """Describe a failure to write the output, such as a full disk, or to use a file."""
    reason = error.strerror or str(error)
    if error.filename is None:
        closed = error.errno == errno.EBADF
        return f"the output cannot be written: {'it is closed' if closed else reason}"
    return f"'{error.filename}' cannot be used: {reason}"


def _write_no_more(stream: TextIO) -> None:
    """Redirect a standard stream to the null device, for the interpreter's flush at its end."""
    with suppress(OSError, ValueError):  # a stream that stands for it has no number
        number = stream.fileno()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, number)
        os.close(nothing)


@contextmanager
def report_if_slow(what: str, after: float | None = None, every: float = _EVERY) -> Iterator[None]:
    """Report a slow step on standard error, also where that is no terminal.

    Args:
        what: the step.
        after: seconds until the first line; None for ``PATIENCE``.
        every: seconds until each further line, which has the elapsed seconds.
    """
    done = Event()
    patience = PATIENCE if after is None else after
    thread = Thread(target=_report_until, args=(done, what, patience, every), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _report_until(done: Event, what: str, after: float, every: float) -> None:
    begun = time.monotonic()
    if done.wait(after):
        return
    say(f"{what} ...")
    while not done.wait(every):
        say(f"{what} ... {time.monotonic() - begun:.0f} s")
