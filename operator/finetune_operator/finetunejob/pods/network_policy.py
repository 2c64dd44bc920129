"""The NetworkPolicy of a job whose pods connect to each other: ranks of a training, and Spark's driver and executors.

torchrun's rendezvous and the ranks exchange pickles, and ask for no login: whoever may connect to a rank can run code in it.
"""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import template


def companions(draft: Draft) -> list[tuple[str, str]]:
    """Kind and name of the NetworkPolicy, if the job needs one."""
    return [("NetworkPolicy", names.network_policy_name(draft.ftj.name))] if _is_needed(draft) else []


def build_companions(draft: Draft) -> list[Json]:
    """The NetworkPolicy, if the job needs one: all pods of the job accept connections only from each other."""
    if not _is_needed(draft):
        return []
    ftj = draft.ftj
    pods_of_job = {"podSelector": {"matchLabels": {names.LABEL_UID: ftj.uid}}}
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": template.metadata(ftj, names.network_policy_name(ftj.name)),
            "spec": {**pods_of_job, "policyTypes": ["Ingress"], "ingress": [{"from": [pods_of_job]}]},
        }
    ]


def _is_needed(draft: Draft) -> bool:
    """Whether pods of the job accept connections.

    NB: the rendezvous of a single pod with several ranks listens on all addresses of the pod too. A SparkApplication has none: its pods belong
    to the spark-operator, and people may reach Spark's UI there.
    """
    prepare = draft.spec.prepare
    has_executors = prepare is not None and prepare.spark.mode == "Kubernetes"
    return draft.settings.network_policies and (draft.spec.distributed.ranks > 1 or has_executors)
