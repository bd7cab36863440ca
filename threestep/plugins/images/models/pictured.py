"""The images of a run's rows on their way to a model, and what a model of images and text computes of a few such rows
by its own forward: rows that are laid out must give the same.

The model's own processor arguments (which tokens are images, their grids) stand for what the layout gives instead:
positions and a mask. Knows no files: `pixels_of` decodes.

M targets of the documents with images.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from threestep.plugins.images.pixels import ImagePixels, pixel_inputs
from threestep.plugins.images.prompts import PixelsOf, PromptImages, pixels_of_keys
from training.utils.base.errors import ThreestepError, first_line
from training.utils.contracts.documents import plain
from training.utils.layout.rows import packed_rows
from training.utils.models.own_forward import rms, rounded_once_more

if TYPE_CHECKING:
    from threestep.plugins.images.kept_features import KeptFeatures
    from training.utils.contracts.documents import Document, MediaSpan, TokenSequence
    from training.utils.contracts.media import Read
    from training.utils.contracts.token_rows import TokenRows

_NOISE_FACTOR = 5.0
_NOISE_SEED = 1
_TYPES = ("mm_token_type_ids", "token_type_ids")  # 1 where a token is of an image, 0 elsewhere (transformers 5.19)


@dataclass(frozen=True)
class RowImages:
    """pixels_of: decodes the images of these keys, in their order.
    examples: a few short documents of one sequence with images, by which a model is read before training.
    kept: features of pictures, of a model that reads them; None where it reads all pixels in every forward.
    """

    name: ClassVar[str] = "images"
    pixels_of: PixelsOf
    examples: tuple[Document, ...]
    kept: KeptFeatures | None = None

    @cached_property
    def alone(self) -> Document:
        """The smallest picture of the examples by itself, with nothing to predict. One that was cut up has all its
        parts, and the tokens between them."""
        parts = [segment.tokens for document in self.examples for segment in document.segments]
        pictures = [
            (tokens, list(images))
            for tokens in parts
            for _, images in groupby(tokens.media, key=lambda image: image.key)
        ]
        tokens, images = min(pictures, key=lambda found: found[1][-1].end - found[1][0].begin)
        cut = tokens.part(images[0].begin, images[-1].end)
        return plain(replace(cut, is_target=torch.zeros_like(cut.is_target)))

    def of_prompts(self, spans: Sequence[tuple[MediaSpan, ...]]) -> PromptImages | None:
        """Return the images of prompts; None where none of them has one. spans: of each prompt."""
        return PromptImages(tuple(spans), self.pixels_of, self.kept) if any(spans) else None

    def measured(self, model: Any) -> PicturedForward:
        """See `RunMedia`."""
        return read_pictured(model, self)

    def loaded(self, rows: TokenRows) -> TokenRows:
        """Return the rows with the pixels of their images, or of those whose features are not kept yet."""
        if rows.media is None:
            return rows
        spans = iter(rows.media.spans)
        keys = [[image.key for image in islice(spans, count)] for count in rows.media.counts]
        pixels = pixels_of_keys(keys, self.pixels_of, self.kept)
        return replace(rows, media=replace(rows.media, read=pixels))


@dataclass(frozen=True)
class PicturedForward:
    """numbers_M: float64 on the CPU: log-probabilities of the targets of the examples, or their scores.
    tolerance: the largest root mean square of a difference that rounding explains.
    of_scores: the model is a scalar model.
    """

    media: RowImages
    numbers_M: torch.Tensor
    tolerance: float
    of_scores: bool = False

    def why_not(self, read: Read, device: torch.device, text: Document | None) -> str | None:
        """See `MediaForward`."""
        documents = self.media.examples
        rows = [[document] for document in documents] if text is None else [[*documents, text]]
        laid_out = self.media.loaded(packed_rows(rows, 0))
        assert laid_out.media is not None
        first_key = laid_out.media.spans[0].key
        with torch.no_grad():
            read_M = read(laid_out.to(device)).double().cpu()
            other_M = read(_with_another(laid_out, first_key).to(device)).double().cpu()
        count = len(self.numbers_M)
        difference = rms(read_M[:count] - self.numbers_M)
        if not difference <= self.tolerance:
            return (
                f"rows with images differ by {difference:.2g} from its own forward pass on single sequences "
                f"(rounding explains {self.tolerance:.2g})"
            )
        owners = {index for index, document in enumerate(documents) if first_key in _keys(document)}
        sequences = range(len(read_M)) if self.of_scores else laid_out.sequence_M.tolist()
        is_own_M = torch.tensor([sequence in owners for sequence in sequences])
        moved_M = (other_M - read_M)[~is_own_M]
        if len(moved_M) and not rms(moved_M) <= self.tolerance:
            return "an image changes what it computes for another document"
        # A new head of zeros (`--share_trunk`) scores everything 0; its trunk is the actor's, which is checked as well.
        is_new = self.of_scores and not bool(self.numbers_M.any())
        if not is_new and torch.equal(other_M[is_own_M], read_M[is_own_M]):
            return "replacing an image changes nothing that it computes"
        return None


def read_pictured(model: Any, images: RowImages) -> PicturedForward:
    """Read the examples one by one by plain calls of `model`, which is in eval mode. ThreestepError if that fails."""
    of_scores = hasattr(model, "score")
    try:
        read = _read(model, images, of_scores)
        with rounded_once_more(model, _NOISE_SEED):
            disturbed = _read(model, images, of_scores)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:
        raise ThreestepError(
            f"{type(model).__name__} cannot be used with images: its own forward pass on a row with images failed "
            f"({type(problem).__name__}: {first_line(problem)}); use the processor that the model was made with, or "
            "another model family"
        ) from problem
    # As in `own_forward`, also what noise is told by.
    eps = torch.finfo(torch.float32 if of_scores or model.dtype == torch.float64 else model.dtype).eps
    compared = torch.cat(read)
    tolerance = _NOISE_FACTOR * rms(torch.cat(disturbed) - compared) + eps * float(compared.abs().max())
    return PicturedForward(images, torch.cat([part[-1:] for part in read] if of_scores else read), tolerance, of_scores)


def _keys(document: Document) -> set[int]:
    return {image.key for segment in document.segments for image in segment.tokens.media}


def _with_another(rows: TokenRows, key: int) -> TokenRows:
    """The rows with the negative of one image, wherever it stands."""
    media = rows.media
    assert media is not None and isinstance(media.read, ImagePixels)
    parts = media.read.values.split(media.read.counts)
    negated = [-part if image.key == key else part for part, image in zip(parts, media.spans, strict=True)]
    return replace(rows, media=replace(media, read=replace(media.read, values=torch.cat(negated))))


def _read(model: Any, images: RowImages, of_scores: bool) -> list[torch.Tensor]:
    """Return, of each example, the log-probabilities of its targets; of a scalar model the scores at its targets and at
    its last token, which comes last."""
    accepted = inspect.signature(model.base_model.forward).parameters
    found = []
    for document in images.examples:
        (segment,) = document.segments
        tokens = segment.tokens
        inputs = own_inputs(model.config, tokens, images.pixels_of, accepted)
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        target_M = tokens.is_target.nonzero().flatten()
        if of_scores:
            scores_T = _scores(model, inputs)
            found.append(torch.cat([scores_T[target_M], scores_T[-1:]]))
            continue
        logits_TV = model(**inputs, use_cache=False).logits[0]
        logprobs_MV = logits_TV[target_M - 1].double().cpu().log_softmax(-1)
        found.append(logprobs_MV.gather(-1, tokens.input_ids[target_M].unsqueeze(-1)).squeeze(-1))
    return found


def _scores(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the score at each token of one sequence, float64 on the CPU."""
    kept: list[torch.Tensor] = []
    hook = model.score.register_forward_hook(lambda module, given, scores_1T1: kept.append(scores_1T1))
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    return kept[0].flatten().double().cpu()


def own_inputs(
    config: Any, tokens: TokenSequence, pixels_of: PixelsOf, accepted: Container[str]
) -> dict[str, torch.Tensor]:
    """Return what a family's processor would hand to its model for one sequence.

    config: of the model. accepted: names of its forward's arguments.
    """
    ids_1T = tokens.input_ids.unsqueeze(0)
    is_image_1T = torch.zeros_like(ids_1T)
    for image in tokens.media:
        is_image_1T[0, image.begin : image.end] = 1
    pixels = pixels_of([image.key for image in tokens.media])
    inputs = {"input_ids": ids_1T, **pixel_inputs(config, pixels)}
    return inputs | {name: is_image_1T for name in _TYPES if name in accepted}
