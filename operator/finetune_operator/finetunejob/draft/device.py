"""The device of the training: GPU or CPU, and the number and the product name of the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from finetune_crds.base import Json
from finetune_crds.status_parts import DeviceStatus
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.resolve import PRODUCT_LABEL, whole_number

# Extended resources that are GPUs, one per unit: nvidia.com/gpu, amd.com/gpu, nvidia.com/mig-1g.5gb, gpu.intel.com/i915.
_GPU = re.compile(r"[^/]+/(gpu|gpu\.shared|mig-.+)|gpu\.intel\.com/.+")
# Node labels and nodeSelector keys whose value is the GPU product; the first key that exists is used.
_PRODUCT_LABELS = (
    PRODUCT_LABEL,
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "k8s.amazonaws.com/accelerator",
)


def configured_resource(ftj: FineTuneJob) -> str:
    """The resource name that the spec sets for GPUs; empty without a spec."""
    return ftj.spec.distributed.gpu_resource if ftj.spec else ""


def count_gpus(pod: Json, gpu_resource: str) -> int:
    """The GPUs in the resource limits of a pod's containers.

    Args:
        gpu_resource: name of a GPU resource, in addition to the well-known names.
    """
    return sum(count for _, count in _limits(pod, gpu_resource))


def gpu_resources(pod: Json, gpu_resource: str) -> set[str]:
    """Return the GPU resources in the resource limits of a pod's containers, with `gpu_resource` as in count_gpus."""
    return {name for name, _ in _limits(pod, gpu_resource)}


def _limits(pod: Json, gpu_resource: str) -> Iterator[tuple[str, int]]:
    """The limit of each GPU resource of each container, as name and number."""
    for container in pod.get("spec", {}).get("containers") or []:
        for name, value in ((container.get("resources") or {}).get("limits") or {}).items():
            if name == gpu_resource or _GPU.fullmatch(name):
                yield name, whole_number(value) or 0


def node_to_read(alive: Sequence[Json], gpu_resource: str) -> str | None:
    """Return the node whose labels name the GPU product: the node of the first pod with a GPU and a node; None without such a pod."""
    nodes = (_node(pod) for pod in alive if count_gpus(pod, gpu_resource))
    return next((node for node in nodes if node), None)


def record_device(draft: Draft, alive: Sequence[Json]) -> None:
    """Record the device of an attempt from its live pods, which are all alike; without pods, keep the status."""
    if not alive:
        return
    # Prefer a pod that has a node: the labels of the node name the product.
    pod = next((pod for pod in alive if _node(pod)), alive[0])
    gpus_per_pod = count_gpus(pod, configured_resource(draft.ftj))
    if not gpus_per_pod:
        draft.update(device=DeviceStatus(type="CPU", summary="CPU"))
        return
    count = gpus_per_pod * draft.spec.distributed.nodes
    before = draft.status.device
    # While the node's labels cannot be read, keep the product in the status, unless another number of GPUs shows that it is outdated.
    reported_product = before.product if before and before.count == count else None
    product = _product(pod, draft.observed.node_labels) or reported_product
    summary = f"{count}x {product or 'GPU'}"
    draft.update(device=DeviceStatus(type="GPU", count=count, product=product, summary=summary))


def _product(pod: Json, node_labels: Mapping[str, Mapping[str, str]]) -> str | None:
    """The GPU product, from the labels of the pod's node, or else from the pod's nodeSelector."""
    labels = node_labels.get(_node(pod) or "", {})
    selector = pod.get("spec", {}).get("nodeSelector") or {}
    products = (source[name] for source in (labels, selector) for name in _PRODUCT_LABELS if source.get(name))
    return next(products, None)


def _node(pod: Json) -> str | None:
    return pod.get("spec", {}).get("nodeName") or None
