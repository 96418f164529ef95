"""How a pair shares the CPUs, and that its daemons accept the flags they are given."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

import transport.launch.pair
import transport.launch.pair_plan
from common.command_line import parse
from common.decode_config import DecodeConfig
from common.errors import NodeUnavailable
from common.prefill_config import PrefillConfig
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan, split_cpus


@pytest.mark.parametrize(
    ("cpus", "prefill", "decode"),
    [
        ({0}, (), ()),
        ({0, 1}, (0,), (1,)),
        ({1000, 1001, 1002}, (1000, 1001), (1002,)),
        ({1000, 1001, 1002, 1003}, (1000, 1001), (1002, 1003)),
    ],
)
def test_every_cpu_goes_to_one_node(
    monkeypatch: pytest.MonkeyPatch, cpus: set[int], prefill: tuple[int, ...], decode: tuple[int, ...]
) -> None:
    # CPUs that do not exist have no topology; 0 and 1 are split also where they are one core.
    monkeypatch.setattr(transport.launch.pair_plan, "available_cpus", lambda: frozenset(cpus))
    assert split_cpus() == (prefill, decode)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("depth", [0, 3])
def test_the_daemons_accept_the_flags(kind: str, depth: int) -> None:
    plan = PairPlan(kind=kind, model="m", max_tokens=512, prefetch_depth=depth)
    prefill = parse(PrefillConfig, plan.prefill_flags("ipc:///p", ()), "0", {})
    decode = parse(DecodeConfig, plan.decode_flags("ipc:///d", ("ipc:///p",), ()), "0", {})
    assert (prefill.backend, decode.backend) == BACKENDS[kind]
    assert (prefill.model, decode.max_tokens) == ("m", 512)
    assert decode.pd_remote_only
    assert decode.prefetch_depth == depth
    assert prefill.source_slots == max(1, depth)


def test_extra_flags_have_the_last_word() -> None:
    plan = PairPlan(max_tokens=512, prefill_extra=("--max-tokens", "64"), decode_extra=("--max-queue", "9"))
    assert parse(PrefillConfig, plan.prefill_flags("ipc:///p", ()), "0", {}).max_tokens == 64
    assert parse(DecodeConfig, plan.decode_flags("ipc:///d", ("ipc:///p",), ()), "0", {}).max_queue == 9


def test_alone_means_no_worker() -> None:
    config = parse(DecodeConfig, PairPlan(alone=True).decode_flags("ipc:///d", (), ()), "0", {})
    assert config.pd_prefill_worker == ()
    assert not config.pd_remote_only


class Asked:
    """In place of a client of the decode node: its STATUS is what the test says."""

    answer: ClassVar[dict[str, Any]] = {}

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def status(self, timeout_ms: int) -> dict[str, Any]:
        return self.answer

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Started:
    """A daemon that is always ready, and no process."""

    def __init__(self, program: str, arguments: list[str], directory: Path, suffix: str) -> None:
        self.endpoint = f"ipc://{directory}/{program}"
        self.status: int | None = None

    def ready(self) -> bool:
        return True

    def kill(self) -> None:
        self.status = 0

    def request_stop(self) -> None:
        self.status = 0

    def wait(self, timeout_ms: int) -> bool:
        return True


def test_waiting_gives_up_at_a_refusal_for_good_and_not_at_one_that_may_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport.launch.pair, "Client", Asked)
    worker = {"refusal": "another decode node has the slots", "misfit": False}
    Asked.answer = {"accepting": False, "workers": [worker]}
    asked = []

    def turn() -> None:
        asked.append(1)
        if len(asked) == 3:
            Asked.answer = {"accepting": True, "workers": [{"refusal": "", "misfit": False}]}

    with Pair(PairPlan("emulated"), Started) as pair:
        pair.wait_ready(turn)
        assert len(asked) == 3
        Asked.answer = {"accepting": False, "workers": [{"refusal": "they differ in dtype", "misfit": True}]}
        with pytest.raises(NodeUnavailable, match="do not fit together: they differ in dtype"):
            pair.wait_ready(turn)
