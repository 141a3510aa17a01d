"""A front end in a process of its own: `python -m jaxoverlap.server.frontend_process '<FrontEndSpec as JSON>'`.

As the engine's, it leaves signals to the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxoverlap.errors import ConfigError
from jaxoverlap.observe.logs import log_to_stderr
from jaxoverlap.server.address import Address
from jaxoverlap.server.admin_service import Instance
from jaxoverlap.server.config import ServerConfig
from jaxoverlap.server.control import Control
from jaxoverlap.server.frontend import FrontEnd

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FrontEndSpec:
    """What `FrontEnd` is made of, all of it JSON."""

    config: Mapping[str, Any]
    instance: Mapping[str, Any]
    index: int
    address: Mapping[str, Any]
    admin_address: Mapping[str, Any] | None


async def run_frontend(spec: FrontEndSpec, engine: socket.socket, supervisor: socket.socket) -> int:
    """Serves; returns the exit code."""
    try:
        admin_address = None if spec.admin_address is None else Address(**spec.admin_address)
        frontend = FrontEnd(
            ServerConfig(**spec.config), Instance(**spec.instance), spec.index, Address(**spec.address), admin_address
        )
        return await frontend.run(engine, supervisor)
    except ConfigError as error:  # a file has changed since the supervisor looked at it
        (await Control.over(supervisor)).send("failed", str(error))
    except Exception:
        logger.exception("the front end has failed")
    return 1


async def _run_and_exit(*arguments: Any) -> NoReturn:
    """Ends the process: taking the event loop down would wait for whatever task or thread does not let go, such as one
    that is at a long prompt."""
    code = 1
    try:
        code = await run_frontend(*arguments)
    finally:
        logging.shutdown()
        os._exit(code)


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    described, engine, supervisor = json.loads(sys.argv[1])
    os.dup2(2, 1)
    spec = FrontEndSpec(**described)
    log_to_stderr(f"front end {spec.index}", spec.config["log_level"], spec.config["log_format"])
    asyncio.run(_run_and_exit(spec, socket.socket(fileno=engine), socket.socket(fileno=supervisor)))
    raise AssertionError("it has ended the process")


if __name__ == "__main__":
    main()
