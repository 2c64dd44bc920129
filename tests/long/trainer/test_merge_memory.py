"""How much memory a merge takes: about one file of weights, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MEASURE = """
import json, sys, warnings
from pathlib import Path

import peft, torch, transformers.models.llama.modeling_llama

from finetune_trainer.train.model.memory import speed
from finetune_trainer.train.model.weights import merge, standalone
from support import networks

warnings.simplefilter("ignore")
way, folder = sys.argv[1], Path(sys.argv[2])
standalone._MAX_SHARD_SIZE = "25MB"
if way == "whole":
    merge._needs_whole_base = lambda *_: True
spec = networks.recipe(folder / "base").model
torch.randn(512, 512) @ torch.randn(512, 512)

def peak():
    return speed.read_peak_memory(torch.device("cpu")) / 2**20

before = peak()
if way == "copied":
    merge.copy_base(folder / "base", spec, folder / way)
else:
    merge.merge_into_base(folder / "base", folder / "adapter", spec, folder / way)
print(json.dumps(peak() - before))
"""
MAKE = """
import sys
from pathlib import Path

import peft, torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
config = LlamaConfig(vocab_size=8000, hidden_size=768, intermediate_size=2048, num_hidden_layers=14,
                     num_attention_heads=12, tie_word_embeddings=False)
model = LlamaForCausalLM(config).to(torch.bfloat16)
print(2 * sum(weight.numel() for weight in model.parameters()) / 2**20)
model.save_pretrained(folder / "base", max_shard_size="25MB")
lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False)
peft.get_peft_model(model, lora).save_pretrained(folder / "adapter", save_embedding_layers=False)
"""


def output_of(program: str, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], check=True, timeout=600, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def test_a_merge_takes_little_more_than_a_file_and_the_adapter(tmp_path: Path) -> None:
    size = output_of(MAKE, tmp_path)
    grown = {way: output_of(MEASURE, way, tmp_path) for way in ("whole", "streamed", "copied")}
    print(f"{size:.0f} MiB in files of 25 MB: grown by", {way: f"{by:.0f} MiB" for way, by in grown.items()})
    assert size > 200
    assert grown["whole"] > 0.9 * size
    # A file of the base, one that is written, the adapter, and what a layer's merge takes.
    assert grown["streamed"] < 130
    assert grown["copied"] < 90
