"""The shared-memory slab: layout, fence, read-only readers, honest failures, and nothing left in /dev/shm."""

import _posixshmem
import errno
import fcntl
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.clock import now_ms
from common.errors import ConfigError
from transport.slab import Slab, SlabView, remove_stale_slabs

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="slabs are looked for in /dev/shm")

SLOTS = 3
SLOT_BYTES = 5_000
STRESS_MS = 400
RACES = 100

OWNER = """
import sys
from transport.slab import Slab
slab = Slab(2, 4_096)
sys.stdout.write(slab.name + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""

WRITER = """
import sys
from transport.slab import Slab
slab = Slab(2, 200_000)
payload, done = slab.slot(0), slab.slot(1)
sys.stdout.write(slab.name + "\\n")
sys.stdout.flush()
for epoch in range(1, 10**9):
    slab.begin(0, epoch)
    payload[:] = bytes([epoch % 251]) * len(payload)
    done[:8] = epoch.to_bytes(8, "little")
    if epoch % 3 == 0:
        # Some productions last long enough for a reader to take them.
        for _ in range(2_000):
            continue
"""


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab(SLOTS, SLOT_BYTES)
    yield made
    made.unlink()


def path_of(slab: Slab | SlabView | str) -> Path:
    return Path("/dev/shm") / (slab if isinstance(slab, str) else slab.name).removeprefix("/")


@contextmanager
def process(program: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process that has made a slab, and the slab's name; both are gone at the end."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        name = running.stdout.readline().strip()
        try:
            yield running, name
        finally:
            running.kill()
            path_of(name).unlink(missing_ok=True)


# Layout and access.


def test_what_the_creator_writes_is_what_a_reader_sees(slab: Slab) -> None:
    view = SlabView(slab.name, SLOTS, SLOT_BYTES)
    for index in range(SLOTS):
        slab.slot(index)[:] = bytes([index + 1]) * SLOT_BYTES
        slab.begin(index, 2**62 - index)
    for index in range(SLOTS):
        assert bytes(view.slot(index)) == bytes([index + 1]) * SLOT_BYTES
        assert view.epoch(index) == slab.epoch(index) == 2**62 - index


def test_slots_and_epoch_words_do_not_overlap_and_start_on_pages(slab: Slab) -> None:
    for index in range(SLOTS):
        slab.begin(index, index + 10)
        slab.slot(index)[:] = b"\xff" * SLOT_BYTES
    assert [slab.epoch(index) for index in range(SLOTS)] == [10, 11, 12]
    whole = path_of(slab).read_bytes()
    assert len(whole) == slab.size_bytes == mmap.PAGESIZE + SLOTS * 2 * mmap.PAGESIZE
    for index in range(SLOTS):
        start = mmap.PAGESIZE * (1 + 2 * index)
        assert whole[start : start + SLOT_BYTES] == b"\xff" * SLOT_BYTES
        assert not any(whole[start + SLOT_BYTES : start + 2 * mmap.PAGESIZE])
        word = whole[64 * index : 64 * (index + 1)]
        assert int.from_bytes(word[:8], "little") == index + 10
        assert not any(word[8:])


def test_a_reader_cannot_write(slab: Slab) -> None:
    view = SlabView(slab.name, SLOTS, SLOT_BYTES)
    assert view.slot(0).readonly
    with pytest.raises(TypeError):
        view.slot(0)[:1] = b"x"
    assert not slab.slot(0).readonly
    # The mapping itself is read-only, not just its Python view.
    [mapped] = {line.split()[1] for line in mappings(slab.name) if line.split()[1] != "rw-s"}
    assert mapped == "r--s"


def mappings(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_only_the_owner_may_open_it_and_its_name_cannot_be_guessed(slab: Slab) -> None:
    assert path_of(slab).stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"/tandem-[0-9a-f]{22}", slab.name)
    other = Slab(1, 1)
    other.unlink()
    assert other.name != slab.name


def test_all_pages_are_there_from_the_start(slab: Slab) -> None:
    assert path_of(slab).stat().st_blocks * 512 >= slab.size_bytes


# The fence.


def test_a_copy_of_a_slot_given_to_a_new_production_is_noticed(slab: Slab) -> None:
    view = SlabView(slab.name, SLOTS, SLOT_BYTES)
    slab.begin(1, 7)
    slab.slot(1)[:] = b"a" * SLOT_BYTES
    copy = bytes(view.slot(1))
    assert view.epoch(1) == 7
    assert copy == b"a" * SLOT_BYTES
    # The word changes before the first byte does.
    slab.begin(1, 8)
    copy = bytes(view.slot(1))
    assert copy == b"a" * SLOT_BYTES
    assert view.epoch(1) == 8
    assert [view.epoch(0), view.epoch(2)] == [0, 0]


def test_no_torn_copy_passes_for_a_whole_one_while_another_process_writes() -> None:
    with process(WRITER) as (_, name):
        view = SlabView(name, 2, 200_000)
        whole = torn = 0
        deadline_ms = now_ms() + STRESS_MS
        while now_ms() < deadline_ms:
            epoch = int.from_bytes(view.slot(1)[:8], "little")
            copy = bytes(view.slot(0))
            if view.epoch(0) != epoch:
                torn += 1
                continue
            whole += 1
            assert copy == bytes([epoch % 251]) * len(copy)
        # Both must have happened, else this proved nothing.
        assert whole > 0
        assert torn > 0


# Errors that a person can act on.


@pytest.mark.parametrize(
    "name",
    ["", "/", "/tandem-", "/other-000000000000000000000000", "tandem-000000000000000000000000"]
    + [
        "/tandem-../../etc/passwd000",
        "/tandem-" + "0" * 22 + "\0x",
        "/tandem-" + "0" * 23 + "\ud800",
        "/" * 300,
    ],
)
def test_a_name_that_no_slab_has_is_refused_before_anything_is_opened(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a slab"):
        SlabView(name, 1, 1)


def test_a_slab_that_cannot_be_opened_names_the_usual_causes() -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened \(No such file.*one host.*--ipc") as caught:
        SlabView("/tandem-" + "0" * 22, 1, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("slot_count", "slot_bytes"),
    [(SLOTS + 1, SLOT_BYTES), (SLOTS, 3 * SLOT_BYTES), (2**20, 1), (2**63 - 1, 2**63 - 1)],
)
def test_a_slab_smaller_than_its_description_is_refused_not_read(
    slab: Slab, slot_count: int, slot_bytes: int
) -> None:
    # Reading beyond the end of the object would be a SIGBUS.
    before = descriptors()
    with pytest.raises(ConfigError, match="smaller than the prefill node said"):
        SlabView(slab.name, slot_count, slot_bytes)
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_room_names_size_flag_and_remedy_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    # Other processes may make slabs meanwhile.
    monkeypatch.setattr("transport.slab.secrets.token_hex", lambda size: "c" * 2 * size)
    open_before = descriptors()
    expected = r"needs 64 MiB .* are free in /dev/shm \(No space left on device\).*--source-slots \(now 4\)"
    with pytest.raises(ConfigError, match=expected + r".*--max-tokens.*--shm-size"):
        Slab(4, 16 * 2**20 - mmap.PAGESIZE)
    assert not path_of("/tandem-" + "c" * 22).exists()
    assert descriptors() == open_before


def test_a_limit_of_the_process_is_reported_alike_and_not_by_a_signal() -> None:
    program = """
