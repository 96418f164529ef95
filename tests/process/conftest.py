"""Fixtures of the process tests: a world per test, or one pair shared by the tests of a module."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import transport.client
from tests.process.world import PREFETCH, Pair, World
from transport.peers import LivenessTimes

# A test stops nodes for longer than a client would stand; how a client gives up is tested on its own.
PATIENT = LivenessTimes(ping_ms=200, suspect_ms=20_000, dead_after_ms=30_000, lease_ms=40_000)


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.client, "TIMES", PATIENT)


@pytest.fixture
def world() -> Iterator[World]:
    # Not pytest's own directory: its path would not fit a socket.
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        world = World(Path(directory))
        yield world
        world.close()


@pytest.fixture(scope="module")
def shared_world() -> Iterator[World]:
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        world = World(Path(directory))
        yield world
        world.close()


@pytest.fixture(scope="module")
def shared_pair(shared_world: World) -> Iterator[Pair]:
    """A prefetching pair for tests that leave it clean; audited when the last of them is done."""
    # The client is not turned between tests.
    pair = shared_world.pair(decode=(*PREFETCH, "--lease-ms", "20000"))
    yield pair
    pair.audit()
