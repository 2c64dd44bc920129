"""New tokens: their rows in the embedding and the output layer, initialized to the mean of the stored rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.train.model.rows import gather_tensor, set_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_crds.training import Model

# Rows of an embedding that are summed at once, in fp64.
_ROWS_PER_SUM = 8192


@dataclass(frozen=True)
class NewTokens:
    """The ids of the tokens that a recipe adds to the vocabulary, ascending."""

    ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Model, tokenizer: PreTrainedTokenizerBase) -> NewTokens:
        """Return the ids of model.newTokens.

        Args:
            model: the model of the recipe.
            tokenizer: the model's, with the new tokens.
        """
        vocabulary = tokenizer.get_vocab()
        return cls(tuple(sorted(vocabulary[token] for token in model.new_tokens)))

    def count_rows(self, stored_rows: int) -> int:
        """Return how many rows an embedding of `stored_rows` rows needs; it may already have rows for new tokens."""
        return max(stored_rows, 1 + max(self.ids, default=-1))

    def enlarge(self, model: PreTrainedModel) -> None:
        """Add the rows of the new tokens to an unsharded model and initialize them, also on the meta device."""
        if not self.ids:
            return
        stored_weights = embedding_and_head_weights(model)
        stored_rows = len(stored_weights[0])
        means = [compute_row_mean(weight.detach()) for weight in stored_weights]
        rows = self.count_rows(stored_rows)
        if rows > stored_rows:
            model.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            # NB: resizing replaces the parameters.
            for weight, mean in zip(embedding_and_head_weights(model), means, strict=True):
                weight[list(self.ids)] = mean.to(weight)


NO_TOKENS = NewTokens()


class ExtendedWeight:
    """A stored weight with rows for new tokens, readable in slices.

    The new rows are the mean of all stored rows (Hewitt, "Initializing new word embeddings for pretrained language models",
    2021), as in transformers, but without its noise of 3e-5 standard deviations. All ranks read the same values.

    Args:
        stored: a tensor, or a slice of a file.
        new: the new tokens.
    """

    def __init__(self, stored: Any, new: NewTokens) -> None:
        self._stored = stored
        self._ids = new.ids
        self._stored_rows, *self._row_shape = shape_of(stored)
        self._rows = new.count_rows(self._stored_rows)
        self._mean = compute_row_mean(stored)

    @property
    def shape(self) -> list[int]:
        """Its shape, with the new rows."""
        return [self._rows, *self._row_shape]

    def __getitem__(self, at: slice) -> torch.Tensor:
        begin, end, _ = at.indices(self._rows)
        stored_end = min(end, self._stored_rows)
        values = self._mean.to(self._stored[:1].dtype).expand(max(0, end - begin), *self._row_shape).clone()
        if begin < stored_end:
            values[: stored_end - begin] = self._stored[begin:stored_end]
        # NB: the stored weight may already have rows for new tokens. Nothing has trained these rows, so they get the mean too.
        new_rows = [token - begin for token in self._ids if begin <= token < end]
        values[new_rows] = self._mean.to(values)
        return values


def shape_of(weight: Any) -> list[int]:
    """Return the shape of a tensor, of a slice of a file, or of an extended weight."""
    return list(weight.get_shape() if hasattr(weight, "get_shape") else weight.shape)


def compute_row_mean(weight: Any) -> torch.Tensor:
    """Return the mean of the rows of a tensor or a slice of a file, fp32 [...]."""
    rows, *row_shape = shape_of(weight)
    total: torch.Tensor | None = None
    for begin in range(0, rows, _ROWS_PER_SUM):
        summed = weight[begin : begin + _ROWS_PER_SUM].double().sum(dim=0)
        total = summed if total is None else total + summed
    return torch.zeros(row_shape) if total is None else (total / rows).float()


def embedding_and_head_weights(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return the parameters of the embedding and of the output layer, which a reward model does not have; tied parameters once."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    return list({id(weight): weight for end in ends for weight in end.parameters()}.values())


def embedding_and_head_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the embedding and of the output layer, for example ["model.embed_tokens", "lm_head"]; only one for a reward model."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


def initialize_trained_rows(model: torch.nn.Module) -> None:
    """Copy the base's rows of new tokens into their trained rows; a collective call."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for layer in model.modules():
        # A tied layer uses the trained rows of the layer that it is tied to.
        if isinstance(layer, TrainableTokensLayer) and layer.tied_adapter is None:
            weight: Any = layer.base_layer.weight
            all_rows = gather_tensor(weight).detach()
            for adapter, ids in layer.token_indices.items():
                rows = all_rows[ids]
                set_rows(layer.trainable_tokens_delta[adapter], rows.float())
                layer.trainable_tokens_original[adapter].copy_(rows)
