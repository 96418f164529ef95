"""Noise on both daemons' sockets while a job runs: its tokens stay right, and nothing else is left of it.

Random frames, mutated messages, and well-formed messages that make no sense come from several peers at once,
some of which never read. Seeded: a failure names the seed.
"""

import random
from typing import Any

import msgpack
import pytest
import zmq

from common import messages as ms
from common.clock import now_ms
from common.ids import new_incarnation
from common.messages import Finished
from tests.process.harness import Daemon, resident_bytes
from tests.process.world import PREFETCH, Answer, Pair, World, expected, prompt_of
from tests.protocol_samples import SAMPLES, as_plain, header_of
from transport.codec import PROTOCOL_TAG, Header, decode, encode

PEERS = 4  # one of them does not read
MESSAGES_PER_TURN = 40
MESSAGES_PER_SOCKET = 500
BIG_BYTES = 4 * 2**20
SETTLED_BYTES = 32 * 2**20
# The attackers want the same two cores: nobody is dead for being late.
PATIENCE = ("--suspect-ms", "5000", "--dead-after-ms", "10000", "--lease-ms", "20000")
ODD_VALUES = [
    None,
    True,
    -1,
    0,
    2**63,
    1.5,
    float("nan"),
    "",
    "x" * 300,
    b"\xff" * 8,
    [],
    {},
    [[]] * 50,
    {"a": {}},
]


class Attacker:
    """One peer of a daemon that says whatever comes to its mind."""

    def __init__(self, context: zmq.Context, endpoint: str, source: random.Random, reads: bool) -> None:
        self._context = context
        self._endpoint = endpoint
        self._source = source
        self._reads = reads
        self._valid = [encode(header_of(type(sample)), sample) for sample in SAMPLES]
        self.sent = 0
        self._open()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 1_000)
        self._socket.connect(self._endpoint)
        self._session: str | None = None
        self._sequence = 0
        self._left = MESSAGES_PER_SOCKET
        self._farewell = f"farewell {self.sent}"
        self.over = False

    def turn(self) -> None:
        """Say a few things and listen; after many, begin anew on another socket.

        Not before all was read: else what nobody has read yet would pile up with each new connection.
        """
        if self.over:
            self.close()
            self._open()
        for _ in range(min(MESSAGES_PER_TURN, self._left)):
            self._socket.send_multipart(self._frames())
            self.sent += 1
            self._left -= 1
            if self._left == 0:
                self._say_farewell()
        if self._reads or self._left == 0:
            self._listen()

    def finish(self) -> bool:
        """Say no more; whether all that was said has been read."""
        if self._left > 0:
            self._left = 0
            self._say_farewell()
        self._listen()
        return self.over

    def _say_farewell(self) -> None:
        self._socket.send_multipart(encode(Header(self._farewell, 1), ms.Ping()))

    def _listen(self) -> None:
        while self._socket.poll(0):
            self._hear(decode(self._socket.recv_multipart())[1])

    def _hear(self, message: Any) -> None:
        match message:
            case ms.HelloOk(session=session):
                self._session, self._sequence = session, 0
            case ms.Bye():
                self._session = None
            case ms.SessionGone(session=session):
                self.over = self.over or session == self._farewell
                self._session = None if session == self._session else self._session

    def _frames(self) -> list[bytes]:
        kinds = [self._noise, self._mutated, self._spliced, self._hello, self._senseless, self._senseless]
        return self._source.choice(kinds)()

    def _noise(self) -> list[bytes]:
        source = self._source
        if source.random() < 0.002:
            return [PROTOCOL_TAG, self._valid[0][1], bytes([source.randrange(256)]) * BIG_BYTES]
        if source.random() < 0.01:
            return [b"x"] * source.randrange(1, 5_000)
        frames = [source.randbytes(source.randrange(60)) for _ in range(source.randrange(1, 6))]
        return frames if source.random() < 0.5 else [PROTOCOL_TAG, *frames]

    def _mutated(self) -> list[bytes]:
        """A message with some bytes changed, cut out or put in."""
        source, frames = self._source, list(self._source.choice(self._valid))
        for _ in range(source.randrange(1, 4)):
            where = source.randrange(len(frames))
            start = source.randrange(len(frames[where]) + 1)
            end = start + source.choice([0, 1, 1, 4])
            frames[where] = (
                frames[where][:start] + source.randbytes(source.randrange(4)) + frames[where][end:]
            )
        return frames

    def _spliced(self) -> list[bytes]:
        """Frames of different messages, doubled or left out."""
        source = self._source
        return [source.choice(source.choice(self._valid)) for _ in range(source.randrange(1, 5))]

    def _hello(self) -> list[bytes]:
        """A session of its own, now and then, or one of a role that is not its."""
        role = self._source.choice([ms.Role.CLIENT, ms.Role.CLIENT, ms.Role.CLIENT, ms.Role.DECODE])
        profile = None if role is ms.Role.CLIENT else self._source.choice([None, SAMPLES[0].profile])
        hello = ms.Hello(new_incarnation(), self._source.randrange(1, 9), role, profile)
        return encode(Header(None, 0), hello)

    def _senseless(self) -> list[bytes]:
        """A message in its place in the row, of a type or with a field that it should not have."""
        source = self._source
        sample = source.choice(SAMPLES)
        body = as_plain(sample)
        if body and source.random() < 0.7:
            body[source.choice(list(body))] = source.choice(ODD_VALUES)
        if self._session is None or type(sample) in ms.UNNUMBERED:
            header = Header(source.choice([None, "nobody"]), 0)
        else:
            self._sequence += 1
            header = Header(self._session, self._sequence)
        return [*encode(header, sample)[:2], msgpack.packb(body)]

    def close(self) -> None:
        self._socket.close()


