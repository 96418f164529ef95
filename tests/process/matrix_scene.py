"""How a job is brought to a place, what is done to it there, and what must hold afterwards.

Decides nothing about what is right: that is `tests/process/matrix.py`. Used by the tests over the matrix, one
`Scene` for each cell. A scene may stop compute with the hold points of its daemons; it never waits for a
duration, but where the point is that a time has passed.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from common.clock import now_ms
from common.errors import ErrorCode
from common.messages import Finished
from tests.process.harness import Daemon
from tests.process.matrix import Cause, Outcome, Place
from tests.process.world import PREFETCH, REMOTE, Answer, JobClient, Pair, World, expected, prompt_of

# A prefill node may take long to start on a busy machine.
PATIENCE = ("--prefill-wait-ms", "60000")
PREFILL_TIMEOUT_MS = 700
JOB_TIMEOUT_MS = 2_500
SUBJECT_TOKENS = 9
# Bad codes that a client learns from its own library, because its node can no longer tell it.
GONE = (None, "PEER_LOST")
_SESSION_LOST = "the decode node has lost its prefill node"


@dataclass(frozen=True)
class Jobs:
    """The prompts of a scene, what the model answers to them, and the flags that choose the model."""

    companion: list[int]
    subject: list[int]
    following: list[int]
    answer: Callable[[list[int], int], list[int]]
    companion_tokens: int = 600
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()


EMULATED = Jobs(
    companion=prompt_of(40, 50),
    subject=prompt_of(300, 51),
    following=prompt_of(150, 52),
    answer=lambda prompt_ids, count: expected(prompt_ids, count, ignore_eos=True),
)

# For a daemon that pauses everywhere: a lane that is faster than its loop would keep it from everything else.
SLOW = replace(EMULATED, decode_flags=("--emulated-decode-ms", "20"))


def decode_flags(place: Place, cause: Cause) -> tuple[str, ...]:
    """What the decode node needs for a job to get to the place and meet the cause."""
    flags = (*PREFETCH, *PATIENCE)
    if place is Place.QUEUED:
        flags = (*REMOTE, *PATIENCE)  # without prefetch a job stays queued while the lane is taken
    if place is Place.LOCAL_PREFILLING:
        flags = ("--on-prefill-failure", "local", *PATIENCE)
    if cause is Cause.PREFILL_TIMEOUT:
        flags += ("--prefill-timeout-ms", str(PREFILL_TIMEOUT_MS))
    if cause is Cause.JOB_TIMEOUT:
        flags += ("--job-timeout-ms", str(JOB_TIMEOUT_MS))
    return flags


def slot_of(status: dict[str, Any]) -> str:
    """The one source slot in a decode node's STATUS: its state, `survivor`, or `lost`."""
    worker = status["workers"][0]
    if worker["survivors"]:
        return "survivor"
    return worker["slots"][0]["state"] if worker["slots"] else "lost"


def play(world: World, place: Place, cause: Cause, outcome: Outcome, plane: str = "auto") -> None:
    """One cell of the matrix on a pair of its own, from its start to its clean end. plane: `--kv-plane`."""
    jobs, kv_plane = EMULATED if world.conditions is None else SLOW, ("--kv-plane", plane)
    jobs = replace(jobs, prefill_flags=kv_plane, decode_flags=(*jobs.decode_flags, *kv_plane))
    pair = world.pair(jobs.prefill_flags, (*decode_flags(place, cause), *jobs.decode_flags))
    scene = Scene(pair, place, cause, jobs)
    play_on(scene, outcome)
    scene.pair.audit(local_tokens=scene.local_tokens(outcome))


def play_on(scene: "Scene", outcome: Outcome) -> None:
    """One cell on a pair that goes on afterwards."""
    scene.arrange()
    scene.strike()
    scene.check_before_release(outcome)
    scene.release()
    scene.check_end(outcome)
    scene.check_following()
    scene.clear()


