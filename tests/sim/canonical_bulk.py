"""The bulk part of a world's canonical form; see `tests.sim.canonical`.

Decides what counts of senders, receivers and what is between them. Sequence numbers become distances from
what the other end has taken; it must never hold one as it is. What a sender remembers of a production that is
over cannot be told from nothing.
"""

from typing import Any

from common import limits
from tests.sim.bulk import BulkWire, Parcel
from transport.bulk import BulkReceiver, BulkSender


def walk_sender(walk: Any, sender: BulkSender) -> None:
    receiver = _end(walk, walk.world.decodes, "receivers", sender.session)
    walk.out.append(sender._sent - (0 if receiver is None else receiver._received))
    _walk_told(walk, sender._told_ms)
    for (slot, epoch), production in sender._productions.items():
        if production.waiting or production.in_flight or _is_current(walk, sender.session, slot, epoch):
            walk.out += (slot, epoch, production.chunks, production.waiting, production.in_flight)


def _is_current(walk: Any, session: str, index: int, epoch: int) -> bool:
    """Whether more may come of the production."""
    for node in walk.world.prefills:
        slot = node.core.grants.find(session, index)
        if slot is not None:
            return slot.production is not None and slot.last_epoch == epoch
    return False


def walk_receiver(walk: Any, receiver: BulkReceiver) -> None:
    sender = _end(walk, walk.world.prefills, "senders", receiver.session)
    walk.out.append(receiver._sent - (0 if sender is None else sender._received))
    _walk_told(walk, receiver._told_ms)


def _walk_told(walk: Any, told_ms: int) -> None:
    """How long ago it was said that something moves counts until it may be said again."""
    walk.out.append(min(walk.now_ms - told_ms, limits.KV_MOVED_MS))


def walk_parcel(walk: Any, parcel: Parcel) -> None:
    walk.value(parcel.frame.message)


def walk_wire(walk: Any, wire: BulkWire) -> None:
    sender = _end(walk, walk.world.prefills, "senders", wire.session)
    receiver = _end(walk, walk.world.decodes, "receivers", wire.session)
    base = 0 if sender is None else sender._received
    walk.out.append(len(wire.up))
    for _, sequence, message in wire.up:
        walk.out.append(sequence - base)
        walk.value(message)
    base = 0 if receiver is None else receiver._received
    walk.out.append(len(wire.down))
    for parcel in wire.down:
        walk.out.append(parcel.frame.sequence - base)
        walk.value(parcel)


def _end(walk: Any, nodes: list[Any], rows: str, session: str) -> Any | None:
    """The sender or receiver of a session, while it lives."""
    return next((end for node in nodes if (end := getattr(node.stack, rows).get(session))), None)
