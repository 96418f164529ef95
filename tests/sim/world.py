"""A simulated world: processes, connections, a clock, and everything that can happen next.

`options` lists what can happen, `take` lets one of them happen and has every invariant checked; nothing else
changes a world, so a run is a list of options and its replay is trivial. A world draws nothing by chance and
can be copied at any time.
"""

import copy
from typing import Any, Self

from tests.sim import faults
from tests.sim.audit import Audit
from tests.sim.bulk import BATCH, BulkWire
from tests.sim.choices import Choices
from tests.sim.client_process import ClientProcess
from tests.sim.decode_process import DecodeProcess
from tests.sim.links import CAPACITY, DealerEnd, PlainPort, Wire
from tests.sim.memory import Slab
from tests.sim.plan import NEVER_MS, Option, Plan, usual
from tests.sim.prefill_process import PrefillProcess
from tests.sim.process import Process
from transport.bulk import FromBulk
from transport.codec import Header, encode
from transport.peers import FrameReceived, SendFrame
from transport.port import ControlPort

SPINS_MAX = 10
IDLE_MS = 200


class World:
    """cuts: (from, to) pairs of processes between which nothing passes. budget: faults left, by name.

    bulk: connections that carry KV, by session. harsh: a connection has done what ZeroMQ never does. spoiled:
    KV or a record was changed.
    """

    def __init__(self, plan: Plan, choices: Choices | None = None) -> None:
        self.plan = plan
        self.now_ms = 0
        self.steps = 0
        self.spins = 0
        self.audit = Audit(plan)
        self.harsh = self.spoiled = False
        self.wires: dict[int, Wire] = {}
        self.bulk: dict[str, BulkWire] = {}
        self.wire_count = 0
        self.cuts: set[tuple[str, str]] = set()
        self.slabs: dict[str, Slab] = {}
        self.budget = dict(plan.faults)
        self.late = bool({"late_completion", "late_request"} & self.budget.keys())
        self.spoken: dict[tuple[str, str, str], list[tuple[int, Any]]] = {}
        self.prefills = [PrefillProcess(f"p{number}", plan) for number in range(plan.prefill_nodes)]
        self.decodes = [DecodeProcess(f"d{number}", plan) for number in range(plan.decode_nodes)]
        self.clients = [self._client(number) for number in range(plan.clients)]
        self.processes: dict[str, Process] = {
            process.name: process for process in (*self.prefills, *self.decodes, *self.clients)
        }
        for node in (*self.prefills, *self.decodes):
            self._started(node)

    def _client(self, number: int) -> ClientProcess:
        node = f"d{number % self.plan.decode_nodes}"
        jobs = [index for index, job in enumerate(self.plan.jobs) if job.client == number]
        return ClientProcess(f"c{number}", node, self.plan, jobs)

    def _started(self, node: PrefillProcess | DecodeProcess) -> None:
        node.port = self._port(node.router)
        if isinstance(node, PrefillProcess):
            self.slabs[node.incarnation] = node.slab

    def _port(self, link: Any) -> Any:
        if not self.plan.codec:
            return PlainPort(link)
        return ControlPort(link, self.plan.times.dead_after_ms)

    def clone(self) -> Self:
        """An independent copy."""
        return copy.deepcopy(self)

    # What processes ask for.

    def dial(self, dealer: str, router: str, route: bytes) -> Any:
        """A new connection; to a dead node it is broken from the start."""
        for known in list(self.wires.values()):
            if known.dead:
                self._forget_wire(known)
        self.wire_count += 1
        wire = Wire(self.wire_count, dealer, router, route)
        self.wires[wire.number] = wire
        node = self.processes[router]
        if node.alive:
            node.router.wires[wire.peer] = wire
        else:
            wire.broken = True
        return self._port(DealerEnd(wire))

    def dial_bulk(self, dealer: str, router: str, session: str) -> BulkWire:
        """The bulk connection of a session; where nobody binds any more it is broken from the start."""
        for name in [name for name, known in self.bulk.items() if known.dead]:
            del self.bulk[name]
        self.wire_count += 1
        wire = self.bulk[session] = BulkWire(self.wire_count, dealer, router, session)
        node = self.processes[router]
        source = node.sources.get(session) if node.alive else None
        if source is None or source.closing:
            wire.broken = True
        else:
            source.wire = wire
        return wire

    def remember(self, sender: str, wire: Wire, frame: SendFrame) -> None:
        """Keep the last words of the last two connections between two nodes, for those that come late."""
        if not self.late or frame.session is None:
            return
        item: Any = (frame.session, frame.sequence, frame.message)
        if self.plan.codec:
            item = encode(Header(frame.session, frame.sequence), frame.message)
        rows = self.spoken.setdefault((sender, wire.dealer, wire.router), [])
        if rows and rows[-1][0] == wire.number:
            rows.pop()
        rows.append((wire.number, item))
        del rows[:-2]

    def old_frame(self, sender: str, wire: Wire) -> Any | None:
        """The last words on an earlier connection between the ends of this one."""
        rows = self.spoken.get((sender, wire.dealer, wire.router), [])
        return next((item for number, item in reversed(rows) if number != wire.number), None)

    def left(self, node: Process) -> None:
        """A node has exited by itself: its last words still travel."""
        if node.alive:
            self.audit.exited(node)
            node.alive = False
            node.port.close()
            for port in getattr(node, "worker_ports", {}).values():
                port.close()
            for wire in getattr(node, "sinks", {}).values():
                wire.close_dealer()
            for source in getattr(node, "sources", {}).values():
                source.close()

    # What can happen.

    def options(self) -> list[Option]:
        """Everything that can happen next, faults with a budget left included."""
        return self.usual_options() + faults.options(self)

    def usual_options(self) -> list[Option]:
        """What can happen without anything going wrong."""
        found = self.prompt_options()
        found += [Option("submit", client.name) for client in self.clients if self.may_submit(client)]
        if self.next_due_ms() < NEVER_MS:
            found.append(Option("time"))
        return found

    def may_submit(self, client: ClientProcess) -> bool:
        return bool(client.runs and client.session is not None and client.waiting)

    def prompt_options(self) -> list[Option]:
        """What happens without any time passing: messages arrive, threads work, supervisors restart."""
        found = []
        now_ms, cuts = self.now_ms, self.cuts
        # Asked for at every step of every run: plain loops, and nothing looked up twice.
        running = set()
        own: list[Option] = []
        for name, process in self.processes.items():
            if process.alive and process.stopped_at_ms is None:
                running.add(name)
                own += process.prompt_options(now_ms)
            elif not process.alive:
                own.append(usual("restart", name))
        for number, wire in self.wires.items():
            dealer, router = wire.dealer, wire.router
            if wire.up and router in running and (not cuts or (dealer, router) not in cuts):
                found.append(usual("deliver_up", number))
            waits = wire.dealer_open and (wire.down or (wire.broken and not wire.told))
            if waits and dealer in running and (not cuts or (router, dealer) not in cuts):
                found.append(usual("deliver_down", number))
        return found + self._bulk_options(running) + own if self.bulk else found + own

    def _bulk_options(self, running: set[str]) -> list[Option]:
        """Deliveries of KV and credit: of one message, in seeded runs also of all that wait."""
        found = []
        several, cuts = self.plan.codec, self.cuts
        for session, wire in self.bulk.items():
            dealer, router = wire.dealer, wire.router
            count = len(wire.up)
            if count and router in running and not wire.up_cut and (dealer, router) not in cuts:
                found.append(usual("bulk_up", session, BATCH if several else 1))
            count = len(wire.down)
            waits = wire.dealer_open and (count or (wire.broken and not wire.told))
            if waits and dealer in running and not wire.down_cut and (router, dealer) not in cuts:
                found.append(usual("bulk_down", session, 1))
                if count > 1 and several:
                    found.append(usual("bulk_down", session, BATCH))
        return found

    def next_due_ms(self) -> int:
        """When the next process must look at its clock, or slow compute is through."""
        due_ms = NEVER_MS
        now_ms = self.now_ms
        for process in self.processes.values():
            if process.runs:
                own_ms = process.due_ms(now_ms)
                if own_ms is not None and own_ms < due_ms:
                    due_ms = own_ms
        return due_ms

    def quiescent(self) -> bool:
        """Nothing is owed, held, queued or on its way, and the nodes have sessions with each other."""
        return self.audit.unrest(self) == ""

    # Letting it happen.

    def take(self, option: Option) -> None:
        """Let one thing happen; raises when an invariant does not hold afterwards."""
        self.steps += 1
        take = getattr(self, "_take_" + option.kind, None)
        if take is not None:
            take(option)
        else:
            self.budget[option.kind] -= 1
            faults.apply(self, option)

    def _take_time(self, option: Option) -> None:
        """The clock moves to the next deadline, or by `detail` if that is less; without any, by a bit."""
        dues = [(process.due_ms(self.now_ms), process) for process in self.processes.values() if process.runs]
        due_ms = min((due for due, _ in dues if due is not None), default=NEVER_MS)
        if due_ms == NEVER_MS:
            due_ms = self.now_ms + IDLE_MS
        if option.detail and self.now_ms + option.detail < due_ms:
            self.now_ms += option.detail
            return
        self.spins = self.spins + 1 if due_ms <= self.now_ms else 0
        self.audit.that(self.spins < SPINS_MAX, "a deadline stays in the past: the daemon would spin")
        self.now_ms = due_ms
        for due, process in dues:
            if due == due_ms and process.runs:
                process.tick(self)

    def _take_hurry(self, option: Option) -> None:
        """A lane comes to wait for what is produced in that slot."""
        node = self.processes[option.where]
        worker = list(node.core.workers)[option.detail]
        slot = next(slot for slot in worker.ledger.slots() if slot.index == option.more)
        for effect in worker.hurry(slot):
            node.step(effect, self)

    def _take_deliver_up(self, option: Option) -> None:
        wire = self.wires[int(option.where)]
        node = self.processes[wire.router]
        node.router.arrived.append((wire.peer, wire.up.popleft()))
        for item in node.port.receive():
            self.audit.hear(node, None, item)
            node.step(item, self)
            self.audit.heard_in_order(node, None, item)
        self._after_delivery(wire)

    def _take_deliver_down(self, option: Option) -> None:
        wire = self.wires[int(option.where)]
        process = self.processes[wire.dealer]
        decode = isinstance(process, DecodeProcess)
        port = process.worker_ports.get(wire.router) if decode else process.port
        if port is None or port.link.wire is not wire:
            raise AssertionError("an open wire without its port")
        if wire.down:
            port.link.arrived.append((wire.route, wire.down.popleft()))
        else:
            wire.told = True
        for item in port.receive():
            self.audit.hear(process, wire.router, item)
            process.step(process.from_worker(wire.router, item) if decode else item, self)
            self.audit.heard_in_order(process, wire.router, item)
        self._after_delivery(wire)

    def _take_bulk_up(self, option: Option) -> None:
        session = option.where
        wire = self.bulk[session]
        node = self.processes[wire.router]
        for _ in range(min(option.detail, len(wire.up))):
            if wire.up:
                said_in, sequence, message = wire.up.popleft()
                arrived = FrameReceived(wire.peer, said_in, sequence, message)
                node.step(FromBulk(session, arrived), self)
        self._after_bulk(wire)

    def _take_bulk_down(self, option: Option) -> None:
        session = option.where
        wire = self.bulk[session]
        node = self.processes[wire.dealer]
        for _ in range(min(option.detail, len(wire.down)) or 1):
            if wire.down:
                node.take_bulk(session, wire.down.popleft(), self)
            elif wire.broken and not wire.told and wire.dealer_open:
                wire.told = True
                node.take_bulk(session, None, self)
        self._after_bulk(wire)

    def _after_bulk(self, wire: BulkWire) -> None:
        if wire.dead:
            del self.bulk[wire.session]
        else:
            self.audit.credit(self, wire)

    def _take_let_go(self, option: Option) -> None:
        session = option.where
        self.processes[session[: session.index(".")]].let_go(session, option.detail, self)

    def _after_delivery(self, wire: Wire) -> None:
        if wire.dead:
            self._forget_wire(wire)
        elif wire.capacity < CAPACITY:
            self._flush(wire)

    def _forget_wire(self, wire: Wire) -> None:
        self.wires.pop(wire.number, None)
        self.processes[wire.router].router.wires.pop(wire.peer, None)

    def _flush(self, wire: Wire) -> None:
        """There is room again: what waits outside moves up."""
        for process in (self.processes[wire.dealer], self.processes[wire.router]):
            if process.runs:
                process.flush(self)

    def _take_compute(self, option: Option) -> None:
        self.processes[option.where].work(self)

    def _take_mail(self, option: Option) -> None:
        self.processes[option.where].take_mail(self)

    def _take_text(self, option: Option) -> None:
        self.processes[option.where].work_text(self)

    def _take_submit(self, option: Option) -> None:
        self.processes[option.where].submit(self)

    def _take_restart(self, option: Option) -> None:
        process = self.processes[option.where]
        process.boot()
        process.stopped_at_ms = None
        if not isinstance(process, ClientProcess):
            self._started(process)

    def _take_continue(self, option: Option) -> None:
        self.processes[option.where].go_on(self.now_ms)

    def _take_mend(self, option: Option) -> None:
        one, other = option.where.split(">")
        self.cuts.discard((one, other))

    def _take_bulk_mend(self, option: Option) -> None:
        wire = self.bulk[option.where]
        wire.up_cut = wire.down_cut = False

    def _take_see(self, option: Option) -> None:
        self.processes[option.where].blind = False

    def _take_unclog(self, option: Option) -> None:
        wire = self.wires[int(option.where)]
        wire.capacity = CAPACITY
        self._flush(wire)
