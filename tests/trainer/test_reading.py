"""How much memory a rank takes while it reads its part of the weights."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MEASURE = """
import sys, torch, threading, time
from pathlib import Path
from support import networks

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def measure(world, folder):
    import peft, transformers.models.llama.modeling_llama
    from finetune_trainer.train import build
    from finetune_trainer.train.model import load, shard, weights
    recipe = networks.recipe(Path(folder))
    model = load.skeleton(recipe, Path(folder), world)
    network = build.Network(model, build.Sft())
    shard.shard(network, shard.mesh("FSDP", world), "FP32")
    before, peak, done = anonymous(), [0], threading.Event()
    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    weights.materialize(network, world.device)
    weights.read_weights(model, recipe.model, Path(folder), world)
    done.set()
    watcher.join()
    size = 4 * sum(weight.numel() for weight in network.parameters())
    Path(f"{folder}/growth-{world.size}-{world.rank}").write_text(str((max(peak[0], anonymous()) - before) / size))

if __name__ == "__main__":
    size, folder = int(sys.argv[1]), sys.argv[2]
    if size == 1:
        with networks.alone() as world:
            measure(world, folder)
    else:
        networks.on_ranks(size, Path(folder) / "rendezvous", measure, folder)
"""


def test_a_rank_holds_no_more_than_its_part_while_it_reads(tmp_path: Path) -> None:
    """Anonymous memory, as a share of a model of about 200 MB: file pages that the kernel can drop do not count."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    program = tmp_path / "measure.py"
    program.write_text(MEASURE)
    for size in (1, 2):
        subprocess.run([sys.executable, str(program), str(size), str(tmp_path)], check=True, timeout=240)
    grown = {path.name: float(path.read_text()) for path in sorted(tmp_path.glob("growth-*"))}
    print(grown)
    assert grown.pop("growth-1-0") < 1.2
    assert len(grown) == 2
    assert max(grown.values()) < 0.7
