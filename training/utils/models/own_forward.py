"""Numbers of a model's own forward, measured when it is loaded.

Whatever steps do instead (a head read at a few positions, packed rows, another attention function, shards, adapters)
is compared with these numbers (`layout_check`). They come from plain `model(input_ids).logits`, one sequence at a time,
before anything about the model is changed. The sequences are short, of random tokens.

The effect of rounding alone is measured by Monte Carlo arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting
randomness in floating-point arithmetic"): each floating-point output of a module without children is multiplied by
1 + eps * u, u uniform in (-1, 1), and rounded. The numbers move as another order of the same sums could move them: more
in half precision, in deep models, and where a router picks experts by a narrow margin.

M targets of the probes that stand alone, or their sequences for a scalar model; T tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.documents import Document, TokenSequence, join, plain, shared_prompt, unshared
from training.utils.models.weights import whole_where_used

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.media import MediaForward, RunMedia


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


_NOISE_FACTOR = 5.0
_NOISE_SEEDS = (1, 2)
_MIDDLE_TOKENS = 4  # before the middle of a sequence, to see whether the second half moves their logits
_SHORT_TOKENS = 64  # up to this many, all logits of a sequence are computed: 33 MB in float64 at a vocabulary of 64,000
_ATTRIBUTE = "_threestep_own_forward"  # of a model, where its OwnForward is kept
# An attribute of models that compute otherwise behind a cache: none is made when they are read.
WITHOUT_CACHE = "_threestep_without_cache"
# An attribute of models that compute parts of their layers piece by piece along the row: the flag that has them do so.
IN_PIECES = "_threestep_in_pieces"


@dataclass(frozen=True)
class OwnForward:
    """numbers_M: float64 on the CPU: log-probabilities of the targets of `probes.alone`, or their scores.
    of_scores: the model is a scalar model.
    tolerance: the largest `difference` that rounding explains.
    head_is_linear: the logits (or scores) are one linear layer on the last hidden state of `base_model`.
    notes: sentences on what was chosen or switched off because of these numbers.
    others: attention implementations to take next, should packed rows give other numbers by the present one.
    with_media: the same of rows with media; None where the data have none.
    """

    probes: Probes
    numbers_M: torch.Tensor
    of_scores: bool
    tolerance: float
    head_is_linear: bool
    notes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    with_media: MediaForward | None = None

    def difference(self, read_M: torch.Tensor) -> float:
        """Return the root mean square of `read_M` minus the numbers; NaN if one of them is NaN."""
        return rms(read_M.detach().double().cpu() - self.numbers_M)


def own_forward_of(model: PreTrainedModel) -> OwnForward | None:
    """Return the measurement of `read_own_forward`. A model that was not loaded from a folder is measured now, unless
    its weights are not whole (None)."""
    known: OwnForward | None = getattr(model, _ATTRIBUTE, None)
    weight = next(model.parameters())
    if known is None and weight.device.type != "meta" and not hasattr(weight, "ds_id"):
        return read_own_forward(model)
    return known


def head_is_linear(model: PreTrainedModel) -> bool:
    """True if the logits (or scores) of `model` are one linear layer on the last hidden state of `base_model`. Of a
    sharded model that was not read when it was loaded this is unknown, and False."""
    own = own_forward_of(model)
    if own is not None:
        return own.head_is_linear
    if next(model.parameters()).device.type != "meta":
        return False
    ids_T, _ = _tokens_of(make_probes(model.config, 0).alone[0])
    with torch.no_grad(), in_eval_mode(model), _without_values(model):
        _, is_linear, _ = _called(model, ids_T)
        return is_linear


def read_own_forward(model: PreTrainedModel, longest_tokens: int = 0, media: RunMedia | None = None) -> OwnForward:
    """Measure `model` and keep the result with it. Raises ThreestepError if it is no causal model of token ids.

    longest_tokens: of the sequences of the training; beyond MOST_LONG_TOKENS a shorter one is read, and a note says so.
    media: of its rows.
    A ZeRO-3 model that no engine owns yet is gathered module by module; every rank must call this.
    """
    own = _measured(model, make_probes(model.config, longest_tokens), media)
    if longest_tokens > MOST_LONG_TOKENS:
        own.notes.append(f"the startup check covers {MOST_LONG_TOKENS:,} of {longest_tokens:,} tokens of a sequence")
    return own


def read_again(model: PreTrainedModel) -> float:
    """Measure `model`, whose weights have changed since, anew; return how far its numbers moved. Notes stay."""
    own = own_forward_of(model)
    assert own is not None, "it was measured when it was loaded"
    again = _measured(model, own.probes, own.with_media.media if own.with_media else None)
    again.notes.extend(own.notes)
    again.others.extend(own.others)
    return own.difference(again.numbers_M)


def _measured(model: PreTrainedModel, probes: Probes, media: RunMedia | None) -> OwnForward:
    of_scores, versions = hasattr(model, "score"), _versions(model)
    with torch.no_grad(), in_eval_mode(model), whole_where_used(model):
        try:
            read = [_read(model, document) for document in probes.alone]
            noise = [
                _disturbed(model, document, seed) - read[index].compared
                for index, document in list(enumerate(probes.alone))[-2:]
                for seed in _NOISE_SEEDS
            ]
            before = {document.tokens: _first_half(model, document) for document in (probes.alone[0], probes.alone[-1])}
            with_media = None if media is None else media.measured(model)
        except (ThreestepError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            raise ThreestepError(
                f"{type(model).__name__} cannot be used: its forward pass with only token IDs fails in "
                f"{_precision(model)} ({type(problem).__name__}: {first_line(problem)}); use a text-only causal "
                "language model, or another --dtype"
            ) from problem
    changed = [name for name, version in _versions(model).items() if version != versions[name]]
    if changed:
        raise ThreestepError(
            f"{type(model).__name__} changes {len(changed)} of its own weights in a forward pass ({changed[0]}), so "
            "neither training nor saving would see the loaded ones; look for a setting in its config.json that turns "
            'this off (RWKV: "rescale_every": 0), or use another family'
        )
    numbers_M = torch.cat([part.numbers_M for part in read])
    if not bool(numbers_M.isfinite().all()):
        raise ThreestepError(
            f"{type(model).__name__} computes {float(numbers_M[~numbers_M.isfinite()][0])} from its loaded weights in "
            f"{_precision(model)}; check the weight files, or train with another --dtype"
        )
    # Scores are read in float32, and some families compute attention in it whatever the model's precision (gpt_neo).
    eps = torch.finfo(torch.float32 if of_scores or model.dtype == torch.float64 else model.dtype).eps
    largest = float(torch.cat([part.compared for part in read]).abs().max())
    tolerance = _NOISE_FACTOR * rms(torch.cat(noise)) + eps * largest
    together = {document.tokens: part.middle_PV for document, part in zip(probes.alone, read, strict=True)}
    _check_causal(model, {tokens: rms(together[tokens] - before[tokens]) for tokens in sorted(before)}, tolerance)
    is_linear = all(part.head_is_linear for part in read if part.head_is_linear is not None)
    own = OwnForward(probes, numbers_M, of_scores, tolerance, is_linear, with_media=with_media)
    setattr(model, _ATTRIBUTE, own)
    return own


def current_difference(
    model: PreTrainedModel,
    own: OwnForward,
    training: bool = False,
    inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> float:
    """Return how far the forward of `model`, called plainly, is from `own` now, as `OwnForward.difference`.
    training: in train mode. inside: makes a context for it, entered once shards are gathered."""
    with torch.no_grad(), in_eval_mode(model, training), whole_where_used(model), inside():
        return own.difference(torch.cat([_read(model, part).numbers_M for part in own.probes.alone]))


def _precision(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _versions(model: nn.Module) -> dict[str, int]:
    """Number of in-place writes to each weight. Shards are written whenever they are gathered: {}."""
    return {name: weight._version for name, weight in model.named_parameters() if not hasattr(weight, "ds_id")}


@dataclass(frozen=True)
class _Read:
    """numbers_M: float64 on the CPU. middle_PV: the logits (or scores) of the last tokens of the first half.
    head_is_linear: None where it was not looked at, to hold few logits."""

    of_scores: bool
    numbers_M: torch.Tensor
    middle_PV: torch.Tensor
    head_is_linear: bool | None

    @property
    def compared(self) -> torch.Tensor:
        """The numbers that are compared with the tolerance; for scores, those of the middle too: one score a sequence
        is too few to measure noise by, and may be near zero where the others are not."""
        return torch.cat([self.numbers_M, self.middle_PV.flatten()]) if self.of_scores else self.numbers_M


def _read(model: PreTrainedModel, document: Document) -> _Read:
    ids_T, is_target_T = _tokens_of(document)
    target_M = torch.nonzero(is_target_T).flatten()
    middle_P = _middle(ids_T)
    is_linear: bool | None
    if hasattr(model, "score"):
        score, is_linear, scores = _called(model, ids_T)
        if not isinstance(scores, torch.Tensor) or scores.shape[:2] != (1, len(ids_T)):
            raise ThreestepError(
                f"{type(model).__name__} computes its score from a pooled state, not per token; use another family"
            )
        return _Read(True, score[0].double().cpu(), scores[0, middle_P].double().cpu(), is_linear)
    logits_PV, is_linear = _logits_at(model, ids_T, torch.cat([middle_P, target_M - 1]))
    logprobs_MV = torch.log_softmax(logits_PV[len(middle_P) :], dim=-1)
    numbers_M = logprobs_MV.gather(-1, ids_T[target_M].unsqueeze(-1)).squeeze(-1)
    return _Read(False, numbers_M, logits_PV[: len(middle_P)], is_linear)


def _middle(ids_T: torch.Tensor) -> torch.Tensor:
    """The positions whose numbers must not know the second half."""
    half = len(ids_T) // 2
    return torch.arange(max(0, half - _MIDDLE_TOKENS), half)


def _logits_at(
    model: PreTrainedModel, ids_T: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, bool | None]:
    """Return the logits of some positions, float64 on the CPU, and `head_is_linear`. Of a long sequence no others are
    computed, where the family can leave them out."""
    if len(ids_T) <= _SHORT_TOKENS or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        logits_1TV, is_linear, _ = _called(model, ids_T)
        return logits_1TV[0, positions].double().cpu(), is_linear if len(ids_T) <= _SHORT_TOKENS else None
    logits_1PV, _, _ = _called(model, ids_T, logits_to_keep=positions.to(model.device))
    return logits_1PV[0].double().cpu(), None


def _called(model: PreTrainedModel, ids_T: torch.Tensor, **others: Any) -> tuple[torch.Tensor, bool, Any]:
    """Call `model` plainly; return its logits (of a scalar model: its score), whether they are one linear layer on the
    last hidden state, and that layer's output. others: further arguments of its forward."""
    of_scores = hasattr(model, "score")
    head = model.score if of_scores else model.get_output_embeddings()
    ids_1T = ids_T.unsqueeze(0).to(model.device)
    with _outputs_kept(model.base_model, head) as kept, _without_cache(model):
        logits = model(input_ids=ids_1T, **others).logits
    is_linear = (
        not others
        and type(head) is nn.Linear
        and model.base_model is not model
        and _is_hidden(kept.get("head_input"), kept.get("hidden"), model.base_model, ids_1T)
        and (of_scores or _same(logits, kept.get("head_output")))
    )
    return logits, is_linear, kept.get("head_output")


