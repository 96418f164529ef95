"""A decode node and a prefill node without sockets, threads or clocks, for tests of the pure cores.

Both stacks are the production ones, joined by in-memory links through the real codec, so every test is a test
of the codec too. Time moves when a test says so; compute runs when a test says so; after every step both
cores check their invariants, and each PREFILL is seen to get at most one completion.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from common.messages import NodeProfile, Prefill, Role
from decode_node import commands
from decode_node import events as ev
from decode_node.core import DecodeCore
from decode_node.jobs import Job
from decode_node.scheduler import Route
from decode_node.stack import DecodeStack, FromWorker, OpenPlane, PlaneOpened, PlaneRefused, ToWorker
from decode_node.worker import Worker
from prefill_node import events as prefill_ev
from tests.actors import DECODE_SETTINGS, NEVER_MS, ROUTE, TIMES, WORKER, Client, PrefillSide, names
from tests.devices import PROFILE, Device, Slab, Text
from transport.codec import Header, decode, encode
from transport.connector import Connector
from transport.listener import Listener
from transport.memory_link import MemoryDealer, MemoryRouter
from transport.peers import CloseSocket, EndSession, OpenSocket, SendFrame, Tick
from transport.port import ControlPort

TURNS_MAX = 200


class Pair:
    """One decode node, one prefill node, any number of clients.

    hold_up, hold_down: keep back what the decode node, the prefill node says to the other. hold_text: the
    text thread stands still. prefill_exists: False while there is no prefill process at all. map_refusal: why
    no slab can be mapped.
    """

    def __init__(
        self, *, slots: int = 1, route: Route = ROUTE, connect: bool = True, **settings: Any
    ) -> None:
        self.now_ms = 0
        self.hold_up = self.hold_down = self.hold_text = False
        self.prefill_exists = connect
        self.map_refusal = ""
        self.settings = replace(DECODE_SETTINGS, **settings)
        self.core = DecodeCore(self.settings, route, names("client-session"), names("job"))
        connector = Connector(TIMES, self.settings.incarnation, Role.DECODE, PROFILE)
        listener = Listener(TIMES, self.core.progress_count)
        self.decode = DecodeStack(listener, {WORKER: connector}, self.core)
        self.device, self.text = Device(), Text()
        self.router = MemoryRouter()
        self.port = ControlPort(self.router, NEVER_MS)
        self.worker_port: ControlPort | None = None
        self.unmapped: list[str] = []
        self.sent: list[Prefill] = []
        self.exit: ev.ExitNode | None = None
        self._dealers: list[MemoryDealer] = []
        self.text_commands: deque[Any] = deque()
        self._slots = slots
        self._slabs: dict[str, Slab] = {}
        self.clients: list[Client] = []
        self.start_prefill("prefill-1")
        self.client = self.add_client("client-1")
        self.tick()

    def start_prefill(self, incarnation: str, profile: NodeProfile = PROFILE) -> None:
        """A new prefill process at the same address; what the former one still says is lost."""
        self.prefill = PrefillSide(incarnation, self._slots, profile)
        self._slabs[incarnation] = self.prefill.slab

    def add_client(self, incarnation: str) -> Client:
        self.clients.append(Client(self, incarnation))
        return self.clients[-1]

    def dial(self, router: MemoryRouter, route: bytes) -> ControlPort:
        dealer = MemoryDealer(router, route)
        self._dealers.append(dealer)  # its name is its id, which must not come again
        return ControlPort(dealer, NEVER_MS)

    @property
    def worker(self) -> Worker:
        """The prefill node, as the decode core sees it."""
        return self.core.workers.get(WORKER)

    def tick(self) -> None:
        """Let everybody look at the clock, and deliver."""
        if self.exit is None:
            self.step_decode(Tick())
        if self.prefill_exists:
            self.prefill.step(Tick(), self.now_ms)
        for client in self.clients:
            if not client.silent:
                client.step(Tick(), self.now_ms)
        self.deliver()

    def advance(self, duration_ms: int) -> None:
        """Move the clock, stopping at every deadline on the way."""
        end_ms = self.now_ms + duration_ms
        turns_at_once = 0
        while (due_ms := self._next_deadline_ms()) is not None and due_ms <= end_ms:
            turns_at_once = 0 if due_ms > self.now_ms else turns_at_once + 1
            assert turns_at_once < 10, "a deadline stays in the past: the daemon would spin"
            self.now_ms = max(self.now_ms, due_ms)
            self.tick()
        self.now_ms = end_ms

    def _next_deadline_ms(self) -> int | None:
        sources = [client.connector for client in self.clients if not client.silent]
        if self.exit is None:
            sources.append(self.decode)
        if self.prefill_exists and self.prefill.exit is None:
            sources.append(self.prefill.stack)
        deadlines = [source.deadline_ms() for source in sources]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def step_decode(self, event: Any) -> None:
        events = deque([event])
        while events and self.exit is None:
            for effect in self.decode.step(events.popleft(), self.now_ms):
                events.extend(self._execute(effect))
            self.core.check()
        assert self.exit is None or not self.core.desk.live(), "INV-7: a job was left behind"

    def _execute(self, effect: Any) -> list[Any]:
        match effect:
            case SendFrame():
                return list(filter(None, [self.port.send(effect, self.now_ms)]))
            case ToWorker(item=item):
                self._execute_worker(item)
            case OpenPlane(hello_ok=hello_ok) if self.map_refusal:
                return [PlaneRefused(WORKER, hello_ok, self.map_refusal)]
            case OpenPlane(hello_ok=hello_ok):
                self.device.mappings[hello_ok.session] = self._slabs[hello_ok.plane.name]
                return [PlaneOpened(WORKER, hello_ok)]
            case ev.ClosePlane(session=session):
                del self.device.mappings[session]
                self.unmapped.append(session)
            case commands.PrepareSubmission() | commands.TokenizeText() | commands.PushTokens():
                self.text_commands.append(effect)
            case commands.ForgetJob():
                self.text_commands.append(effect)
                if effect.known_to_compute:
                    self.device.commands.append(effect)
            case (
                commands.SampleFirst()
                | commands.StartImport()
                | commands.StartLocalPrefill()
                | commands.StartDecode()
            ):
                self.device.commands.append(effect)
            case commands.StopLane():
                self.device.commands.append(effect)
            case ev.ExitNode():
                self.exit = effect
        return []

    def _execute_worker(self, item: Any) -> None:
        match item:
            case OpenSocket(route=route):
                self.worker_port = self.dial(self.prefill.router, route)
            case CloseSocket():
                self.worker_port.close()
                self.worker_port = None
            case SendFrame(message=message) if self.worker_port is not None:
                if isinstance(message, Prefill):
                    self._check_not_read(message)
                    self.sent.append(message)
                self.worker_port.send(item, self.now_ms)

    def _check_not_read(self, request: Prefill) -> None:
        """INV-4: nothing is sent into a slot of this slab that a copy still reads."""
        slabs = self.device.mappings
        copies = [item for item in self.device.commands if isinstance(item, commands.StartImport)]
        reads = [item.record.slot for item in copies if slabs.get(item.session) is self.prefill.slab]
        assert request.slot not in reads, "INV-4: PREFILL into a slot that is being copied"

    def deliver(self) -> None:
        """Deliver messages and let the text thread work until nothing moves. Compute stands still."""
        for _ in range(TURNS_MAX):
            if not any(
                [self._deliver_up(), self._deliver_down(), self._deliver_clients(), self._work_text()]
            ):
                return
        raise AssertionError("messages go round and round")

    def _deliver_up(self) -> int:
        return sum(self._feed(self.prefill, item) for item in self._arrivals(self._prefill_port()))

    def _prefill_port(self) -> ControlPort | None:
        heard = self.prefill_exists and self.prefill.exit is None and not self.hold_up
        return self.prefill.port if heard else None

    def _feed(self, side: PrefillSide, item: Any) -> int:
        side.step(item, self.now_ms)
        return 1

    def _deliver_down(self) -> int:
        moved = 0
        for item in self._arrivals(None if self.hold_down or self.exit else self.worker_port):
            self.step_decode(FromWorker(WORKER, item))
            moved += 1
        return moved

    def _deliver_clients(self) -> int:
        moved = 0
        for item in self._arrivals(None if self.exit else self.port):
            self.step_decode(item)
            moved += 1
        for client in self.clients:
            for item in self._arrivals(None if client.silent else client.port):
                client.step(item, self.now_ms)
                moved += 1
        return moved

    @staticmethod
    def _arrivals(port: ControlPort | None) -> Iterator[Any]:
        return iter(()) if port is None else port.receive()

    def _work_text(self) -> int:
        if self.hold_text:
            return 0
        moved = len(self.text_commands)
        while self.text_commands:
            answer = self.text.carry_out(self.text_commands.popleft())
            if answer is not None and self.exit is None:
                self.step_decode(answer)
        return moved

    def prefill_chunk(self) -> None:
        """The prefill node's compute finishes the chunk it was given."""
        self.prefill.step(self.prefill.slab.compute(self.prefill.chunks.popleft()), self.now_ms)
        self.deliver()

    def prefill_all(self) -> None:
        """Whole productions, until the prefill node's compute has nothing to do."""
        while self.prefill.chunks:
            self.prefill_chunk()

    def compute(self) -> None:
        """Carry out every waiting command of the decode node, copies included; no decode step."""
        while self.device.commands:
            self.compute_one()

    def compute_one(self) -> None:
        answer = self.device.carry_out()
        if answer is not None:
            self.step_decode(answer)
            self.deliver()

    def decode_steps(self, number: int = 1) -> None:
        for _ in range(number):
            for answer in self.device.step():
                self.step_decode(answer)
                self.deliver()
            self.compute()

    def finish(self) -> None:
        """Let everything run to its end."""
        for _ in range(TURNS_MAX):
            self.deliver()
            self.prefill_all()
            self.compute()
            if self.device.running:
                self.decode_steps()
            elif not self.prefill.chunks and not self.device.commands:
                return
        raise AssertionError("the pair does not come to rest")

    def stop_decode(self) -> None:
        self.step_decode(ev.StopRequested())
        self.deliver()

    def stop_prefill(self) -> None:
        self.prefill.step(prefill_ev.StopRequested(), self.now_ms)
        self.deliver()

    def end_session(self, reason: str = "test") -> None:
        """The session between the nodes ends, by the decode node's word."""
        self.step_decode(FromWorker(WORKER, EndSession(self.worker.session, reason)))
        self.deliver()

    def edit_down(self, change: Callable[[Any], Any]) -> None:
        """Change the messages that wait on the way to the decode node; None removes one."""
        arrived = self.worker_port.link.arrived
        for _ in range(len(arrived)):
            header, message = decode(arrived.popleft())
            changed = change(message)
            if changed is not None:
                arrived.append(encode(Header(header.session, header.sequence), changed))

    def job(self, label: str, client: Client | None = None) -> Job | None:
        """The live job of a label."""
        session = (client or self.client).session
        job_id = self.core.desk.clients.job_id(session, label)
        return None if job_id is None else self.core.desk.get(job_id)

    def slot_states(self) -> list[str]:
        return [str(slot.state) for slot in self.worker.ledger.slots()]

    def source_states(self) -> list[str]:
        return [slot["state"] for slot in self.prefill.core.status(self.now_ms)["slots"]]
