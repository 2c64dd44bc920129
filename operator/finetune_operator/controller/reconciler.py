"""The base of both reconcilers: takes a key from the work queue, reconciles the resource, and retries on failure."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import ClassVar

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator import metrics
from finetune_operator.controller.reading import UnreadableStatusError
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.errors import ExternalError
from finetune_operator.kube import KubeError

# Delay of the next pass while another replica holds a Lease that this replica requires.
BUSY_SECONDS = 1.0

# The share of the longest wait after which the next pass comes at the earliest. The waits differ, so that passes that begin together, for
# example after a start, do not stay together.
_MIN_WAIT_SHARE = 0.8

# A pass that comes later than this looks again at what no watch reports. A shorter delay continues what the last pass began.
_ROUTINE_SECONDS = 1.0

# By HTTP status (0: no response), the reason why a request to the API server failed, as a label of a metric. NB: not the reason in
# the response: webhooks add reasons of their own, and the values of a label must be a fixed set.
_REASON_BY_STATUS = {
    0: "ApiServerUnreachable",
    HTTPStatus.BAD_REQUEST: "Invalid",
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.CONFLICT: "Conflict",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.TOO_MANY_REQUESTS: "TooManyRequests",
}

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """The current time; the reconciler's default clock."""
    return datetime.now(UTC)


@dataclass
class Reconciler(ABC):
    """Reconciles resources of one kind, whose keys it gets from a work queue."""

    kind: ClassVar[str]
    expected: ClassVar[tuple[type[Exception], ...]] = (KubeError, ExternalError, UnreadableStatusError)
    """Errors whose message suffices; for any other error, the log shows the traceback."""

    store: Store
    queue: WorkQueue

    async def handle(self, key: str) -> None:
        """Reconcile one resource. Errors are logged, and the resource is retried later."""
        namespace, name = key.split("/")
        body = self.store.of(self.kind).get((namespace, name))
        if body is None:
            self.queue.drop(key)
            return
        try:
            with metrics.reconcile_seconds.labels(self.kind).time():
                requeue = await self.reconcile(body)
            # As the pass has left it.
            current_body = self.store.of(self.kind).get((namespace, name), body)
            longest_wait = self.find_longest_wait(current_body)
        except Exception as error:
            server_delay = error.retry_after_seconds if isinstance(error, KubeError) else 0.0
            delay = self.queue.retry(key, at_least_seconds=server_delay)
            metrics.reconcile_errors.labels(self.kind, self._classify_error(error)).inc()
            if isinstance(error, self.expected):
                # A conflict is normal: another client wrote after the pass began. The next pass reads the new version.
                conflict = isinstance(error, KubeError) and error.status == HTTPStatus.CONFLICT
                log.log(
                    logging.INFO if conflict else logging.WARNING,
                    "%s: %s; retrying in %.1f s",
                    key,
                    error,
                    delay,
                )
            else:
                log.exception("%s: unexpected error; retrying in %.1f s", key, delay)
                await self._try_to_report(key, body, error)
            return
        self.queue.forget(key)
        longest_wait *= random.uniform(_MIN_WAIT_SHARE, 1.0)  # noqa: S311
        wait_seconds = longest_wait if requeue is None else min(requeue, longest_wait)
        self.queue.add_after(key, wait_seconds, is_routine=wait_seconds > _ROUTINE_SECONDS)

    @abstractmethod
    async def reconcile(self, body: Json) -> float | None:
        """Reconcile once, and return the seconds until the next reconcile; None to wait for an event or the longest wait."""

    @abstractmethod
    def find_longest_wait(self, body: Json) -> float:
        """Return the seconds after which a reconciled resource is reconciled again without an event."""

    @abstractmethod
    async def report_internal_error(self, body: Json, message: str) -> None:
        """Report in the status that the operator failed on a resource with an unexpected error."""

    def _classify_error(self, error: Exception) -> str:
        """The reason of an error in one word, of a fixed set."""
        match error:
            case ExternalError():
                return error.problem.reason.value
            case KubeError():
                return _REASON_BY_STATUS.get(error.status, "ApiServerError")
            case _ if isinstance(error, self.expected):
                return type(error).__name__.removesuffix("Error")
            case _:
                return ConditionReason.INTERNAL_ERROR.value

    async def _try_to_report(self, key: str, body: Json, error: Exception) -> None:
        message = f"the operator failed to reconcile this resource ({type(error).__name__}) and retries: read the operator's log"
        try:
            await self.report_internal_error(body, message)
        except Exception:
            log.exception("%s: failed to report the error in the status", key)
