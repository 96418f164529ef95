"""The clients of a decode node: their sessions, the labels of their live jobs, their mistakes.

Decides which label names which job and when a client has sent too much nonsense. Called by the core alone. A
label is the client's own and counts within its session only; it must never be used to find anybody else's
job.
"""

from typing import Any

from common import limits
from common.errors import ErrorCode
from common.messages import ClientError
from decode_node.events import CloseClient, SendToClient


class Clients:
    """All open client sessions."""

    def __init__(self) -> None:
        self._labels: dict[str, dict[str, str]] = {}
        self._mistakes: dict[str, int] = {}

    def open(self, session: str) -> None:
        """A client has a session."""
        self._labels[session] = {}
        self._mistakes[session] = 0

    def close(self, session: str) -> list[str]:
        """The session has ended; ids of the jobs it leaves behind."""
        self._mistakes.pop(session, None)
        return list(self._labels.pop(session, {}).values())

    def has(self, session: str) -> bool:
        """Whether the session is open."""
        return session in self._labels

    def refusal(self, session: str, label: str) -> tuple[ErrorCode, str] | None:
        """Why this client may not add a job of this label, if it may not."""
        labels = self._labels[session]
        if label in labels:
            return ErrorCode.DUPLICATE_ID, "one of your live jobs has this label: choose another"
        if len(labels) >= limits.JOBS_PER_CLIENT:
            return ErrorCode.BUSY, f"you have {limits.JOBS_PER_CLIENT} live jobs: wait for some to end"
        return None

    def add(self, session: str, label: str, job_id: str) -> None:
        """Name a job."""
        self._labels[session][label] = job_id

    def job_id(self, session: str, label: str) -> str | None:
        """The live job that this client calls so."""
        return self._labels.get(session, {}).get(label)

    def remove(self, session: str, label: str) -> None:
        """The job has ended; its label is free again."""
        self._labels.get(session, {}).pop(label, None)

    def mistake(self, session: str, code: ErrorCode, detail: str) -> list[Any]:
        """Answer nonsense, and give the client up when it does not stop."""
        if session not in self._mistakes:
            return []
        self._mistakes[session] += 1
        if self._mistakes[session] > limits.BAD_MESSAGES_PER_CLIENT:
            return [CloseClient(session, f"more than {limits.BAD_MESSAGES_PER_CLIENT} bad messages")]
        return [SendToClient(session, ClientError(code, detail))]

    @property
    def sessions(self) -> list[str]:
        return list(self._labels)
