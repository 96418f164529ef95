"""Fixtures of the gateway's tests: a scripted node with its gateway, and a real pair with one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.gateway.harness import GatewayProcess
from tests.gateway.nursery import gateway_nursery
from tests.gateway.scripted import Script, ScriptedNode
from tests.process.conftest import shared_world, started_nursery, world  # noqa: F401
from tests.process.world import Pair, World

LANES = 4


@pytest.fixture(scope="session", autouse=True)
def started_gateway_nursery() -> None:
    """Before the first test: a child of these tests that is no test's."""
    gateway_nursery()


@pytest.fixture(scope="session")
def scripted_gateway(started_nursery: None) -> Iterator[tuple[GatewayProcess, Path]]:  # noqa: F811
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        endpoint = Path(directory) / "node"
        flags = ("--served-model-name", "model", "--keep-alive-ms", "100", "--max-queue", "40")
        gateway = GatewayProcess(f"ipc://{endpoint}", *flags)
        yield gateway, endpoint
        gateway.close()


@pytest.fixture
def scripted(scripted_gateway: tuple[GatewayProcess, Path]) -> Iterator[Script]:
    """The shared gateway, with a node of this test's own."""
    gateway, endpoint = scripted_gateway
    node = ScriptedNode(f"ipc://{endpoint}")
    script = Script(gateway, node)
    try:
        gateway.wait_connected()
        yield script
    finally:
        node.end()


@pytest.fixture(scope="module")
def pair(shared_world: World) -> Pair:  # noqa: F811
    """A real pair with several lanes."""
    return shared_world.pair(
        decode=("--pd-remote-only", "--slots", str(LANES), "--lease-ms", "20000", "--emulated-decode-ms", "1")
    )


@pytest.fixture(scope="module")
def gateway(pair: Pair) -> Iterator[GatewayProcess]:
    """A gateway to the real pair."""
    started = GatewayProcess(pair.decode.endpoint)
    started.wait_connected()
    yield started
    started.close()


@pytest.fixture
def gateways() -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways; ends them all."""
    started: list[GatewayProcess] = []

    def start(*arguments: str, **options: str) -> GatewayProcess:
        started.append(GatewayProcess(*arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()
