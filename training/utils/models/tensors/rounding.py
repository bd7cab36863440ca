"""Short documents of random tokens, by which a model is read before anything is trained, and the effect of rounding
alone on its numbers, measured by rounding every module's output once more.

Monte Carlo arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic"): each
floating-point output of a module without children is multiplied by 1 + eps * u, u uniform in (-1, 1), and rounded. The
numbers move as another order of the same sums could move them: more in half precision, in deep models, and where a
router picks experts by a narrow margin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from training.utils.contracts.documents import Document, TokenSequence, join, plain, shared_prompt, unshared

_AT_ONCE = 2**20  # numbers, so that an MLP's of a long row are not in memory several times


@contextlib.contextmanager
def rounded_once_more(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, forwards of `model` are disturbed by about one rounding error a module. torch's random state is left
    alone."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturbed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        moved = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for part, into in zip(tensor.flatten().split(_AT_ONCE), moved.view(-1).split(_AT_ONCE), strict=True):
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            uniform = torch.rand(wide.shape, generator=generator, device=wide.device, dtype=wide.dtype) * 2 - 1
            into.copy_(wide * (1 + torch.finfo(tensor.dtype).eps * uniform))
        return moved

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        return disturbed(output) if isinstance(output, torch.Tensor) else None

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    with contextlib.ExitStack() as hooks:
        for leaf in leaves:
            hooks.callback(leaf.register_forward_hook(after).remove)
        yield


def rms(numbers: torch.Tensor) -> float:
    """Return the root mean square; NaN if a number is."""
    return float(numbers.square().mean().sqrt())


MOST_LONG_TOKENS = 16_384  # of a long sequence: every rank reads all of it, also where ranks share the training's rows
_LONG_TARGETS = 8  # of a long sequence, only its last tokens are predicted


@dataclass(frozen=True)
class Probes:
    """first, second: a prompt with two responses each. other: as long as `first`, with other tokens.
    long: one sequence of `longest_tokens`, the training's longest length, or of MOST_LONG_TOKENS if that is less; None
    if it would be no longer than the others."""

    first: Document
    second: Document
    other: Document
    long: Document | None
    longest_tokens: int

    @cached_property
    def alone(self) -> list[Document]:
        """Each sequence of `first` and `second` as a document, then `long`."""
        return [*unshared(self.first), *unshared(self.second), *([self.long] if self.long else [])]


def make_probes(config: Any, longest_tokens: int) -> Probes:
    """config: of a transformers model. longest_tokens: of the sequences of the training, 0 if unknown.

    Special tokens are left out: pad moves the place at which a score is read, a placeholder stands for something else.
    """
    ordinary = _ordinary_ids(config)
    generator = torch.Generator().manual_seed(0)

    def run(length: int, is_target: bool) -> TokenSequence:
        ids = ordinary[torch.randint(0, len(ordinary), (length,), generator=generator)]
        return TokenSequence(ids, torch.full((length,), is_target))

    def document(prompt: int, *responses: int) -> Document:
        return shared_prompt(run(prompt, False), [run(length, True) for length in responses])

    first, second, other = document(5, 3, 4), document(4, 2, 3), document(5, 3, 4)
    long = None
    if longest_tokens > max(document.tokens for document in unshared(first)):
        length = min(longest_tokens, MOST_LONG_TOKENS)
        prompt, response = run(length - _LONG_TARGETS, False), run(_LONG_TARGETS, True)
        long = plain(join(prompt.input_ids, response.input_ids))
    return Probes(first, second, other, long, longest_tokens)


def _ordinary_ids(config: Any) -> torch.Tensor:
    """The ids that no setting of the configuration names, int64."""
    text_config = config.get_text_config()
    special: set[int] = set()
    for name, value in {**config.to_dict(), **text_config.to_dict()}.items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            special.update(value if isinstance(value, (list, tuple)) else [value])
    ids = [index for index in range(text_config.vocab_size) if index not in special]
    return torch.tensor(ids or list(range(text_config.vocab_size)))
