"""The data of a run: its splits at one version, tokenized once in each pod of the first attempt, and the plan of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune_trainer.examples import answer_end, columns
from finetune_trainer.pod.exit_status import DataError, TrainingError
from finetune_trainer.train.data import dataset, pack, read
from finetune_trainer.train.data.encode import Encoder
from finetune_trainer.train.data.feed import Examples
from finetune_trainer.train.data.token_cache import TokenCache
from finetune_trainer.train.runtime.recipe import row_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.data import Columns, Splits
    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.runtime.distributed import World

_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """The data that a run trains and evaluates on."""

    splits: Splits
    """The location of the data, with the version that all ranks and all attempts read."""
    train: dataset.Split
    validation: Examples | None
    plan: pack.Plan
    columns: Columns
    """The columns of an example in the splits, even if the recipe does not name them."""

    @property
    def tokens(self) -> int:
        """Tokens in the training split."""
        return int(self.train.offsets[-1])

    @property
    def validation_split(self) -> dataset.Split | None:
        """The examples of the validation split, if the data has one."""
        return self.validation.split if self.validation is not None else None

    def summary(self, recipe: Recipe) -> str:
        """Describe the examples and the steps in one line."""
        plan = self.plan
        sequences = len(plan.sequences)
        full = (
            f" ({self.tokens / (sequences * row_tokens(recipe)):.0%} full)" if recipe.training.packing else ""
        )
        return (
            f"{len(self.train):,} examples with {self.tokens:,} tokens in {sequences:,} sequences{full}; "
            f"{plan.max_steps:,} steps of {plan.global_batch} sequences"
        )

    def with_splits(self, train: dataset.Split, validation: dataset.Split | None) -> Corpus:
        """Return the corpus with these splits: the same examples with more arrays, such as the log-probabilities under a reference model."""
        if self.validation is None or validation is None:
            return replace(self, train=train)
        return replace(self, train=train, validation=replace(self.validation, split=validation))


def load(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    folder: Path,
    *,
    version: int | None,
    table_versions: str = "",
    on_counts: Callable[[Mapping[str, float]], None],
    confirm: Callable[[], None] = lambda: None,
) -> Corpus:
    """Read and tokenize the splits of a recipe; all ranks call this together.

    Args:
        recipe: a recipe with data.splits.
        tokenizer: the base model's.
        world: the ranks.
        folder: the folder in which the ranks of a pod share the tokens.
        version: version of the Delta table that an earlier attempt read; None: the recipe's version, or the newest.
        table_versions: versions of the tables of splits that an earlier attempt read, as in `Splits.versions`; empty: as for `version`.
        on_counts: called with the counts of each tokenized split, by MLflow name, on the ranks that tokenize.
        confirm: called on rank 0 before tokens are stored; raises SupersededError if newer pods claimed the checkpoint folder.

    Raises:
        DataError: data is missing or broken, its columns are not known, or evaluation is configured without a validation
            split.
        RecipeRefusedError: examples are conversations, and nothing says how to render them; or the objective does not
            work with the examples that were found.
    """
    splits = _pin_versions(recipe, world, version, table_versions)
    if recipe.data.columns is None:
        complete_recipe = world.agree(lambda: resolve_columns(recipe, splits) if world.leads else None)
        # Every rank gets the recipe of rank 0, which is never None: "or recipe" is for the type checker.
        recipe = world.broadcast(complete_recipe) or recipe

    def tokenize() -> None:
        encoder = Encoder.of(recipe, tokenizer)
        if encoder.documents.columns.messages and (missing := answer_end.explain_missing_stop(tokenizer)):
            world.say(f"NB: {missing}")
        prepared = read.has_token_ids(splits, encoder.documents.encoding)
        # Token ids in the table need no cache: each attempt reads them again.
        cache = None if prepared else TokenCache.of(recipe, splits, encoder, confirm)
        for name in _SPLITS:
            if cache is not None and cache.fetch(name, folder / name):
                world.say(f"{name}: using the tokens of an earlier attempt")
                continue
            # The result is False if there is no validation split: then there is no folder either.
            if dataset.tokenize(splits, name, encoder, folder / name, prepared=prepared):
                world.say(
                    f"{name}: {encoder.summary()}{' with the token ids of the table' if prepared else ''}"
                )
                on_counts(encoder.metrics(name))
                if cache is not None and world.leads:
                    cache.store(name, folder / name)

    world.agree_in_pod(tokenize)
    train = dataset.Split.load(folder / "train")
    _check_same_tokens(train, world)
    plan = _plan_steps(recipe, train)
    if not (folder / "validation").is_dir():
        world.agree(lambda: _check_no_evaluation(recipe))
        return Corpus(
            splits, train, validation=None, plan=plan, columns=columns.find_table_columns(recipe.data)
        )
    validation = dataset.Split.load(folder / "validation")
    evaluation_examples = Examples(validation, _pack_examples(recipe, validation))
    return Corpus(splits, train, evaluation_examples, plan, columns.find_table_columns(recipe.data))


def _check_same_tokens(train: dataset.Split, world: World) -> None:
    """Check that all pods have the same tokens.

    Raises:
        TrainingError: the tokens of the pods differ.
    """
    if len(set(world.gather(train.digest))) > 1:
        raise TrainingError(
            "TokensDiffer",
            "the pods tokenized the training split differently: run the same image in all pods, and delete the folders "
            "tokens-* next to the checkpoints",
        )


def _pin_versions(recipe: Recipe, world: World, version: int | None, table_versions: str) -> Splits:
    """Return the recipe's splits at `version`, or at `table_versions`, or else at the versions that rank 0 reads; files have none."""
    splits = recipe.data.splits
    assert splits is not None  # noqa: S101 - load_recipe() refuses a recipe without splits
    if version is not None:
        return splits.model_copy(update={"version": version})
    earlier_splits = splits.pin(table_versions)
    leader_splits = world.agree(lambda: read.pin_versions(earlier_splits) if world.leads else None)
    # Every rank gets the splits of rank 0, which are never None: "or splits" is for the type checker.
    return world.broadcast(leader_splits) or splits


