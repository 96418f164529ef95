"""The transfer benchmark: its ends move every byte, its relay keeps a rate, its figures are reckoned right.

Its scenes are a few megabytes; how fast they are is not looked at.
"""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from common import limits
from common.client_messages import Finished, Timings, Usage
from common.clock import now_us
from common.kv_layout import KvLayout

ROOT = Path(__file__).parents[2]
MBIT = 8


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(limits, "KV_PIECE_BYTES", limits.KV_PIECE_BYTES)
    return import_module("benchmarks.transfer_ends")


# In a process of its own: what starts the sender leaves a helper behind until its process ends.
ARMS = """
import sys
sys.path[:0] = ["{root}/scripts", "{root}"]
import numpy as np
from benchmarks.transfer_ends import SLOTS, Load, ReceivingEnd, SenderProcess, noise
from common.kv_layout import KvLayout
layout = KvLayout(3, 2, 64, "float32", 48)
load = Load(layout, 20, 3, {piece_bytes})
with SenderProcess(None) as sender, ReceivingEnd(sender) as receiver:
    assert receiver.run("raw", load).gb_per_s > 0
    landing = receiver.landings[layout]
    assert not any(np.frombuffer(landing.slot(0), dtype=np.uint8)), "the bare loop drops them"
    for arm in ("tandem", "tandem_digests"):
        for index in range(SLOTS):
            np.frombuffer(landing.slot(index), dtype=np.uint8)[:] = 0
        run = receiver.run(arm, load)
        assert run.gb_per_s > 0 and run.cpu_gb_per_s > 0
        for index in range(SLOTS):
            assert landing.slot(index) == noise(layout, index)
    assert receiver.run("raw_landed", load).gb_per_s > 0
    assert sorted(landing.slot(1)) == sorted(noise(layout, 1)), "in the order of arrival"
"""


@pytest.mark.parametrize("piece_bytes", [4_096, 40_000])
def test_every_arm_moves_all_of_the_bytes(piece_bytes: int) -> None:
    code = ARMS.format(root=ROOT, piece_bytes=piece_bytes)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_import_out_of_a_slab_is_held_against_a_plain_copy(benchmarks: ModuleType) -> None:
    transfer = import_module("benchmarks.transfer")
    transfer_layout = KvLayout(8, 4, 64, "float32", 256)
    large_bytes, transfer.LARGE_BYTES = transfer.LARGE_BYTES, 4 * transfer_layout.slot_bytes
    try:
        figures = transfer.measure_shm(transfer_layout, 3)
    finally:
        transfer.LARGE_BYTES = large_bytes
    assert figures["shm_of_plain_copy"]["count"] == 4
    assert figures["shm_of_plain_copy"]["median"] > 0


def test_the_best_size_is_the_one_that_moves_most_with_digests(benchmarks: ModuleType) -> None:
    transfer = import_module("benchmarks.transfer")
    by_size = {
        size: {"gb_per_s": {"tandem": {"median": 9 - rate}, "tandem_digests": {"median": rate}}}
        for size, rate in ((256, 1.0), (512, 3.0), (1_024, 2.0))
    }
    assert transfer.best_size(by_size) == 512


def finished(prefill_us: int, transfer_us: int, exposed_us: int) -> Finished:
    timings = Timings(
        total_ms=1,
        first_token_ms=1,
        stages_ms={},
        prefill_queue_us=0,
        prefill_busy_us=prefill_us,
        decode_busy_us=0,
        copy_us=0,
        digest_us=0,
        lane_gap_us=None,
        transfer_us=transfer_us,
        transfer_exposed_us=exposed_us,
    )
    return Finished("a", "length", "remote", Usage(8, 2), timings)


def test_the_exposed_share_is_reckoned_prompt_by_prompt(benchmarks: ModuleType) -> None:
    hosts = import_module("benchmarks.hosts")
    answers = [
        finished(100_000, 60_000, 5_000),
        finished(200_000, 90_000, 30_000),
        finished(50_000, 1, 1_000),
    ]
    figures = hosts.figures_of(answers)
    assert figures["exposed_of_prefill"] == {"median": 0.05, "min": 0.02, "max": 0.15, "count": 3}
    assert figures["transfer_ms"]["median"] == 60


def test_a_pair_that_used_no_socket_is_no_measurement(benchmarks: ModuleType) -> None:
    hosts = import_module("benchmarks.hosts")
    with pytest.raises(hosts.TandemError, match="no transfer was measured"):
        hosts.figures_of([finished(100_000, 0, 0)])


def relayed(benchmarks: ModuleType, delay_us: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that goes through a forwarder of `MBIT`."""
    shaping, hosts = import_module("benchmarks.shaping"), import_module("benchmarks.hosts")
    [port] = hosts.free_ports("127.0.0.1", 1)
    far = socket.create_server(("127.0.0.1", port))
    forwarder = shaping.Forwarder("127.0.0.2", "127.0.0.1", (port,), MBIT, delay_us)
    threading.Thread(target=forwarder.run, daemon=True).start()
    near = None
    while near is None:
        try:
            near = socket.create_connection(("127.0.0.2", port))
        except ConnectionRefusedError:
            continue
    taken, _ = far.accept()
    far.close()
    return near, taken


def received(end: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = end.recv(count - len(data))
        assert part, "the connection ended early"
        data += part
    return bytes(data)


def test_the_relay_hands_on_all_bytes_in_order_at_its_rate_and_both_ways(benchmarks: ModuleType) -> None:
    near, far = relayed(benchmarks, 0)
    data = np.random.default_rng(1).bytes(200_000)
    started_us = now_us()
    threading.Thread(target=near.sendall, args=(data,)).start()
    assert received(far, len(data)) == data
    assert now_us() - started_us >= len(data) * 8 / MBIT * 0.95
    far.sendall(b"back")
    assert received(near, 4) == b"back"
    far.close()
    assert near.recv(1) == b""
    near.close()


def test_the_relay_delays_each_way(benchmarks: ModuleType) -> None:
    near, far = relayed(benchmarks, 30_000)
    started_us = now_us()
    near.sendall(b"there")
    assert received(far, 5) == b"there"
    assert now_us() - started_us >= 30_000
    near.close()
    far.close()
