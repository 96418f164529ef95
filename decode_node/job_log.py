"""What the log says of jobs.

Decides which events and fields those are; called by the node's wiring for what it hands to clients. It must
never write what a client sent or was sent: no prompt, no text, no token ids, no detail that may quote them.
"""

from typing import Any

from common.errors import ErrorCode
from common.log import NodeLog
from common.log_events import LogEvent
from common.messages import Accepted, Failed, Finished, Rejected
from decode_node.events import ReportEnd


def log_answer(log: NodeLog, message: Any) -> None:
    """What a client was answered to its SUBMIT."""
    match message:
        case Accepted(job_id=job_id, prompt_tokens=tokens):
            log.info(LogEvent.JOB_ACCEPTED, job=job_id, prompt_tokens=tokens)
        case Rejected(code=code):
            # Not the detail, which is for the client: it may quote what the client sent.
            log.warning(LogEvent.JOB_REJECTED, code=code)


def log_end(log: NodeLog, end: ReportEnd) -> None:
    """What became of a job."""
    match end.answer:
        case Finished(reason=reason, path=path, usage=usage, timings=timings):
            log.info(
                LogEvent.JOB_FINISHED,
                job=end.job_id,
                reason=reason,
                path=path,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                total_ms=timings.total_ms,
                stages_ms=timings.stages_ms,
            )
        case Failed(code=code, detail=detail):
            log.info(LogEvent.JOB_FAILED, job=end.job_id, code=code, detail=detail)
        case None:
            log.info(LogEvent.JOB_FAILED, job=end.job_id, code=ErrorCode.CLIENT_GONE, detail=end.cause)
