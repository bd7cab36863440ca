"""Folders with adapters where the plugin that reads them is not there."""

from __future__ import annotations

import json

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.loading import weight_files
from training.utils.loading.configurations import load_config
from training.utils.loading.weight_files import find_adapter, model_of


@pytest.fixture
def without_plugin(monkeypatch):
    monkeypatch.setattr(weight_files, "added", lambda table, known: {})
    monkeypatch.setattr(weight_files, "missing", lambda table: {"adapter_config.json": "lora"})
    monkeypatch.setattr(weight_files, "missing_plugin", lambda table, file: f"get the plugin of {table} in {file}")


def test_the_plugin_is_named(without_plugin, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x"}))
    for read in (find_adapter, model_of, load_config):
        with pytest.raises(ThreestepError, match="holds adapter_config.json, .*the plugin of adapters in adapter_conf"):
            read(str(tmp_path))


def test_models_are_no_adapters(without_plugin, save_folder):
    folder = save_folder()
    assert find_adapter(folder) is None and model_of(folder) == folder
    assert find_adapter("a/name") is None
