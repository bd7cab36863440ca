"""Pictures of samples on a page: held by it, bounded, and of the run's folder alone."""

from __future__ import annotations

import pytest

from tests.support.image_readers import picture
from threestep.plugins.report.figures.sample_media import media_shown, sample_media

NAME = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sample_pictures").mkdir()
    (tmp_path / "sample_pictures" / f"{NAME}.png").write_bytes(picture(4, 4))
    return tmp_path


def test_the_page_holds_the_pictures(folder):
    (uri,) = sample_media(folder, {"images": [NAME]})
    assert uri.startswith("data:image/png;base64,iVBOR")
    assert media_shown((uri, uri)) == (
        f'<div class="pictures"><img src="{uri}" alt="image 1 of 2"><img src="{uri}" alt="image 2 of 2"></div>'
    )
    assert sample_media(folder, {}) == () and media_shown(()) == ""


@pytest.mark.parametrize("name", ["../sample_pictures/" + NAME, "f" * 64, f"{NAME}.png", "", 3, None, {"a": 1}])
def test_a_name_that_is_none_of_the_folder_is_counted_alone(folder, name):
    assert sample_media(folder, {"images": [name]}) == (None,)
    assert media_shown((None,)) == '<div class="pictures"><span class="soft">1 image not shown</span></div>'


def test_links_large_files_and_what_is_no_list_are_left_out(folder):
    kept = folder / "sample_pictures"
    (kept / f"{'a' * 64}.png").symlink_to(kept / f"{NAME}.png")
    (kept / f"{'b' * 64}.png").write_bytes(bytes(2**17 + 1))
    assert sample_media(folder, {"images": ["a" * 64, "b" * 64]}) == (None, None)
    assert sample_media(folder, {"images": "0123"}) == ()
