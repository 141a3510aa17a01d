"""The house has floors: imports go downward only, and the lower ones need no device."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxoverlap"

FLOOR = {
    "errors": -3, "v1": -3, "interrupt": -3, "checks": -2,
    "id_arrays": -2, "prompts": -2, "sampling_params": -1, "outputs": -1,
    "constraint": 0, "request": 0,
    "config": 1, "observe": 0,
    "cache": 1, "scheduler": 1, "model": 1, "wire": 1,
    "runtime": 2, "text": 2,
    "engine": 3, "display": 3,
    "llm": 4, "client": 4, "simulation": 4,
    "server": 5,
    "cli": 6,
}  # fmt: skip
NO_JAX = {
    "errors",
    "interrupt",
    "checks",
    "v1",
    "prompts",
    "wire",
    "client",
    "sampling_params",
    "outputs",
    "constraint",
    "request",
    "config",
    "observe",
    "cache",
    "scheduler",
    "text",
    "server",
}
SIDEWAYS = {("scheduler", "cache"), ("config", "scheduler"), ("prompts", "checks"), ("request", "constraint")}
"""Allowed between different parts of one floor."""


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path):
    part = part_of(path)
    if part == "__init__":
        return
    assert part in FLOOR, f"{part} has no floor yet"
    for name in imported(path):
        words = name.split(".")
        if words[0] == "jaxoverlap" and len(words) > 1 and words[1] in FLOOR and words[1] != part:
            other = words[1]
            downward = FLOOR[other] < FLOOR[part] or (part, other) in SIDEWAYS
            assert downward, f"{path.name} (floor {FLOOR[part]}) imports {name} (floor {FLOOR[other]})"
        if words[0] in ("jax", "flax", "jaxlib"):
            assert part not in NO_JAX, f"{path.name} imports {name}"
        assert words[0] != "grpc" or part in ("server", "client", "v1"), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "pallas_kernels").glob("*.py")), ids=lambda path: path.name)
def test_kernels_know_nothing_of_the_engine(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"jaxoverlap", "flax", "transformers", "grpc"}


@pytest.mark.parametrize(
    "module",
    [
        "jaxoverlap",
        "jaxoverlap.scheduler.scheduler",
        "jaxoverlap.config",
        "jaxoverlap.cli.main",
        "jaxoverlap.server.config",
    ],
)
def test_import_is_light(module):
    code = f"import {module}, sys; print([m for m in ('jax', 'grpc', 'torch', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"


def test_a_front_end_needs_no_jax():
    code = "import jaxoverlap.server.frontend_process, sys; print([m for m in ('jax', 'torch') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"
