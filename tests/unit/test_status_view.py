"""How STATUS looks: every value of both nodes is there, in words, in a narrow terminal as well."""

import io
from typing import Any

import pytest
from rich.console import Console

from transport.launch.status_view import NodeView, duration, render

JOB = "3f2b8c1d-aaaa-4bbb-8ccc-1234567890ab"
ORPHAN = {
    "slot": 0,
    "state": "orphaned",
    "job": JOB,
    "epoch": 12,
    "age_ms": 3_210,
    "cause": "cancelled by its client",
    "ends_by": "the producer's completion, or the session's end in 900 ms",
}
FREE = {"slot": 1, "state": "free", "job": None, "epoch": 3, "age_ms": 65_000, "cause": ""}
WORKER = {
    "worker": "tcp://prefill-host:5701",
    "session": "99887766-1111",
    "refusal": "",
    "usable": True,
    "draining": False,
    "suspected": False,
    "slots": [ORPHAN, FREE],
    "survivors": [],
    "orphans": 1,
    "progress_age_ms": 120,
    "counters": {"orphans": 4, "late_completions": 3, "prefills_sent": 20, "sessions": 0},
}
DECODE: dict[str, Any] = {
    "role": "decode",
    "accepting": True,
    "ready": False,
    "draining": False,
    "idle": False,
    "incarnation": "a81bc81b-dead",
    "model": "SmolLM2",
    "max_tokens": 2_048,
    "clients": 2,
    "jobs": {"queued": 3, "decoding": 1},
    "lanes": [{"lane": 0, "state": "decoding", "job": JOB}],
    "prefetch_depth": 1,
    "workers": [WORKER],
    "progress": 1_234,
    "progress_age_ms": 12_345,
    "sessions": [{"session": "0011223344", "role": "client", "silent_ms": 30}],
    "stale_messages": 5,
    "counters": {"jobs_accepted": 20, "jobs_rejected": 0},
}
PREFILL: dict[str, Any] = {
    "role": "prefill",
    "accepting": False,
    "ready": False,
    "draining": True,
    "model": "SmolLM2",
    "decode_sessions": ["99887766-1111"],
    "progress": 77,
    "progress_age_ms": None,
    "slots": [{"slot": 0, "state": "computing", "epoch": 12, "job": JOB, "age_ms": 950}],
    "queued": 2,
    "counters": {"prefills_done": 3},
}


def shown(*views: NodeView, width: int = 80) -> str:
    output = io.StringIO()
    Console(file=output, width=width, highlight=False).print(render(views))
    return output.getvalue()


def decode_shown(width: int = 80, **changes: Any) -> str:
    return shown(NodeView("decode", "ipc:///d", DECODE | changes), width=width)


def words_of(text: str) -> str:
    return " ".join(text.split())


def test_a_decode_node_is_shown_with_sessions_lanes_slots_queues_and_counters() -> None:
    text = words_of(decode_shown())
    assert text.startswith(
        "decode node ipc:///d not ready, accepting "
        "model SmolLM2 progress 1234 last progress 12.3 s ago incarnation a81bc81b"
    )
    assert "sessions client 00112233 silent 30 ms" in text
    assert "stale messages 5" in text
    assert "lane state job 0 decoding 3f2b8c1d" in text
    assert "jobs queued 3 decoding 1" in text
    assert (
        "prefill node tcp://prefill-host:5701 session 99887766 usable yes orphans 1 "
        "progress age 120 ms" in text
    )
    assert "slot state job epoch age 0 orphaned 3f2b8c1d 12 3.2 s 1 free - 3 1 min 5 s" in text
    assert "counters orphans 4 late completions 3 prefills sent 20" in text
    assert "counters jobs accepted 20" in text
    assert "jobs rejected" not in text, "what has not happened is no news"


