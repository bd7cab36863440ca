"""Forms of stored weights that plugins read; a model in a form that nobody reads is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from training.utils.base.errors import ThreestepError
from training.utils.loading import weight_files as module
from training.utils.loading.configurations import load_config
from training.utils.loading.weight_files import StoredForm, WholeWeights, check_form, stored_form

FIELD = "zipped"


class Zipped(StoredForm):
    """Weights that are whole where their field says 1."""

    def check_entry(self, entry, file):
        if not isinstance(entry, int):
            raise ThreestepError(f"'{file}' expects in {FIELD} a number, got {entry!r}")

    def check(self, config, where):
        config.seen = where

    def check_trains(self, config, where):
        if not self.is_read_whole(config):
            raise ThreestepError(f"'{where}' cannot be trained")

    def is_read_whole(self, config):
        return getattr(config.get_text_config(), FIELD) == 1

    def forget(self, config):
        delattr(config.get_text_config(), FIELD)


@pytest.fixture
def zipped(monkeypatch):
    forms = {"stored_forms": {FIELD: f"{__name__}:Zipped"}}
    monkeypatch.setattr(module, "added", lambda table, known: forms.get(table, {}))
    monkeypatch.setattr(module, "missing", lambda table: {})


def test_whole_weights_are_nobodys(zipped):
    config: Any = PreTrainedConfig()
    check_form(config, "FOLDER")
    stored_form(config).check_trains(config, "FOLDER")
    stored_form(config).forget(config)
    form = stored_form(config)
    assert isinstance(form, WholeWeights) and form.is_read_whole(config) and not hasattr(config, "seen")


@pytest.mark.parametrize(("value", "whole"), [(1, True), (2, False)])
@pytest.mark.parametrize("nested", [False, True])
def test_the_plugin_that_knows_the_field_is_asked(zipped, value, whole, nested):
    config: Any = PreTrainedConfig() if nested else PreTrainedConfig(**{FIELD: value})
    if nested:
        config.text_config = PreTrainedConfig(**{FIELD: value})
    check_form(config, "FOLDER")
    assert config.seen == "FOLDER"
    form = stored_form(config)
    assert not isinstance(form, WholeWeights) and form.is_read_whole(config) is whole
    if whole:
        stored_form(config).check_trains(config, "FOLDER")
    else:
        with pytest.raises(ThreestepError, match="'FOLDER' cannot be trained"):
            stored_form(config).check_trains(config, "FOLDER")
    stored_form(config).forget(config)
    assert isinstance(stored_form(config), WholeWeights)


def with_field(folder: str, value: Any) -> str:
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {FIELD: value}))
    return folder


def test_a_folder_is_checked_before_its_configuration_is_read(zipped, save_folder):
    folder = with_field(save_folder(), "much")
    with pytest.raises(ThreestepError, match=f"'{folder}/config.json' expects in zipped a number, got 'much'"):
        load_config(folder)
    assert load_config(with_field(folder, 1)).seen == folder


def test_without_the_plugin_it_is_named(monkeypatch, save_folder):
    monkeypatch.setattr(module, "added", lambda table, known: {})
    monkeypatch.setattr(module, "missing", lambda table: {FIELD: "zips"})
    monkeypatch.setattr(module, "missing_plugin", lambda table, field: "they need the plugin 'zips'")
    folder = with_field(save_folder(), 2)
    with pytest.raises(ThreestepError, match=f"'{folder}' has zipped in its config.json, .* stored whole; they need"):
        load_config(folder)
