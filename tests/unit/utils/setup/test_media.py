"""Media without a plugin that reads them, and with more than one."""

from __future__ import annotations

import sys

import pytest
from transformers import LlamaConfig, Qwen2VLConfig

from training.utils.base.errors import ThreestepError
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.setup import media

pytestmark = pytest.mark.unit


@pytest.fixture
def folders(tmp_path):
    LlamaConfig().save_pretrained(tmp_path / "text")
    Qwen2VLConfig().save_pretrained(tmp_path / "more")
    return tmp_path


@pytest.fixture
def plugins(monkeypatch):
    """The entries of the table of media, as plugins add them."""
    entries: dict[str, str] = {}
    monkeypatch.setattr(media, "added", lambda table, known: entries)
    media.media_kind.cache_clear()
    yield entries
    media.media_kind.cache_clear()


@pytest.mark.parametrize("name", ["text", "more"])
def test_without_a_plugin_nothing_is_read_and_a_row_says_so(name, folders, plugins, monkeypatch):
    monkeypatch.setattr(media, "missing_plugin", lambda kind, name: f"no plugin for {name} in {kind}")
    path = str(folders / name)
    assert media.why_unread(path) == "no plugin for images in media"
    assert media.reader_of_model(path, False, None) is None and media.reader_of_folder(path, None) is None
    assert media.planned_media(path, False, 1, 1) is None and media.run_media([], None, id) is None
    with pytest.raises(ThreestepError, match="^images: no plugin for images in media$"):
        media.media_kind()


def test_a_model_of_text_asks_no_plugin(folders, plugins):
    plugins["images"] = "a.module.that.is:not_there"
    path = str(folders / "text")
    assert media.why_unread(path) == ONLY_TEXT
    assert media.reader_of_model(path, False, None) is None and media.planned_media(path, False, 1, 1) is None
    assert "a.module.that.is" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        media.reader_of_model(str(folders / "more"), False, None)


def test_two_plugins_are_one_too_many(plugins):
    plugins |= {"images": "a:b", "video": "c:d"}
    with pytest.raises(ThreestepError, match=r"several plugins read media \(images, video\).*; uninstall one"):
        media.media_kind()
