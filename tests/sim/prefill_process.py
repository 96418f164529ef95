"""A prefill process: the production stack, a modelled slab and a modelled compute thread."""

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.errors import ErrorCode
from common.kv_layout import chunk_bounds
from common.messages import PrefillDone, PrefillFailed, ShmPlane, TcpPlane
from prefill_node import events as ev
from prefill_node.core import PrefillCore
from prefill_node.production import PrefillSettings
from prefill_node.stack import PrefillStack
from tests.sim import memory
from tests.sim.bulk import BulkSource, Parcel
from tests.sim.links import RouterEnd, Sent
from tests.sim.memory import Slab
from tests.sim.plan import CHUNK_TOKENS, VOCABULARY, Option, Plan, usual
from tests.sim.process import Names, Process, outbox_deadline_ms
from transport.bulk import CloseBulk, FromBulk, PieceLetGo, ToBulk
from transport.listener import Listener
from transport.peers import RouteLost, SendFrame, Tick

if TYPE_CHECKING:
    from tests.sim.world import World


class PrefillProcess(Process):
    """command: the chunk compute has; begun: whether it has touched the slot for it. sources: bulk ends.

    damage: how the next record is spoiled, 0 for not at all.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        super().__init__(name)
        self.plan = plan
        self.boot()

    def boot(self) -> None:
        """A new incarnation, with a slab of its own."""
        self.incarnations += 1
        plan = self.plan
        self.incarnation = f"{self.name}.{self.incarnations}"
        plane = ShmPlane(self.incarnation, plan.slots, plan.layout.slot_bytes)
        settings = PrefillSettings(
            incarnation=self.incarnation,
            profile=plan.profile,
            slot_count=plan.slots,
            plane=plane,
            token_bytes=plan.layout.token_bytes,
            lease_ms=plan.times.lease_ms,
            stall_ms=plan.stall_ms,
            drain_ms=plan.drain_ms,
            decode_nodes=plan.decode_nodes,
            slots_per_session=plan.slots_per_session or plan.slots,
            planes=tuple(sorted(set(plan.planes))),
        )
        self.core = PrefillCore(settings, Names(f"{self.incarnation}-session"))
        self.stack = PrefillStack(
            Listener(plan.times, self.core.progress_count), self.core, plan.layout, plan.times.lease_ms
        )
        self.router = RouterEnd()
        self.port: Any = None
        self.slab = Slab(plan.slots)
        self.sources: dict[str, BulkSource] = {}
        self.command: ev.RunChunk | None = None
        self.begun = False
        self.draining = False
        self.damage = 0
        self.exit: ev.ExitNode | None = None
        self.alive, self.hung = True, False
        self.slow_until_ms = 0

    def own_deadline_ms(self) -> int | None:
        deadlines = (self.stack.deadline_ms(), outbox_deadline_ms(self.port))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, world: "World") -> None:
        self.flush(world)
        self.step(Tick(), world)

    def flush(self, world: "World") -> None:
        """Try what the ports keep back."""
        for lost in self.port.flush(self.local_ms(world.now_ms)):
            self.step(lost, world)

    def step(self, event: Any, world: "World") -> None:
        """One event and all that follows from it inside this process."""
        events = deque([event])
        local_ms = self.local_ms(world.now_ms)
        while events and self.exit is None:
            for effect in self.stack.step(events.popleft(), local_ms):
                if isinstance(effect, SendFrame):
                    lost = self.port.send(self._completion(effect, world), local_ms)
                    if lost is not None:
                        events.append(lost)
                elif isinstance(effect, ev.RunChunk):
                    world.audit.that(self.command is None, "INV-2: compute was given two chunks at once")
                    self.command, self.begun = effect, False
                elif isinstance(effect, ToBulk):
                    events.extend(self._to_bulk(effect.session, effect.item, world))
                elif isinstance(effect, ev.PreparePlane):
                    self.sources[effect.session] = BulkSource()
                    events.append(ev.PlanePrepared(effect.session, effect.route, TcpPlane(1)))
                elif isinstance(effect, ev.ExitNode):
                    self.exit = effect
            self.core.check()
        if self.exit is not None:
            world.left(self)

    def _to_bulk(self, session: str, item: Any, world: "World") -> list[Any]:
        source = self.sources[session]
        if isinstance(item, CloseBulk):
            source.close()
            return []
        wire = source.wire
        world.audit.that(wire is not None and item.route == wire.peer, "KV goes to a stranger")
        parcel = Parcel(item, self.slab)
        if wire.put_down(parcel) is Sent.GONE:
            return [FromBulk(session, RouteLost(item.route))]
        source.reading.append(parcel)
        return []

    def let_go(self, session: str, count: int, world: "World") -> None:
        """Memory of the oldest parcels of a session is no longer read; of a closed end, then of all."""
        source = self.sources[session]
        for _ in range(min(count, len(source.reading))):
            parcel = source.reading.popleft()
            parcel.read()
            if not source.closing:
                piece = parcel.frame.message
                self.step(FromBulk(session, PieceLetGo(piece.slot, piece.epoch)), world)
        if source.closing and not source.reading:
            del self.sources[session]
            self.step(ev.BulkReleased(session), world)

    def _completion(self, frame: SendFrame, world: "World") -> SendFrame:
        """Book a completion, and spoil a record if that is due."""
        message = frame.message
        if not isinstance(message, (PrefillDone, PrefillFailed)):
            world.audit.said(world, frame)
            return frame
        world.audit.completed(frame)
        if self.damage and isinstance(message, PrefillDone):
            frame = replace(frame, message=_damaged(message, self.damage))
            self.damage = 0
        wire = self.router.wires.get(frame.route)
        if wire is not None:
            world.remember("p", wire, frame)
        return frame

    def hears(self, worker: str | None, session: str, route: bytes) -> bool:
        """Whether a message of that session, by that route, is one of an open session."""
        known = self.stack.listener._sessions.get(session)
        return known is not None and known.route == route

    @property
    def computes(self) -> bool:
        return self.command is not None and not self.hung

    def prompt_options(self, now_ms: int) -> list[Option]:
        ready = self.computes and self.slow_until_ms <= now_ms
        found = [usual("compute", self.name)] if ready else []
        for session, source in self.sources.items():
            count = len(source.reading)
            if source.closing or (count and not source.wire.down_cut):
                found.append(usual("let_go", session, 1))
                if count > 1 and self.plan.codec:
                    found.append(usual("let_go", session, count))
        return found

    def work(self, world: "World") -> None:
        """Compute begins its chunk, or ends it and answers."""
        command = self.command
        world.audit.written(world, self, command.slot, command.epoch)
        if not self.begun:
            self.begun = True
            if not command.digests:
                again = command.epoch <= self.slab.epochs[command.slot]
                world.audit.that(not again, "INV-5: an epoch of a slot comes again")
                self.slab.begin(command.slot, command.epoch)
            self.slab.write(command.slot, command.start, memory.TORN + command.epoch)
            return
        self.command = None
        self.step(self._compute(command), world)

    def _compute(self, command: ev.RunChunk) -> Any:
        slab, slot = self.slab, command.slot
        slab.write(slot, command.start, memory.content_of(command.prompt, command.end))
        digest = memory.digest_of(slab.read(slot, command.start))
        if command.end * 4 < len(command.prompt):
            return ev.ChunkComputed(slot, command.epoch, command.end, digest, 1_000)
        folded = 0
        digests = (*command.digests, digest)
        for (start, _), wanted in zip(chunk_bounds(0, command.end, CHUNK_TOKENS), digests, strict=True):
            content = slab.read(slot, start)
            if memory.digest_of(content) != wanted:
                return ev.ComputeFailed(slot, command.epoch, "an earlier chunk changed", ErrorCode.KV_CORRUPT)
            folded = memory.mix(folded, content)
        token = memory.next_token(folded).to_bytes(4, "little")
        logits = token * VOCABULARY
        return ev.ChunkComputed(slot, command.epoch, command.end, digest, 1_000, logits, token * 4)

    def fail_chunk(self, world: "World") -> None:
        """Compute raises in the chunk it has."""
        command, self.command = self.command, None
        self.step(ev.ComputeFailed(command.slot, command.epoch, "the engine raised"), world)

    def request_stop(self, world: "World") -> None:
        self.draining = True
        self.step(ev.StopRequested(), world)


def _damaged(record: PrefillDone, how: int) -> PrefillDone:
    """1: a digest is missing. 2: a token is missing. 3: other logits. 4: bytes are missing."""
    match how:
        case 1:
            return replace(record, chunk_digests=record.chunk_digests[:-1])
        case 2:
            return replace(record, token_count=record.token_count - 1)
        case 3:
            return replace(record, logits=bytes(len(record.logits)))
    return replace(record, byte_count=record.byte_count - 1)
