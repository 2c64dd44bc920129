"""The script that tutorials show: torch FSDP, and every example padded to the maximum length, or to the longest of its batch.

`torchrun -m bench.trainer.padded [longest]`, with the work in the environment. Padded to the longest, a batch has as many rows as a
packed one has on average. Nothing in it is made slow: attention is
torch's scaled_dot_product_attention, the weights are sharded a layer at a time, and on CPU the ranks talk over gloo.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from bench.trainer.meter import Meter
from bench.trainer.work import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SEED, Work

# The label of what is no target, in transformers.
_IGNORED = -100


def main() -> None:
    """Train for the steps of the work."""
    work, longest = Work.load(), sys.argv[1:] == ["longest"]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(SEED)

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    batches = Batches(tokenizer, work, longest=longest)
    size = work.sequences * (work.rows_of_a_sequence if longest else 1)
    rows: Any = tokens_of(work.rows, tokenizer, work.max_length)
    sampler: DistributedSampler = DistributedSampler(rows, seed=SEED)
    loader = DataLoader(rows, batch_size=size, sampler=sampler, collate_fn=batches)
    probe: Any = tokens_of(work.probe, tokenizer, work.max_length)
    model = sharded(load(work), work, device)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE
    )

    meter = Meter()
    meter.loss = probed(model, [*DataLoader(probe, batch_size=size, collate_fn=batches)], device)
    model.train()
    meter.start()
    for step, batch in zip(range(work.all_steps), loader, strict=False):
        tokens = int(batch["attention_mask"].sum())
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(tokens, batch["input_ids"].numel())
        if step == 0:
            meter.gradient = norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
    to = f"the longest of {size} rows" if longest else str(work.max_length)
    meter.save(work.out, f"FSDP2 over {dist.get_world_size()}, sdpa, padded to {to}")
    dist.destroy_process_group()


def tokens_of(rows: str, tokenizer: PreTrainedTokenizerBase, most: int) -> list[list[int]]:
    """The tokens of each text of a file, the one that ends it included; before the training, as the others have them."""
    lines = Path(rows).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] + tokenizer.eos_token for line in lines]
    token_ids: list[list[int]] = tokenizer(texts, truncation=True, max_length=most)["input_ids"]
    return token_ids


def probed(model: Any, batches: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """The loss of some batches, the mean of their targets; no batch is larger than those of the training."""
    model.eval()
    losses, targets = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            # The first token of a row is no target.
            count = int((batch["labels"][:, 1:] != _IGNORED).sum())
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            losses += count * model(**on_device).loss.item()
            targets += count
    return losses / targets


@dataclass(frozen=True)
class Batches:
    """Makes batches of examples, padded to the maximum length or to the longest; no loss on padding."""

    tokenizer: PreTrainedTokenizerBase
    work: Work
    longest: bool

    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """A batch."""
        length = max(map(len, rows)) if self.longest else self.work.max_length
        batch = {
            "input_ids": torch.full((len(rows), length), self.tokenizer.pad_token_id),
            "attention_mask": torch.zeros((len(rows), length), dtype=torch.long),
            "labels": torch.full((len(rows), length), _IGNORED),
        }
        for at, row in enumerate(rows):
            batch["input_ids"][at, : len(row)] = batch["labels"][at, : len(row)] = torch.tensor(row)
            batch["attention_mask"][at, : len(row)] = 1
        return batch


def load(work: Work) -> Any:
    """The model in fp32, or with LoRA on a base in the precision of the work."""
    compute = torch.bfloat16 if work.precision == "BF16" else torch.float32
    frozen = work.method == "LoRA"
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=compute if frozen else torch.float32)
    if frozen:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear"
        )
        model = get_peft_model(model, config)
    return model


def sharded(model: Any, work: Work, device: torch.device) -> Any:
    """The model on its device, sharded a decoder layer at a time."""
    compute = torch.bfloat16 if work.precision == "BF16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    model.to(device)
    base = model.get_base_model() if work.method == "LoRA" else model
    for layer in base.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # NB: over gloo, averaging silently sums (pytorch#162338).
                module.set_force_sum_reduction_for_comms(True)
    return model


if __name__ == "__main__":
    main()
