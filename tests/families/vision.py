"""Judges one family of models of images and text: rows of texts by a tiny model of its configuration, and rows with
images where the family is known (`threestep.plugins.images.data.families`).

M tokens to be predicted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.families.answers import REFUSED, RIGHT, WRONG, Answer, asked, compared
from tests.families.builds import draw_weights, quiet
from tests.families.configs import PAD, VOCABULARY, tiny_vision_config
from tests.families.judge import refused, verdict, why_not_built
from tests.families.reading import CPU, answers_of_rollout, answers_of_rows, load, reading
from tests.families.subjects import LONG, Subject, alone, documents, known, true_logprobs
from tests.support.vision_models import FAMILIES, Family, answers, awake, sequence, with_pixels
from threestep.plugins.images.data.reader import unread_because
from threestep.plugins.images.models.pictured import RowImages
from training.utils.contracts.documents import Document, plain, shared_prompt, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models.layout_check import check_padded, why_not_packed
from training.utils.models.settings import ModelSettings

TOLERANCE = 1e-5  # of log-probabilities; norms and rotations are computed in float32 in every precision
LONGEST = 60


def judged(family: str, place: Path, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Return, as JSON values, what is found about a family. place: an empty folder. skipped: questions."""
    torch.set_num_threads(1)
    quiet()
    started = time.monotonic()
    result: dict[str, Any] = {"family": family, "model": "", "built": "", "answers": []}
    images = asked("images", lambda: ask_images(family, place)) if "images" not in skipped else []
    try:
        folder = place / "start"
        result["model"] = type(build(family, folder)).__name__
        subject = known(family, folder, AutoModelForImageTextToText)
    except Exception as problem:  # noqa: BLE001 - why plain transformers cannot build a family is the answer
        found = [answer.as_json() for answer in images]
        return result | {"built": why_not_built(problem), "answers": found, "images": of_images(images)}
    texts = asked("rows", lambda: ask_rows(subject, skipped))
    return result | {
        "answers": [answer.as_json() for answer in [*texts, *images]],
        "verdict": verdict(subject, texts),
        "images": of_images(images),
        "seconds": round(time.monotonic() - started, 1),
    }


def build(family: str, folder: Path) -> PreTrainedModel:
    model: Any = AutoModelForImageTextToText.from_config(tiny_vision_config(family))
    draw_weights(model, seed=0)
    model.eval().save_pretrained(folder)
    return model


def ask_rows(subject: Subject, skipped: Sequence[str]) -> list[Answer]:
    """Rows of texts alone, and rollouts of texts, of a model that is loaded as one of images and text."""
    model = load(subject.folder, subject.dtype, takes_media=True)
    read = reading(model)
    if subject.runs:
        read(padded_rows(alone(documents(LONG)), PAD))
        return [Answer("runs", WRONG, None, f"it runs here and not in plain transformers ({subject.runs})")]
    found = answers_of_rows(subject, model, read, lambda shared: true_logprobs(subject.model, alone(shared)))
    if not refused(found) and "rollout" not in skipped:
        found += asked("rollout", lambda: answers_of_rollout(subject, model, model, "rollout"))
    return found


# Rows with images


def ask_images(name: str, place: Path) -> list[Answer]:
    """Rows of images and texts, padded, packed and with prompts shared, of a family that is known; of any other the
    sentence by which a run ends."""
    if name not in FAMILIES:
        return [Answer("images", REFUSED, None, unread_because(SimpleNamespace(model_type=name), "the folder"))]
    family = awake(FAMILIES[name]())
    family.model.float().double()  # as it is read from a file
    family.model.float().save_pretrained(place / "images")
    family.model.double()
    pictured = documents_of(family)
    examples = tuple(unshared(document)[0] for document in pictured[:2])
    images = RowImages(family.pixels, examples)
    settings = ModelSettings(str(place / "images"), takes_media=True)
    model = load_causal_lm(settings, torch.float64, VOCABULARY, longest_tokens=LONGEST, media=images).eval()
    read = reading(model)
    check_padded(model, read, CPU)
    apart = [one for document in pictured for one in unshared(document)]
    with torch.no_grad():
        expected = torch.cat([family.own_logprobs(one) for one in apart])
    half = len(apart) // 2
    layouts = {"padded": [[one] for one in apart], "packed": [apart[:half], apart[half:]]}
    layouts["shared"] = [pictured[:1], pictured[1:]]
    found = []
    for layout, rows in layouts.items():
        question = f"images.{layout}"
        reason = None if layout == "padded" else why_not_packed(model, read, LONGEST, CPU, sharing=layout == "shared")
        if reason is not None:
            found.append(Answer(question, REFUSED, None, reason))
            continue
        laid_out = images.loaded(packed_rows(rows, PAD))
        read_M = read(laid_out).double()
        found.append(compared(question, float((read_M - expected).abs().max()), TOLERANCE))
        found.append(seen(question, laid_out, read_M, read, [unshared(one) for row in rows for one in row]))
    return found


def documents_of(family: Family) -> list[Document]:
    """A prompt of an image and one of two, which responses share; a text; images in two turns."""
    turns = sequence(family, 3, "image 3", 4, "image 2", 5)
    turns.is_target[-2:] = True
    return [
        shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5, 3)),
        shared_prompt(sequence(family, "image 2", 1, "image 1", 2), answers(family, 4, 2)),
        shared_prompt(sequence(family, 6), answers(family, 3, 4)),
        plain(turns),
    ]


def seen(
    question: str, rows: TokenRows, read_M: torch.Tensor, read: Any, sequences: Sequence[Sequence[Document]]
) -> Answer:
    """The negatives of all pictures of one key move the sequences with it and no others."""
    media = rows.media
    assert media is not None and media.read is not None
    key = media.spans[0].key
    parts = media.read.values.split(media.read.counts)
    turned = [-part if image.key == key else part for part, image in zip(parts, media.spans, strict=True)]
    other = with_pixels(rows, replace(media.read, values=torch.cat(turned)))
    moved_M = (read(other).double() - read_M).abs()
    has_it = [any(image.key == key for image in one.segments[0].tokens.media) for part in sequences for one in part]
    is_own_M = torch.tensor([has_it[index] for index in rows.sequence_M.tolist()])
    if not bool((moved_M[is_own_M] > 1e-4).all()):
        return Answer(f"{question}.seen", WRONG, None, "replacing an image changes nothing that it computes")
    return compared(f"{question}.others", float(moved_M[~is_own_M].max()), TOLERANCE)


def of_images(found: Sequence[Answer]) -> str:
    bad = [answer for answer in found if answer.verdict not in (RIGHT, REFUSED)]
    if bad:
        return f"WRONG: {bad[0].question} {bad[0].said} {'' if bad[0].difference is None else bad[0].difference}"
    by_name = {answer.question: answer for answer in found}
    if not found or (len(found) == 1 and found[0].verdict == REFUSED):
        return f"refused: {found[0].said}" if found else ""
    layouts = [name for name in ("shared", "packed") if by_name[f"images.{name}"].verdict == RIGHT]
    word = {"shared": "shares", "packed": "packs"}
    return word[layouts[0]] if layouts else f"padded, because {by_name['images.packed'].said}"
