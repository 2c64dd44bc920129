"""The script that tutorials show: torch FSDP, and every example padded to the maximum length.

`torchrun -m bench.trainer.padded`, with the work in the environment. Nothing in it is made slow: attention is
torch's scaled_dot_product_attention, the weights are sharded a layer at a time, and on CPU the ranks talk over gloo.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from bench.trainer.meter import Meter
from bench.trainer.work import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SEED, Work


def main() -> None:
    """Train for the steps of the work."""
    work = Work.load()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(SEED)

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    loader = examples(work, tokenizer)
    model = sharded(load(work), work, device)
    optimizer = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE
    )

    meter = Meter()
    model.train()
    for _, batch in zip(range(work.all_steps), loader, strict=False):
        tokens = int(batch["attention_mask"].sum())
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step(tokens)
    meter.save(work.out, f"FSDP2 over {dist.get_world_size()}, sdpa, padded to {work.max_length}")
    dist.destroy_process_group()


def examples(work: Work, tokenizer: PreTrainedTokenizerBase) -> DataLoader:
    """Batches of examples, each padded to the maximum length; no loss on padding."""
    lines = Path(work.rows).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["text"] + tokenizer.eos_token for line in lines]

    def collate(texts: list[str]) -> dict[str, torch.Tensor]:
        batch = tokenizer(
            texts, padding="max_length", truncation=True, max_length=work.max_length, return_tensors="pt"
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "labels": labels,
        }

    sampler: DistributedSampler = DistributedSampler(rows, seed=SEED)
    return DataLoader(rows, batch_size=work.sequences, sampler=sampler, collate_fn=collate)


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
