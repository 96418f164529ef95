"""The world's own books: what no single core can see.

Every job is answered once and honestly, with the tokens of an undisturbed process; every PREFILL gets at
most one completion; compute never writes where a live session reads; nothing grows; and in the end nothing
is left.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from common.errors import ErrorCode, ExitStatus, InvariantViolation
from common.lifecycle import SlotState, SourceState
from common.messages import Accepted, Bye, Failed, Finished, Hello, Prefill, PrefillFailed, Rejected, Tokens
from tests.sim.memory import expected_tokens
from tests.sim.plan import Plan
from transport.bulk import piece_bytes
from transport.peers import SendFrame

if TYPE_CHECKING:
    from tests.sim.client_process import ClientProcess
    from tests.sim.decode_process import DecodeProcess
    from tests.sim.prefill_process import PrefillProcess
    from tests.sim.world import World

_WRITTEN = (SlotState.PRODUCING, SlotState.ORPHANED)
_COMMANDS_MAX = 64


def workers(decode: "DecodeProcess") -> list[Any]:
    """The prefill nodes as the decode core sees them."""
    return list(decode.core.workers)


def source_slots(prefill: "PrefillProcess") -> list[Any]:
    """The slots as the prefill core sees them."""
    return list(prefill.core.grants)


class Audit:
    """tokens, answers: by label. completions: by (session, slot, epoch).

    prefills, returned, ended: by job id; how often a PREFILL was sent, came back from a draining node.
    heard: the last number that each process took of each session. attempts: by (node, peer), the newest
    attempt and its route; kept in seeded runs only.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tokens: dict[str, int] = {}
        self.answers: dict[str, Any] = {}
        self.accepted: dict[str, str] = {}
        self.completions: Counter[tuple[str, int, int]] = Counter()
        self.ended: Counter[str] = Counter()
        self.prefills: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.crashed: set[str] = set()
        self.sent_in: dict[str, tuple[str, str]] = {}
        self.statuses: Counter[int] = Counter()
        self.heard: dict[tuple[str, str], int] = {}
        self.out_of_order = False
        self.attempts: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.layers = plan.profile.layers

    @staticmethod
    def that(holds: bool, what: str) -> None:
        if not holds:
            raise InvariantViolation(what)

    # While it runs.

    def hear(self, process: Any, worker: str | None, item: Any) -> None:
        """A frame is about to be taken; note whether it is the next one of an open session."""
        self.out_of_order = False
        session = getattr(item, "session", None)
        if session is None or item.sequence == 0 or not process.hears(worker, session, item.route):
            return
        last = self.heard.get((process.name, session), 0)
        self.out_of_order = item.sequence != last + 1
        if not self.out_of_order:
            self.heard[process.name, session] = item.sequence

    def heard_in_order(self, process: Any, worker: str | None, item: Any) -> None:
        """A message that is missing, or comes twice, ends the session."""
        if self.out_of_order:
            goes_on = process.alive and process.hears(worker, item.session, item.route)
            self.that(not goes_on, f"INV-5: {item.session} goes on after a gap or repeat")
        elif self.plan.codec and isinstance(getattr(item, "message", None), Hello):
            self._greeted(process, item)

    def _greeted(self, node: Any, item: Any) -> None:
        """A node has taken a HELLO: a newer attempt has ended the session of the one before."""
        sessions, hello = node.stack.listener._sessions, item.message
        name = (node.incarnation, hello.incarnation)
        attempt, route = self.attempts.get(name, (0, b""))
        if hello.attempt > attempt:
            stays = any(known.route == route for known in sessions.values())
            self.that(not stays, f"a newer attempt of {hello.incarnation} leaves its earlier session open")
            self.attempts[name] = (hello.attempt, item.route)

    def said(self, world: "World", frame: SendFrame) -> None:
        """Nobody accuses a peer of breaking the protocol unless a connection did what it never does."""
        if isinstance(frame.message, Bye) and not world.harsh:
            reason = frame.message.reason
            accuses = any(code in reason for code in (ErrorCode.PROTOCOL_ERROR, ErrorCode.SEQUENCE_ERROR))
            self.that(not accuses, f"a session ends without cause: {reason}")

    def submitted(self, label: str, client: "ClientProcess") -> None:
        self.sent_in[label] = (client.name, client.session)

    def completed(self, frame: SendFrame) -> None:
        """A prefill node answers a PREFILL."""
        name = (frame.session, frame.message.slot, frame.message.epoch)
        self.completions[name] += 1
        message = frame.message
        if isinstance(message, PrefillFailed) and message.code is ErrorCode.DRAINING:
            self.returned[message.job_id] += 1
        self.that(self.completions[name] == 1, f"INV-7: {name} was completed twice")

    def written(self, world: "World", prefill: "PrefillProcess", index: int, epoch: int) -> None:
        """Compute touches a slot: nobody with a live session may hold it for anything else, and nothing that
        was sent of another production may still be read from it."""
        for source in prefill.sources.values():
            for parcel in source.reading:
                piece = parcel.frame.message
                sent = piece.slot == index and piece.epoch != epoch
                self.that(not sent, f"INV-4: compute writes epoch {epoch} while {piece} is sent")
        for decode in world.decodes:
            if not decode.alive:
                continue
            for worker in workers(decode):
                ledger = worker.ledger
                for slot in (*ledger.slots(), *ledger.survivors()):
                    mine = slot.incarnation == prefill.incarnation and slot.index == index
                    if mine and slot.session in prefill.stack.listener._sessions:
                        fits = slot.state in _WRITTEN and slot.last_epoch == epoch
                        self.that(fits, f"INV-4: compute writes epoch {epoch} into {slot}")

    def asked(self, world: "World", decode: "DecodeProcess", worker: str, frame: SendFrame) -> None:
        """A decode node sends a PREFILL: none of its copies may read that slot."""
        if not isinstance(frame.message, Prefill):
            return
        job_id = frame.message.job_id
        self.prefills[job_id] += 1
        retries = self.plan.prefill_retries if self.plan.policy == "retry" else 0
        tries = 1 + retries + self.returned[job_id]
        self.that(self.prefills[job_id] <= tries, f"{job_id} is tried more often than it may be")
        slab = world.processes[worker].slab
        copied = _is_copied(decode, slab, frame.message.slot)
        self.that(not copied, "INV-4: PREFILL into a slot that is being copied")
        incarnation = world.processes[worker].incarnation
        for known in workers(decode):
            for slot in known.ledger.survivors():
                same = slot.incarnation == incarnation and slot.index == frame.message.slot
                self.that(not same, "INV-4: PREFILL into a slot whose survivor lives")

    # KV that comes over a socket.

    def lands(self, decode: "DecodeProcess", session: str, index: int, epoch: int | None = None) -> None:
        """Landing memory is about to be written, or, without an epoch, given to a new production."""
        landing = decode.mappings[session]
        copied = _is_copied(decode, landing, index)
        self.that(not copied, f"INV-4: KV lands in slot {index} of {session} while it is copied")
        if epoch is None:
            return
        self.that(landing.epochs[index] == epoch, f"INV-5: KV of epoch {epoch} lands in {index} of {session}")
        for ledger in [worker.ledger for worker in workers(decode)]:
            for slot in (*ledger.slots(), *ledger.survivors()):
                if (slot.session, slot.index) == (session, index):
                    # READY or IMPORTING by this very piece; FREE after a failure, whose word was faster.
                    fits = slot.last_epoch == epoch and slot.state is not SlotState.ORPHANED
                    self.that(fits, f"INV-5: KV of epoch {epoch} is not wanted, but lands in {slot}")

    def imports(self, landing: Any, record: Any) -> None:
        """A copy of landed KV is about to be asked for."""
        landed, wanted = landing.landed[record.slot], record.token_count * self.layers
        whole = landing.epochs[record.slot] == record.epoch and landed == wanted
        self.that(whole, f"INV-3: {landed} of {wanted} have landed of slot {record.slot}, which is imported")

    def imported(self, world: "World", decode: "DecodeProcess", ended: Any) -> None:
        """KV that lies in memory of its own is good, unless a fault has changed something."""
        reservation = decode.core.lanes[ended.lane].reservation
        landing = decode.mappings[reservation.session]
        if hasattr(landing, "landed") and ended.code in (ErrorCode.KV_CORRUPT, ErrorCode.KV_STALE):
            self.that(world.spoiled, f"INV-4: {reservation} is {ended.code}, and nobody spoiled it")

    def credit(self, world: "World", wire: Any) -> None:
        """Credit is neither lost nor made: it is at hand, or spent on KV under way, or on its way back."""
        sender = world.processes[wire.router].stack.senders.get(wire.session)
        if sender is None or sender._route is None or wire.broken or not wire.dealer_open or world.harsh:
            return
        layout = self.plan.layout
        away = sum(piece_bytes(parcel.frame.message, layout) for parcel in wire.down)
        back = sum(message.byte_count for _, _, message in wire.up)
        held = sender._credit_bytes + away + back
        self.that(held == sender._full_credit_bytes, f"credit of {wire.session} is {held} in all")

    def unmapped(self, decode: "DecodeProcess", session: str) -> None:
        reading = any(
            item.slab is not None and item.command.session == session
            for item in decode.device.filling.values()
        )
        self.that(not reading, "INV-4: a mapping is closed while a copy reads it")

    def bounded(self, world: "World", decode: "DecodeProcess") -> None:
        """INV-6, for what lies between the core and its threads."""
        device = decode.device
        longest = max(len(device.commands), len(device.mailbox), len(decode.text.commands))
        self.that(longest <= _COMMANDS_MAX, "INV-6: a queue between threads grows")

    def told(self, decode: "DecodeProcess", frame: SendFrame) -> None:
        """A decode node says something to a client."""
        message = frame.message
        kind = type(message)
        if kind is Tokens:
            self._told_tokens(message)
        elif kind is Finished or kind is Failed or kind is Rejected:
            self._told_end(message)
        elif kind is Accepted:
            self.that(message.label not in self.answers, "INV-7: accepted after the end")
            self.accepted[message.job_id] = decode.incarnation

    def _told_tokens(self, message: Tokens) -> None:
        label = message.label
        self.that(label not in self.answers, f"INV-7: {label} gets tokens after its end")
        wanted = expected_tokens(self.plan.jobs[int(label[3:])])
        had = self.tokens.get(label, 0)
        count = had + len(message.token_ids)
        self.that(wanted[had:count] == message.token_ids, f"INV-9: {label} got a wrong token")
        self.tokens[label] = count

    def _told_end(self, message: Any) -> None:
        label = message.label
        self.that(label not in self.answers, f"INV-7: {label} was answered twice")
        self.answers[label] = message
        had = self.tokens.get(label, 0)
        if isinstance(message, Finished):
            wanted = len(expected_tokens(self.plan.jobs[int(label[3:])]))
            self.that(had == wanted, f"INV-9: {label} finished after {had} of {wanted} tokens")
        else:
            definite = message.code.definite
            self.that(not (definite and had), f"INV-8: {label} failed definitely after a token")
            if isinstance(message, Failed):
                self.that(message.definite == definite, "INV-8: the flag contradicts the code")

    def reported(self, job_id: str) -> None:
        self.ended[job_id] += 1
        self.that(self.ended[job_id] == 1, f"INV-7: {job_id} ended twice")

    def exited(self, node: Any) -> None:
        """A node leaves by itself: it has answered for everything."""
        self.statuses[int(node.exit.status)] += 1
        self.that(node.exit.status != ExitStatus.INVARIANT, "a node found itself wrong")
        core = node.core
        if hasattr(core, "desk"):
            self.that(not core.desk.live(), "INV-7: a job was left behind")

    def died(self, incarnation: str) -> None:
        """A node was killed: it owes nobody anything."""
        self.crashed.add(incarnation)

    # At rest.

    def unrest(self, world: "World") -> str:
        """What is not yet at rest, or an empty text."""
        prompt = world.prompt_options()
        if prompt:
            return f"{prompt[0]} can still happen"
        for process in world.processes.values():
            if not process.runs:
                return f"{process.name} does not run"
        return (
            next((text for text in map(_prefill_unrest, world.prefills) if text), "")
            or next((text for node in world.decodes if (text := _decode_unrest(world, node))), "")
            or next((text for text in map(_client_unrest, world.clients) if text), "")
        )

    def leftovers(self, world: "World") -> str:
        """INV-7, its first half: an orphan, or a slot of a session that has ended."""
        for decode in world.decodes:
            for worker in workers(decode):
                if worker.orphans or any(worker.ledger.survivors()):
                    return f"{decode.name} has orphans or survivors"
                if not _serves(worker):
                    return f"{decode.name} has no usable session with {worker.name}"
        for prefill in world.prefills:
            for slot in source_slots(prefill):
                if slot.state is SourceState.ABANDONED or _ungranted(prefill, slot):
                    return f"slot {slot.index} of {prefill.name} is {slot.state}"
        return ""

    def final(self, world: "World") -> None:
        """INV-7 at rest: every job that had to be answered was."""
        for label, (name, session) in self.sent_in.items():
            client = world.processes[name]
            if client.session == session:
                self.that(label in self.answers, f"INV-7: {label} has no answer")
        for job_id, incarnation in self.accepted.items():
            if incarnation not in self.crashed:
                self.that(self.ended[job_id] == 1, f"INV-7: {job_id} has no end")


