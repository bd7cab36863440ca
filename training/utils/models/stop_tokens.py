"""The tokens at which a finished model stops, for whoever serves it: `eos_token_id` of its generation_config.json.

Plain transformers and every server read it. The tokens that a model has learnt to end its turns with are often not its
tokenizer's eos: `<|im_end|>` on a base model, another token after a tool call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a control token looks like in a vocabulary that does not mark it as one: <|im_end|>, <end_of_turn>, [EOS].
_CONTROL = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """The ids in the model's generation configuration."""
    return stop_tokens_in(getattr(model, "generation_config", None), model.name_or_path)


def stop_tokens_in(config: Any, where: str) -> list[int]:
    """The ids in a configuration, which may hold one, several or none. ThreestepError for anything else.

    where: folder or hub name of the model
    """
    given: Any = getattr(config, "eos_token_id", None)
    tokens = [token for token in (given if isinstance(given, list | tuple) else [given]) if token is not None]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise ThreestepError(
            f"'{where}': eos_token_id in generation_config.json (or, without that file, in config.json) must be "
            f"a token ID or a list of token IDs, got {given!r}; correct it"
        )
    return tokens


def joined_stop_tokens(
    own: Sequence[int], tokenizer: PreTrainedTokenizerBase, trained: Sequence[int], inside: Collection[int] = ()
) -> list[int]:
    """Return the ids that were `trained` to end a response, a model's own stop tokens but for pieces of ordinary text
    (`unused_stop_tokens`), and the tokenizer's eos.

    inside: special tokens that were trained before the end of responses too, at which a model must not stop; the first
        of `trained` stops it all the same.
    """
    others = [*trained[1:], *(token for token in own if _may_end(token, tokenizer)), tokenizer.eos_token_id]
    return list(dict.fromkeys([trained[0], *(token for token in others if token is not None and token not in inside)]))


def unused_stop_tokens(own: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Name those of a model's own stop tokens at which nothing ends here, in a sentence; None if there are none.

    An ordinary piece of text is named as an end where a tokenizer was replaced under a configuration (Llama's default
    is 2, whatever that is); responses that ended there would be cut anywhere.
    """
    others = [token for token in own if not _may_end(token, tokenizer) and token != tokenizer.eos_token_id]
    if not others:
        return None
    words = {token: tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(tokenizer) else None for token in others}
    named = ", ".join(
        f"{token} ({'no token of the tokenizer' if word is None else repr(word)})" for token, word in words.items()
    )
    return (
        f"warning: the model's configuration lists the end tokens {named}, which the tokenizer treats as text: "
        "responses do not end there; if they should, register these as added tokens in the tokenizer"
    )


def _may_end(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """True for a token that is not ordinary text: an added one, special or not, or one that is written as control
    tokens are."""
    if token in tokenizer.added_tokens_decoder:
        return True
    inside = 0 <= token < len(tokenizer)
    return inside and _CONTROL.fullmatch(str(tokenizer.convert_ids_to_tokens(token))) is not None


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