def test_a_prefill_node_is_shown_with_its_queue_and_what_computes() -> None:
    text = words_of(shown(NodeView("prefill", "ipc:///p", PREFILL)))
    assert "prefill node ipc:///p not ready, not accepting, draining" in text
    assert "progress 77" in text
    assert "decode sessions 99887766 queued 2" in text
    assert "0 computing 3f2b8c1d 12 950 ms" in text


def test_a_node_that_is_ready_says_so() -> None:
    assert words_of(decode_shown(ready=True)).startswith("decode node ipc:///d ready, accepting")


def test_an_orphan_is_explained_with_age_cause_and_what_ends_it() -> None:
    assert (
        "slot 0: orphaned 3.2 s ago: cancelled by its client; "
        "ends by the producer's completion, or the session's end in 900 ms"
    ) in words_of(decode_shown())
    bare = {"slot": 4, "state": "orphaned"}
    assert "slot 4: orphaned" in decode_shown(workers=[WORKER | {"slots": [bare]}])


def test_several_prefill_nodes_are_shown_one_by_one() -> None:
    workers = [WORKER | {"worker": f"tcp://host-{number}:1"} for number in (1, 2)]
    text = words_of(decode_shown(workers=workers))
    assert [text.count(f"prefill node tcp://host-{number}:1") for number in (1, 2)] == [1, 1]
    assert text.count("0 orphaned 3f2b8c1d 12") == 2


def test_a_refusal_of_the_prefill_node_is_shown() -> None:
    workers = [WORKER | {"refusal": "they differ in dtype"}]
    assert "refusal they differ in dtype" in words_of(decode_shown(workers=workers))


def test_of_very_many_slots_those_in_use_are_shown() -> None:
    slots = [FREE | {"slot": index} for index in range(100)] + [ORPHAN | {"slot": 100}]
    lines = shown(NodeView("prefill", "ipc:///p", PREFILL | {"slots": slots})).splitlines()
    assert len(lines) < 30
    assert any("100  orphaned" in line for line in lines)
    assert any("and 89 more" in line for line in lines)


def test_what_is_not_known_is_shown_under_its_own_name() -> None:
    text = words_of(
        decode_shown(
            new_number=7,
            new_list=["a", "b"],
            new_parts={"deep": {"deeper": 1}},
            new_rows=[{"colour": "red", "size": 2}],
        )
    )
    for expected in (
        "new number 7",
        "new list a, b",
        "new parts deep deeper 1",
        "new rows colour size red 2",
    ):
        assert expected in text


@pytest.mark.parametrize("status", [{}, {"worker": None}, {"slots": [], "jobs": {}, "counters": {"a": 0}}])
def test_a_node_that_says_little_is_shown_as_well(status: dict[str, Any]) -> None:
    assert len(shown(NodeView("decode", "ipc:///d", status)).splitlines()) == 1
    assert "decode node  ipc:///d" in shown(NodeView("decode", "ipc:///d", status))


def test_a_node_that_does_not_answer_is_named_with_the_problem() -> None:
    lines = shown(NodeView("decode", "ipc:///d", None, "nobody answers")).split("\n")
    assert lines[:2] == [
        "decode node  ipc:///d",
        "  nobody answers",
    ]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_every_terminal_is_wide_enough(width: int) -> None:
    views = [NodeView("decode", "ipc:///d", DECODE), NodeView("prefill", "ipc:///p", PREFILL)]
    lines = shown(*views, width=width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert "…" not in "".join(lines), "nothing is cut"
    if width == 80:
        assert len(lines) <= 24, "both nodes fit a terminal of the usual height"


def test_text_of_a_node_is_text_and_no_markup() -> None:
    assert "[bold]x[/bold]" in decode_shown(model="[bold]x[/bold]")


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1.0 s"),
        (59_900, "59.9 s"),
        (65_000, "1 min 5 s"),
        (3_600_000, "1 h 0 min"),
    ],
)
def test_a_duration_is_short(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text
