"""Fixtures of the link tests: one kind of wire at a time, and everything closed afterwards."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.wires import MemoryWire, Wire, ZmqWire


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the name of a socket file."""
    directory = Path(tempfile.mkdtemp(prefix="tandem-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=["memory", "tcp", "ipc"])
def wire(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[Wire]:
    """Each kind of link in turn."""
    kind = request.param
    opened = MemoryWire() if kind == "memory" else ZmqWire(kind, short_directory)
    yield opened
    opened.close()


@pytest.fixture(params=["tcp", "ipc"])
def zmq_wire(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[ZmqWire]:
    """Each kind of link that has sockets."""
    opened = ZmqWire(request.param, short_directory)
    yield opened
    opened.close()
