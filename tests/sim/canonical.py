"""The canonical form of a simulated world: what two worlds must share to have the same future.

Decides which states exploration takes for one. `key` walks every attribute of every object of a world; what
is left out stands in `tests.sim.explore_fields`, by name and for a reason, and everything else counts, so
that new state cannot be forgotten. Names drawn at run time (sessions, jobs, incarnations, sockets) become
numbers in order of appearance; instants become distances to the clock of their process; attempts, sequence
numbers and counts of progress become distances to where their peer stands. A key must never hold an instant
or a drawn name.

Times are left out while nothing can come of them: `RELEVANT_MS` says when they count.
"""

import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

from common import messages
from common.lifecycle import JobState, SlotState
from common.messages import Role
from decode_node import core, jobs, scheduler, slots, timers, worker
from tests.sim import audit, bulk, client_process, decode_device, decode_process, links, prefill_process
from tests.sim import canonical_bulk as bulk_walks
from tests.sim import world as sim_world
from tests.sim.explore_clone import slots_of
from tests.sim.explore_fields import EXCLUDED, IN_MESSAGES, INSTANTS, RELEVANT_MS
from tests.sim.plan import NEVER_MS
from tests.sim.process import Process
from transport import bulk as bulk_rules
from transport import listener, peers

_DRAWN = re.compile(r"[pdc]\d+\.\d+(-(session|client|job)-\d+)?|attempt-\d+|peer-\d+")


def key(world: Any) -> Hashable:
    """The canonical form. Equal keys: the same options, and equal keys after each of them."""
    return tuple(_Walk(world).out)


def attributes_of(cls: type) -> tuple[str, ...]:
    """The attributes that the key of a message or slotted object can speak of."""
    return tuple(field.name for field in fields(cls)) if is_dataclass(cls) else slots_of(cls)


@cache
def _is_drawn(text: str | bytes) -> bool:
    return _DRAWN.fullmatch(text if isinstance(text, str) else text.decode("latin-1")) is not None


