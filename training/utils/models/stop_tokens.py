"""At which tokens a finished model stops, for whoever serves it: `eos_token_id` of its generation_config.json.

Plain transformers and every server read it. The tokens that a model has learnt to end its turns with are often not its
tokenizer's eos: `<|im_end|>` on a base model, a token of its own behind a tool call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.run.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """The ids in the model's generation configuration."""
    return stop_tokens_in(getattr(model, "generation_config", None), model.name_or_path)


def stop_tokens_in(config: Any, where: str) -> list[int]:
    """The ids in a configuration, which may hold one, several or none. ThreestepError for anything else.

    where: folder or hub name of the model
    """
    own: Any = getattr(config, "eos_token_id", None)
    tokens = [token for token in (own if isinstance(own, list | tuple) else [own]) if token is not None]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise ThreestepError(
            f"'{where}': eos_token_id in generation_config.json (or in config.json without that file) expects the "
            f"number of a token, or a list of them, got {own!r}; correct it"
        )
    return tokens


def joined_stop_tokens(
    own: Sequence[int], tokenizer: PreTrainedTokenizerBase, trained: Sequence[int], inside: Collection[int] = ()
) -> list[int]:
    """Return the ids that were `trained` to end a response, a model's own stop tokens that are special tokens of the
    tokenizer, and the tokenizer's eos.

    inside: special tokens that were trained before the end of responses too, at which a model must not stop; the first
        of `trained` stops it all the same.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    others = [*trained[1:], *(token for token in own if token in special), tokenizer.eos_token_id]
    return list(dict.fromkeys([trained[0], *(token for token in others if token is not None and token not in inside)]))


def set_stop_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trained: Sequence[int], inside: Collection[int] = ()
) -> None:
    """Make the model stop at its `joined_stop_tokens`."""
    stops = joined_stop_tokens(stop_tokens(model), tokenizer, trained, inside)
    generation: Any = model.generation_config
    if generation is None:  # transformers cannot generate with it
        return
    generation.eos_token_id = stops if len(stops) > 1 else stops[0]
    generation._from_model_config = False  # transformers 4 would take eos_token_id from config.json again
