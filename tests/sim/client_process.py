"""A client process: the production connector, the jobs it still has to submit, and what it was told."""

from collections import deque
from typing import TYPE_CHECKING, Any

from common.messages import CancelJob, Failed, Finished, Rejected, Role, Submit
from tests.sim.plan import JobPlan, Plan
from tests.sim.process import Process, outbox_deadline_ms
from transport.connector import Connector
from transport.peers import (
    CloseSocket,
    Delivered,
    OpenSocket,
    Post,
    SendFrame,
    SessionEnded,
    SessionOpened,
    StopConnecting,
    Tick,
)

if TYPE_CHECKING:
    from tests.sim.world import World

_TERMINAL = (Finished, Failed, Rejected)


class ClientProcess(Process):
    """waiting: numbers of jobs to submit, by number in the plan. live: labels without an answer so far."""

    def __init__(self, name: str, node: str, plan: Plan, waiting: list[int]) -> None:
        super().__init__(name)
        self.node = node
        self.plan = plan
        self.waiting = deque(waiting)
        self.port: Any = None
        self.boot()

    def boot(self) -> None:
        """A new incarnation, which knows nothing of the jobs that the former one has sent."""
        if self.incarnations:
            self.die()
        self.incarnations += 1
        self.incarnation = f"{self.name}.{self.incarnations}"
        self.connector = Connector(self.plan.client_times, self.incarnation, Role.CLIENT)
        self.session: str | None = None
        self.live: set[str] = set()
        self.alive = True

    def own_deadline_ms(self) -> int | None:
        deadlines = (self.connector.deadline_ms(), outbox_deadline_ms(self.port))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, world: "World") -> None:
        self.flush(world)
        self.step(Tick(), world)

    def flush(self, world: "World") -> None:
        """Try what the ports keep back."""
        local_ms = self.local_ms(world.now_ms)
        if self.port is not None:
            for lost in self.port.flush(local_ms):
                self.step(lost, world)

    def step(self, event: Any, world: "World") -> None:
        events = deque([event])
        local_ms = self.local_ms(world.now_ms)
        while events:
            for effect in self.connector.step(events.popleft(), local_ms):
                match effect:
                    case OpenSocket(route=route):
                        self.port = world.dial(self.name, self.node, route)
                    case CloseSocket() if self.port is not None:
                        self.port.close()
                        self.port = None
                    case SendFrame() if self.port is not None:
                        world.audit.said(world, effect)
                        lost = self.port.send(effect, local_ms)
                        if lost is not None:
                            events.append(lost)
                    case SessionOpened(hello_ok=hello_ok):
                        self.session = hello_ok.session
                    case SessionEnded():
                        self.session = None
                        self.live.clear()
                    case Delivered(message=message):
                        if isinstance(message, _TERMINAL):
                            self.live.discard(message.label)

    def hears(self, worker: str | None, session: str, route: bytes) -> bool:
        """Whether a message of that session, by that route, is one of an open session."""
        known = self.connector._session
        return known is not None and (known.identity, known.route) == (session, route)

    def submit(self, world: "World") -> None:
        """Send the next job."""
        number = self.waiting.popleft()
        job: JobPlan = self.plan.jobs[number]
        label = f"job{number}"
        self.live.add(label)
        sampling = {"max_tokens": job.max_tokens, "eos": job.eos, "stop": job.stop}
        world.audit.submitted(label, self)
        self.step(Post(self.session, Submit(label, prompt_ids=job.prompt, sampling=sampling)), world)

    def cancel(self, label: str, world: "World") -> None:
        self.step(Post(self.session, CancelJob(label)), world)

    def leave(self, world: "World") -> None:
        """Say goodbye and be gone."""
        self.step(StopConnecting("the client is done"), world)
        self.die()

    def vanish(self) -> None:
        """Its machine is gone: nobody closes the socket."""
        self.alive = False
        self.session = None
        self.live.clear()

    def die(self) -> None:
        """Go without a word; the socket is closed by the operating system."""
        self.vanish()
        if self.port is not None:
            self.port.close()
            self.port = None
