"""Two hosts on one machine: network namespaces with an address each, joined by a cable."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

SECONDS = 300


@dataclass(frozen=True)
class Host:
    """A network namespace: its address, and the device that leads to the other one."""

    name: str
    address: str
    device: str


class NotPermitted(Exception):
    """This process may not make network namespaces; why, in the words of ``ip``."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make them, and take them away again.

    Raises:
        NotPermitted: there is no ``ip``, or it may not do that here.
    """
    number = os.getpid() % 100_000
    first, second = (
        Host(f"zb{number}-{side}", f"10.213.7.{side + 1}", f"zb{number}{'ab'[side]}")
        for side in range(2)
    )
    try:
        for host in (first, second):
            _ip("netns", "add", host.name)
        _ip("link", "add", first.device, "type", "veth", "peer", "name", second.device)
        for host in (first, second):
            _ip("link", "set", host.device, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in (first, second):
            with suppress(NotPermitted):
                _ip("netns", "del", host.name)  # takes the device along


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotPermitted(f"there is no ip command: {error.strerror}") from error
    if done.returncode:
        raise NotPermitted(done.stderr.strip() or f"ip {' '.join(arguments)} failed")


class Running:
    """A command on a host."""

    def __init__(self, host: Host, command: list[str], environment: Mapping[str, str]) -> None:
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in end()
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", host.name, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": host.device},
            start_new_session=True,
            cwd=tempfile.gettempdir(),
        )

    def end(self) -> tuple[int, str]:
        """Exit status and output, once it has ended; it is killed if it takes too long."""
        try:
            self.process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        return self.process.returncode, text
