"""The reactor: what ends a poll, and what is handed over between threads."""

import os
import queue
import signal
import threading
from collections.abc import Iterator

import pytest

from common import limits
from common.clock import now_ms, thread_cpu_ms
from common.errors import InvariantViolation
from transport.link import DealerLink, RouterLink, Sent
from transport.loop import Commands, Loop, Mailbox, Wakeup
from transport.zmq_sockets import new_context

LONG_MS = 20_000
SHORT_MS = 60
BURST = 10_000


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def woken_early(loop: Loop) -> bool:
    """Whether a poll ends long before its deadline."""
    started_ms = now_ms()
    loop.poll(started_ms + LONG_MS)
    return now_ms() - started_ms < LONG_MS // 2


def waits_to_the_end(loop: Loop) -> bool:
    deadline_ms = now_ms() + SHORT_MS
    assert loop.poll(deadline_ms) == []
    return now_ms() >= deadline_ms


def test_a_poll_without_news_ends_at_its_deadline(loop: Loop) -> None:
    assert waits_to_the_end(loop)
    started_ms = now_ms()
    assert loop.poll(started_ms - 1_000) == []
    assert now_ms() - started_ms < SHORT_MS


def test_a_pause_is_left_out_of_the_loops_clock(loop: Loop) -> None:
    assert loop.poll(loop.now_ms()) == []
    before_ms, real_ms = loop.now_ms(), now_ms()
    threading.Event().wait(2 * limits.PAUSE_MS / 1_000)
    loop.end_turn()
    assert loop.paused_ms > limits.PAUSE_MS
    assert loop.now_ms() - before_ms < now_ms() - real_ms - limits.PAUSE_MS


def test_a_turn_that_computes_for_long_is_no_pause(loop: Loop) -> None:
    assert loop.poll(loop.now_ms()) == []
    began_ms, computed_ms = now_ms() - 1, thread_cpu_ms()
    while thread_cpu_ms() - computed_ms < 2 * limits.PAUSE_MS:
        sum(range(1_000))
    real_ms = now_ms() - began_ms
    loop.end_turn()
    assert loop.paused_ms < real_ms - limits.PAUSE_MS, "what it computed is charged"


def test_a_wait_that_was_meant_is_no_pause(loop: Loop) -> None:
    assert loop.poll(loop.now_ms() + 2 * limits.PAUSE_MS) == []
    assert loop.paused_ms < limits.PAUSE_MS


def test_a_wake_up_before_the_poll_is_not_lost_and_counts_once(loop: Loop) -> None:
    for _ in range(3):
        loop.wakeup.wake()
    assert woken_early(loop)
    assert waits_to_the_end(loop)


def test_a_thread_ends_a_poll_that_has_no_deadline(loop: Loop) -> None:
    mailbox = Mailbox(loop.wakeup)
    polling = threading.Event()

    def hand_over() -> None:
        polling.wait()
        mailbox.put("item")

    thread = threading.Thread(target=hand_over)
    thread.start()
    polling.set()
    assert loop.poll(None) == []
    thread.join()
    assert mailbox.take() == ["item"]


def test_a_mailbox_keeps_the_order_and_is_empty_after_taking() -> None:
    wakeup = Wakeup()
    mailbox = Mailbox(wakeup)
    assert mailbox.take() == []
    for number in range(100):
        mailbox.put(number)
    assert mailbox.take() == list(range(100))
    assert mailbox.take() == []
    wakeup.close()


