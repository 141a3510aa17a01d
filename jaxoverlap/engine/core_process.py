"""The engine in a process of its own: `python -m jaxoverlap.engine.core_process '<EngineSpec as JSON>'`.

It ends when its supervisor does, by the end of the socket between them, also while it builds the engine. Signals are
the supervisor's to take: a terminal's Ctrl-C or an init system's SIGTERM may reach all processes at once, and a drain
must not lose the engine.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.garbage import full_collections_only_when_idle
from jaxoverlap.engine.link import Link
from jaxoverlap.engine.messages import EngineFacts
from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.observe.logs import log_to_stderr

logger = logging.getLogger(__name__)

STANDARD_BUILDER = "jaxoverlap.engine.build:build_engine"
SUPERVISOR = -1
"""Its index among the links."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What to build, all of it JSON.

    Attributes:
      builder: "module:function" of something like `build_engine`.
      config: fields of `EngineConfig`.
      profile_dir: where traces go; None allows none.
      progress: "module:function" of what shows the warm-up; None shows nothing.
      log_level: of this package's log; log_format: "text" or "json".
    """

    builder: str = STANDARD_BUILDER
    config: Mapping[str, Any]
    profile_dir: str | None = None
    progress: str | None = None
    log_level: str = "info"
    log_format: str = "text"


def run_engine(
    spec: EngineSpec,
    supervisor: socket.socket,
    frontends: Sequence[socket.socket],
    *,
    on_orphaned: Callable[[], None] = lambda: None,
) -> None:
    """Builds an engine and serves until the supervisor goes. What goes wrong is told to all, and raised.

    Args:
      on_orphaned: called in a thread if the supervisor goes while the engine is built, which nothing interrupts.
    """
    links = [Link(SUPERVISOR, supervisor), *(Link(index, connection) for index, connection in enumerate(frontends))]
    try:
        with _watching(supervisor, on_orphaned):
            core = _build(spec, links)
    except BaseException as error:
        text = str(error) if isinstance(error, JaxOverlapError) else f"{type(error).__name__}: {error}"
        for link in links:
            link.post("failed", text)
            link.close()
        raise
    core.run()


@contextmanager
def _watching(supervisor: socket.socket, on_orphaned: Callable[[], None]) -> Iterator[None]:
    """Meanwhile nobody else looks at the supervisor's socket, and nothing comes over it but its end."""
    built, done = socket.socketpair()

    def watch() -> None:
        readable, _, _ = select.select([supervisor, built], [], [])
        if supervisor in readable and not supervisor.recv(1, socket.MSG_PEEK):
            on_orphaned()

    watcher = threading.Thread(target=watch, name="supervisor", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.close()
        watcher.join()
        built.close()


def _build(spec: EngineSpec, links: Sequence[Link]) -> Any:
    from jaxoverlap.engine.core import EngineCore
    from jaxoverlap.engine.profiler import Profiler
    from jaxoverlap.runtime.memory import let_jax_take

    options = {} if spec.progress is None else {"progress": _named(spec.progress)}
    config = EngineConfig(**spec.config)
    let_jax_take(config.gpu_memory_fraction)
    built = _named(spec.builder)(config, **options)
    scheduler = built.resolved.scheduler
    source = built.tokenizer_source
    if isinstance(source, Mapping):
        source = {name: value for name, value in source.items() if name.startswith("tokenizer.")}
    facts = EngineFacts(
        name=built.name,
        architecture=built.architecture,
        vocab_size=scheduler.limits.vocab_size,
        max_model_len=scheduler.limits.max_model_len,
        page_size=scheduler.limits.page_size,
        num_pages=scheduler.limits.num_pages,
        max_running=scheduler.max_running,
        max_queue=scheduler.max_queue,
        eos_token_ids=list(built.engine.eos_token_ids),
        dtype=built.dtype,
        kv_cache_dtype=built.kv_cache_dtype,
        devices=list(built.devices),
        platform=built.resolved.platform,
        schedule=built.resolved.schedule,
        lookahead=built.resolved.lookahead,
        capabilities=built.engine.supported_parameters,
        sampling_defaults=dict(built.sampling_defaults),
        tokenizer_source=source if isinstance(source, Mapping) else str(source),
    )
    full_collections_only_when_idle()
    return EngineCore(
        built.engine,
        facts,
        Profiler(spec.profile_dir),
        links[0],
        links[1:],
        watchdog_seconds=config.watchdog_seconds,
        watchdog_exit_seconds=math.inf if config.watchdog_exit_seconds is None else config.watchdog_exit_seconds,
    )


def _named(path: str) -> Callable[..., Any]:
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    spec, supervisor, *frontends = json.loads(sys.argv[1])
    os.dup2(2, 1)  # standard output is the supervisor's alone
    engine_spec = EngineSpec(**spec)
    log_to_stderr("engine", engine_spec.log_level, engine_spec.log_format)
    code = 1
    try:
        run_engine(
            engine_spec,
            socket.socket(fileno=supervisor),
            [socket.socket(fileno=number) for number in frontends],
            on_orphaned=lambda: os._exit(code),
        )
        code = 0
    except JaxOverlapError as error:  # the supervisor has been told
        logger.debug("the engine ends", exc_info=error)
    except Exception:
        logger.exception("the engine has ended")
    finally:
        # Without waiting for threads, and without taking JAX down piece by piece.
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    main()
