"""Which rows are the examples of a run's images, and what does not go with images."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.vision_models import answers, awake, llava, sequence
from threestep.plugins.images.models import kept_features
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.run.row_images import check_beside_images, row_images, with_kept_features
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import MediaSpan, shared_prompt, unshared
from training.utils.contracts.rows import SentenceRow
from training.utils.data.rows.documents import sentence_document
from training.utils.models.own_forward import read_own_forward
from training.utils.models.token_model import PolicyModel


def row(length, *keys):
    mask = np.zeros(length, dtype=bool)
    mask[-1] = True
    images = tuple(MediaSpan(at, 1, key=key) for at, key in enumerate(keys))
    return SentenceRow(0, np.arange(length, dtype=np.int32), mask, media=images)


def lengths(rows):
    images = row_images(rows, lambda keys: None, sentence_document)
    return [document.tokens for document in images.examples]


def test_the_shortest_rows_with_different_images_are_the_examples():
    assert lengths([row(3), row(9, 1), row(8, 2), row(7, 1), row(4)]) == [7, 8]
    assert lengths([row(9, 1), row(7, 1, 2), row(8, 1)]) == [7, 8]
    assert lengths([row(5, 1), row(3)]) == [5]


def test_later_rows_are_not_read():
    def rows():
        for length in range(100, 60, -1):
            assert length > 68
            yield row(length, length)

    assert lengths(rows()) == [69, 70]


def test_rows_without_images_have_none():
    assert row_images([row(3), row(4)], lambda keys: None, sentence_document) is None


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"neftune_alpha": 5.0}, "^--neftune_alpha 5.0 does not go with rows that have images: noise .*; use 0$"),
    ],
)
def test_a_flag_that_does_not_go_with_images_is_refused(settings, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        check_beside_images(settings)
    check_beside_images({"neftune_alpha": 0.0})


@pytest.fixture(scope="module")
def measured():
    """A model whose tower is frozen, and the images of its rows, which it was measured by."""
    family = awake(llava())
    family.tower.requires_grad_(False)
    documents = [shared_prompt(sequence(family, 2, f"image {key}", 3), answers(family, 4)) for key in (0, 1)]
    images = RowImages(family.pixels, tuple(alone for document in documents for alone in unshared(document)))
    read_own_forward(family.model, media=images)
    return family.model, images


def kept(model, images, megabytes):
    engine = SimpleNamespace(eval=model.eval, ranks=SimpleNamespace(device=torch.device("cpu")))
    policy = PolicyModel(model)
    return with_kept_features(images, megabytes, model, engine, read=lambda rows: policy(rows).logprobs_M)


def test_features_are_kept_where_they_give_the_numbers_of_pixels(measured):
    model, images = measured
    assert kept(model, images, 0) is images
    found = kept(model, images, 8)
    assert len(found.kept) == 2 and found.kept.most_bytes == 8 * 2**20


def test_features_that_give_other_numbers_are_refused(measured, monkeypatch):
    model, images = measured
    features = kept_features.FeatureReader.features
    monkeypatch.setattr(kept_features.FeatureReader, "features", lambda self, pixels: -features(self, pixels))
    sentence = "^--kept_image_features_mb 8 does not go with this Llava.*: with them it computes other numbers, by .*"
    with pytest.raises(ThreestepError, match=sentence + "; leave it out$"):
        kept(model, images, 8)
