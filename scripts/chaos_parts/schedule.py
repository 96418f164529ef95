"""The seeded rows of disturbances.

Decides, from the seed alone, what is done in which order, how long it lasts and how long the pause before it
is. Five rows run side by side: one for each node, one for the wire between them, one for strangers at both
doors, one for clients that are killed or fall silent. It knows no process and no clock; `run.py`, `relay.py`
and `strangers.py` carry the rows out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from chaos_parts.scenario import Scenario

NODE_KINDS = {
    "kill": 3,
    "kill twice": 1,
    "drain": 2,
    "stop, shorter than suspect": 3,
    "stop, longer than dead_after": 2,
    "stop, longer than the lease": 2,
}
RESTARTS = frozenset({"kill", "kill twice", "drain"})

WIRE_KINDS = {
    "drop a message": 3,
    "repeat a message": 3,
    "swap two messages": 2,
    "flip a byte": 4,
    "shorten a message": 2,
    "replay an old message": 2,
    "replay a foreign message": 3,
    "insert garbage": 1,
    "cut inside a message": 2,
    "close": 1,
    "reset": 2,
    "delay": 4,
    "swallow": 2,
}
# What the decode node and the prefill node say to each other; the wire waits for one of the type.
TO_PREFILL = ("Prefill", "Cancel", "Release", "Ping", "Hello")
TO_DECODE = ("PrefillDone", "PrefillFailed", "Pong", "HelloOk", "Grant")

# A rival that comes when no session is open holds the prefill node for a lease: few of them.
STRANGER_KINDS = {
    "random bytes": 2,
    "random frames": 3,
    "mutated frames": 4,
    "many frames": 2,
    "wrong sequence": 2,
    "wrong messages": 3,
    "bad jobs": 3,
    "rival decode node": 1,
}

CLIENT_KINDS = {"kill a client": 3, "silence a client": 2, "leave a client alone": 1}


@dataclass(frozen=True, slots=True)
class NodeAct:
    """Something done to a node. hold_ms: how long it stays stopped or away; rest_ms: pause before the act."""

    kind: str
    rest_ms: int
    hold_ms: int


@dataclass(frozen=True, slots=True)
class WireAct:
    """Something done to the next message of a type, or (delay, swallow) to all of them for `hold_ms`."""

    kind: str
    rest_ms: int
    to_prefill: bool
    message: str
    hold_ms: int
    seed: int


@dataclass(frozen=True, slots=True)
class StrangerAct:
    """One visit to a node's door. door: 0 is the decode node, 1 the prefill node."""

    kind: str
    rest_ms: int
    door: int
    seed: int


@dataclass(frozen=True, slots=True)
class ClientAct:
    """A client process that runs some jobs. hold_ms: until it is killed or stopped, from its first token."""

    kind: str
    rest_ms: int
    hold_ms: int
    seed: int


def random_of(seed: int, row: str) -> Random:
    """The source of randomness of one row."""
    return Random(f"{seed} {row}")


def node_acts(seed: int, node: str, scenario: Scenario) -> Iterator[NodeAct]:
    """Endless row for one node, `decode` or `prefill`."""
    random = random_of(seed, node)
    times = scenario.times
    while True:
        kind = _one_of(random, NODE_KINDS)
        rest_ms = random.randint(*scenario.rest_ms)
        holds = {
            "kill": random.choice((0, 0, 100, 500, 2 * times.dead_after_ms)),
            "kill twice": random.choice((0, 50, 100)),
            "drain": random.choice((0, 100, 1_000)),
            "stop, shorter than suspect": random.randint(10, times.suspect_ms * 3 // 4),
            "stop, longer than dead_after": random.randint(times.dead_after_ms + 100, times.lease_ms - 100),
            "stop, longer than the lease": random.randint(times.lease_ms + 100, times.lease_ms * 3 // 2),
        }
        yield NodeAct(kind, rest_ms, holds[kind])


def wire_acts(seed: int, scenario: Scenario) -> Iterator[WireAct]:
    """Endless row for the connection between the nodes."""
    random = random_of(seed, "wire")
    while True:
        kind = _one_of(random, WIRE_KINDS)
        to_prefill = random.random() < 0.5
        message = random.choice(TO_PREFILL if to_prefill else TO_DECODE)
        hold_ms = random.choice((20, scenario.times.suspect_ms, scenario.times.dead_after_ms + 200))
        yield WireAct(kind, random.randint(100, 2_500), to_prefill, message, hold_ms, random.getrandbits(32))


def stranger_acts(seed: int) -> Iterator[StrangerAct]:
    """Endless row of visits by peers that nobody invited."""
    random = random_of(seed, "strangers")
    while True:
        kind = _one_of(random, STRANGER_KINDS)
        yield StrangerAct(kind, random.randint(50, 1_000), random.randrange(2), random.getrandbits(32))


def client_acts(seed: int, scenario: Scenario) -> Iterator[ClientAct]:
    """Endless row of client processes."""
    random = random_of(seed, "clients")
    while True:
        kind = _one_of(random, CLIENT_KINDS)
        rest_ms = random.randint(*scenario.rest_ms)
        yield ClientAct(kind, rest_ms, random.choice((0, 20, 200)), random.getrandbits(32))


def _one_of(random: Random, weights: dict[str, int]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]