class Scene:
    """One job, perhaps with a companion that takes the lane, on a pair with one lane and one source slot."""

    def __init__(self, pair: Pair, place: Place, cause: Cause, jobs: Jobs = EMULATED) -> None:
        self.world: World = pair.world
        self.pair = pair
        self.place = place
        self.cause = cause
        self.jobs = jobs
        self.client: JobClient = self.world.client(pair.decode)
        self.companion: Answer | None = None
        self.subject: Answer | None = None
        self.submitted_ms = 0
        self._cancelled_before = self._jobs_cancelled()
        self._held: list[tuple[Daemon, str]] = []

    def arrange(self) -> None:
        """Bring the subject to its place; it stays there."""
        _ARRANGEMENTS[self.place](self)
        self._wait_tokens(self.place.tokens_out)
        state = str(self.place.state)
        self._wait_jobs(lambda jobs: jobs.get(state) == 1, f"the job is {state}")

    def strike(self) -> None:
        """Bring the cause about, and wait until the decode node knows."""
        _CAUSES[self.cause](self)

    def check_before_release(self, outcome: Outcome) -> None:
        """An end does not wait for compute, and the slot is where it should be."""
        if outcome.code is ErrorCode.CLIENT_GONE:
            alone = 0 if self.companion is None else 1
            self._wait_jobs(lambda jobs: sum(jobs.values()) == alone, "nobody's job is gone")
            assert self._jobs_cancelled() == self._cancelled_before + 1
            assert self.subject.code in GONE
        elif outcome.code is not None:
            self.world.end_of(self.subject)
            assert self.subject.code == outcome.code, self.subject.end
            assert self.subject.end.definite is outcome.code.definite
        else:
            assert self.subject.end is None, self.subject.end
        self._check_tokens(self.place.tokens_out)
        if outcome.slot is not None:
            what = f"the slot is {outcome.slot}"
            self.world.wait_status(self.pair.decode, lambda status: slot_of(status) == outcome.slot, what)

    def release(self) -> None:
        """Send the companion home and let compute go on."""
        if self.companion is not None:
            self.pair.client.cancel("companion")
            self.world.end_of(self.companion)
            assert self.companion.code in ("CANCELLED", "JOB_TIMEOUT"), self.companion.end
            count = len(self.companion.token_ids)
            assert self.companion.token_ids == self.jobs.answer(self.jobs.companion, count)
        for daemon, point in self._held:
            daemon.release(point)

    def check_end(self, outcome: Outcome) -> None:
        """The subject has had its one answer; the prefill node, if it is gone, comes back."""
        waits_for_prefill = self.place in (Place.TOKENIZING, Place.QUEUED)
        if self.cause is Cause.PREFILL_STOPPED:
            self.pair.prefill.signal(signal.SIGCONT)
        if self.cause is Cause.PREFILL_KILLED and waits_for_prefill:
            self._restart_prefill()
        if outcome.code is None:
            self.world.end_of(self.subject)
            assert isinstance(self.subject.end, Finished), self.subject.end
            local = self.place is Place.LOCAL_PREFILLING
            assert self.subject.end.path == ("local" if local else "remote")
            self._check_tokens(SUBJECT_TOKENS)
        else:
            self._check_tokens(self.place.tokens_out)
        if self.cause is Cause.PREFILL_KILLED and not waits_for_prefill:
            self._restart_prefill()
        if self.cause is Cause.DECODE_DRAIN:
            self._succeed()
        self.world.wait_status(
            self.pair.decode, lambda status: status["workers"][0]["usable"], "they are a pair"
        )

    def check_following(self) -> None:
        """The next job gets right tokens from the same pair."""
        following = self.pair.run(
            "following", self.jobs.following, max_tokens=SUBJECT_TOKENS, ignore_eos=True
        )
        assert isinstance(following.end, Finished), following.end
        assert following.end.path == "remote"
        assert following.token_ids == self.jobs.answer(self.jobs.following, SUBJECT_TOKENS)
        assert self.world.status(self.pair.decode)["counters"]["kv_refused"] == 0

    def local_tokens(self, outcome: Outcome) -> int:
        """Prompt tokens that the decode node of the end has computed itself."""
        stayed = outcome.code is None and self.cause is not Cause.DECODE_DRAIN
        return len(self.jobs.subject) if stayed and self.place is Place.LOCAL_PREFILLING else 0

    def clear(self) -> None:
        """Nothing of the scene is left in the pair."""
        if self.client in self.world.clients:
            _leave(self)
        self.pair.wait_clean()

    def hold(self, daemon: Daemon, point: str) -> None:
        daemon.hold(point)
        self._held.append((daemon, point))

    def submit(self) -> None:
        self.submitted_ms = now_ms()
        self.subject = self.client.submit(
            "subject", self.jobs.subject, max_tokens=SUBJECT_TOKENS, ignore_eos=True
        )

    def submit_and_wait_held(self, daemon: Daemon, point: str) -> None:
        before = len(daemon.logged("hook.held", point=point))
        self.hold(daemon, point)
        self.submit()
        self.world.wait_held(daemon, point, before + 1)

    def take_lane(self) -> None:
        """A companion decodes."""
        self.companion = self.pair.client.submit(
            "companion", self.jobs.companion, max_tokens=self.jobs.companion_tokens, ignore_eos=True
        )
        self.world.wait(lambda: len(self.companion.token_ids) > 1, "the companion decodes")

    def stop_lane(self) -> None:
        """The companion's next step takes as long as the scene lasts."""
        before = len(self.pair.decode.logged("hook.held", point="decode.step"))
        self.hold(self.pair.decode, "decode.step")
        self.world.wait_held(self.pair.decode, "decode.step", before + 1)

    def wait_session_lost(self) -> None:
        self.world.wait_status(
            self.pair.decode, lambda status: status["workers"][0]["session"] is None, _SESSION_LOST
        )

    def _jobs_cancelled(self) -> int:
        return self.world.status(self.pair.decode)["counters"]["jobs_cancelled"]

    def _wait_tokens(self, count: int) -> None:
        self.world.wait(lambda: len(self.subject.token_ids) >= count, f"{count} tokens are out")

    def _wait_jobs(self, condition: Callable[[dict[str, int]], bool], what: str) -> None:
        self.world.wait_status(self.pair.decode, lambda status: condition(status["jobs"]), what)

    def _check_tokens(self, count: int) -> None:
        assert self.subject.token_ids == self.jobs.answer(self.jobs.subject, SUBJECT_TOKENS)[:count]

    def _restart_prefill(self) -> None:
        self.pair.prefill = self.world.prefill(*self.jobs.prefill_flags, bind=self.pair.prefill.endpoint)

    def _succeed(self) -> None:
        """The drained node has left in good order, and another one takes its place."""
        drained = self.pair.decode
        assert self.world.exit_of(drained) == 0, drained.tail()
        self.world.check_remains(drained)
        flags = (*decode_flags(self.place, self.cause), *self.jobs.decode_flags)
        decode = self.world.decode(self.pair.prefill, *flags, bind=drained.endpoint)
        self.pair = Pair(self.world, self.pair.prefill, decode)


