"""A real decode node, a prefill node made by hand, and a client: the stage of the handmade tests.

Decides how the three come together and what is left when they part; used by `test_handmade_decode.py` and
`test_handmade_bulk.py`, which add what is said on the control and on the bulk socket.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from common.messages import Prefill, Release
from tests.process.handmade_prefill import HandmadePrefill
from tests.process.harness import Daemon
from tests.process.raw_peer import RawPeer
from tests.process.world import PREFETCH, Answer, JobClient, World, expected, prompt_of

ASKED, ASKED_TOKENS = prompt_of(200, 61), 5
# The oracle takes its time on a busy machine, and so does a client that is not turned meanwhile.
PATIENCE = ("--suspect-ms", "3000", "--dead-after-ms", "4000", "--lease-ms", "20000")


@dataclass
class Stage:
    """The decode node, its handmade prefill node, and a client of its own."""

    world: World
    decode: Daemon
    prefill: HandmadePrefill
    client: JobClient
    asked_count: int = 0

    def wait_usable(self) -> None:
        self.world.wait_status(
            self.decode, lambda status: status["workers"][0]["usable"], "they have a session"
        )

    def ask(self) -> tuple[Answer, Prefill]:
        """A job, and the PREFILL that it leads to."""
        self.asked_count += 1
        label = f"asked{self.asked_count}"
        answer = self.client.submit(label, ASKED, max_tokens=ASKED_TOKENS, ignore_eos=True)
        before = len(self.prefill.said(Prefill))
        self.world.wait(lambda: len(self.prefill.said(Prefill)) > before, "PREFILL arrives")
        return answer, self.prefill.said(Prefill)[-1]

    def wait_released(self, request: Prefill) -> None:
        released = Release(request.slot, request.epoch)
        self.world.wait(lambda: released in self.prefill.said(Release), "the slot comes back")

    def wait_farewell(self, session: str) -> str:
        """The decode node ends this session and opens another; the cause that it logs."""
        self.world.wait(lambda: self.prefill.session != session, "the session ends and another begins")
        self.wait_usable()
        return self.world.wait_for_log(self.decode, "session.ended", session=session)["cause"]


def whole() -> list[int]:
    """The right answer to what is asked."""
    return expected(ASKED, ASKED_TOKENS, ignore_eos=True)


AnyStage = TypeVar("AnyStage", bound=Stage)


@contextmanager
def set_up(
    world: World, kind: type[AnyStage], prefill_kind: type[HandmadePrefill], *flags: str
) -> Iterator[AnyStage]:
    """A stage whose nodes have a session; afterwards every slot must be free and nothing outstanding."""
    endpoint = f"ipc://{world.directory}/handmade"
    decode = world.decode(endpoint, *PREFETCH, *flags, *PATIENCE)
    with RawPeer(decode.endpoint) as peer:
        profile = peer.hello().profile
    prefill = prefill_kind(endpoint, profile)
    world.clients.append(prefill)
    stage = kind(world, decode, prefill, world.client(decode))
    stage.wait_usable()
    yield stage
    status = world.wait_status(decode, lambda status: status["idle"], "nothing is left")
    assert [slot["state"] for slot in status["workers"][0]["slots"]] == ["free"]
    assert not status["workers"][0]["survivors"]
    assert not status["workers"][0]["orphans"]
    world.clients.remove(prefill)
    prefill.close()
    world.stop(decode)
