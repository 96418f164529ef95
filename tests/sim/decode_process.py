"""A decode process: the production stack, its ports, and modelled compute and text threads."""

from collections import deque
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from common.engines.registry import BACKENDS, BackendFacts
from common.messages import HelloOk, KvPiece, Role
from decode_node import commands
from decode_node import events as ev
from decode_node.core import DecodeCore
from decode_node.scheduler import Route
from decode_node.settings import DecodeSettings
from decode_node.stack import DecodeStack, FromWorker, OpenPlane, PlaneOpened, PlaneRefused, ToWorker
from tests.sim.bulk import BulkWire, Landing, Parcel
from tests.sim.decode_device import DecodeDevice, TextDevice
from tests.sim.links import RouterEnd
from tests.sim.memory import Slab
from tests.sim.plan import Option, Plan, usual
from tests.sim.process import Names, Process, outbox_deadline_ms
from transport.bulk import BULK_ROUTE, CloseBulk, ExpectChunks, FromBulk, Land, ToBulk
from transport.connector import Connector
from transport.listener import Listener
from transport.peers import CloseSocket, FrameReceived, OpenSocket, RouteLost, SendFrame, Tick

if TYPE_CHECKING:
    from tests.sim.world import World

BACKEND = "simulated"
_FACTS = BackendFacts(prefill=False, lanes_max=8, local_prefill=True, emulated=True)
_FOR_COMPUTE = (commands.SampleFirst, commands.StartLocalPrefill, commands.StartDecode, commands.StopLane)
_COMPUTE_FIRST = (*_FOR_COMPUTE, commands.StartImport, commands.ForgetJob)


