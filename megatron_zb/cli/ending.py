"""End of a command: an exit code, and at most one line about what went wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from megatron_zb.errors import UsageError, explain_missing_package

WRONG = 2
INTERRUPTED = 130  # the exit status of shells for a program that Ctrl-C has ended
_NOBODY_READS = 1  # what Python's documentation and rich end with
PATIENCE = 2.0  # seconds until a slow step is reported
_EVERY = 5.0  # seconds between its further lines


def ended(program: str, command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code.

    The code is the command's own (0 for None), 2 after a UsageError, 130 after Ctrl-C and 1,
    without a word, where nobody reads the output any more.

    Args:
        program: the name that errors begin with.
        command: function to run.
    """
    try:
        try:
            with explain_missing_package():
                return command() or 0
        except UsageError as error:
            print(f"{program}: error: {error}", file=sys.stderr)
            return WRONG
        except KeyboardInterrupt:
            print(f"{program}: interrupted", file=sys.stderr)
            return INTERRUPTED
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more()
        return _NOBODY_READS
    except OSError as error:
        _write_no_more()
        print(f"{program}: error: {_describe(error)}", file=sys.stderr)
        return WRONG


def _describe(error: OSError) -> str:
    """Describe a failure to write the output, such as a full disk, or to use a file."""
    reason = error.strerror or str(error)
    if error.filename is None:
        return f"the output cannot be written: {reason}"
    return f"'{error.filename}' cannot be used: {reason}"


def _write_no_more() -> None:
    """Redirect standard output to the null device, for the interpreter's flush at its end."""
    with suppress(OSError, ValueError):  # a stream that stands for the output has no number
        number = sys.stdout.fileno()
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
    with suppress(OSError, ValueError):  # standard error is closed, or nobody reads it
        print(f"{what} ...", file=sys.stderr, flush=True)
        while not done.wait(every):
            seconds = time.monotonic() - begun
            print(f"{what} ... {seconds:.0f} s", file=sys.stderr, flush=True)
