"""A story, read back and played, does what the recorded node did, and tells nothing of what clients wrote."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvariantViolation
from common.messages import HelloRefused, StatusReply, Submit, Tokenize, Tokens
from common.story import ITEMS_PER_SNAPSHOT, STRETCH_MAX, Story, ending_of, reason_of
from common.story_form import Blank, Form
from common.version import VERSION
from decode_node import events as ev
from decode_node.slots import SlotLedger
from prefill_node.events import ChunkComputed
from tests.cores import Pair
from tests.sim import replay_story
from tests.sim.replay_story import Replay, UnreadableStory, read_story
from tests.unit.test_random_walks import Walk
from transport.peers import FrameReceived, Tick
from transport.story_file import KEPT_STORIES, write_story

EVENTS = 80
STEPS_PER_SNAPSHOT = 60
MARKER = "the-bird-sings-at-noon"


def written(value: Any) -> str:
    return json.dumps(Form().plain(value))


class Recorded:
    """A stack whose steps are recorded as a daemon records them, and what each of them asked for."""

    def __init__(self, stack: Any, steps_per_snapshot: int = STEPS_PER_SNAPSHOT) -> None:
        self.stack = stack
        self.story = Story(stack, steps_per_snapshot)
        self.effects: list[str] = []

    def step(self, event: Any, now_ms: int) -> list[Any]:
        self.story.record(event, now_ms)
        effects = self.stack.step(event, now_ms)
        self.effects.append(written(effects))
        return effects

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stack, name)

    def lines(self, place: str = "outside", reason: str = "test") -> list[str]:
        head = {
            "version": VERSION,
            "role": "test",
            "incarnation": "i",
            "place": place,
            "reason": reason,
            "flags": {},
        }
        return list(self.story.lines(head, ending_of(self.stack, self.story.last_ms)))


class RecordedWalk:
    """A random walk whose decode stack and last prefill stack are recorded."""

    def __init__(self, seed: int) -> None:
        self.walk = Walk(seed)
        pair = self.walk.pair
        pair.decode = Recorded(pair.decode)
        pair.prefill.stack = Recorded(pair.prefill.stack)
        start = pair.start_prefill

        def start_recorded(*arguments: Any) -> None:
            start(*arguments)
            pair.prefill.stack = Recorded(pair.prefill.stack)

        pair.start_prefill = start_recorded

    @property
    def stacks(self) -> list[Recorded]:
        return [self.walk.pair.decode, self.walk.pair.prefill.stack]

    def go(self, events: int = EVENTS) -> None:
        for _ in range(events):
            self.walk.random.choice(self.walk.events)()


def played(lines: list[str]) -> tuple[Replay, list[str]]:
    """The replay of a file, and the effects of each step."""
    replay, effects = read_story(lines), []
    replay.run(lambda number, event, now_ms, asked: effects.append(written(asked)))
    return replay, effects


@pytest.mark.parametrize("seed", range(16))
def test_a_replay_asks_for_what_the_recorded_node_asked_for_and_ends_in_the_same_state(seed: int) -> None:
    run = RecordedWalk(seed)
    run.go()
    for recorded in run.stacks:
        replay, effects = played(recorded.lines())
        assert effects == recorded.effects[-len(effects) :] if effects else recorded.effects == []
        assert replay.first is None
        assert replay.differences == []


def test_at_least_so_many_steps_as_asked_for_are_kept_and_not_many_more() -> None:
    pair = Pair()
    recorded = pair.decode = Recorded(pair.decode, steps_per_snapshot=10)
    for number in range(57):
        pair.advance(1)
        recorded.step(Tick(), pair.now_ms)
        kept = len(read_story(recorded.lines()).steps)
        assert min(number + 1, 10) <= kept <= 20


def test_ids_that_were_drawn_come_again() -> None:
    pair = Pair()
    recorded = pair.decode = Recorded(pair.decode)
    pair.client.submit("a", [1, 2, 3])
    guest = pair.add_client("guest")
    pair.tick()
    replay, _ = played(recorded.lines())
    stack = replay.stack
    assert [job.job_id for job in stack.core.desk.live()] == [pair.job("a").job_id]
    assert guest.session in stack.core.desk.clients.sessions


def broken_pair(pair: Pair, act: Callable[[], None]) -> Exception:
    with pytest.raises(InvariantViolation) as caught:
        act()
    return caught.value


def exit_status(path: Path, lines: list[str]) -> int:
    path.write_text("".join(lines))
    return replay_story.main([str(path)])


def test_a_ledger_that_a_handler_corrupts_breaks_in_the_replay_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pair = Pair()
    pair.decode = Recorded(pair.decode)
    reserve = SlotLedger.reserve

    def corrupting(ledger: SlotLedger, *arguments: Any, **more: Any) -> Any:
        ledger.granted_count += 1
        return reserve(ledger, *arguments, **more)

    monkeypatch.setattr(SlotLedger, "reserve", corrupting)
    error = broken_pair(pair, lambda: pair.client.submit("a", [1, 2, 3]))
    lines = pair.decode.lines("check", reason_of(error))
    assert exit_status(tmp_path / "story", lines) == 0
    shown = capsys.readouterr().out
    assert "INV-1: a granted slot has vanished" in shown.splitlines()[-2]
    assert "SubmissionPrepared" in shown
    monkeypatch.setattr(SlotLedger, "reserve", reserve)
    assert exit_status(tmp_path / "story", lines) == 1
    assert "NOT REPRODUCED" in capsys.readouterr().out


def test_an_answer_given_twice_breaks_the_same_step_of_the_replay(tmp_path: Path) -> None:
    pair = Pair()
    pair.prefill.stack = Recorded(pair.prefill.stack)
    pair.client.submit("a", [1, 2, 3])
    answer = pair.prefill.slab.compute(pair.prefill.chunks.popleft())
    assert isinstance(answer, ChunkComputed)
    pair.prefill.step(answer, pair.now_ms)
    error = broken_pair(pair, lambda: pair.prefill.step(answer, pair.now_ms))
    lines = pair.prefill.stack.lines("step", reason_of(error))
    assert exit_status(tmp_path / "story", lines) == 0
    replay, _ = played(lines)
    assert replay.first.steps == len(replay.steps)
    another = pair.prefill.stack.lines("step", "INV-1: another reason")
    assert exit_status(tmp_path / "story", another) == 1


def test_a_state_that_is_not_the_recorded_one_at_the_end_is_not_reproduced(tmp_path: Path) -> None:
    pair = Pair()
    pair.decode = Recorded(pair.decode)
    pair.client.submit("a", [1, 2, 3])
    lines = pair.decode.lines()
    assert exit_status(tmp_path / "story", lines) == 0
    assert '"jobs_accepted":1' in lines[-1]
    lines[-1] = lines[-1].replace('"jobs_accepted":1', '"jobs_accepted":2')
    assert exit_status(tmp_path / "story", lines) == 1


def test_nothing_that_a_client_wrote_or_got_is_in_a_story() -> None:
    pair = Pair(max_queue=100)
    pair.decode, pair.prefill.stack = Recorded(pair.decode), Recorded(pair.prefill.stack)
    prompt_ids = [7, 19, 3, 11, 23]
    sampling = {"max_tokens": 2, "stop": [MARKER], "stop_token_ids": [987_654], MARKER: MARKER}
    pair.client.submit("job-0", prompt_ids, stop=[MARKER], logit_bias={"3": 0.765_432_1}, logprobs=1)
    pair.client.say(Tokenize("text", prompt=MARKER))
    pair.client.say(Tokenize("ids", token_ids=(987_654,)))
    pair.client.say(Submit("text", prompt=MARKER, sampling=sampling))
    pair.client.say(Submit("chat", messages=({"role": "user", "content": MARKER},), sampling=sampling))
    pair.client.say(Submit("ids", prompt_ids=(987_654_321,) * 2, sampling={"stop_token_ids": [987_654]}))
    pair.client.say(StatusReply({"a": [MARKER]}))
    pair.finish()
    for number in range(1, 4):
        pair.client.submit(f"job-{number}", prompt_ids, stop=[MARKER], logit_bias={"3": 0.765_432_1})
    answer, job = pair.client.text("job-0"), pair.job("job-3")
    told = [MARKER, MARKER.encode().hex(), "987654", job.prompt.hex(), job.prompt[:12].hex(), f'"{answer}"']
    told += ["0.7654321", str(pair.client.of("job-0", Tokens)[0].logprobs[0].logprob)]
    assert all([answer, *told])
    for stack in (pair.decode, pair.prefill.stack):
        # What happened, and a snapshot of how things stand.
        text = "".join([*stack.lines(), *Recorded(stack.stack).lines()])
        assert [secret for secret in told if secret in text] == []
        assert '{"blank":"bytes","length":20}' in text
        assert job.prompt_digest in text
    assert f'"prompt":{{"blank":"str","length":{len(MARKER)}}}' in "".join(pair.decode.lines())


def test_a_story_does_not_keep_in_memory_what_it_blanks() -> None:
    pair = Pair()
    story = Story(pair.decode)
    frame = FrameReceived(b"route", "s", 1, Submit("a", prompt="x" * 100_000, sampling={"stop": ["y" * 99]}))
    story.record(frame, 1)
    kept, _ = story._steps[-1]
    assert kept.message.prompt == Blank("str", 100_000)
    assert kept.message.sampling == Blank("dict", 1)
    token = ev.TokenSampled("job", 0, 3, None, 1, None)
    story.record(token, 2)
    assert story._steps[-1][0] is token


def test_many_items_in_events_end_a_generation_early() -> None:
    recorded = Recorded(Pair().decode)
    refusal = HelloRefused(True, "", ("field",) * (ITEMS_PER_SNAPSHOT // 3))
    for _ in range(40):
        recorded.story.record(FrameReceived(b"route", "s", 1, refusal), 1)
    assert 4 <= json.loads(recorded.lines()[0])["steps"] <= 8


def test_a_long_queue_is_written_down_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.story.OBJECTS_USUAL", 60)
    pair = Pair(max_queue=100)
    story = Story(pair.decode, steps_per_snapshot=10)

    def most_steps() -> int:
        counts = []
        for _ in range(40):
            story.record(Tick(), 1)
            counts.append(json.loads(next(story.lines({}, None)))["steps"])
        return max(counts)

    few = most_steps()
    for number in range(60):
        pair.client.submit(f"job-{number}", [1, 2, 3])
    most_steps()  # the next snapshot sees the queue
    assert 2 * few <= most_steps() <= 2 * 10 * STRETCH_MAX


def test_a_file_is_for_its_user_alone_and_few_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT_STORIES + 3):
        path = write_story(tmp_path, "decode", f"{number:016x}", ["{}\n"])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = write_story(tmp_path, "prefill", "0", ["{}\n"])
    assert len(list(tmp_path.glob("story-decode-*"))) == KEPT_STORIES
    assert path.exists()
    assert other.exists()
    with pytest.raises(FileExistsError):
        write_story(tmp_path, "prefill", "0", ["{}\n"])


def test_what_only_looks_like_a_story_is_left_alone_and_in_nobodys_way(tmp_path: Path) -> None:
    dangling, folder = tmp_path / "story-decode-a.jsonl", tmp_path / "story-decode-b.jsonl"
    dangling.symlink_to(tmp_path / "nowhere")
    folder.mkdir()
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "story-decode-c.jsonl"
    elsewhere.write_text("")
    link.symlink_to(elsewhere)
    os.utime(elsewhere, (0, 0))
    for number in range(KEPT_STORIES + 3):
        path = write_story(tmp_path, "decode", f"{number:016x}", ["{}\n"])
        assert path.exists()
    left = set(tmp_path.iterdir()) - {dangling, folder, elsewhere, link}
    assert len(left) == KEPT_STORIES
    assert (dangling.is_symlink(), link.is_symlink(), folder.is_dir()) == (True, True, True)


def test_a_story_is_told_even_if_older_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"{path} stays")

    monkeypatch.setattr(Path, "unlink", refuse)
    paths = [write_story(tmp_path, "decode", str(number), ["{}\n"]) for number in range(KEPT_STORIES + 2)]
    assert [path for path in paths if not path.exists()] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[:-1], "damaged|steps of"),
        (
            lambda lines: [*lines[:1], lines[1].replace("decode_node.core.", "subprocess."), *lines[2:]],
            "list of",
        ),
        (
            lambda lines: [*lines[:1], lines[1].replace('"on_client_hello"', '"__class__"'), *lines[2:]],
            "no method",
        ),
        (lambda lines: [lines[0].replace('"story":1', '"story":2'), *lines[1:]], "form is 2"),
        (
            lambda lines: [*lines[:1], '{"state":{"unknown":"itertools.count"}}', *lines[2:]],
            "cannot be rebuilt",
        ),
        (lambda lines: [*lines[:1], '{"state":{"blank":"bytes","length":99999999999}}', *lines[2:]], "blank"),
    ],
)
def test_what_is_no_story_is_refused(change: Callable[[list[str]], list[str]], words: str) -> None:
    pair = Pair()
    pair.decode = Recorded(pair.decode)
    pair.client.submit("a", [1, 2, 3])
    with pytest.raises(UnreadableStory, match=words):
        read_story(change(pair.decode.lines()))