class _Walk:
    """One walk over one world. out: the key so far."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.now_ms = world.now_ms
        self.out: list[Any] = []
        self.names: dict[Any, Any] = {}
        self.seen: dict[int, int] = {}
        self.attempts = _newest_attempts(world)
        self.progress = sum(node.core.line.progress for node in world.prefills)
        self.bases = _sequence_bases(world)
        self.clients_end = world.plan.client_times.lease_ms < NEVER_MS
        self.value(world)

    def value(self, value: Any) -> None:
        _WALKERS[type(value)](self, value)

    def name(self, text: Any) -> Any:
        """The number of a drawn name; any other text stands for itself."""
        number = self.names.get(text)
        if number is None:
            number = len(self.names) if _is_drawn(text) else text
            self.names[text] = number
        return number

    def instant(self, time_ms: int | None) -> None:
        self.out.append(None if time_ms is None else self.distance(time_ms))

    def distance(self, time_ms: int) -> int:
        """From now; what is never reached is always equally far."""
        return min(time_ms - self.now_ms, NEVER_MS // 2)

    def item(self, item: Any, up: bool) -> None:
        """A message on its way."""
        session, sequence, message = item
        base = 0 if session is None else self.bases.get((session, up), 0)
        self.out.append(None if session is None else self.name(session))
        self.out.append(sequence - base)
        self.value(message)

    def attempt(self, incarnation: str, number: int) -> None:
        """How far an attempt is behind the newest of its process, if that still lives."""
        newest = self.attempts.get(incarnation)
        self.out.append("dead" if newest is None else number - newest)


def _connectors_of(process: Any) -> list[Any]:
    """The connecting ends of a process."""
    if isinstance(process, client_process.ClientProcess):
        return [process.connector]
    return list(getattr(process.stack, "connectors", {}).values())


def _sequence_bases(world: Any) -> dict[tuple[str, bool], int]:
    """By session and direction: the number that the receiver waits after, or the sender has reached."""
    bases: dict[tuple[str, bool], int] = {}
    for process in world.processes.values():
        if hasattr(process, "router"):
            for session in process.stack.listener._sessions.values():
                bases[session.identity, True] = session.received
                bases.setdefault((session.identity, False), session.sent)
        for connector in _connectors_of(process):
            session = connector._session
            if session is not None:
                bases[session.identity, False] = session.received
                bases.setdefault((session.identity, True), session.sent)
    return bases


def _newest_attempts(world: Any) -> dict[str, int]:
    """By incarnation; several connectors of one process are measured by the newest of all."""
    found = {}
    for process in world.processes.values():
        numbers = [connector._attempt for connector in _connectors_of(process)]
        found[process.incarnation] = max(numbers, default=0)
    return found


_Walker = Callable[[_Walk, Any], None]
_PLAIN = {int, float, bool, type(None)}


class _Walkers(dict[type, _Walker]):
    """How to walk a value, by its type."""

    def __missing__(self, cls: type) -> _Walker:
        self[cls] = walker = _walker_for(cls)
        return walker


def _walker_for(cls: type) -> _Walker:
    if issubclass(cls, (str, bytes)) and not issubclass(cls, Enum):
        return lambda walk, value: walk.out.append(walk.name(value))
    if issubclass(cls, Enum):
        # The hash of an enumeration's member is computed in Python.
        return lambda walk, value: walk.out.append(value._value_)
    if cls in _PLAIN:
        return lambda walk, value: walk.out.append(value)
    if issubclass(cls, (tuple, list, deque)):
        return _walk_row
    if issubclass(cls, dict):
        return _walk_dict
    if issubclass(cls, (set, frozenset)):
        return _walk_set
    if is_dataclass(cls) and cls.__dataclass_params__.frozen:
        return _message_walker(cls)
    if cls in EXCLUDED:
        return _object_walker(cls)
    raise TypeError(f"the canonical form does not know {cls.__name__}")


def _walk_row(walk: _Walk, row: Iterable[Any]) -> None:
    walk.out.append(len(row))
    for item in row:
        _WALKERS[type(item)](walk, item)


def _walk_dict(walk: _Walk, items: dict[Any, Any]) -> None:
    walk.out.append(len(items))
    for name, item in items.items():
        _WALKERS[type(name)](walk, name)
        _WALKERS[type(item)](walk, item)


def _walk_set(walk: _Walk, items: set[Any]) -> None:
    walk.out.append(len(items))
    for item in sorted(items):
        walk.value(item)


def _message_walker(cls: type) -> _Walker:
    names = [
        field.name
        for field in fields(cls)
        if field.name not in IN_MESSAGES and not field.name.endswith("_us")
    ]
    special = _MESSAGES.get(cls)

    def walk_message(walk: _Walk, message: Any) -> None:
        walk.out.append(cls)
        for name in names:
            item = getattr(message, name)
            kind = type(item)
            if kind in _PLAIN:
                walk.out.append(item)
            else:
                _WALKERS[kind](walk, item)
        if special is not None:
            special(walk, message)

    return walk_message


def _object_walker(cls: type) -> _Walker:
    special = _OBJECTS.get(cls)
    is_process = issubclass(cls, Process)
    parts_by_count: dict[int, _Parts] = {}

    def walk_object(walk: _Walk, thing: Any) -> None:
        out = walk.out
        number = walk.seen.get(id(thing))
        if number is not None:
            out.append(number)
            return
        walk.seen[id(thing)] = len(walk.seen)
        out.append(cls)
        if is_process:
            walk.now_ms = thing.local_ms(walk.world.now_ms)
        own = slots_of(cls) or thing.__dict__
        parts = parts_by_count.get(len(own))
        if parts is None:
            parts = parts_by_count[len(own)] = _Parts(thing, own)
        plain = parts.plain(thing)
        if _PLAIN.issuperset(map(type, plain)):
            out.append(plain)
        else:
            _walk_row(walk, plain)
        for value in parts.others(thing):
            _WALKERS[type(value)](walk, value)
        for name, relevant in parts.instants:
            if relevant is None or relevant(thing):
                walk.instant(getattr(thing, name))
        if special is not None:
            special(walk, thing)

    return walk_object


class _Parts:
    """What the key speaks of in objects of one class. plain: what held plain values in the first of them."""

    def __init__(self, first: Any, own: Iterable[str]) -> None:
        cls = type(first)
        names = [name for name in own if name not in EXCLUDED[cls]]
        values = [name for name in names if name not in INSTANTS]
        plain = [name for name in values if type(getattr(first, name)) in _PLAIN]
        self.plain = _getter(plain)
        self.others = _getter([name for name in values if name not in plain])
        self.instants = [(name, RELEVANT_MS.get((cls, name))) for name in names if name in INSTANTS]


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of these attributes, as one tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda thing: tuple(getattr(thing, name) for name in names)


def _walk_process(walk: _Walk, process: Any) -> None:
    """What lasts until an instant of the world's clock."""
    now_ms = walk.world.now_ms
    stopped_ms = process.stopped_at_ms
    walk.out.append(None if stopped_ms is None else stopped_ms - now_ms)
    walk.out.append(max(0, process.slow_until_ms - now_ms))


def _walk_job(walk: _Walk, job: jobs.Job) -> None:
    walk.out.append(job.known_to_compute)
    walk.out.append(job.kv_here if job.state is JobState.PREFILLED else None)


def _walk_slot(walk: _Walk, slot: slots.GrantedSlot) -> None:
    """What has arrived counts until everything has."""
    owed = slot.state in (SlotState.PRODUCING, SlotState.ORPHANED)
    walk.out.append((slot.record_here, slot.chunks_here) if owed else None)


def _walk_core(walk: _Walk, it: core.DecodeCore) -> None:
    """How long a queued job has waited for a prefill node counts while there is none."""
    if it.workers.usable:
        return
    for job in it.desk.live():
        if job.state is JobState.QUEUED:
            walk.instant(it._wait_deadline_ms(job))


