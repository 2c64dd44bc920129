"""Which failure a pod reports, and where it finds its gang."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from finetune_crds.contract import ENV_ATTEMPT, ENV_RECIPE, PodError, TerminationMessage
from finetune_crds.recipe import Recipe
from finetune_trainer.pod.exit_status import RecipeRefusedError, describe
from finetune_trainer.train import launch
from finetune_trainer.train.launch import Gang, find_first_failure
from finetune_trainer.train.runtime import device
from finetune_trainer.train.runtime.scratch import ENV_SCRATCH, write_outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.pods import Pod


def write_error(
    folder: Path, rank: int, *, code: int, reason: str, when: int, origin: int | None = None
) -> None:
    """Leave a rank's message, as if said at `when`."""
    error = PodError(reason=reason, message=f"{reason}!", rank=origin)
    write_outcome(folder, rank, code, TerminationMessage(error=error))
    os.utime(folder / f"rank-{rank}.json", (when, when))


def ended(rank: int, code: int, when: int) -> ProcessFailure:
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="/nowhere")
    failure.timestamp = when
    return failure


def test_the_rank_that_failed_first_speaks_for_the_pod(tmp_path: Path) -> None:
    write_error(tmp_path, 0, code=1, reason="Broken", when=20)
    write_error(tmp_path, 1, code=65, reason="MissingColumn", when=10)
    code, message = describe(find_first_failure({0: ended(0, 1, 20), 1: ended(1, -15, 20)}, tmp_path))
    assert (code, message.error) == (65, PodError(reason="MissingColumn", message="MissingColumn!", rank=1))


def test_the_loss_of_a_peer_is_never_the_cause(tmp_path: Path) -> None:
    write_error(tmp_path, 0, code=1, reason="PeerLost", when=10)
    code, message = describe(find_first_failure({0: ended(0, 1, 10), 1: ended(1, -9, 11)}, tmp_path))
    assert (code, message.error) == (
        137,
        PodError(
            reason="WorkerKilled",
            message="rank 1 was killed by SIGKILL: the container most likely ran out of memory",
            rank=1,
        ),
    )


def test_a_crash_of_native_code_names_where_the_stacks_are(tmp_path: Path) -> None:
    _, message = describe(find_first_failure({0: ended(0, -signal.SIGSEGV, 10)}, tmp_path))
    assert message.error == PodError(
        reason="WorkerKilled",
        message="rank 0 was killed by SIGSEGV: native code crashed; the log of the pod has the Python stacks of the rank",
        rank=0,
    )


def test_an_error_that_all_ranks_agreed_on_names_where_it_came_from(tmp_path: Path) -> None:
    write_error(tmp_path, 0, code=64, reason="ModelNotFound", when=10, origin=3)
    code, message = describe(find_first_failure({0: ended(0, 64, 10)}, tmp_path))
    assert (code, message.error) == (64, PodError(reason="ModelNotFound", message="ModelNotFound!", rank=3))


def test_a_rank_that_said_nothing_is_reported_by_its_exit_code(tmp_path: Path) -> None:
    code, message = describe(find_first_failure({2: ended(2, 3, 10)}, tmp_path))
    assert (code, message.error) == (
        3,
        PodError(reason="WorkerFailed", message="rank 2 exited with code 3: see its log", rank=2),
    )


def test_the_gang_is_found_through_torchruns_environment(pod: Pod) -> None:
    recipe = Recipe.model_validate(pod.but({"distributed.processesPerNode": 3}).recipe)
    environment = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "tiny-0.tiny",
        "PET_MASTER_PORT": "29500",
    }
    assert Gang.of(environment, recipe) == Gang(2, 4, 1, "tiny-0.tiny", 29500)
    alone = Gang.of({}, recipe)
    assert (alone.nodes, alone.processes, alone.node_rank, alone.address) == (1, 3, 0, "localhost")


def test_a_large_model_without_a_gpu_ends_before_its_weights_are_fetched(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    LlamaConfig().save_pretrained(tmp_path / "large")
    monkeypatch.setattr(device.Gpus, "visible", lambda: device.Gpus(0))
    gang = Gang(1, 1, 0, "localhost", 29500)
    with pytest.raises(RecipeRefusedError) as refused:
        launch._choose_device(
            Recipe.model_validate(pod.but({"model.base": str(tmp_path / "large")}).recipe), gang, tmp_path
        )
    assert (refused.value.reason, "has 6.7 billion parameters" in refused.value.message) == ("NoGpu", True)
    launch._choose_device(Recipe.model_validate(pod.recipe), gang, tmp_path)


def test_cpus_that_are_asked_for_hide_the_gpus(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    recipe = Recipe.model_validate(pod.but({"distributed.device": "CPU"}).recipe)
    launch._choose_device(recipe, Gang(1, 2, 0, "localhost", 29500), tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_torchrun_never_starts_a_rank_again(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 10: a gang of fixed size that the operator makes anew; when a part of it comes back, the rest can hang."""
    configs: list[api.LaunchConfig] = []

    def noted(config: api.LaunchConfig, _entrypoint: str) -> Callable[..., None]:
        configs.append(config)
        return lambda *_arguments: None

    monkeypatch.setattr(api, "elastic_launch", noted)
    launch._run_workers(Gang(2, 4, 1, "tiny-0.tiny", 29500), Recipe.model_validate(pod.recipe), tmp_path)
    (config,) = configs
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 4, 0)


def test_a_recipe_that_is_started_by_hand_is_judged_and_that_of_a_pod_is_not(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server has accepted that of a pod, if by the rules of an earlier version."""
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe.model_validate(pod.but({"method.lora": {}}).recipe).to_yaml())
    monkeypatch.setenv(ENV_RECIPE, str(path))
    monkeypatch.setenv(ENV_SCRATCH, "")
    for name in ("set_defaults", "_choose_device", "_run_workers"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RecipeRefusedError) as refused:
            launch.launch()
        monkeypatch.setenv(ENV_ATTEMPT, "1")
        assert launch.launch() is None
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    assert (
        refused.value.message
        == "method: set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning"
    )


VARIABLES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing set": ({}, {"OMP_NUM_THREADS": "4", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    "the allocator's of people": (
        {"PYTORCH_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "1"},
        {"PYTORCH_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "1"},
    ),
    "the allocator's older name": (
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "OMP_NUM_THREADS": "4"},
    ),
}


@pytest.mark.parametrize(("variables", "expected"), VARIABLES.values(), ids=VARIABLES)
def test_what_people_set_for_libraries_stays(variables: dict[str, str], expected: dict[str, str]) -> None:
    environment = dict(variables)
    launch.set_defaults(environment, 4)
    assert environment == {
        **expected,
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "PYTHONFAULTHANDLER": "1",
    }