def _is_copied(decode: "DecodeProcess", memory: Any, index: int) -> bool:
    """Whether a copy from this slot of a slab, or of landing memory, runs or is asked for."""
    device = decode.device
    for item in device.filling.values():
        if item.slab is memory and item.command.record.slot == index:
            return True
    return any(
        type(item) is tuple and item[1] is memory and item[0].record.slot == index for item in device.commands
    )


def _serves(worker: Any) -> bool:
    """A session is open, and usable as soon as it holds a slot."""
    return worker.usable or (worker.session is not None and worker.ledger.granted_count == 0)


def _ungranted(prefill: "PrefillProcess", slot: Any) -> bool:
    """The slot lies in the pool although a session may hold it."""
    if slot.state is not SourceState.POOL:
        return False
    grants, most = prefill.core.grants, prefill.core.settings.slots_per_session
    return any(len(list(grants.held_by(session))) < most for session in grants.sessions)


def _prefill_unrest(prefill: "PrefillProcess") -> str:
    for slot in source_slots(prefill):
        if slot.state not in (SourceState.IDLE, SourceState.POOL) or _ungranted(prefill, slot):
            return f"slot {slot.index} of {prefill.name} is {slot.state}"
    for sender in prefill.stack.senders.values():
        if sender._waiting or any(known.in_flight for known in sender._productions.values()):
            return f"{prefill.name} has KV to send"
    if set(prefill.sources) != set(prefill.stack.senders):
        return f"{prefill.name} keeps bulk ends {list(prefill.sources)}"
    return f"{prefill.name} computes" if prefill.command is not None else ""


def _decode_unrest(world: "World", decode: "DecodeProcess") -> str:
    core, device = decode.core, decode.device
    if not core.idle or core.desk.timers.deadline_ms() is not None:
        return f"{decode.name} is not idle"
    if device.samplers or decode.text.streams or device.has_work:
        return f"a thread of {decode.name} holds something"
    sessions = set()
    for worker in workers(decode):
        if not _serves(worker):
            return f"{decode.name} has no usable session"
        if not any(worker.session in node.stack.listener._sessions for node in world.prefills):
            return f"the session of {decode.name} is known to itself alone"
        sessions.add(worker.session)
    if set(decode.sinks) != set(decode.stack.receivers):
        return f"{decode.name} keeps bulk ends {list(decode.sinks)}"
    return "" if set(decode.mappings) == sessions else f"{decode.name} keeps mappings {decode.mappings}"


def _client_unrest(client: "ClientProcess") -> str:
    if client.session is None or client.waiting or client.live:
        return f"{client.name} has no session or waits for answers"
    return ""
