"""The processes round a decode node, for tests of the pure cores: a prefill node, clients, and the settings
of all. Production stacks and connectors behind in-memory links; see tests/cores.py.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from common.messages import (
    CancelJob,
    Failed,
    Finished,
    NodeProfile,
    PrefillDone,
    PrefillFailed,
    Rejected,
    Role,
    ShmPlane,
    Submit,
    Tokens,
)
from decode_node.scheduler import Route
from decode_node.settings import DecodeSettings
from prefill_node import events as prefill_ev
from prefill_node.core import PrefillCore
from prefill_node.production import PrefillSettings
from prefill_node.stack import PrefillStack
from tests.devices import LAYOUT, MAX_TOKENS, PROFILE, TOKEN_BYTES, Slab, SlotMemory
from transport.connector import Connector
from transport.listener import Listener
from transport.memory_link import MemoryRouter
from transport.peers import (
    CloseSocket,
    Delivered,
    LivenessTimes,
    OpenSocket,
    Post,
    SendFrame,
    SessionOpened,
    StopConnecting,
)
from transport.port import ControlPort

if TYPE_CHECKING:
    from tests.cores import Pair

TIMES = LivenessTimes(
    ping_ms=100,
    suspect_ms=300,
    dead_after_ms=600,
    lease_ms=1_000,
    hello_timeout_ms=200,
    backoff_min_ms=50,
    backoff_max_ms=400,
)
STALL_MS = 2_000
DRAIN_MS = 10_000
PREFILL_TIMEOUT_MS = 4_000
PREFILL_WAIT_MS = 1_500
JOB_TIMEOUT_MS = 20_000
MAX_QUEUE = 8
NEVER_MS = 10**9

DECODE_SETTINGS = DecodeSettings(
    incarnation="decode-1",
    profile=PROFILE,
    lease_ms=TIMES.lease_ms,
    dead_after_ms=TIMES.dead_after_ms,
    stall_ms=STALL_MS,
    drain_ms=DRAIN_MS,
    max_queue=MAX_QUEUE,
    prefill_timeout_ms=PREFILL_TIMEOUT_MS,
    prefill_wait_ms=PREFILL_WAIT_MS,
    job_timeout_ms=JOB_TIMEOUT_MS,
    prefill_retries=1,
)
WORKER = "memory"
ROUTE = Route((WORKER,), remote_only=True, backend="emulated", slots=1, prefetch_depth=1)
LOCAL_ROUTE = replace(ROUTE, remote_only=False, prefetch_depth=0, on_prefill_failure="local")


def names(prefix: str) -> Callable[[], str]:
    """A source of fresh names."""
    numbers = count(1)
    return lambda: f"{prefix}-{next(numbers)}"


def prefill_settings(
    incarnation: str, slots: int, profile: NodeProfile = PROFILE, decode_nodes: int = 1
) -> PrefillSettings:
    plane = ShmPlane(incarnation, slots, MAX_TOKENS * TOKEN_BYTES)
    bounds = TIMES.lease_ms, STALL_MS, DRAIN_MS, decode_nodes, slots
    return PrefillSettings(incarnation, profile, slots, plane, TOKEN_BYTES, *bounds)


class PrefillSide:
    """One prefill process: stack, slab, and the chunks it was asked to compute."""

    def __init__(self, incarnation: str, slots: int, profile: NodeProfile = PROFILE) -> None:
        core = PrefillCore(prefill_settings(incarnation, slots, profile), names(f"{incarnation}-session"))
        self.core = core
        self.stack = PrefillStack(
            Listener(TIMES, core.progress_count), core, LAYOUT, give_up_ms=TIMES.lease_ms
        )
        self.router = MemoryRouter()
        self.port = ControlPort(self.router, NEVER_MS)
        self.slab = Slab([SlotMemory() for _ in range(slots)])
        self.chunks: deque[prefill_ev.RunChunk] = deque()
        self.completions: Counter[tuple[str, int, int]] = Counter()
        self.exit: prefill_ev.ExitNode | None = None

    def step(self, event: Any, now_ms: int) -> None:
        events = deque([event])
        while events and self.exit is None:
            for effect in self.stack.step(events.popleft(), now_ms):
                match effect:
                    case SendFrame(message=PrefillDone() | PrefillFailed() as message, session=session):
                        self.completions[session, message.slot, message.epoch] += 1
                        events.extend(filter(None, [self.port.send(effect, now_ms)]))
                    case SendFrame():
                        events.extend(filter(None, [self.port.send(effect, now_ms)]))
                    case prefill_ev.RunChunk():
                        self.chunks.append(effect)
                    case prefill_ev.ExitNode():
                        self.exit = effect
            self.core.check()
        assert all(times == 1 for times in self.completions.values()), "INV-7: answered twice"
        assert len(self.chunks) <= 1, "compute was given two chunks at once"


class Client:
    """A client of the decode node: the real connector, and everything that was said about each label."""

    def __init__(self, pair: "Pair", incarnation: str) -> None:
        self._pair = pair
        self.connector = Connector(TIMES, incarnation, Role.CLIENT)
        self.port: ControlPort | None = None
        self.session: str | None = None
        self.received: list[Any] = []
        self.silent = False

    def step(self, event: Any, now_ms: int) -> None:
        for effect in self.connector.step(event, now_ms):
            match effect:
                case OpenSocket(route=route):
                    self.port = self._pair.dial(self._pair.router, route)
                case CloseSocket() if self.port is not None:
                    self.port.close()
                    self.port = None
                case SendFrame() if self.port is not None:
                    self.port.send(effect, now_ms)
                case SessionOpened(hello_ok=hello_ok):
                    self.session = hello_ok.session
                case Delivered(message=message):
                    self.received.append(message)

    def say(self, message: Any) -> None:
        self.step(Post(self.session, message), self._pair.now_ms)
        self._pair.deliver()

    def submit(self, label: str, prompt_ids: list[int], max_tokens: int = 4, **sampling: Any) -> None:
        fields = {"max_tokens": max_tokens, **sampling}
        self.say(Submit(label, prompt_ids=tuple(prompt_ids), sampling=fields))

    def cancel(self, label: str) -> None:
        self.say(CancelJob(label))

    def leave(self) -> None:
        """Say goodbye."""
        self.step(StopConnecting("done"), self._pair.now_ms)
        self._pair.deliver()

    def of(self, label: str, kind: type) -> list[Any]:
        return [item for item in self.received if isinstance(item, kind) and item.label == label]

    def tokens(self, label: str) -> list[int]:
        return [token_id for piece in self.of(label, Tokens) for token_id in piece.token_ids]

    def text(self, label: str) -> str:
        return "".join(piece.text for piece in self.of(label, Tokens))

    def answer(self, label: str) -> Finished | Failed | Rejected | None:
        """The one terminal answer, or None so far; nothing may follow it."""
        answers = [item for kind in (Finished, Failed, Rejected) for item in self.of(label, kind)]
        assert len(answers) <= 1, f"INV-7: {label} was answered {len(answers)} times"
        if answers and not isinstance(answers[0], Rejected):
            about = [item for item in self.received if getattr(item, "label", None) == label]
            assert about[-1] is answers[0], "something follows the terminal answer"
        if answers and isinstance(answers[0], Failed) and answers[0].definite:
            assert self.tokens(label) == [], "INV-8: a definite failure after a token"
        return answers[0] if answers else None
