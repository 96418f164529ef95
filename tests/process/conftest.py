"""Fixtures of the process tests: a world per test, or one pair shared by the tests of a module."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.process.harness import nursery
from tests.process.world import PREFETCH, Pair, World


@pytest.fixture(scope="session", autouse=True)
def started_nursery() -> None:
    """Before the first test: a child of these tests that is no test's."""
    nursery()


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


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime directory for scripts."""
    # Not pytest's own directory: its path would not fit a socket.
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        yield Path(directory)
