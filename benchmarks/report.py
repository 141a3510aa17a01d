"""What every benchmark prints and writes: a table, and JSON with the environment it was measured in."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that all scripts share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="also write the results to this file")
    return options


def environment() -> dict[str, Any]:
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "revision": revision.stdout.strip() or None,
        "python": platform.python_version(),
        "jax": version("jax"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def show(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> None:
    table = Table(title=title, caption=note or None, title_justify="left", caption_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(width=140).print(table)


def write(path: Path | None, name: str, results: dict[str, Any], *, keys: Mapping[str, Sequence[str]]) -> None:
    """Args: keys: of each table the columns that say which row is which, for `jaxoverlap bench --compare`."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"benchmark": name, "environment": environment(), **results, "keys": keys}
        path.write_text(json.dumps(whole, indent=2) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