import resource, sys
from common.errors import ConfigError
from transport.slab import Slab
resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))
Slab(1, 4_096).unlink()
try:
    Slab(8, 1_048_576)
except ConfigError as error:
    sys.stdout.write(str(error))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "File too large" in finished.stdout
    assert "--source-slots (now 8)" in finished.stdout


def test_a_host_without_shared_memory_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(_posixshmem, "shm_open", refuse)
    with pytest.raises(
        ConfigError, match=r"no shared memory can be made in /dev/shm \(Permission denied\): let --kv-plane"
    ):
        Slab(1, 1)


# Nothing is left behind.


def test_unlinking_removes_the_name_and_keeps_the_bytes_for_its_readers(slab: Slab) -> None:
    view = SlabView(slab.name, SLOTS, SLOT_BYTES)
    slab.slot(2)[:3] = b"abc"
    slab.unlink()
    slab.unlink()
    assert not path_of(slab).exists()
    assert bytes(view.slot(2)[:3]) == b"abc"
    with pytest.raises(ConfigError):
        SlabView(slab.name, SLOTS, SLOT_BYTES)


def test_a_view_is_unmapped_when_the_last_reader_of_a_slot_lets_go(slab: Slab) -> None:
    owned = len(mappings(slab.name))
    view = SlabView(slab.name, SLOTS, SLOT_BYTES)
    reading = view.slot(0)
    del view
    gc.collect()
    assert len(mappings(slab.name)) == owned + 1
    assert reading[0] == 0
    del reading
    gc.collect()
    assert len(mappings(slab.name)) == owned