def _walk_scheduler(walk: _Walk, it: scheduler.Scheduler) -> None:
    for heap, state in ((it._queued, JobState.QUEUED), (it._prefilled, JobState.PREFILLED)):
        waiting = sorted(place[:2] + (place[2].job_id,) for place in heap if place[2].state is state)
        walk.out.append(tuple(dict.fromkeys(walk.name(job_id) for _, _, job_id in waiting)))


def _walk_timers(walk: _Walk, it: timers.Timers) -> None:
    walk.out.append(len(it._deadlines))
    for (job_id, kind), deadline_ms in sorted(it._deadlines.items()):
        walk.out += (walk.name(job_id), kind, walk.distance(deadline_ms))


def _walk_listener(walk: _Walk, it: listener.Listener) -> None:
    for (role, incarnation), attempt in it._attempts.items():
        if incarnation in walk.attempts:
            walk.out += (role, walk.name(incarnation))
            walk.attempt(incarnation, attempt.number)
            walk.out.append(walk.name(attempt.route))
            walk.value(attempt.answer)


def _walk_session(walk: _Walk, session: peers.Session) -> None:
    for number, up in ((session.sent, True), (session.received, False), (session.sent, False)):
        walk.out.append(number - walk.bases.get((session.identity, up), 0))
    walk.out.append(session.received - walk.bases.get((session.identity, True), 0))
    if session.role is not Role.CLIENT or walk.clients_end:
        walk.out.append(session.heard_ms - walk.now_ms)


def _walk_wire(walk: _Walk, wire: links.Wire) -> None:
    ends = _connectors_of(walk.world.processes[wire.dealer])
    walk.out.append(any(wire.route == connector._route for connector in ends))
    for row, up in ((wire.up, True), (wire.down, False)):
        walk.out.append(len(row))
        for item in row:
            walk.item(item, up)


def _walk_audit(walk: _Walk, books: audit.Audit) -> None:
    for label, (client, session) in books.sent_in.items():
        # To a session that is gone nothing more is said; after the answer the tokens no longer count.
        gone = walk.world.processes[client].session != session
        stand = "answered" if label in books.answers else books.tokens.get(label, 0)
        walk.out += (label, "gone" if gone else stand)
    owed = [
        job_id
        for job_id, incarnation in books.accepted.items()
        if incarnation not in books.crashed and not books.ended[job_id]
    ]
    walk.out.append(tuple(walk.name(job_id) for job_id in owed))


def _walk_world(walk: _Walk, world: Any) -> None:
    walk.value(world.audit)
    for wire in world.wires.values():
        walk.value(wire)
    for wire in world.bulk.values():
        if not wire.dead:
            walk.value(wire)
    if any(left and name.startswith("late") for name, left in world.budget.items()):
        for place, rows in world.spoken.items():
            walk.out.append(place)
            for number, (session, _, message) in rows:
                walk.out += (number in world.wires, walk.name(session))
                walk.value(message)


def _walk_worker(walk: _Walk, node: worker.Worker) -> None:
    walk.out.append(None if node.session is None else node._peer_progress - walk.progress)


def _walk_device(walk: _Walk, device: decode_device.DecodeDevice) -> None:
    """What a lane holds counts while it decodes."""
    walk.out.append(tuple((lane, device.folded.get(lane)) for lane in device.running))


def _walk_text(walk: _Walk, text: decode_device.TextDevice) -> None:
    walk.out.append(tuple(walk.name(job_id) for job_id in text.streams))


_OBJECTS: dict[type, _Walker] = {
    core.DecodeCore: _walk_core,
    jobs.Job: _walk_job,
    slots.GrantedSlot: _walk_slot,
    scheduler.Scheduler: _walk_scheduler,
    timers.Timers: _walk_timers,
    listener.Listener: _walk_listener,
    peers.Session: _walk_session,
    links.Wire: _walk_wire,
    audit.Audit: _walk_audit,
    decode_device.TextDevice: _walk_text,
    sim_world.World: _walk_world,
    bulk_rules.BulkSender: bulk_walks.walk_sender,
    bulk_rules.BulkReceiver: bulk_walks.walk_receiver,
    bulk.Parcel: bulk_walks.walk_parcel,
    bulk.BulkWire: bulk_walks.walk_wire,
    worker.Worker: _walk_worker,
    decode_device.DecodeDevice: _walk_device,
    decode_process.DecodeProcess: _walk_process,
    prefill_process.PrefillProcess: _walk_process,
    client_process.ClientProcess: _walk_process,
}
_MESSAGES: dict[type, _Walker] = {
    messages.Pong: lambda walk, pong: walk.out.append(pong.progress - walk.progress),
    messages.Hello: lambda walk, hello: walk.attempt(hello.incarnation, hello.attempt),
}
_WALKERS = _Walkers()
