"""The only place that reads a clock.

Cores take time as an argument. Loops and compute threads ask here, so that a test can look for stray clocks
by name. All values but `wall_s` are monotonic; none of them may cross a process boundary (durations travel,
instants do not).
"""

import time


def now_ms() -> int:
    """Whole milliseconds of this process's monotonic clock."""
    return time.monotonic_ns() // 1_000_000


def now_us() -> int:
    """Whole microseconds of this process's monotonic clock, for busy times and gaps."""
    return time.monotonic_ns() // 1_000


def thread_cpu_ms() -> int:
    """Milliseconds for which the calling thread has computed since it began."""
    return time.thread_time_ns() // 1_000_000


def thread_cpu_ns() -> int:
    """The same in nanoseconds, for measuring single calls."""
    return time.thread_time_ns()


def wall_s() -> int:
    """Whole seconds since 1970, for people and for fields that other software dates things by; never for a
    duration."""
    return int(time.time())


def pause_ms(duration_ms: float) -> None:
    """Sleep on a thread that owns no socket (emulated compute, held test hooks)."""
    time.sleep(duration_ms / 1_000)
