"""The reactor: one thread that owns every socket of a daemon and never computes.

Decides when the node's code runs: after a message, after an item from another thread, at its deadline, after
a signal; and what time it is for the node, which is not charged for time in which it did not run. Called once
by each daemon's `__main__`, on the main thread. It holds no rule of the protocol; it must never block on
anything but its poller.
"""

import os
import queue
import signal
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from common import limits
from common.clock import now_ms, thread_cpu_ms
from common.errors import check


class Wakeup:
    """A pipe that ends a poll from another thread or from a signal handler."""

    def __init__(self) -> None:
        self.read_descriptor, self.write_descriptor = os.pipe()
        os.set_blocking(self.read_descriptor, False)
        os.set_blocking(self.write_descriptor, False)

    def wake(self) -> None:
        """End the current or the next poll. Safe from any thread."""
        try:
            os.write(self.write_descriptor, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def drain(self) -> bytes:
        """Take what was written: signal numbers, or zeros."""
        try:
            return os.read(self.read_descriptor, 4_096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self.read_descriptor)
        os.close(self.write_descriptor)


class ThreadDied(Exception):
    """A thread of ours ended by an exception that nothing there was meant to catch."""


class Mailbox:
    """Items from other threads to the loop: bounded, ordered, and each put ends the poll."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._items: deque[Any] = deque()
        self._wakeup = wakeup

    def put(self, item: Any) -> None:
        """Hand an item to the loop. Raises `InvariantViolation` when the loop has stopped taking them."""
        check(len(self._items) < limits.MAILBOX_ITEMS, "the loop does not take what other threads hand it")
        self._items.append(item)
        self._wakeup.wake()

    def guard(self, work: Callable[[], None]) -> None:
        """Run a thread's work; an exception out of it reaches the loop as an invariant violation."""
        try:
            work()
        except BaseException:  # a panic in native code is no Exception
            self.put(ThreadDied(traceback.format_exc()))

    def take(self) -> list[Any]:
        """The oldest items, at most one batch. Raises `InvariantViolation` when a guarded thread died."""
        count = min(len(self._items), limits.MAILBOX_BATCH_ITEMS)
        items = [self._items.popleft() for _ in range(count)]
        if self._items:
            self._wakeup.wake()
        died = next((item for item in items if isinstance(item, ThreadDied)), None)
        check(died is None, f"a thread died: {died}")
        return items


class Commands:
    """Items from the loop to one other thread: bounded and ordered.

    `queue.SimpleQueue` and not `queue.Queue`: the latter's waiter needs the interpreter's lock twice to wake
    up, and the lane stands still meanwhile.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: Any) -> None:
        """Hand an item to the thread. Raises `InvariantViolation` when it has stopped taking them."""
        check(self._items.qsize() < limits.MAILBOX_ITEMS, "a thread does not take what the loop hands it")
        self._items.put(item)

    def get(self, block: bool = True) -> Any:
        """The next item. Raises `queue.Empty` when there is none and it is not to wait for one."""
        return self._items.get(block)


class Loop:
    """Poller, wake-up and signals of one process.

    Signal handlers do nothing: the interpreter writes the signal's number into the wake-up pipe, and `poll`
    returns it with everything else.

    The loop's clock leaves out pauses, in which the process was stopped or starved: nobody was heard then,
    compute did not run either, and what arrived meanwhile is still unread when the loop goes on. Without this
    a node continued by SIGCONT would take every peer for dead and its own engine for hung. Time for which
    this thread itself computed is no pause, however long it was.
    """

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.paused_ms = 0
        self._turn_began: tuple[int, int] | None = None
        self._poller = zmq.Poller()
        self._poller.register(self.wakeup.read_descriptor, zmq.POLLIN)
        self._restore: Callable[[], None] | None = None

    def catch_signals(self, *numbers: signal.Signals) -> None:
        """From now on `poll` reports these signals. Main thread only."""
        # The pipe comes first: a signal between the two calls would else be caught and forgotten.
        earlier_descriptor = signal.set_wakeup_fd(self.wakeup.write_descriptor, warn_on_full_buffer=False)
        earlier = {number: signal.signal(number, lambda *_: None) for number in numbers}

        def restore() -> None:
            signal.set_wakeup_fd(earlier_descriptor)
            for number, handler in earlier.items():
                signal.signal(number, handler)

        self._restore = restore

    def watch(self, sockets: list[zmq.Socket]) -> None:
        """End the poll when one of these can be read."""
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def forget(self, sockets: list[zmq.Socket]) -> None:
        """Watch these no longer; before they are closed."""
        for socket in sockets:
            self._poller.unregister(socket)

    def now_ms(self) -> int:
        """The process's clock without its pauses."""
        return now_ms() - self.paused_ms

    def end_turn(self) -> None:
        """Leave out what the turn since the last poll was starved of; then a deadline can be reckoned."""
        if self._turn_began is not None:
            began_ms, computed_ms = self._turn_began
            self._leave_out(self.now_ms() - began_ms - (thread_cpu_ms() - computed_ms))
            self._turn_began = None

    def poll(self, deadline_ms: int | None) -> list[signal.Signals]:
        """Wait until something happens or the deadline passes; signals that arrived meanwhile.

        The deadline is one of this loop's clock, as is whatever is reckoned from `now_ms`.
        """
        began_ms = self.now_ms()
        timeout_ms = None if deadline_ms is None else max(0, deadline_ms - began_ms)
        self._poller.poll(timeout_ms)
        if timeout_ms is not None:
            self._leave_out(self.now_ms() - began_ms - timeout_ms)
        self._turn_began = self.now_ms(), thread_cpu_ms()
        return [signal.Signals(number) for number in self.wakeup.drain() if number]

    def _leave_out(self, late_ms: int) -> None:
        if late_ms >= limits.PAUSE_MS:
            self.paused_ms += late_ms

    def close(self) -> None:
        if self._restore is not None:
            self._restore()
        self.wakeup.close()
