"""Counts the model FLOPs of a step, and reads the peak FLOP/s and the peak memory of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune_trainer.train.model.network import experts

if TYPE_CHECKING:
    from finetune_trainer.train.model.network.trained_network import Network

# Dense bf16 FLOP/s by a part of the device's name, from NVIDIA's data sheets. The first part that matches counts: longer parts first.
_PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of the GPU in dense bf16, in FLOP/s; None if it is unknown, for example for a MIG slice."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        return None
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


class Flops:
    """Model FLOPs by 6 N tokens + 12 L H x attended (Chowdhery et al., arXiv:2204.02311, appendix B).

    N is the number of parameters, L of layers, H the width; a token attends to all of its document. An embedding
    multiplies nothing unless it is also the output layer, and only the experts that a token uses count. Frozen weights count 4 N:
    their gradients are not computed.
    """

    def __init__(self, network: Network) -> None:
        config = network.base.config.get_text_config()
        embedding_ids = {id(weight) for weight in network.base.get_input_embeddings().parameters()}
        untied_embedding_ids = embedding_ids - {id(weight) for weight in network.head.parameters()}
        share_of_used_experts = _share_of_used_experts(network)
        self._flops_per_token = 0.0
        for name, weight in network.base.named_parameters():
            # The original of a layer in modulesToSave is still a part of the model, but computes nothing.
            if ".original_module." in name or id(weight) in untied_embedding_ids:
                continue
            used_share = share_of_used_experts if ".experts." in name else 1.0
            flops_per_number = 6.0 if weight.requires_grad else 4.0
            self._flops_per_token += flops_per_number * count_numbers(weight) * used_share
        self._flops_per_pair: float = 12.0 * config.num_hidden_layers * config.hidden_size

    def count(self, tokens: float, attended: float) -> float:
        """Return the FLOPs of the forward and backward passes.

        Args:
            tokens: number of tokens.
            attended: the sum of the squares of the documents' lengths.
        """
        return self._flops_per_token * tokens + self._flops_per_pair * attended


def _share_of_used_experts(network: Network) -> float:
    read_field = experts.field_reader(network.base.config.get_text_config())
    expert_count = experts.count_per_layer(read_field)
    if not expert_count:
        return 1.0
    # NB: if the config does not have the experts per token, all experts count as used.
    used_experts = experts.count_per_token(read_field) or expert_count
    return used_experts / expert_count


def count_numbers(weight: torch.Tensor) -> int:
    """Return the number of elements of a weight, also of a 4-bit weight, which packs two per byte."""
    state = getattr(weight, "quant_state", None)
    return int(weight.numel() if state is None else state.shape.numel())


def read_peak_memory(device: torch.device) -> int:
    """Read the peak memory of this rank in bytes: of the GPU, or, without a GPU, of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # NB: not ru_maxrss, which starts from the peak of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
