"""How much memory a rank takes while it reads its part of the weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.train.model import shard
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.weights import fill, load
from finetune_trainer.train.objectives.sft import Sft
from support import networks

if TYPE_CHECKING:
    from finetune_trainer.train.runtime.distributed import World


def anonymous_bytes() -> int:
    """Anonymous memory of this process: file pages that the kernel can drop do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure_growth(world: World, folder: Path) -> None:
    """Read the weights, and write by how much memory grew at its peak, as a share of the model."""
    recipe = networks.recipe(folder)
    model = load.build_skeleton(recipe, folder, world)
    network = Network(model, Sft())
    shard.shard(network, shard.build_mesh("FSDP", world), "FP32")
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    fill.materialize(network, world.device)
    fill.read_weights(model, recipe.model, folder, world)
    done.set()
    watcher.join()
    size = 4 * sum(weight.numel() for weight in network.parameters())
    growth = (max(peak[0], anonymous_bytes()) - before) / size
    (folder / f"growth-{world.size}-{world.rank}").write_text(str(growth))


def test_a_rank_holds_no_more_than_its_part_while_it_reads(tmp_path: Path) -> None:
    """Of a model of about 200 MB, beside which other memory is small."""
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
    for ranks in (1, 2):
        networks.on_ranks(ranks, tmp_path / f"rendezvous-{ranks}", measure_growth, tmp_path)
    growth = {path.name: float(path.read_text()) for path in sorted(tmp_path.glob("growth-*"))}
    print(growth)
    assert growth.pop("growth-1-0") < 1.2
    assert len(growth) == 2
    assert max(growth.values()) < 0.7
