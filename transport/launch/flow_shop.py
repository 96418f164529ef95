"""The least time in which two nodes can do a list of jobs: the bound that measurements are held against.

Decides nothing at run time; the demonstration and the benchmark call it with busy times that they measured.
It is the blocking flow shop of two machines in a fixed order: one prefill node, one lane, a number of source
slots. It must stay a bound: whatever costs time beside prefill and decode (copies, messages, hand-offs) has
no place here.
"""

from collections.abc import Sequence


def makespan(prefill_s: Sequence[float], decode_s: Sequence[float], slots: int) -> float:
    """Least time, in seconds, from the first prefill's start to the last decode's end.

    prefill_s, decode_s: busy seconds of each job, in the order in which they run. slots: source slots; a job
    holds one from its prefill's start until the lane takes its KV, which needs no time. Raises ValueError
    when the lists differ in length or there is no slot.
    """
    _check(prefill_s, decode_s)
    if slots < 1:
        raise ValueError(f"a prefill needs a source slot, not {slots}")
    prefill_end = decode_end = 0.0
    imports: list[float] = []
    for job, (prefill, decode) in enumerate(zip(prefill_s, decode_s, strict=True)):
        slot_free = imports[job - slots] if job >= slots else 0.0
        prefill_end = max(prefill_end, slot_free) + prefill
        imports.append(max(prefill_end, decode_end))
        decode_end = imports[-1] + decode
    return decode_end


def plain_sum(prefill_s: Sequence[float], decode_s: Sequence[float]) -> float:
    """Least time, in seconds, when nothing overlaps. Raises ValueError when the lists differ in length."""
    _check(prefill_s, decode_s)
    return sum(prefill_s) + sum(decode_s)


def _check(prefill_s: Sequence[float], decode_s: Sequence[float]) -> None:
    if len(prefill_s) != len(decode_s):
        raise ValueError(f"{len(prefill_s)} prefill times do not go with {len(decode_s)} decode times")
