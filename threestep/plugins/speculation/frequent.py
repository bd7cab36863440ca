"""The tokens among which a head guesses: a few hundred or thousand cover nearly all that is drawn, and the output layer
over the whole vocabulary would be a large part of a guess. (FR-Spec, arXiv:2502.14856, ranks tokens by a corpus; here
they are counted in the rollouts.) A token that is not among them is a guess that is wrong, nothing else.

V vocabulary, S of its tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.rollout import Rollout

_COVERED = 0.99  # of the tokens drawn so far
_WORTH = 0.5  # of the vocabulary at most: the copy of the output layer's rows is read and written once a rollout


class FrequentTokens:
    """Counts the tokens that were drawn."""

    def __init__(self) -> None:
        self._counts_V: torch.Tensor | None = None

    def note(self, rollout: Rollout, vocabulary: int) -> None:
        """Count a rollout's tokens."""
        drawn_M = rollout.response_ids_BR[rollout.response_mask_BR]
        counts_V = torch.bincount(drawn_M, minlength=vocabulary)
        self._counts_V = counts_V if self._counts_V is None else self._counts_V.to(counts_V.device) + counts_V

    def state_dict(self) -> list[int] | None:
        """Return the counts, as JSON holds them."""
        return None if self._counts_V is None else self._counts_V.tolist()

    def load_state_dict(self, state: list[int] | None) -> None:
        self._counts_V = None if state is None else torch.tensor(state)

    def among(self, prompt_ids_M: torch.Tensor) -> torch.Tensor | None:
        """Return int64 [S], in ascending order: the most frequent tokens, and those of the prompts. None where all are
        to be taken: nothing was counted, or they are too many."""
        if self._counts_V is None:
            return None
        ranked_V = self._counts_V.sort(descending=True, stable=True)
        reached_V = ranked_V.values.cumsum(0) >= _COVERED * self._counts_V.sum()
        most = int(reached_V.int().argmax()) + 1
        among_S = torch.cat([ranked_V.indices[:most], prompt_ids_M]).unique()
        return among_S if len(among_S) <= _WORTH * len(self._counts_V) else None


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many logits a model's output layer gives."""
    layer: Any = model.get_output_embeddings()
    return int(layer.weight.shape[0])


class FewLogits:
    """A model's output layer, of some tokens alone; of all where among_S is None."""

    def __init__(self, model: PreTrainedModel, among_S: torch.Tensor | None = None) -> None:
        """among_S: int64, in ascending order."""
        self._layer: Any = model.get_output_embeddings()
        # Other kinds (with adapters, rounded weights) are more than a product with their weight.
        self.among_S = among_S if type(self._layer) is torch.nn.Linear else None
        if self.among_S is not None:
            self._weight_SH = self._layer.weight[self.among_S]
            self._bias_S = None if self._layer.bias is None else self._layer.bias[self.among_S]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [..., S]."""
        if self.among_S is None:
            return self._layer(states).float()
        return functional.linear(states, self._weight_SH, self._bias_S).float()
