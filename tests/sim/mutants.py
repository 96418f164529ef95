"""Faults planted in the product, to see that the simulator finds them.

Decides nothing: each mutant is an exact piece of source, what stands there instead, and the rule that this
breaks. `tests.sim.mutants_run` imports the product with one of them applied, in memory, and runs what is run
for the product itself; no test is aimed at a mutant. A mutant must never be written to a file.

Compute is modelled here, so the two rules of "read before verify" are broken where the model keeps them, in
`tests.sim.decode_device`. The epoch that an import compares is not among the mutants: while every chunk has a
digest, leaving it out turns KV_STALE into KV_CORRUPT and changes nothing else (a unit test holds the code).
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` stands exactly once in the source of `module`; `breaks` says which rule goes with it."""

    name: str
    module: str
    old: str
    new: str
    breaks: str


HAND_MADE = (
    Mutant(
        "free at cancel",
        "decode_node.worker",
        '        slot.cause = cause\n        self.counters["orphans"] += 1\n',
        "        slot.state, slot.job_id = SlotState.FREE, None\n",
        "INV-4: a slot whose producer still owes its completion is reserved again",
    ),
    Mutant(
        "release on timeout",
        "decode_node.worker",
        '        slot.cause = cause\n        self.counters["orphans"] += 1\n',
        '        if cause == "prefill timeout":\n'
        "            slot.state, slot.job_id = SlotState.FREE, None\n",
        "INV-4: the deadline of the RPC frees the slot, though its producer still writes",
    ),
    Mutant(
        "late completion resolves a live job",
        "decode_node.worker",
        "        if orphaned:\n",
        "        if False:\n",
        "INV-5: the completion of an orphan is taken for one of a live job",
    ),
    Mutant(
        "completion counted twice",
        "prefill_node.line",
        "        slot.production.cancelled = True\n        return []\n",
        "        slot.production.cancelled = True\n"
        "        failed = _failure(slot.production.request, ErrorCode.CANCELLED, '')\n"
        "        return [SendMessage(slot.session, failed)]\n",
        "INV-7: a CANCEL is answered at once, and the production is answered again at its chunk's end",
    ),
    Mutant(
        "epoch and session not compared in the ledger",
        "decode_node.slots",
        "slot.holds(reservation) and slot.state",
        "slot.state",
        "INV-5: a reservation of an ended session is taken for one of the open session",
    ),
    Mutant(
        "survivor's slot reserved anew",
        "decode_node.slots",
        "and (slot.incarnation, slot.index) not in taken:",
        "and taken is not None:",
        "INV-4: PREFILL into a slot that a copy of the ended session still reads",
    ),
    Mutant(
        "prefilled jobs go with their session",
        "decode_node.slots",
        "            if slot.state in _SURVIVING:\n",
        "            if slot.state is SlotState.IMPORTING:\n",
        "INV-2: a READY job loses its slot at the end of the session, and does not know",
    ),
    Mutant(
        "sweep only when busy",
        "decode_node.core",
        "in self.desk.timers.take_due(now_ms):",
        "in self.desk.timers.take_due(now_ms) if self.watch.owes else ():",
        "INV-7: deadlines of jobs are looked at only while compute has something to do",
    ),
    Mutant(
        "sequence gap ignored",
        "transport.peers",
        "        if sequence != self.received + 1:\n",
        "        if sequence <= self.received:\n",
        "INV-5: a lost message does not end the session, and nobody learns what was lost",
    ),
    Mutant(
        "admission submits twice",
        "decode_node.worker",
        "        return reservation, [SendToWorker(reservation.session, request)]\n",
        "        return reservation, 2 * [SendToWorker(reservation.session, request)]\n",
        "INV-4: the same PREFILL is sent a second time",
    ),
    Mutant(
        "import before the first token is known",
        "decode_node.jobs",
        "self.first_token is not None and decided",
        "decided",
        "INV-3: the lane is given to a job whose logits were not verified yet",
    ),
    Mutant(
        "read before verify: the first token",
        "tests.sim.decode_device",
        "        if record.logits_digest != record.logits[:4] * 4:\n",
        "        if False:\n",
        "INV-3: the first token is sampled from logits that do not match their digest",
    ),
    Mutant(
        "read before verify: the copy",
        "tests.sim.decode_device",
        "        if memory.digest_of(content) != record.chunk_digests[item.start // CHUNK_TOKENS]:\n",
        "        if False:\n",
        "INV-3: a lane decodes from KV that does not match its digests",
    ),
    Mutant(
        "record not checked against its job",
        "decode_node.handoff",
        "        if problem is not None:\n",
        "        if False:\n",
        "INV-3: a record of another length or prompt is imported",
    ),
    Mutant(
        "lease end returns a computing slot",
        "common.lifecycle",
        "    (SourceState.COMPUTING, SourceEvent.SESSION_ENDED): SourceState.ABANDONED,\n",
        "    (SourceState.COMPUTING, SourceEvent.SESSION_ENDED): SourceState.POOL,\n",
        "INV-4: a slot is granted anew while compute still writes to it",
    ),
    Mutant(
        "lane free at cancel",
        "common.lifecycle",
        "    (LaneState.DECODING, LaneEvent.STOP_REQUESTED): LaneState.STOPPING,\n",
        "    (LaneState.DECODING, LaneEvent.STOP_REQUESTED): LaneState.FREE,\n",
        "INV-4: a lane is given away before compute has let go of it",
    ),
    Mutant(
        "done without a release to wait for",
        "common.lifecycle",
        "    (SourceState.COMPUTING, SourceEvent.DONE): SourceState.HELD,\n",
        "    (SourceState.COMPUTING, SourceEvent.DONE): SourceState.IDLE,\n",
        "INV-4: the prefill node takes a finished slot for free before it was released",
    ),
    Mutant(
        "completion before the sends have let go",
        "prefill_node.line",
        "        if not slot.production.sends:\n",
        "        if True:\n",
        "INV-4: a slot is handed on while KV of it is still sent from there",
    ),
    Mutant(
        "KV of an old epoch lands",
        "transport.bulk",
        "arrival is None or piece.epoch != arrival.epoch",
        "arrival is None",
        "INV-5: late pieces of a production that was let go of land in the one that followed",
    ),
    Mutant(
        "credit of fenced KV is kept",
        "transport.bulk",
        "            self.fenced_pieces += 1\n            return [credit]\n",
        "            self._sent -= 1\n            return []\n",
        "INV-6: with each production that was let go of, less may be on its way",
    ),
    Mutant(
        "ready without all chunks",
        "decode_node.worker",
        "        if done and not orphaned and not slot.chunks_here:\n",
        "        if False:\n",
        "INV-3: the record alone makes a slot READY whose KV is still on its way",
    ),
)


def source_of(module: str) -> str:
    """The source of a module of this repository, not imported."""
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def patched_source(mutant: Mutant) -> str:
    """The mutant's source. Raises ValueError when its text does not stand exactly once in the module."""
    source = source_of(mutant.module)
    times = source.count(mutant.old)
    if times != 1:
        raise ValueError(f"the text of mutant {mutant.name!r} stands {times} times in {mutant.module}")
    return source.replace(mutant.old, mutant.new)
