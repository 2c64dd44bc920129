"""The defaults of the operator's pods, which templates of the chart and of users override."""

from __future__ import annotations

from finetune_crds.base import Json

GRACE_SECONDS = 120
"""The default of terminationGracePeriodSeconds."""
TMP = "/tmp"  # noqa: S108
IGNORE_DISRUPTION: Json = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}
"""The rule of a podFailurePolicy by which an evicted or preempted pod does not use up a retry."""


def build_pod_defaults(
    container: str, image: str, *, is_product_image: bool, pull_policy: str, user: int
) -> Json:
    """Return a pod without an API token that satisfies the `restricted` Pod Security Standard.

    With `user` 0, the pod also satisfies OpenShift's restricted-v2, which assigns the user itself.
    """
    return {
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                **(
                    {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
                    if is_product_image and user
                    else {}
                ),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "imagePullPolicy": pull_policy,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        **({"readOnlyRootFilesystem": True} if is_product_image else {}),
                    },
                    "volumeMounts": [
                        {"name": "tmp", "mountPath": TMP},
                        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
                    ],
                }
            ],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                # NB: containers get 64 MiB of shared memory by default; NCCL and data loaders need more.
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
