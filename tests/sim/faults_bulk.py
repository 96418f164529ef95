"""What can go wrong with the connections that carry KV, while control lives; see `tests.sim.faults`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ErrorCode
from common.messages import BulkOpen, Credit
from tests.sim.bulk import BulkWire
from tests.sim.plan import Option
from transport.bulk import FromBulk
from transport.peers import BadFrame, FrameReceived

if TYPE_CHECKING:
    from tests.sim.world import World

DAMAGE = 1 << 35
_STRANGER = b"stranger"
_MUCH = 2**40


@dataclass(frozen=True, slots=True)
class Fault:
    find: Callable[["World"], list[Option]]
    apply: Callable[["World", Option], None]


def repairs(world: "World") -> list[Option]:
    """What ends a lasting fault."""
    return [Option("bulk_mend", name) for name, wire in world.bulk.items() if wire.up_cut or wire.down_cut]


def _open_wires(world: "World") -> list[tuple[str, BulkWire]]:
    return [(name, wire) for name, wire in world.bulk.items() if wire.dealer_open and not wire.broken]


def _find_lost(world: "World") -> list[Option]:
    return [
        Option("bulk_lost", name, up, down)
        for name, wire in _open_wires(world)
        for up in sorted({0, len(wire.up)})
        for down in sorted({0, len(wire.down)})
    ]


def _lost(world: "World", option: Option) -> None:
    """The connection breaks; of each row a first part still arrives."""
    world.bulk[option.where].break_off(option.detail, option.more)


def _find_cut(world: "World") -> list[Option]:
    found = []
    for name, wire in _open_wires(world):
        found += [] if wire.up_cut else [Option("bulk_cut", name, 0)]
        found += [] if wire.down_cut else [Option("bulk_cut", name, 1)]
    return found


def _cut(world: "World", option: Option) -> None:
    """Nothing passes in one direction. 0: credit. 1: KV."""
    wire = world.bulk[option.where]
    if option.detail:
        wire.down_cut = True
    else:
        wire.up_cut = True


def _find_stranger(world: "World") -> list[Option]:
    found = []
    for name, wire in _open_wires(world):
        node = world.processes[wire.router]
        sender = node.stack.senders.get(name) if node.runs else None
        if sender is not None:
            # Who names the session before its decode node does is taken for it: the name is the secret.
            ways = 2 if sender._route is None else 4
            found += [Option("bulk_stranger", name, how) for how in range(ways)]
    return found


def _stranger(world: "World", option: Option) -> None:
    """Somebody else connects: 0, 1: with a session of his own. 2: with this one. 3: with nonsense."""
    session = option.where
    node = world.processes[world.bulk[session].router]
    item: Any = FrameReceived(_STRANGER, "another-session", 1, BulkOpen(_MUCH))
    if option.detail == 1:
        item = FrameReceived(_STRANGER, "another-session", 2, Credit(_MUCH))
    elif option.detail == 2:
        item = FrameReceived(_STRANGER, session, 1, BulkOpen(_MUCH))
    elif option.detail == 3:
        item = BadFrame(_STRANGER, session, 1, ErrorCode.BAD_MESSAGE, "nonsense")
    node.step(FromBulk(session, item), world)
    world.audit.that(session in node.stack.senders, "INV-5: a stranger ends a session")


def _find_corrupt(world: "World") -> list[Option]:
    return [
        Option("corrupt_piece", name, place)
        for name, wire in _open_wires(world)
        for place in sorted({0, len(wire.down) - 1})
        if wire.down
    ]


def _corrupt(world: "World", option: Option) -> None:
    """Bytes of a piece change on the way."""
    parcel = world.bulk[option.where].down[option.detail]
    parcel.content = parcel.read() ^ DAMAGE


def _rows(kind: str, least: int) -> Callable[["World"], list[Option]]:
    """Rows that hold so many messages. detail 0: up."""

    def find(world: "World") -> list[Option]:
        found = []
        for name, wire in _open_wires(world):
            found += [Option(kind, name, 0)] if len(wire.up) >= least else []
            found += [Option(kind, name, 1)] if len(wire.down) >= least else []
        return found

    return find


def _row(world: "World", option: Option) -> Any:
    wire = world.bulk[option.where]
    return wire.down if option.detail else wire.up


def _duplicate(world: "World", option: Option) -> None:
    row = _row(world, option)
    row.append(row[0])


def _overtake(world: "World", option: Option) -> None:
    row = _row(world, option)
    row[0], row[1] = row[1], row[0]


def _dropped(world: "World", option: Option) -> None:
    _row(world, option).popleft()


FAULTS = {
    "bulk_lost": Fault(_find_lost, _lost),
    "bulk_cut": Fault(_find_cut, _cut),
    "bulk_stranger": Fault(_find_stranger, _stranger),
    "corrupt_piece": Fault(_find_corrupt, _corrupt),
    "bulk_duplicate": Fault(_rows("bulk_duplicate", 1), _duplicate),
    "bulk_overtake": Fault(_rows("bulk_overtake", 2), _overtake),
    "bulk_dropped": Fault(_rows("bulk_dropped", 1), _dropped),
}
HARSH = ("bulk_duplicate", "bulk_overtake", "bulk_dropped")
SPOILING = ("corrupt_piece",)
