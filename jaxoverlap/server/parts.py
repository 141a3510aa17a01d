"""The parts of a server, as processes or within this one.

Processes are new interpreters, never forks: gRPC and JAX do not survive one. They get their sockets by number, find
modules where this process finds them, and are a process group each, so that a terminal's Ctrl-C is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jaxoverlap.engine.core_process import EngineSpec, run_engine
from jaxoverlap.errors import JaxOverlapError

logger = logging.getLogger(__name__)

ENGINE_MODULE, FRONTEND_MODULE = "jaxoverlap.engine.core_process", "jaxoverlap.server.frontend_process"


class ProcessPart:
    """A process of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process

    @classmethod
    async def start(cls, name: str, module: str, spec: Any, sockets: Sequence[socket.socket]) -> ProcessPart:
        """Runs a module with a JSON argument: the spec, then the numbers of the sockets, which become its own."""
        numbers = [connection.fileno() for connection in sockets]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            json.dumps([spec, *numbers]),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=numbers,
            process_group=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        for connection in sockets:
            connection.close()
        return cls(name, process)

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


class EngineThread:
    """The engine in a thread of this process. Nothing can kill it; the process that ends takes it along."""

    name = "engine"

    def __init__(self, spec: EngineSpec, supervisor: socket.socket, frontend: socket.socket) -> None:
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._arguments = spec, supervisor, [frontend]
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None: ...

    def _run(self) -> None:
        code = 1
        try:
            run_engine(*self._arguments)
            code = 0
        except JaxOverlapError as error:  # the supervisor has been told
            logger.debug("the engine ends", exc_info=error)
        except Exception:
            logger.exception("the engine has failed")
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._set_ended, code)

    def _set_ended(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)


class FrontEndTask:
    """A front end on this process's event loop."""

    name = "front end"

    def __init__(self, work: asyncio.Task[int]) -> None:
        self._work = work

    async def wait(self) -> int:
        await asyncio.wait({self._work})
        if self._work.cancelled():
            return 1
        if self._work.exception() is not None:
            logger.error("the front end has failed", exc_info=self._work.exception())
            return 1
        return self._work.result()

    def kill(self) -> None:
        self._work.cancel()
