"""TRL's SFTTrainer with its packing, as its documentation says to use it, or with our attention.

`torchrun -m bench.trainer.trl_packed [isolated]`, with the work in the environment. Best-fit packing, and batches without
padding whose documents are isolated: by flash attention where it is installed, else by the mask that transformers
builds for scaled_dot_product_attention out of the positions. That mask grows with the square of the batch, so there
the packs of a step are taken one by one, which is the fastest that this trainer can do. With `isolated`, our attention is registered
in transformers, so that what remains between TRL and us is the loop.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from bench.trainer.meter import Meter
from bench.trainer.work import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SEED, Work
from finetune_trainer.train.model.network.attention import register

_IN_BF16 = "isolated_in_bf16"


class Steps(TrainerCallback):
    """Tells the meter of each optimizer step, and of its tokens; a batch without padding has no others."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.tokens = 0
        self._steps = 0

    def counting(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """A trainer's forward and backward pass, counting the tokens of its batches."""

        def counted(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            self.tokens += inputs["input_ids"].numel()
            self._begin()
            return training_step(model, inputs, *arguments, **options)

        return counted

    def _begin(self) -> None:
        if self._steps == 0 and self.tokens:
            self._steps = 1
            self.meter.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An optimizer step has ended."""
        self.meter.step(self.tokens, self.tokens)
        self.tokens = 0

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """The trainer logs the first step, which is one of the warm-up, with the norm of its gradients before they are clipped."""
        if math.isnan(self.meter.gradient) and "grad_norm" in logs:
            self.meter.gradient = logs["grad_norm"]


def main() -> None:
    """Train for the steps of the work."""
    disable_progress_bar()
    work, isolated = Work.load(), sys.argv[1:] == ["isolated"]
    cuda = torch.cuda.is_available()
    flash = cuda and importlib.util.find_spec("flash_attn") is not None
    attention = register_attention(cuda=cuda) if isolated else "flash_attention_2" if flash else "sdpa"
    frozen = work.method == "LoRA"
    compute = torch.bfloat16 if work.precision == "BF16" else torch.float32
    arguments = config(work, cuda=cuda, packs=work.sequences if flash or isolated else 1)
    meter = Meter()
    steps = Steps(meter)
    trainer: Any = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            work.model, dtype=compute if frozen else torch.float32, attn_implementation=attention
        ),
        args=arguments,
        train_dataset=Dataset.from_json(work.rows, cache_dir=f"{work.out}/datasets"),
        eval_dataset=Dataset.from_json(work.probe, cache_dir=f"{work.out}/datasets"),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        peft_config=LoraConfig(
            task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear"
        )
        if frozen
        else None,
        callbacks=[steps],
    )
    if isolated:
        trainer.compute_loss = with_documents(trainer.compute_loss)
    meter.loss = trainer.evaluate()["eval_loss"]
    trainer.training_step = steps.counting(trainer.training_step)
    trainer.train()
    meter.save(work.out, f"{sharding(work, cuda=cuda)}, {attention}, packed (bfd, padding-free)")


def register_attention(*, cuda: bool) -> str:
    """Register our attention, and return its name. On a GPU it gets its states in bf16: autocast leaves rotated queries and keys in fp32."""
    name = register(gpu=cuda)
    if not cuda:
        return name
    isolated_attention = AttentionInterface()[name]

    def attend(module: Any, *states: Any, **options: Any) -> Any:
        query, key, value, *others = states
        return isolated_attention(
            module, query.bfloat16(), key.bfloat16(), value.bfloat16(), *others, **options
        )

    AttentionInterface.register(_IN_BF16, attend)
    return _IN_BF16


def with_documents(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer's loss, whose model gets the bounds of the documents that our attention needs."""

    def computed(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        bounds = {"cu_seqlens": inputs["cu_seq_lens_q"], "max_seqlen": inputs["max_length_q"]}
        return compute_loss(model, {**inputs, **bounds}, *arguments, **options)

    return computed


def config(work: Work, *, cuda: bool, packs: int) -> SFTConfig:
    """The trainer's arguments: as the others train, and after the first step nothing written, logged or evaluated meanwhile."""
    sharded: dict[str, Any] = (
        {"fsdp": True, "fsdp_config": {"version": 2}} if cuda and work.processes > 1 else {}
    )
    return SFTConfig(
        output_dir=f"{work.out}/trl",
        packing=True,
        packing_strategy="bfd",
        max_length=work.max_length,
        max_steps=work.all_steps,
        per_device_train_batch_size=packs,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=work.sequences // packs,
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=1.0,
        bf16=work.precision == "BF16",
        use_cpu=not cuda,
        ddp_backend=None if cuda else "gloo",
        logging_strategy="steps",
        logging_first_step=True,
        logging_steps=work.all_steps + 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        **sharded,
    )


def sharding(work: Work, *, cuda: bool) -> str:
    """How the ranks share the work. accelerate cannot shard on CPU: its ranks hold a copy each."""
    if work.processes == 1:
        return "one process"
    return f"FSDP2 over {work.processes}" if cuda else f"DDP over {work.processes} (cannot shard on CPU)"


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
