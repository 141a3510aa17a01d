"""docs/operations.md has every option of the command, with its default."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxoverlap.cli.serve import LimitOptions, NetworkOptions, OperationOptions, SecurityOptions
from jaxoverlap.server.config import ServerConfig

DOCS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
FIELDS = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
OPTIONS = [
    field.name
    for group in (NetworkOptions, SecurityOptions, LimitOptions, OperationOptions)
    for field in dataclasses.fields(group)
]


def test_the_command_has_an_option_for_every_setting():
    assert sorted(OPTIONS) == sorted(FIELDS)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_explained_with_its_default(name):
    flag = f"`--{name.replace('_', '-')}`"
    (row,) = [line for line in DOCS.splitlines() if line.startswith("| ") and flag in line.split("|")[1]]
    default = FIELDS[name]
    if default is False:
        assert "| off |" in row
    elif default is not None:
        assert f"| {default:g} |" in row if isinstance(default, float) else f"| {default} |" in row