def test_opening_views_again_and_again_leaks_nothing(slab: Slab) -> None:
    before = (descriptors(), len(mappings(slab.name)))
    for _ in range(300):
        SlabView(slab.name, SLOTS, SLOT_BYTES)
    gc.collect()
    assert (descriptors(), len(mappings(slab.name))) == before


def test_a_reader_that_ends_does_not_remove_the_slab(slab: Slab) -> None:
    program = f"from transport.slab import SlabView\nSlabView({slab.name!r}, {SLOTS}, {SLOT_BYTES})"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert path_of(slab).exists()


def test_slabs_of_killed_processes_are_removed_and_those_of_live_ones_kept(slab: Slab) -> None:
    with process(OWNER) as (dying, stale), process(OWNER) as (_, live):
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        remove_stale_slabs()  # a prefill node that starts elsewhere may have been quicker
        assert not path_of(stale).exists()
        assert path_of(live).exists()
        assert path_of(slab).exists()
        assert {live[1:], slab.name[1:]}.isdisjoint(remove_stale_slabs())


def test_a_stopped_process_is_alive(slab: Slab) -> None:
    with process(OWNER) as (stopped, name):
        stopped.send_signal(signal.SIGSTOP)
        assert name[1:] not in remove_stale_slabs()
        assert path_of(name).exists()


def test_the_cleaner_leaves_other_files_alone() -> None:
    other = Path("/dev/shm") / f"tandem-notes-{os.getpid()}"
    other.write_text("mine")
    try:
        assert other.name not in remove_stale_slabs()
        assert other.read_text() == "mine"
    finally:
        other.unlink()


# The cleaner against the creator.


def interrupted(monkeypatch: pytest.MonkeyPatch, meddle: Callable[[str], None]) -> Slab:
    """Make a slab while `meddle(name)` runs between its creation and its lock, the first time."""
    names: list[str] = []
    real_open = _posixshmem.shm_open

    def open_then_meddle(name: str, flags: int, mode: int) -> int:
        descriptor = real_open(name, flags, mode=mode)
        names.append(name)
        if len(names) == 1:
            meddle(name)
        return descriptor

    monkeypatch.setattr(_posixshmem, "shm_open", open_then_meddle)
    made = Slab(1, 1)
    monkeypatch.undo()
    assert len(names) == 2
    assert made.name == names[1]
    return made


def test_a_slab_removed_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = interrupted(monkeypatch, lambda name: path_of(name).unlink())
    assert path_of(made).exists()
    assert made.name[1:] not in remove_stale_slabs()
    made.unlink()


def test_a_slab_that_a_cleaner_is_about_to_remove_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def take(name: str) -> None:
        held.append(os.open(path_of(name), os.O_RDWR))
        fcntl.flock(held[0], fcntl.LOCK_EX)
        path_of(name).unlink()

    made = interrupted(monkeypatch, take)
    os.close(held[0])
    assert path_of(made).exists()
    made.unlink()


def test_slabs_made_while_cleaners_run_are_all_there() -> None:
    stop = threading.Event()

    def clean() -> None:
        while not stop.is_set():
            remove_stale_slabs()

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    try:
        made = [Slab(1, 100) for _ in range(RACES)]
    finally:
        stop.set()
        for cleaner in cleaners:
            cleaner.join()
    assert [one.name for one in made if not path_of(one).exists()] == []
    for index, one in enumerate(made):
        one.begin(0, index)
        assert SlabView(one.name, 1, 100).epoch(0) == index
        one.unlink()
