"""Which rows are the examples of a run's images, and what does not go with images."""

from __future__ import annotations

import numpy as np
import pytest

from training.utils.data.rows.documents import sentence_document
from training.utils.data.rows.phases import SentenceRow
from training.utils.layout.images import ImageSpan
from training.utils.opening.row_images import check_beside_images, images_of
from training.utils.run.errors import ThreestepError


def row(length, *keys):
    mask = np.zeros(length, dtype=bool)
    mask[-1] = True
    images = tuple(ImageSpan(at, 1, key=key) for at, key in enumerate(keys))
    return SentenceRow(0, np.arange(length, dtype=np.int32), mask, images=images)


def lengths(rows):
    images = images_of(rows, lambda keys: None, sentence_document)
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
    assert images_of([row(3), row(4)], lambda keys: None, sentence_document) is None
    assert images_of([row(3, 1)], None, sentence_document) is None


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"neftune_alpha": 5.0}, "^--neftune_alpha 5.0 does not go with rows that have images: noise .*; use 0$"),
        ({"mtp_num_layers": 1}, "^--mtp_num_layers 1 does not go with rows that have images: the head reads"),
    ],
)
def test_a_flag_that_does_not_go_with_images_is_refused(settings, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        check_beside_images(settings)
    check_beside_images({"neftune_alpha": 0.0, "mtp_num_layers": 0})