class DecodeProcess(Process):
    """mappings: slabs and landing memory by session. sinks: ends of bulk connections, by session.

    blind: no plane can be opened, and reading of slabs fails, while control lives.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        super().__init__(name)
        self.plan = plan
        self.boot()

    def boot(self) -> None:
        """A new incarnation."""
        self.incarnations += 1
        plan = self.plan
        self.incarnation = f"{self.name}.{self.incarnations}"
        planes = (plan.planes[min(int(self.name[1:]), len(plan.planes) - 1)],)
        settings = DecodeSettings(
            incarnation=self.incarnation,
            profile=plan.profile,
            lease_ms=plan.client_times.lease_ms,
            dead_after_ms=plan.times.dead_after_ms,
            stall_ms=plan.stall_ms,
            drain_ms=plan.drain_ms,
            max_queue=plan.max_queue,
            prefill_timeout_ms=plan.prefill_timeout_ms,
            prefill_wait_ms=plan.prefill_wait_ms,
            prefill_retries=plan.prefill_retries,
            job_timeout_ms=plan.job_timeout_ms,
            planes=planes,
        )
        names = tuple(f"p{number}" for number in range(plan.prefill_nodes))
        route = Route(names, plan.remote_only, BACKEND, plan.lanes, plan.depth, plan.policy)
        session, job = f"{self.incarnation}-client", f"{self.incarnation}-job"
        # No engine so far has several lanes; the cores can.
        with patch.dict(BACKENDS, {BACKEND: _FACTS}):
            self.core = DecodeCore(settings, route, Names(session), Names(job))
        listener = Listener(plan.client_times, self.core.progress_count)
        connectors = {
            name: Connector(plan.times, self.incarnation, Role.DECODE, plan.profile, planes) for name in names
        }
        self.stack = DecodeStack(listener, connectors, self.core)
        self.router = RouterEnd()
        self.port: Any = None
        self.worker_ports: dict[str, Any] = {}
        self.device, self.text = DecodeDevice(), TextDevice()
        self.mappings: dict[str, Slab] = {}
        self.sinks: dict[str, BulkWire] = {}
        self.parcel: Parcel | None = None
        self.blind = self.draining = False
        self.exit: ev.ExitNode | None = None
        self.alive, self.hung = True, False
        self.slow_until_ms = 0

    def own_deadline_ms(self) -> int | None:
        deadlines = [self.stack.deadline_ms(), outbox_deadline_ms(self.port)]
        deadlines += [outbox_deadline_ms(port) for port in self.worker_ports.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, world: "World") -> None:
        self.flush(world)
        self.step(Tick(), world)

    def flush(self, world: "World") -> None:
        """Try what the ports keep back."""
        local_ms = self.local_ms(world.now_ms)
        for lost in self.port.flush(local_ms):
            self.step(lost, world)
        for name, port in list(self.worker_ports.items()):
            for lost in port.flush(local_ms):
                self.step(self.from_worker(name, lost), world)

    def step(self, event: Any, world: "World") -> None:
        """One event and all that follows from it inside this process."""
        events = deque([event])
        local_ms = self.local_ms(world.now_ms)
        while events and self.exit is None:
            effects = self.stack.step(events.popleft(), local_ms)
            # KV lands before anything else: the copy of what it completes may be among compute's commands.
            for effect in effects:
                if isinstance(effect, ToBulk) and isinstance(effect.item, Land):
                    self._land(effect.session, effect.item.piece, world)
            for effect in effects:
                if isinstance(effect, _COMPUTE_FIRST):
                    self._execute_compute(effect, world)
            for effect in effects:
                if not isinstance(effect, _COMPUTE_FIRST):
                    follows = self._execute(effect, world, local_ms)
                    if follows is not None:
                        events.append(follows)
            self.core.check()
            world.audit.bounded(world, self)
        if self.exit is not None:
            world.left(self)

    def _execute_compute(self, effect: Any, world: "World") -> None:
        if isinstance(effect, commands.ForgetJob):
            self.text.commands.append(effect)
            if effect.known_to_compute:
                self.device.commands.append(effect)
        elif isinstance(effect, commands.StartImport):
            source = self.mappings[effect.session]
            if isinstance(source, Landing):
                world.audit.imports(source, effect.record)
            self.device.commands.append((effect, source))
        else:
            self.device.commands.append(effect)

    def _execute(self, effect: Any, world: "World", local_ms: int) -> Any | None:
        match effect:
            case SendFrame():
                world.audit.told(self, effect)
                world.audit.said(world, effect)
                return self.port.send(effect, local_ms)
            case ToWorker(worker=worker, item=item):
                return self._to_worker(worker, item, world, local_ms)
            case commands.PrepareSubmission() | commands.PushTokens():
                self.text.commands.append(effect)
            case OpenPlane(worker=worker, hello_ok=hello_ok):
                source = None if self.blind else self._open_plane(worker, hello_ok, world)
                if source is None:
                    return PlaneRefused(worker, hello_ok, "the KV cannot be read")
                self.mappings[hello_ok.session] = source
                return PlaneOpened(worker, hello_ok)
            case ToBulk(session=session, item=item):
                self._to_bulk(session, item, world)
            case ev.ClosePlane(session=session):
                world.audit.unmapped(self, session)
                del self.mappings[session]
            case ev.ReportEnd(job_id=job_id):
                world.audit.reported(job_id)
            case ev.ExitNode():
                self.exit = effect
        return None

    def _open_plane(self, worker: str, hello_ok: HelloOk, world: "World") -> Slab | None:
        if hello_ok.bulk is None:
            return world.slabs.get(hello_ok.plane.name)
        self.sinks[hello_ok.session] = world.dial_bulk(self.name, worker, hello_ok.session)
        return Landing(self.plan.slots)

    def _to_bulk(self, session: str, item: Any, world: "World") -> None:
        match item:
            case SendFrame() if session in self.sinks:
                self.sinks[session].put_up((session, item.sequence, item.message))
            case ExpectChunks(slot=slot, epoch=epoch):
                world.audit.lands(self, session, slot)
                self.mappings[session].begin(slot, epoch)
            case CloseBulk():
                self.sinks.pop(session).close_dealer()

    def _land(self, session: str, piece: KvPiece, world: "World") -> None:
        world.audit.lands(self, session, piece.slot, piece.epoch)
        self.mappings[session].land(self.parcel)

    def take_bulk(self, session: str, parcel: Parcel | None, world: "World") -> None:
        """A piece has arrived, or, without one, the end of its connection."""
        self.parcel = parcel
        if parcel is None:
            item: Any = RouteLost(BULK_ROUTE)
        else:
            frame = parcel.frame
            parcel.read()
            item = FrameReceived(BULK_ROUTE, frame.session, frame.sequence, frame.message)
        self.step(FromBulk(session, item), world)
        self.parcel = None

    def _to_worker(self, worker: str, item: Any, world: "World", local_ms: int) -> Any | None:
        if isinstance(item, OpenSocket):
            self.worker_ports[worker] = world.dial(self.name, worker, item.route)
        elif isinstance(item, CloseSocket):
            port = self.worker_ports.pop(worker, None)
            if port is not None:
                port.close()
        elif worker in self.worker_ports:
            port = self.worker_ports[worker]
            world.audit.asked(world, self, worker, item)
            world.audit.said(world, item)
            world.remember("d", port.link.wire, item)
            lost = port.send(item, local_ms)
            return None if lost is None else self.from_worker(worker, lost)
        return None

    def from_worker(self, worker: str, item: Any) -> Any:
        """Something from the socket to a prefill node, as the stack takes it."""
        return FromWorker(worker, item)

    def hears(self, worker: str | None, session: str, route: bytes) -> bool:
        """Whether a message of that session, by that route, is one of an open session."""
        if worker is None:
            known = self.stack.listener._sessions.get(session)
        else:
            known = self.stack.connectors[worker]._session
        return known is not None and (known.identity, known.route) == (session, route)

    def session_with(self, worker: str) -> str | None:
        """The open session with a prefill node, as the core sees it."""
        return self.core.workers.get(worker).session

    def prompt_options(self, now_ms: int) -> list[Option]:
        found = []
        if not self.hung and self.slow_until_ms <= now_ms and self.device.has_work:
            found.append(usual("compute", self.name))
        if self.device.mailbox:
            found.append(usual("mail", self.name))
        if self.text.commands:
            found.append(usual("text", self.name))
        return found

    def work(self, world: "World") -> None:
        """One unit of the compute thread."""
        self.device.work(self.blind)

    def take_mail(self, world: "World") -> None:
        """The loop takes compute's first answer."""
        answer = self.device.mailbox.popleft()
        if isinstance(answer, ev.ImportEnded):
            world.audit.imported(world, self, answer)
        self.step(answer, world)

    def work_text(self, world: "World") -> None:
        answer = self.text.work()
        if answer is not None:
            self.step(answer, world)

    def request_stop(self, world: "World") -> None:
        self.draining = True
        self.step(ev.StopRequested(), world)
