"""The decode node's compute thread, driven by hand: what it does with a lane when commands cross.

The thread is not started; the test calls what the thread would call, in the order it wants to see.
"""

import io
from collections.abc import Iterator

import numpy as np
import pytest

from common.block_store import BlockStore
from common.digests import prompt_digest
from common.engines.registry import EngineSettings, load_decode_engine, load_prefill_engine
from common.errors import ErrorCode
from common.hooks import HoldPoints
from common.kv_convert import KvConverter
from common.log import NodeLog
from common.messages import PrefillDone
from common.sampling import SamplingParams
from decode_node import commands
from decode_node import events as ev
from decode_node.compute import DecodeCompute
from decode_node.kv_import import ImportFrom, KvSource
from prefill_node.compute import PrefillCompute
from prefill_node.events import ComputeFailed, RunChunk
from tests.oracle import expected_tokens
from transport.loop import Mailbox, Wakeup
from transport.slab import Slab, SlabView

SETTINGS = EngineSettings(
    backend="emulated", model="", emulated_prefill_tokens_per_s=1e9, emulated_decode_ms=1e-3
)
PROMPT = list(range(40, 100))
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


def one_chunk(prompt_ids: list[int], epoch: int = 1) -> RunChunk:
    """The whole of a prompt, which the decode node has named as `PROMPT`."""
    prompt = np.array(prompt_ids, dtype="<i4").tobytes()
    return RunChunk("job", 0, epoch, prompt, prompt_digest(PROMPT), 0, len(prompt_ids), (), ())


class Bench:
    """A slab with one finished production, and a compute thread that the test plays."""

    def __init__(self, slab: Slab, wakeup: Wakeup) -> None:
        self.mailbox = Mailbox(wakeup)
        log = NodeLog(node="decode", incarnation="test", stream=io.StringIO())
        hooks = HoldPoints(None, log)
        self.engine = engine = load_prefill_engine(SETTINGS)
        engine.attach([slab.slot(0)])
        self.producer = producer = PrefillCompute(SETTINGS, self.mailbox, hooks, log)
        producer.attach(slab, engine.capabilities.layout, BlockStore(engine.capabilities.layout, 16, 0))
        producer._layout, producer._slots = engine.capabilities.layout, [slab.slot(0)]
        chunk = producer._compute(engine, one_chunk(PROMPT))
        engine.attach([])
        layout, form = engine.capabilities.layout, engine.capabilities.form
        view = SlabView(slab.name, 1, slab.slot_bytes)
        self.source = KvSource(view, layout, KvConverter(form, form, layout.head_dim))
        self.record = PrefillDone(
            "job",
            0,
            1,
            "",
            len(PROMPT),
            128,
            0,
            (chunk.digest,),
            chunk.logits,
            chunk.logits_digest,
            0,
            0,
        )
        self.compute = DecodeCompute(SETTINGS, self.mailbox, hooks, log)
        self.compute._engine = load_decode_engine(SETTINGS)

    def copy(self, token_id: int) -> ImportFrom:
        """The order to copy the slot into lane 0."""
        return ImportFrom(commands.StartImport("job", 0, "session", self.record, token_id), self.source)

    def sample_and_import(self) -> list[object]:
        """Until the copy has ended and decode has begun; what compute said."""
        self.compute._sample_first(commands.SampleFirst("job", self.record, SAMPLING))
        first = expected_tokens(PROMPT, 1)[0]
        self.compute._start_import(self.copy(first))
        while self.compute._filling:
            self.compute._fill(0)
        return self.mailbox.take()


@pytest.fixture
def bench() -> Iterator[Bench]:
    layout = load_prefill_engine(SETTINGS).capabilities.layout
    slab, wakeup = Slab(1, layout.slot_bytes), Wakeup()
    yield Bench(slab, wakeup)
    slab.unlink()
    wakeup.close()


def test_a_good_copy_is_decoded_without_another_word(bench: Bench) -> None:
    sampled, ended = bench.sample_and_import()
    for _ in range(3):
        bench.compute._work()
    steps = bench.mailbox.take()

    assert (ended.code, ended.decoding) == (None, True)
    assert [sampled.token_id, *(step.token_id for step in steps)] == expected_tokens(
        PROMPT, 4, ignore_eos=True
    )
    assert steps[-1].finish_reason == "length"


def test_a_job_forgotten_between_its_copy_and_its_first_step_is_not_decoded(bench: Bench) -> None:
    bench.sample_and_import()
    bench.compute._forget_job(commands.ForgetJob("job", known_to_compute=True))
    bench.compute._work()
    bench.compute._stop_lane(commands.StopLane(0))

    assert bench.mailbox.take() == [ev.LaneStopped(0)]


def test_a_job_forgotten_during_its_copy_ends_with_the_copy(bench: Bench) -> None:
    bench.compute._sample_first(commands.SampleFirst("job", bench.record, SAMPLING))
    bench.compute._start_import(bench.copy(0))
    bench.compute._forget_job(commands.ForgetJob("job", known_to_compute=True))
    while bench.compute._filling:
        bench.compute._fill(0)
    bench.compute._work()

    ended = bench.mailbox.take()[-1]
    assert (ended.code, ended.decoding) == (None, False)


def test_a_slot_that_was_given_away_is_refused_as_stale(bench: Bench) -> None:
    stale = PrefillDone(
        **{name: getattr(bench.record, name) for name in bench.record.__slots__} | {"epoch": 7}
    )
    bench.record = stale
    ended = bench.sample_and_import()[-1]

    assert (ended.code, ended.decoding) == ("KV_STALE", False)


def test_a_prompt_that_changed_on_the_way_is_not_computed(bench: Bench) -> None:
    answer = bench.producer._compute(bench.engine, one_chunk([*PROMPT[:-1], PROMPT[-1] ^ 1], epoch=2))
    assert (type(answer), answer.code) == (ComputeFailed, ErrorCode.KV_CORRUPT)
    assert "changed on the way" in answer.detail
    assert bench.source.view.epoch(0) == 1, "the slot was not touched"
