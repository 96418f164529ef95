"""Everything that can go wrong, by name: when it can, and what it does.

A fault's finder lists the ways it can happen now; its effect changes the world from outside. Repairs undo
what lasts, and cost no budget. "delay" has no options of its own: it lets time pass while messages wait.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from decode_node import commands
from decode_node import events as decode_ev
from tests.sim import faults_bulk
from tests.sim.faults_bulk import DAMAGE, Fault
from tests.sim.links import CAPACITY
from tests.sim.plan import Option
from transport.peers import EndSession

if TYPE_CHECKING:
    from tests.sim.world import World

SLOW_MS = (250, 700, 1_500)


def options(world: "World") -> list[Option]:
    """Faults with a budget left, and repairs."""
    found = repairs(world)
    for name, left in world.budget.items():
        if left > 0 and name in FAULTS:
            found += FAULTS[name].find(world)
    return found


def apply(world: "World", option: Option) -> None:
    world.harsh = world.harsh or option.kind in HARSH
    world.spoiled = world.spoiled or option.kind in SPOILING
    FAULTS[option.kind].apply(world, option)


def repairs(world: "World") -> list[Option]:
    """What ends a lasting fault."""
    found = [
        Option("continue", node.name)
        for node in world.processes.values()
        if node.alive and node.stopped_at_ms is not None
    ]
    found += [Option("mend", f"{one}>{other}") for one, other in sorted(world.cuts)]
    found += [Option("see", node.name) for node in world.decodes if node.alive and node.blind]
    found += [Option("unclog", str(wire.number)) for wire in world.wires.values() if wire.capacity < CAPACITY]
    found += faults_bulk.repairs(world)
    return found


# Clients.


def _find_cancel(world: "World") -> list[Option]:
    return [
        Option("cancel", client.name, int(label[3:]))
        for client in world.clients
        if client.runs and client.session is not None
        for label in sorted(client.live)
    ]


def _cancel(world: "World", option: Option) -> None:
    world.processes[option.where].cancel(f"job{option.detail}", world)


def _find_client_gone(world: "World") -> list[Option]:
    return [
        Option("client_gone", client.name, how) for client in world.clients if client.live for how in range(3)
    ]


def _client_gone(world: "World", option: Option) -> None:
    """0: with a goodbye. 1: its socket closes. 2: without a trace."""
    client = world.processes[option.where]
    if option.detail == 0:
        client.leave(world)
    elif option.detail == 1:
        client.die()
    else:
        client.vanish()


# Connections.


def _open_wires(world: "World") -> list[Any]:
    return [wire for wire in world.wires.values() if wire.dealer_open and not wire.broken]


def _find_lost_suffix(world: "World") -> list[Option]:
    return [
        Option("lost_suffix", str(wire.number), up, down)
        for wire in _open_wires(world)
        for up in sorted({0, len(wire.up)})
        for down in sorted({0, len(wire.down)})
    ]


def _lost_suffix(world: "World", option: Option) -> None:
    world.wires[int(option.where)].break_off(option.detail, option.more)


def _find_partition(world: "World") -> list[Option]:
    pairs = {(wire.dealer, wire.router) for wire in _open_wires(world)}
    both = pairs | {(router, dealer) for dealer, router in pairs}
    return [Option("partition", f"{one}>{other}") for one, other in sorted(both - world.cuts)]


def _partition(world: "World", option: Option) -> None:
    one, other = option.where.split(">")
    world.cuts.add((one, other))


def _find_full_queue(world: "World") -> list[Option]:
    return [
        Option("full_queue", str(wire.number), size)
        for wire in _open_wires(world)
        if wire.capacity == CAPACITY
        for size in (0, 1)
    ]


def _full_queue(world: "World", option: Option) -> None:
    world.wires[int(option.where)].capacity = option.detail


def _find_duplicate(world: "World") -> list[Option]:
    return _rows(world, "duplicate", 1)


def _find_overtake(world: "World") -> list[Option]:
    return _rows(world, "overtake", 2)


def _rows(world: "World", kind: str, least: int) -> list[Option]:
    """Rows of a connection that hold so many messages. detail 0: up."""
    found = []
    for wire in _open_wires(world):
        found += [Option(kind, str(wire.number), 0)] if len(wire.up) >= least else []
        found += [Option(kind, str(wire.number), 1)] if len(wire.down) >= least else []
    return found


def _find_dropped(world: "World") -> list[Option]:
    return _rows(world, "dropped", 1)


def _dropped(world: "World", option: Option) -> None:
    wire = world.wires[int(option.where)]
    (wire.down if option.detail else wire.up).popleft()


def _duplicate(world: "World", option: Option) -> None:
    wire = world.wires[int(option.where)]
    row = wire.down if option.detail else wire.up
    row.append(row[0])


def _overtake(world: "World", option: Option) -> None:
    wire = world.wires[int(option.where)]
    row = wire.down if option.detail else wire.up
    row[0], row[1] = row[1], row[0]


def _find_late_completion(world: "World") -> list[Option]:
    return _find_late(world, "late_completion", "p")


def _find_late_request(world: "World") -> list[Option]:
    return _find_late(world, "late_request", "d")


def _find_late(world: "World", kind: str, sender: str) -> list[Option]:
    """Open connections between nodes, for which the sender has words of another session."""
    found = []
    for wire in _open_wires(world):
        if wire.dealer[0] != "d":
            continue
        if world.old_frame(sender, wire) is not None:
            found.append(Option(kind, str(wire.number)))
    return found


def _late_completion(world: "World", option: Option) -> None:
    wire = world.wires[int(option.where)]
    wire.put_down(world.old_frame("p", wire))


def _late_request(world: "World", option: Option) -> None:
    wire = world.wires[int(option.where)]
    wire.put_up(world.old_frame("d", wire))


# Nodes.


def _find_crash(kind: str, nodes: str) -> Callable[["World"], list[Option]]:
    def find(world: "World") -> list[Option]:
        return [
            Option(kind, node.name, kept) for node in getattr(world, nodes) if node.alive for kept in (0, 1)
        ]

    return find


def _crash(world: "World", option: Option) -> None:
    """1: what it has sent still arrives."""
    node = world.processes[option.where]
    world.audit.died(node.incarnation)
    for wire in (*world.wires.values(), *world.bulk.values()):
        if wire.router == node.name:
            wire.break_off(0, option.detail * len(wire.down))
        elif wire.dealer == node.name:
            wire.close_dealer()
            wire.break_off(option.detail * len(wire.up), 0)
    node.router.wires.clear()
    node.alive = False
    node.stopped_at_ms = None


def _find_stop(kind: str, nodes: str) -> Callable[["World"], list[Option]]:
    def find(world: "World") -> list[Option]:
        return [Option(kind, node.name) for node in getattr(world, nodes) if node.runs]

    return find


def _stop(world: "World", option: Option) -> None:
    world.processes[option.where].stop(world.now_ms)


def _drain(world: "World", option: Option) -> None:
    world.processes[option.where].request_stop(world)


def _find_drain(kind: str, nodes: str) -> Callable[["World"], list[Option]]:
    def find(world: "World") -> list[Option]:
        return [Option(kind, node.name) for node in getattr(world, nodes) if node.runs and not node.draining]

    return find


def _computing(world: "World") -> list[Any]:
    busy = [node for node in world.prefills if node.runs and node.computes]
    return busy + [node for node in world.decodes if node.runs and node.device.has_work and not node.hung]


def _find_slow(world: "World") -> list[Option]:
    return [
        Option("slow_compute", node.name, how)
        for node in _computing(world)
        if node.slow_until_ms <= world.now_ms
        for how in range(len(SLOW_MS))
    ]


def _slow(world: "World", option: Option) -> None:
    world.processes[option.where].slow_until_ms = world.now_ms + SLOW_MS[option.detail]


def _find_hung(world: "World") -> list[Option]:
    # Only work that an answer is owed for: a thread that hangs over nothing harms nobody.
    return [
        Option("hung_compute", node.name)
        for node in _computing(world)
        if node in world.prefills or node.device.owes
    ]


def _hung(world: "World", option: Option) -> None:
    world.processes[option.where].hung = True


def _find_compute_error(world: "World") -> list[Option]:
    failing = [node for node in world.prefills if node.runs and node.computes]
    failing += [
        node
        for node in world.decodes
        if node.runs and not node.hung and (node.device.filling or node.device.running)
    ]
    return [Option("compute_error", node.name) for node in failing]


def _compute_error(world: "World", option: Option) -> None:
    node = world.processes[option.where]
    if option.where[0] == "p":
        node.fail_chunk(world)
    else:
        node.device.fail()


def _find_text_error(world: "World") -> list[Option]:
    return [
        Option("text_error", node.name)
        for node in world.decodes
        if node.runs and node.text.commands and isinstance(node.text.commands[0], commands.PushTokens)
    ]


def _text_error(world: "World", option: Option) -> None:
    node = world.processes[option.where]
    command = node.text.commands.popleft()
    node.step(decode_ev.TextFailed(command.job_id, "the tokenizer raised"), world)


# Sessions, slabs, records.


def _find_second_session(world: "World") -> list[Option]:
    found = []
    for wire in _open_wires(world):
        node = world.processes[wire.dealer]
        if wire.dealer[0] == "d" and node.runs and node.session_with(wire.router) is not None:
            found.append(Option("second_session", wire.dealer, int(wire.router[1:])))
    return found


def _second_session(world: "World", option: Option) -> None:
    decode, worker = world.processes[option.where], f"p{option.detail}"
    ending = EndSession(decode.session_with(worker), "another session follows")
    decode.step(decode.from_worker(worker, ending), world)


def _find_data_dead(world: "World") -> list[Option]:
    return [Option("data_dead", node.name) for node in world.decodes if node.runs and not node.blind]


def _data_dead(world: "World", option: Option) -> None:
    world.processes[option.where].blind = True


def _find_corrupt_chunk(world: "World") -> list[Option]:
    found = []
    for node in world.prefills:
        for index, chunks in enumerate(node.slab.chunks):
            found += [Option("corrupt_chunk", node.name, index, start) for start in chunks]
    return found


def _corrupt_chunk(world: "World", option: Option) -> None:
    chunks = world.processes[option.where].slab.chunks[option.detail]
    chunks[option.more] ^= DAMAGE


def _find_short_record(world: "World") -> list[Option]:
    return [
        Option("short_record", node.name, how)
        for node in world.prefills
        if node.runs and node.command is not None and not node.damage
        for how in (1, 2, 3, 4)
    ]


def _short_record(world: "World", option: Option) -> None:
    world.processes[option.where].damage = option.detail


FAULTS = {
    "cancel": Fault(_find_cancel, _cancel),
    "client_gone": Fault(_find_client_gone, _client_gone),
    "lost_suffix": Fault(_find_lost_suffix, _lost_suffix),
    "partition": Fault(_find_partition, _partition),
    "full_queue": Fault(_find_full_queue, _full_queue),
    "duplicate": Fault(_find_duplicate, _duplicate),
    "overtake": Fault(_find_overtake, _overtake),
    "dropped": Fault(_find_dropped, _dropped),
    "late_completion": Fault(_find_late_completion, _late_completion),
    "late_request": Fault(_find_late_request, _late_request),
    "crash_prefill": Fault(_find_crash("crash_prefill", "prefills"), _crash),
    "crash_decode": Fault(_find_crash("crash_decode", "decodes"), _crash),
    "stop_prefill": Fault(_find_stop("stop_prefill", "prefills"), _stop),
    "stop_decode": Fault(_find_stop("stop_decode", "decodes"), _stop),
    "drain_prefill": Fault(_find_drain("drain_prefill", "prefills"), _drain),
    "drain_decode": Fault(_find_drain("drain_decode", "decodes"), _drain),
    "slow_compute": Fault(_find_slow, _slow),
    "hung_compute": Fault(_find_hung, _hung),
    "compute_error": Fault(_find_compute_error, _compute_error),
    "text_error": Fault(_find_text_error, _text_error),
    "second_session": Fault(_find_second_session, _second_session),
    "data_dead": Fault(_find_data_dead, _data_dead),
    "corrupt_chunk": Fault(_find_corrupt_chunk, _corrupt_chunk),
    "short_record": Fault(_find_short_record, _short_record),
    **faults_bulk.FAULTS,
}
HARSH = ("duplicate", "overtake", "dropped", *faults_bulk.HARSH)
SPOILING = ("corrupt_chunk", "short_record", *faults_bulk.SPOILING)
NAMES = ("delay", *FAULTS)
