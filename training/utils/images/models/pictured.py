"""What a model of images and text computes of a few rows with images by its own forward, and whether rows that are laid
out give the same.

The model's own processor arguments (which tokens are images, their grids) stand for what the layout gives instead:
positions and a mask.

M targets of the documents with images.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError, first_line
from training.utils.images.models.vision import pixel_inputs
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.models.tensors.rounding import rms, rounded_once_more

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document, TokenSequence
    from training.utils.images.prompts import PixelsOf
    from training.utils.layout.pictures import RowImages

_NOISE_FACTOR = 5.0
_NOISE_SEED = 1
_TYPES = ("mm_token_type_ids", "token_type_ids")  # 1 where a token is of an image, 0 elsewhere (transformers 5.19)


@dataclass(frozen=True)
class PicturedForward:
    """numbers_M: float64 on the CPU: log-probabilities of the targets of the examples, or their scores.
    tolerance: the largest root mean square of a difference that rounding explains.
    of_scores: the model is a scalar model.
    """

    images: RowImages
    numbers_M: torch.Tensor
    tolerance: float
    of_scores: bool = False


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
            f"{type(model).__name__} cannot be read: its own forward of a row with images fails "
            f"({type(problem).__name__}: {first_line(problem)}); give the processor that the model was made with, or "
            "another family"
        ) from problem
    # As in `own_forward`, also what noise is told by.
    eps = torch.finfo(torch.float32 if of_scores or model.dtype == torch.float64 else model.dtype).eps
    compared = torch.cat(read)
    tolerance = _NOISE_FACTOR * rms(torch.cat(disturbed) - compared) + eps * float(compared.abs().max())
    return PicturedForward(images, torch.cat([part[-1:] for part in read] if of_scores else read), tolerance, of_scores)


def why_not_pictured(
    pictured: PicturedForward, read: Callable[[TokenRows], torch.Tensor], device: torch.device, text: Document | None
) -> str | None:
    """Return None if rows with images give the numbers of the model's own forward, and an image changes those of its
    document alone; else the reason why not.

    text: a document without images that shares a row with those that have some; None: each has a row of its own.
    """
    documents = pictured.images.examples
    rows = [[document] for document in documents] if text is None else [[*documents, text]]
    laid_out = pictured.images.with_pixels(packed_rows(rows, 0))
    first_key = laid_out.images[0].key
    with torch.no_grad():
        read_M = read(laid_out.to(device)).double().cpu()
        other_M = read(_with_another(laid_out, first_key).to(device)).double().cpu()
    count = len(pictured.numbers_M)
    difference = rms(read_M[:count] - pictured.numbers_M)
    if not difference <= pictured.tolerance:
        return (
            f"rows with images differ by {difference:.2g} from its own forward of single sequences (rounding explains "
            f"{pictured.tolerance:.2g})"
        )
    owners = {index for index, document in enumerate(documents) if first_key in _keys(document)}
    sequences = range(len(read_M)) if pictured.of_scores else laid_out.sequence_M.tolist()
    is_own_M = torch.tensor([sequence in owners for sequence in sequences])
    moved_M = (other_M - read_M)[~is_own_M]
    if len(moved_M) and not rms(moved_M) <= pictured.tolerance:
        return "an image changes what it computes of another document"
    # A new head of zeros (`--share_trunk`) scores everything 0; its trunk is the actor's, which is checked as well.
    is_new = pictured.of_scores and not bool(pictured.numbers_M.any())
    if not is_new and torch.equal(other_M[is_own_M], read_M[is_own_M]):
        return "another image changes nothing that it computes"
    return None


def _keys(document: Document) -> set[int]:
    return {image.key for segment in document.segments for image in segment.tokens.images}


def _with_another(rows: TokenRows, key: int) -> TokenRows:
    """The rows with the negative of one image, wherever it stands."""
    assert rows.pixels is not None
    parts = rows.pixels.values.split(rows.pixels.counts)
    negated = [-part if image.key == key else part for part, image in zip(parts, rows.images, strict=True)]
    return replace(rows, pixels=replace(rows.pixels, values=torch.cat(negated)))


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
    for image in tokens.images:
        is_image_1T[0, image.begin : image.end] = 1
    pixels = pixels_of([image.key for image in tokens.images])
    inputs = {"input_ids": ids_1T, **pixel_inputs(config, pixels)}
    return inputs | {name: is_image_1T for name in _TYPES if name in accepted}