def _disturbed(model: PreTrainedModel, document: Document, seed: int) -> torch.Tensor:
    with rounded_once_more(model, seed):
        return _read(model, document).compared


def _first_half(model: PreTrainedModel, document: Document) -> torch.Tensor:
    """`_Read.middle_PV`, read from the first half alone."""
    ids_T, _ = _tokens_of(document)
    middle_P, ids_t = _middle(ids_T), ids_T[: len(ids_T) // 2]
    if hasattr(model, "score"):
        _, _, scores = _called(model, ids_t)
        return scores[0, middle_P].double().cpu()
    return _logits_at(model, ids_t, middle_P)[0]


def _check_causal(model: PreTrainedModel, moved: dict[int, float], tolerance: float) -> None:
    """moved: by how much the numbers of the first half differ from those of the first half alone, in sequences of so
    many tokens, the shortest first."""
    tokens, most = list(moved.items())[-1]
    if moved[min(moved)] <= tolerance < most:
        raise ThreestepError(
            f"the outputs of {type(model).__name__} depend on a row's length (as with rope_type longrope or dynamic in "
            f"config.json): without the second half of {tokens} tokens, those for the first half change by {most:.2g} "
            f"(rounding explains at most {tolerance:.2g}), but not with {min(moved)} tokens; use shorter sequences"
        )
    if not all(each <= tolerance for each in moved.values()):
        raise ThreestepError(
            f"{type(model).__name__} is not causal: the second half of a sequence changes the outputs of the first by "
            f"{max(moved.values()):.2g} (rounding explains at most {tolerance:.2g}), as in an encoder; use a causal "
            "language model"
        )


def _tokens_of(document: Document) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and targets of a document of one segment."""
    (segment,) = document.segments
    return segment.tokens.input_ids, segment.tokens.is_target


def _is_hidden(head_input: Any, hidden: Any, trunk: nn.Module, ids_1T: torch.Tensor) -> bool:
    """True if the head reads the trunk's output. hidden: None if the model calls a part of its trunk, as OPT does: then
    the trunk is called, of whose output the meta device gives the shape alone."""
    if hidden is not None or not isinstance(head_input, torch.Tensor):
        return _same(head_input, hidden)
    answer = trunk(input_ids=ids_1T)[0]
    return _same(head_input, answer) or (answer.device.type == "meta" and answer.shape == head_input.shape)


def _same(one: Any, other: Any) -> bool:
    """True if two tensors hold the same numbers, in any precision; on the meta device, if they are one tensor."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    if one.device.type == "meta":
        return one is other or one._base is other
    return bool(torch.equal(one.double(), other.double()))


@contextlib.contextmanager
def _outputs_kept(trunk: nn.Module, head: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict that a forward inside fills: the trunk's first output, and the head's input and output."""
    kept: dict[str, Any] = {}

    def after_trunk(module: nn.Module, inputs: Any, output: Any) -> None:
        kept["hidden"] = output[0]

    def after_head(module: nn.Module, inputs: Any, output: Any) -> None:
        kept["head_input"], kept["head_output"] = inputs[0] if inputs else None, output

    with contextlib.ExitStack() as hooks:
        hooks.callback(trunk.register_forward_hook(after_trunk).remove)
        if isinstance(head, nn.Module):
            hooks.callback(head.register_forward_hook(after_head).remove)
        yield kept


@contextlib.contextmanager
def _without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a model with WITHOUT_CACHE makes none."""
    if not hasattr(model, WITHOUT_CACHE):
        yield
        return
    config: Any = model.config.get_text_config()
    before, config.use_cache = getattr(config, "use_cache", None), False
    try:
        yield
    finally:
        config.use_cache = before


@contextlib.contextmanager
def _without_values(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a model on the meta device makes masks without a look at their numbers: with sdpa, transformers asks
    whether a family's own mask hides anything (BioGPT)."""
    config: Any = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


@contextlib.contextmanager
def in_eval_mode(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Inside, every module is in eval mode (or in train mode); after, each is as it was."""
    were = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in were.items():
            module.training = was_training
