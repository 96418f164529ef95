"""The hub and its calls without a node: waits, their end, and clients that take nothing."""

import asyncio
from typing import Any

import pytest

from common.clock import now_ms
from common.errors import ErrorCode
from common.messages import Failed
from decode_node.gateway.api_errors import ApiError
from decode_node.gateway.hub import STALLED_MS, TICK_MS, Call, Hub

KEEP_ALIVE_MS = 100


def hub_with(call: Call) -> Hub:
    hub = Hub("ipc:///nowhere", None, KEEP_ALIVE_MS, lambda item: None)
    hub.calls[call.label] = call
    return hub


async def ticked(hub: Hub, work: Any = None) -> Any:
    """What `work` gives while the hub looks after its calls."""
    ticker = asyncio.create_task(hub._tick())
    try:
        async with asyncio.timeout(5):
            return await (work if work is not None else asyncio.sleep(2.5 * TICK_MS / 1_000))
    finally:
        ticker.cancel()


def test_a_client_that_takes_nothing_for_long_is_given_up_and_a_slow_one_is_not() -> None:
    for waited_ms, expected in ((STALLED_MS, ["given up"]), (STALLED_MS // 2, [])):
        told: list[str] = []
        call = Call("a", "session", lambda told=told: told.append("given up"))
        call.sending_since_ms = now_ms() - waited_ms
        hub = hub_with(call)
        asyncio.run(ticked(hub))
        assert told == expected
        assert (call.label in hub.calls) == (not expected)


def test_a_wait_ends_with_nothing_when_a_keep_alive_is_due() -> None:
    call = Call("a", "session", lambda: None)
    hub = hub_with(call)
    started_ms = now_ms()

    async def wait() -> list[Any]:
        return await ticked(hub, call.take())

    assert asyncio.run(wait()) == []
    assert now_ms() - started_ms >= KEEP_ALIVE_MS
    assert not call.keep_alive_due


def test_a_wait_that_is_cancelled_loses_nothing_that_comes_later() -> None:
    call = Call("a", "session", lambda: None)

    async def run() -> list[Any]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call.take()
        call.arrived.append("later")
        call.wake()
        return await call.take()

    assert asyncio.run(run()) == ["later"]
    assert call.waiting_since_ms is None


def test_failing_everybody_leaves_their_jobs_to_be_cancelled() -> None:
    call = Call("a", "session", lambda: None)
    hub = hub_with(call)
    hub.fail_all(ErrorCode.SHUTTING_DOWN, "the end")
    (answer,) = asyncio.run(call.take())
    assert (type(answer), answer.code) == (Failed, ErrorCode.SHUTTING_DOWN)
    assert hub.let_go(call)
    assert not hub.let_go(call)


def test_without_a_session_everything_is_unavailable() -> None:
    hub = Hub("ipc:///nowhere", None, KEEP_ALIVE_MS, lambda item: None)
    for ask in (hub.status, lambda: hub.tokenize(prompt="a")):
        with pytest.raises(ApiError, match="nobody has answered at ipc:///nowhere"):
            asyncio.run(ask())
    with pytest.raises(ApiError, match="cannot be reached"):
        hub.submit("a", {"prompt": "a"}, lambda: None)
    assert hub.calls == {}
