from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from jaxoverlap.cli.main import app
from tests.cli import toy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs a command in this process on the toy device."""
    monkeypatch.setattr("jaxoverlap.llm.build_engine", toy.build_engine)
    log = logging.getLogger("jaxoverlap")
    before = log.handlers, log.level, log.propagate
    environment = dict(os.environ)

    def run(*args: str | Path, stdin: str | bytes | None = None) -> Any:
        result = typer.testing.CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    yield run
    log.handlers, log.level, log.propagate = before
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a command in a process of its own: on the toy device, or with the real thing (module="jaxoverlap…")."""
    started = []

    def run(*args: str | Path, module: str = "tests.cli.toy", env: dict[str, str] | None = None, **options: Any):
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, args)],
            cwd=ROOT,
            # Unbuffered, a forgotten flush would not show.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | (env or {}),
            **({"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe} | options),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def write_lines(path: Path, *items: Any) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return path


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