def test_items_of_several_threads_all_arrive_each_threads_own_in_order(loop: Loop) -> None:
    mailbox = Mailbox(loop.wakeup)

    def put(name: int) -> None:
        for number in range(2_000):
            mailbox.put((name, number))

    threads = [threading.Thread(target=put, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    arrived: list[tuple[int, int]] = []
    while len(arrived) < 8_000:
        assert woken_early(loop)
        arrived += mailbox.take()
    for thread in threads:
        thread.join()
    assert mailbox.take() == []
    for name in range(4):
        assert [number for source, number in arrived if source == name] == list(range(2_000))


def test_a_mailbox_is_bounded_and_loses_nothing_at_the_limit() -> None:
    wakeup = Wakeup()
    mailbox = Mailbox(wakeup)
    # More wake-ups than a pipe holds: none of them may block either.
    for number in range(limits.MAILBOX_ITEMS):
        mailbox.put(number)
    with pytest.raises(InvariantViolation, match="does not take"):
        mailbox.put("one too many")
    wakeup.wake()
    taken: list[int] = []
    while batch := mailbox.take():
        assert len(batch) <= limits.MAILBOX_BATCH_ITEMS
        taken += batch
    assert taken == list(range(limits.MAILBOX_ITEMS))
    mailbox.put("room again")
    assert mailbox.take() == ["room again"]
    wakeup.close()


def test_what_is_left_of_a_mailbox_ends_the_next_poll(loop: Loop) -> None:
    mailbox = Mailbox(loop.wakeup)
    for number in range(limits.MAILBOX_BATCH_ITEMS + 1):
        mailbox.put(number)
    assert woken_early(loop)
    assert len(mailbox.take()) == limits.MAILBOX_BATCH_ITEMS
    assert woken_early(loop)
    assert mailbox.take() == [limits.MAILBOX_BATCH_ITEMS]
    assert waits_to_the_end(loop)


def test_commands_are_bounded_and_keep_their_order() -> None:
    commands = Commands()
    for number in range(limits.MAILBOX_ITEMS):
        commands.put(number)
    with pytest.raises(InvariantViolation, match="does not take"):
        commands.put("one too many")
    assert [commands.get() for _ in range(limits.MAILBOX_ITEMS)] == list(range(limits.MAILBOX_ITEMS))
    with pytest.raises(queue.Empty):
        commands.get(block=False)


def test_signals_are_reported_in_order_by_the_poll_they_end(loop: Loop) -> None:
    loop.catch_signals(signal.SIGUSR1, signal.SIGUSR2)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    loop.wakeup.wake()
    assert loop.poll(now_ms() + LONG_MS) == [signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1]
    assert waits_to_the_end(loop)


def test_a_signal_ends_a_poll_in_progress(loop: Loop) -> None:
    loop.catch_signals(signal.SIGUSR1)
    timer = threading.Timer(SHORT_MS / 1_000, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    assert loop.poll(None) == [signal.SIGUSR1]
    timer.join()


def test_closing_gives_signals_and_descriptors_back() -> None:
    def own_handler(*_: object) -> None:
        caught.append("own")

    caught: list[str] = []
    earlier = signal.signal(signal.SIGUSR1, own_handler)
    before = len(os.listdir("/proc/self/fd"))
    try:
        loop = Loop()
        loop.catch_signals(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is not own_handler
        loop.close()
        assert signal.getsignal(signal.SIGUSR1) is own_handler
        assert signal.set_wakeup_fd(-1) == -1
        os.kill(os.getpid(), signal.SIGUSR1)
        assert caught == ["own"]
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@pytest.fixture
def links() -> Iterator[tuple[RouterLink, DealerLink]]:
    context = new_context()
    router = RouterLink(context, "tcp://127.0.0.1:0")
    dealer = DealerLink(context, router.endpoint, b"attempt-1")
    yield router, dealer
    dealer.close()
    router.close()
    context.term()


def test_a_watched_socket_ends_the_poll_and_a_forgotten_one_does_not(
    loop: Loop, links: tuple[RouterLink, DealerLink]
) -> None:
    router, dealer = links
    loop.watch([router.socket])
    assert waits_to_the_end(loop)
    dealer.send(b"", [b"hello"])
    assert woken_early(loop)
    assert len(router.receive(10)) == 1
    loop.forget([router.socket])
    dealer.send(b"", [b"hello again"])
    assert waits_to_the_end(loop)


def test_a_burst_taken_in_batches_never_leaves_the_poll_waiting(
    loop: Loop, links: tuple[RouterLink, DealerLink]
) -> None:
    # ZeroMQ's descriptor is edge-triggered: what a batch leaves behind must still end the next poll.
    router, dealer = links
    loop.watch([router.socket])
    sent, arrived = 0, []
    while len(arrived) < BURST:
        while sent < BURST and dealer.send(b"", [b"%d" % sent]) is Sent.YES:
            sent += 1
        assert woken_early(loop)
        arrived += [int(frames[0]) for _, frames in router.receive(limits.RECEIVE_BATCH_MESSAGES)]
    assert arrived == list(range(BURST))
    assert waits_to_the_end(loop)
