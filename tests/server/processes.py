"""`jaxoverlap serve` as its own processes, on the toy device unless said otherwise."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.server.rig import PATIENCE, Caller, eventually

ROOT = Path(__file__).parents[2]
SMALL = ("--max-running", "4", "--page-size", "4", "--num-pages", "600")


class Served:
    """A server that has been started; `address` is there when it is ready.

    Attributes:
      children: the processes below it, engine first.
    """

    def __init__(self, *arguments: str, module: str = "tests.server.toy", listen: str = "127.0.0.1:0", **env: str):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", "--listen", listen, *arguments],
            cwd=ROOT,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.callers: list[Caller] = []

    def wait_ready(self) -> Served:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # ends, at the latest, with the process
        assert line.startswith("serving "), line + self.log()
        self.address = line.split()[-1]
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        return self

    @property
    def engine(self) -> psutil.Process:
        return next(child for child in self.children if "core_process" in " ".join(child.cmdline()))

    @property
    def frontend(self) -> psutil.Process:
        return next(child for child in self.children if "frontend_process" in " ".join(child.cmdline()))

    def caller(self) -> Caller:
        self.callers.append(Caller(self.address))
        return self.callers[-1]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code; by then nobody is left, and nobody listens."""
        code = self.process.wait(PATIENCE)
        eventually(lambda: not any(map(_is_alive, getattr(self, "children", []))), "the end of the children")
        return code

    def check_exits_at_once(self) -> None:
        """Within two seconds, or on a busy machine within twenty starts of a bare Python."""
        started = time.monotonic()
        self.wait()
        seconds = time.monotonic() - started
        if seconds >= 2:
            started = time.monotonic()
            subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
            assert seconds < 20 * (time.monotonic() - started)

    def check_port_is_free(self) -> None:
        host, port = self.address.rsplit(":", 1)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for caller in self.callers:
            caller.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        children = getattr(self, "children", [])
        try:
            if kind is None:
                eventually(lambda: not any(map(_is_alive, children)), "the end of the children")
        finally:
            for child in filter(_is_alive, children):
                child.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
