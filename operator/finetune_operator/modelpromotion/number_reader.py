"""Reads the number of spec.onRegression from Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.regression import PrometheusQuery
from finetune_operator import prometheus, secrets
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube
from finetune_operator.modelpromotion.model import Promotion, Reading
from finetune_operator.prometheus import Prometheus
from finetune_operator.registry.outages import Outages
from finetune_operator.text import normalize_address

# Of so many workers, one may wait for a server. A pass beyond that goes on without the number: a slow server must not hold all workers.
_WORKERS_PER_WAIT = 4
# Returns the server at an address, with a token.
OpenPrometheus = Callable[[str, str], Prometheus]


def needs_number(promotion: Promotion, spec: ModelPromotionSpec) -> bool:
    """Whether a version is watched, so that this pass needs the number of spec.onRegression.

    NB: it is read during a move to a candidate too, so that the watch begins with the number at the time of the move.
    """
    watch, move = promotion.status.watch, promotion.status.move
    is_held = spec.suspend or spec.rollback_to is not None or promotion.deleting
    is_moving = move is not None and move.reason in ("Promoted", "Reverted")
    return spec.on_regression is not None and not is_held and (watch is not None or is_moving)


@dataclass(frozen=True)
class NumberReader:
    """Asks the Prometheus servers that promotions name.

    Attributes:
        workers: the number of promotions that are reconciled at the same time.
    """

    kube: Kube
    outages: Outages
    open_prometheus: OpenPrometheus
    workers: int
    _waiting: Counter[str] = field(default_factory=Counter)
    """By address: the number of passes that wait."""

    async def read(self, promotion: Promotion, spec: ModelPromotionSpec) -> Reading | None:
        """Return the number, or the problem that keeps it from being read; None while none is needed, or too many passes wait."""
        query = spec.on_regression.prometheus if spec.on_regression else None
        if query is None or not needs_number(promotion, spec):
            return None
        address = normalize_address(query.url)
        if self._waiting[address] >= max(self.workers // _WORKERS_PER_WAIT, 1):
            return None
        self._waiting[address] += 1
        try:
            return Reading(await self._ask(query, address, promotion.namespace))
        except ExternalError as error:
            return Reading(problem=error.problem)
        finally:
            self._waiting[address] -= 1

    async def _ask(self, query: PrometheusQuery, address: str, namespace: str) -> float:
        secret = await secrets.read(
            self.kube, namespace, query.secret_ref, secrets.PROMETHEUS, (prometheus.TOKEN,)
        )
        server = self.open_prometheus(query.url, (secret or {}).get(prometheus.TOKEN, ""))
        # Another login may be throttled on its own.
        outage_key = ("prometheus", address, secrets.build_key(secret))
        return await self.outages.ask(outage_key, partial(server.read_number, query.query))
