from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.rig import Rig, running


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[Rig]:
    with running() as rig:
        yield rig


@pytest.fixture
def rig(shared_rig: Rig) -> Iterator[Rig]:
    """A module's server; each test leaves it idle, with every page back, and able to answer."""
    yield shared_rig
    shared_rig.wait_idle()
    shared_rig.check_probe()