def attack(pair: Pair, daemon: Daemon, duration_ms: int, seed: int) -> int:
    """Attack a daemon of a pair at work for so long; how many jobs were served meanwhile."""
    context = zmq.Context()
    endpoint = daemon.endpoint
    peers = [
        Attacker(context, endpoint, random.Random(f"{seed} {number}"), number > 0) for number in range(PEERS)
    ]
    deadline_ms = now_ms() + duration_ms
    jobs = 0

    def turn(answer: Answer) -> bool:
        for peer in peers:
            peer.turn()
        return answer.end is not None

    while now_ms() < deadline_ms:
        prompt_ids = prompt_of(60, jobs % 5)
        answer = pair.client.submit(f"job {seed} {jobs}", prompt_ids, max_tokens=24)
        pair.world.wait(lambda answer=answer: turn(answer), f"a job ends under attack, seed {seed}", 60_000)
        assert isinstance(answer.end, Finished), (seed, answer.end)
        assert answer.token_ids == expected(prompt_ids, 24), seed
        jobs += 1
    pair.world.wait(lambda: all(peer.finish() for peer in peers), f"all is read, seed {seed}", 60_000)
    assert sum(peer.sent for peer in peers) > MESSAGES_PER_SOCKET, "this was no attack"
    for peer in peers:
        peer.close()
    context.term()
    return jobs


@pytest.mark.parametrize(
    "duration_ms", [pytest.param(5_000), pytest.param(60_000, marks=pytest.mark.nightly)], ids=["5s", "60s"]
)
def test_noise_changes_nothing_and_leaves_nothing(world: World, duration_ms: int) -> None:
    pair = world.pair(PATIENCE, (*PREFETCH, *PATIENCE, "--emulated-decode-ms", "10"))
    pair.check_job("before", prompt_of(60))
    part_ms = duration_ms // 4
    grown = {}
    for daemon in (pair.decode, pair.prefill):
        # The first part lets buffers and caches grow to their size.
        assert attack(pair, daemon, part_ms, seed=1)
        settled_bytes = resident_bytes(daemon)
        assert attack(pair, daemon, part_ms, seed=2)
        grown[daemon.name] = resident_bytes(daemon) - settled_bytes
    assert max(grown.values()) < SETTLED_BYTES, grown
    for daemon in (pair.decode, pair.prefill):
        assert world.status(daemon)["accepting"]
        assert daemon.logged("peer.protocol_error"), "nothing of it arrived"
    pair.check_job("after", prompt_of(60))
    pair.audit()
