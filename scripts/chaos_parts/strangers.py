"""Strangers at both doors: peers that send what no peer of ours would.

Decides what each kind of stranger sends; what comes of it is for the audit to say, which looks at the nodes
and at the jobs of others. It runs on a thread of its own, one visit at a time, each over a connection of its
own. It must never touch a job that it did not send itself.
"""

import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from chaos_parts.schedule import StrangerAct
from common.clock import now_ms
from common.ids import new_incarnation
from common.messages import (
    Cancel,
    CancelJob,
    Hello,
    HelloOk,
    Ping,
    Prefill,
    PrefillDone,
    Release,
    Role,
    SessionGone,
    StatusRequest,
    Submit,
)
from transport.codec import Header, decode, encode
from transport.link import DealerLink
from transport.zmq_sockets import new_context

_ANSWER_MS = 500
_FRAMES_MAX = 5


class Strangers(threading.Thread):
    """Carries out a row of visits. endpoints: of the decode and the prefill node. counts: visits by kind."""

    def __init__(self, acts: Iterator[StrangerAct], endpoints: tuple[str, str]) -> None:
        super().__init__(name="strangers", daemon=True)
        self.counts: Counter[str] = Counter()
        self.fault = ""
        self._acts = acts
        self._endpoints = endpoints
        self._leave = threading.Event()

    def leave(self) -> None:
        """End the thread after its present visit."""
        self._leave.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """The thread's work."""
        try:
            for act in self._acts:
                if self._leave.wait(act.rest_ms / 1_000):
                    return
                self.counts[act.kind] += 1
                self._visit(act)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            raise

    def _visit(self, act: StrangerAct) -> None:
        random = Random(act.seed)
        endpoint = self._endpoints[act.door]
        if act.kind == "random bytes":
            _send_bytes(endpoint, random.randbytes(random.choice((1, 64, 5_000))))
            return
        with _Stranger(endpoint) as stranger:
            match act.kind:
                case "random frames":
                    for _ in range(random.randint(1, 20)):
                        stranger.send(_random_frames(random))
                case "mutated frames":
                    stranger.greet()
                    for message in random.choices(_messages(random), k=10):
                        stranger.send(_mutated(stranger.numbered(message), random))
                case "many frames":
                    frame = random.randbytes(random.choice((0, 1, 300)))
                    stranger.send([frame] * random.choice((4, 100, 2_000)))
                case "wrong sequence":
                    stranger.greet()
                    stranger.sequence += random.choice((-1, 1, 2**40))
                    stranger.send(stranger.numbered(Ping()))
                case "wrong messages":
                    stranger.greet()
                    for message in random.choices(_messages(random), k=8):
                        stranger.send(stranger.numbered(message))
                case "bad jobs":
                    stranger.greet()
                    for job in _bad_jobs(random):
                        stranger.send(stranger.numbered(job))
                    stranger.answers(_ANSWER_MS)
                case "rival decode node":
                    stranger.rival()


class _Stranger:
    """One DEALER and, if it was greeted, its session."""

    def __init__(self, endpoint: str) -> None:
        self._context = new_context()
        self._link = DealerLink(self._context, endpoint, b"stranger")
        self._session = "0" * 32
        self._profile: Any = None
        self.sequence = 0

    def __enter__(self) -> "_Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._context.term()

    def send(self, frames: list[bytes]) -> None:
        """Whether it arrives is not a stranger's care."""
        self._link.send(self._link.route, frames)

    def numbered(self, message: Any) -> list[bytes]:
        """Frames of the session's next message."""
        self.sequence += 1
        return encode(Header(self._session, max(1, self.sequence)), message)

    def greet(self) -> None:
        """Open a session as a client, if somebody answers."""
        self.send(encode(Header(None, 0), Hello(new_incarnation(), 1, Role.CLIENT)))
        for answer in self.answers(_ANSWER_MS, until=HelloOk):
            if isinstance(answer, HelloOk):
                self._session, self._profile = answer.session, answer.profile

    def rival(self) -> None:
        """Say to be a decode node of the very same model, and then nothing more."""
        self.greet()
        self.send(encode(Header(None, 0), Hello(new_incarnation(), 1, Role.DECODE, self._profile)))
        for _ in self.answers(_ANSWER_MS):
            continue

    def answers(self, timeout_ms: int, until: type | None = None) -> Iterable[Any]:
        """What arrives within the time, at most up to a message of the type; valid messages only."""
        arrived: list[Any] = []
        deadline_ms = now_ms() + timeout_ms
        while now_ms() < deadline_ms and not (until and arrived and isinstance(arrived[-1], until)):
            if self._link.socket.poll(max(1, deadline_ms - now_ms())):
                arrived += [decode(frames)[1] for _, frames in self._link.receive(1)]
        return arrived


def _send_bytes(endpoint: str, data: bytes) -> None:
    """Not even ZeroMQ."""
    with socket.socket(socket.AF_UNIX) as stream:
        try:
            stream.connect(endpoint.removeprefix("ipc://"))
            stream.sendall(data)
        except OSError:
            return  # the node is away, or has had enough


def _random_frames(random: Random) -> list[bytes]:
    sizes = [random.choice((0, 1, 8, 100, 5_000)) for _ in range(random.randint(1, _FRAMES_MAX))]
    frames = [random.randbytes(size) for size in sizes]
    return [b"TANDEM/1", *frames] if random.random() < 0.5 else frames


def _mutated(frames: list[bytes], random: Random) -> list[bytes]:
    """A frame changed, cut, lost or repeated."""
    index = random.randrange(len(frames))
    frame = bytearray(frames[index])
    match random.randrange(4):
        case 0 if frame:
            frame[random.randrange(len(frame))] ^= random.randint(1, 255)
            return [*frames[:index], bytes(frame), *frames[index + 1 :]]
        case 1:
            return [*frames[:index], bytes(frame[: len(frame) // 2]), *frames[index + 1 :]]
        case 2:
            return [*frames[:index], *frames[index + 1 :]]
    return [*frames[: index + 1], *frames[index:]]


def _messages(random: Random) -> list[Any]:
    """Messages of every direction, of which a client may send few."""
    slot, epoch = random.randrange(4), random.choice((1, 2, 10, 2**62))
    return [
        Ping(),
        StatusRequest(),
        Prefill("00" * 16, slot, epoch, bytes(40), "00" * 16, 0, 1_000),
        PrefillDone("00" * 16, slot, epoch, "00" * 16, 10, 32, 10, (bytes(16),), bytes(16), bytes(16), 0, 0),
        Cancel(slot, epoch),
        Release(slot, epoch),
        CancelJob("load-0-1"),
        SessionGone("0" * 32),
    ]


def _bad_jobs(random: Random) -> list[Submit]:
    """Jobs of which none may be accepted."""
    jobs = [
        Submit("bad", prompt_ids=()),
        Submit("bad", prompt_ids=(2**40,)),
        Submit("bad", prompt_ids=(-1,)),
        Submit("bad"),
        Submit("bad", prompt="a", prompt_ids=(97,)),
        Submit("bad", prompt_ids=(97,), sampling={"max_tokens": 0}),
        Submit("bad", prompt_ids=(97,), sampling={"max_tokens": 2**40}),
        Submit("bad", prompt_ids=(97,), sampling={"temperature": "hot"}),
        Submit("bad", prompt_ids=(97,), sampling={"colour": 3}),
        Submit("bad", messages=({"role": "nobody", "content": "a"},)),
        Submit("bad", prompt_ids=tuple([97] * 5_000)),
    ]
    return random.sample(jobs, 4)