def _at_point(of: str, point: str) -> Callable[[Scene], None]:
    def arrange(scene: Scene) -> None:
        scene.submit_and_wait_held(getattr(scene.pair, of), point)

    return arrange


def _queued(scene: Scene) -> None:
    scene.take_lane()
    scene.stop_lane()
    scene.submit()


def _unsampled(scene: Scene) -> None:
    scene.take_lane()
    scene.stop_lane()
    scene.submit()
    scene.pair.wait_slot("ready")


def _prefilled(scene: Scene) -> None:
    scene.take_lane()
    scene.submit()
    scene.world.wait(lambda: scene.subject.token_ids, "the first token comes without a lane")
    scene.stop_lane()


def _local_prefilling(scene: Scene) -> None:
    scene.pair.prefill.spoil("prefill.chunk", "fail")
    scene.submit_and_wait_held(scene.pair.decode, "local.chunk")


_ARRANGEMENTS: dict[Place, Callable[[Scene], None]] = {
    Place.TOKENIZING: _at_point("decode", "text.prepare"),
    Place.QUEUED: _queued,
    Place.PREFILLING: _at_point("prefill", "prefill.chunk"),
    Place.UNSAMPLED: _unsampled,
    Place.PREFILLED: _prefilled,
    Place.IMPORTING: _at_point("decode", "import.piece"),
    Place.LOCAL_PREFILLING: _local_prefilling,
    Place.DECODING: _at_point("decode", "decode.step"),
    Place.FLUSHING: _at_point("decode", "text.push"),
}


def _cancel(scene: Scene) -> None:
    scene.client.cancel("subject")


def _leave(scene: Scene) -> None:
    scene.world.clients.remove(scene.client)
    scene.client.close()


def _silence(scene: Scene) -> None:
    scene.world.clients.remove(scene.client)
    scene.world.wait_for_log(scene.pair.decode, "session.ended", cause="lease expired")
    scene.world.clients.append(scene.client)


def _let_pass(duration_ms: int) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        until_ms = scene.submitted_ms + duration_ms
        scene.world.wait(lambda: now_ms() > until_ms, "the time passes")

    return strike


def _prefill_error(scene: Scene) -> None:
    scene.pair.prefill.spoil("prefill.chunk", "fail")


def _prefill_killed(scene: Scene) -> None:
    scene.world.kill(scene.pair.prefill)
    scene.wait_session_lost()


def _prefill_stopped(scene: Scene) -> None:
    scene.pair.prefill.signal(signal.SIGSTOP)
    scene.wait_session_lost()


def _decode_drain(scene: Scene) -> None:
    scene.pair.decode.signal(signal.SIGTERM)
    scene.world.wait_for_log(scene.pair.decode, "node.draining")


_CAUSES: dict[Cause, Callable[[Scene], None]] = {
    Cause.CANCEL: _cancel,
    Cause.LEAVE: _leave,
    Cause.SILENCE: _silence,
    Cause.PREFILL_TIMEOUT: _let_pass(PREFILL_TIMEOUT_MS),
    Cause.JOB_TIMEOUT: _let_pass(JOB_TIMEOUT_MS),
    Cause.PREFILL_ERROR: _prefill_error,
    Cause.PREFILL_KILLED: _prefill_killed,
    Cause.PREFILL_STOPPED: _prefill_stopped,
    Cause.DECODE_DRAIN: _decode_drain,
}
