"""Faults on real processes: every state of a job against every cause of trouble, from one table.

A telling part of it runs on every change, on shared memory, and a third of that over TCP, another one after
another change. All of it on both, and all of it again with queues of one message and pauses at every
hand-over, is for the night: `pytest -m nightly tests/process/test_matrix.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from common.lifecycle import JobState
from tests.process.harness import ROOT
from tests.process.matrix import CELLS, EXPECTED, POSSIBLE, TELLING, Cause, Cell, Place, name_of
from tests.process.matrix_scene import Scene, decode_flags, play, play_on
from tests.process.world import Pair, World

QUEUES_OF_ONE = {"high_water_mark": 1, "delay_ms": 3.0}
LASTING_FLAGS = decode_flags(Place.PREFILLING, Cause.CANCEL)
SOURCES = [
    path for name in ("transport", "prefill_node", "decode_node") for path in (ROOT / name).glob("*.py")
]
OVER_TCP = TELLING[sum(path.stat().st_size for path in SOURCES) % 3 :: 3]
on_both_planes = pytest.mark.parametrize("plane", ["shm", "tcp"])
every_possible_cell = pytest.mark.parametrize("cell", POSSIBLE, ids=name_of)


@pytest.fixture
def harsh_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world whose daemons have queues of one message and pause everywhere; another seed for each cell."""
    cell: Cell = request.node.callspec.params["cell"]
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        world = World(Path(directory), QUEUES_OF_ONE | {"seed": CELLS.index(cell)})
        yield world
        world.close()


@pytest.fixture(scope="module")
def lasting_pair(shared_world: World) -> Iterator[Pair]:
    """One pair for the cells that need no flags of their own and leave both nodes alive."""
    pair = shared_world.pair(decode=LASTING_FLAGS)
    yield pair
    pair.audit()


def lasts(cell: Cell) -> bool:
    mortal = (Cause.PREFILL_KILLED, Cause.DECODE_DRAIN)
    return decode_flags(*cell) == LASTING_FLAGS and cell[1] not in mortal


def test_the_table_knows_every_state_and_says_why_a_cell_cannot_be() -> None:
    assert {place.state for place in Place} == set(JobState) - {JobState.ENDED}
    assert {(place, cause) for cause, row in EXPECTED.items() for place in row} == set(CELLS)
    reasons = [EXPECTED[cause][place] for place, cause in CELLS if (place, cause) not in POSSIBLE]
    assert all(isinstance(reason, str) for reason in reasons)
    assert len(POSSIBLE) + len(reasons) == len(Place) * len(Cause)
    assert {place for place, _ in TELLING} == set(Place)
    assert {cause for _, cause in TELLING} == set(Cause)
    assert set(TELLING) <= set(POSSIBLE)


@pytest.mark.parametrize("cell", [cell for cell in TELLING if lasts(cell)], ids=name_of)
def test_a_fault_in_a_state_has_its_one_right_answer_and_the_pair_lasts(
    lasting_pair: Pair, cell: Cell
) -> None:
    place, cause = cell
    play_on(Scene(lasting_pair, place, cause), EXPECTED[cause][place])


@pytest.mark.parametrize("cell", [cell for cell in TELLING if not lasts(cell)], ids=name_of)
def test_a_fault_in_a_state_has_its_one_right_answer(world: World, cell: Cell) -> None:
    place, cause = cell
    play(world, place, cause, EXPECTED[cause][place])


@pytest.mark.parametrize("cell", OVER_TCP, ids=name_of)
def test_a_fault_in_a_state_has_the_same_answer_over_tcp(world: World, cell: Cell) -> None:
    place, cause = cell
    play(world, place, cause, EXPECTED[cause][place], "tcp")


@pytest.mark.nightly
@on_both_planes
@every_possible_cell
def test_every_fault_in_every_state_has_its_one_right_answer(world: World, cell: Cell, plane: str) -> None:
    place, cause = cell
    play(world, place, cause, EXPECTED[cause][place], plane)


@pytest.mark.nightly
@on_both_planes
@every_possible_cell
def test_queues_of_one_message_and_pauses_change_no_answer(
    harsh_world: World, cell: Cell, plane: str
) -> None:
    place, cause = cell
    play(harsh_world, place, cause, EXPECTED[cause][place], plane)