def resolve_columns(recipe: Recipe, splits: Splits) -> Recipe:
    """Return the recipe with the columns of an example: its own, or the columns that the schema of the splits shows.

    Raises:
        DataError: the columns are not known, or the data is missing or broken.
        RecipeRefusedError: the objective does not work with the examples that were found.
    """
    if recipe.data.columns is not None:
        return recipe
    where = splits.path or splits.train or ""
    schema_columns = columns.find_columns(read.read_schema(splits), where, objective=recipe.objective.type)
    print(f"columns {columns.describe_columns(schema_columns)}", flush=True)
    # NB: data.prepare is removed so that `find_table_columns` returns these columns unchanged: they were found in the splits themselves, not
    # in the source of a preparation.
    data = recipe.data.model_copy(update={"columns": schema_columns, "prepare": None})
    complete = recipe.model_copy(update={"data": data})
    from finetune_trainer.pod import spec_rules

    spec_rules.check_columns(recipe, complete)
    return complete


def _check_no_evaluation(recipe: Recipe) -> None:
    training = recipe.training
    if training.eval_every_steps is not None or training.early_stopping is not None:
        raise DataError(
            "EmptySplit",
            "training.evalEverySteps or training.earlyStopping requires a validation split, but the data has none: add one, or "
            "remove the fields",
        )


def _pack_examples(recipe: Recipe, split: dataset.Split) -> list[list[int]]:
    packing = recipe.training.packing
    return pack.pack_examples(split.lengths, max_length=row_tokens(recipe), packing=packing)


def _plan_steps(recipe: Recipe, train: dataset.Split) -> pack.Plan:
    training = recipe.training
    return pack.Plan.of(
        _pack_examples(recipe, train),
        # NB: by the recipe's number of ranks, not by the actual one: a resumed run on other ranks takes the same steps.
        global_batch=recipe.global_batch,
        seed=training.seed,
        epochs=training.epochs,
        max_steps=training.max_steps,
    )
