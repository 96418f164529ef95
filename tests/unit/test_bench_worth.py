"""What `bench.py worth` makes of timings: lines, the length from which the prefill node pays, plain words."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from common.client_messages import Timings

ROOT = Path(__file__).parents[2]
LENGTHS = (100, 400, 800)


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("benchmarks.worth")


def timings(first_token_ms: int, prefill_us: int = 0, exposed_us: int = 0, transfer_us: int = 0) -> Timings:
    return Timings(
        total_ms=first_token_ms,
        first_token_ms=first_token_ms,
        stages_ms={},
        prefill_queue_us=0,
        prefill_busy_us=prefill_us,
        decode_busy_us=70_000,
        copy_us=1_000,
        digest_us=500,
        lane_gap_us=None,
        transfer_us=transfer_us,
        transfer_exposed_us=exposed_us,
    )


def figures(worth: ModuleType, local_ms: float, remote_ms: float, fixed_ms: int, exposed_us: int = 0) -> dict:
    """Of a decode node with `local_ms` a token, and a prefill node with `remote_ms` behind a fixed cost."""
    local = [(length, timings(int(length * local_ms))) for length in LENGTHS]
    remote = [
        (
            length,
            timings(
                int(fixed_ms + length * remote_ms), int(1_000 * length * remote_ms), exposed_us, exposed_us
            ),
        )
        for length in LENGTHS
    ]
    return worth.figures_of({"local": local, "remote": remote}, 64, 800)


def test_a_faster_node_pays_from_the_length_where_the_lines_meet(worth: ModuleType) -> None:
    found = figures(worth, local_ms=2, remote_ms=1, fixed_ms=150, exposed_us=20_000)
    assert found["first_token"] == {
        "from_tokens": 151,
        "to_tokens": 800,
        "min_remote_prompt_tokens": 151,
    }
    assert found["step_ms"] == 10
    assert "For the first token, the prefill node pays from 151 tokens on." in found["words"]
    assert "Keep shorter prompts local: --min-remote-prompt-tokens 151" in found["words"]
    assert any("delays the first token of a prompt of 800 tokens by 20 ms" in each for each in found["words"])


def test_a_slower_node_is_never_worth_it_for_the_first_token_but_may_be_for_throughput(
    worth: ModuleType,
) -> None:
    found = figures(worth, local_ms=1, remote_ms=1.5, fixed_ms=10)
    assert found["first_token"]["from_tokens"] is None
    assert found["throughput"]["from_tokens"] == 2
    assert "never pays for prompts of up to 800 tokens" in found["words"][0]
    assert not any("--min-remote-prompt-tokens" in sentence for sentence in found["words"])
    assert any("share memory" in sentence for sentence in found["words"])


def test_a_faster_node_without_a_fixed_cost_always_pays(worth: ModuleType) -> None:
    found = figures(worth, local_ms=2, remote_ms=1, fixed_ms=0)
    assert found["words"][0] == "For the first token, the prefill node always pays."
    assert found["first_token"]["min_remote_prompt_tokens"] == 1


def test_one_length_is_refused(worth: ModuleType) -> None:
    parser = worth.argparse.ArgumentParser()
    worth.configure(parser)
    with pytest.raises(worth.ConfigError, match="--lengths"):
        worth.measure(parser.parse_args(["--lengths", "5", "5"]), None)


def test_two_ways_that_differ_less_than_equal_prompts_do_are_called_equally_fast(worth: ModuleType) -> None:
    local = [(length, timings(length + noise)) for length in LENGTHS for noise in (0, 90, 100)]
    remote = [(length, timings(length + noise)) for length in LENGTHS for noise in (0, 50, 80)]
    found = worth.figures_of({"local": local, "remote": remote}, 64, 800)
    assert found["within_spread"]
    assert found["words"][-1] == worth.UNSURE
    assert worth.UNSURE not in figures(worth, local_ms=2, remote_ms=1, fixed_ms=0)["words"]


def test_one_prompt_that_was_held_up_does_not_turn_the_line(worth: ModuleType) -> None:
    samples = [(length, timings(length + held_up)) for length in LENGTHS for held_up in (0, 0, 3_000)]
    found = worth.figures_of({"local": samples, "remote": samples}, 64, 800)
    assert found["lines_ms"]["local_first_token"]["fixed"] == pytest.approx(0)
    assert found["lines_ms"]["local_first_token"]["per_token"] == pytest.approx(1)
