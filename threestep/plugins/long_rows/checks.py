"""Refusals of what does not go over several ranks: models without heads to share out, and features that read
whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from threestep.plugins.long_rows.arguments import FLAG, LongRowsArguments
from training.utils.base.errors import ThreestepError
from training.utils.plugins.plugin import StepNeeds
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.base.errors import Mistakes

_ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers, as configurations of transformers name them


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note flags that need whole rows on one rank when ranks share rows (`Hooks.check`)."""
    settings = flags.settings
    others = {f"--{name}": bool(settings.get(name)) for name in ("reuse_forwards", "reuse_values")}
    others |= {flag: asks for needs in hooks("step_needs") for flag, asks in needs(flags).whole_rows.items()}
    check_beside(mistakes, flags.added.of(LongRowsArguments).sequence_parallel_size, others)


def step_needs(flags: Any) -> StepNeeds:
    """The needs of shared rows (`Hooks.step_needs`)."""
    size = flags.added.of(LongRowsArguments).sequence_parallel_size
    return StepNeeds(own_forwards=f"ranks share rows ({FLAG} {size})" if size > 1 else "")


def check_beside(mistakes: Mistakes, size: int, others: Mapping[str, bool]) -> None:
    """Note flags that cannot be combined with P > 1. others: flags as given, True if they are set."""
    for given, asks in others.items():
        mistakes.require(
            size == 1 or not asks,
            f"{FLAG} {size} cannot be combined with {given} yet, which needs whole rows on one rank; drop one of them",
        )


def check_model(model: PreTrainedModel, size: int, longest_tokens: int) -> None:
    """ThreestepError if the rows of a transformers model cannot be split across `size` ranks.

    longest_tokens: of the sequences
    """
    if size == 1:
        return
    text_config, name = model.config.get_text_config(), type(model).__name__
    reason = _why_not(model, text_config, longest_tokens)
    if reason is not None:
        raise ThreestepError(f"{FLAG} {size}: {name} {reason}; drop {FLAG}, or use another model")
    heads = int(text_config.num_attention_heads)
    if heads % size:
        divisors = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ThreestepError(
            f"{FLAG} must divide the {heads} attention heads of {name}, got {size}; use one of {divisors}"
        )


def sizes_for(model: PreTrainedModel, ranks: int, longest_tokens: int) -> list[int]:
    """Return in ascending order how many of `ranks` can share a row of a transformers model; 1 always can."""
    text_config = model.config.get_text_config()
    if _why_not(model, text_config, longest_tokens) is not None:
        return [1]
    heads = int(text_config.num_attention_heads)
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and heads % size == 0]


def _why_not(model: PreTrainedModel, text_config: Any, longest_tokens: int) -> str | None:
    from torch import nn

    from training.utils.contracts.token_rows import MOST_MASK_BYTES
    from training.utils.models.families import language_part

    convolves = any(isinstance(module, (nn.Conv1d, nn.Conv2d)) for module in language_part(model).modules())
    if getattr(model, "_is_stateful", False) or convolves or not getattr(text_config, "num_attention_heads", None):
        return "has state-space or convolution layers, which read neighboring tokens of the row"
    others = sorted({*(getattr(text_config, "layer_types", None) or ())} - {*_ATTENTION})
    if others:
        return f"has {', '.join(others)} layers, whose rows cannot be split"
    if not getattr(model, "_supports_attention_backend", False):
        return "does not pass arguments on to its attention"
    window = getattr(text_config, "sliding_window", None)
    windowed = window is not None and getattr(text_config, "use_sliding_window", True) and window < longest_tokens
    if windowed and longest_tokens**2 > MOST_MASK_BYTES:
        return (
            f"has a sliding window of {window} tokens, whose mask for sequences of {longest_tokens:,} tokens takes "
            f"{longest_tokens**2 / 1e9:.0f} GB"
        )
    return None
