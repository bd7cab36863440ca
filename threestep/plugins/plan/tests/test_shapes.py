"""Public shapes: the weights that follow are the published ones."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.plan.shapes import SHAPES, shape_of, write_shape
from training.utils.base.errors import ThreestepError

# As the repositories' safetensors have them.
WEIGHTS = {
    "0.5B": 494_032_768, "1.5B": 1_543_714_304, "7B": 7_615_616_512, "8B": 8_030_261_248, "13B": 13_015_864_320,
    "32B": 32_763_876_352, "70B": 70_553_706_496, "405B": 405_853_388_800,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_those_published(name):
    shape = SHAPES[name]
    keys = shape.width // shape.heads * shape.key_value_heads
    attention = 2 * shape.width**2 + 2 * shape.width * keys
    biases = shape.width + 2 * keys if shape.family == "qwen2" else 0
    layer = attention + biases + 3 * shape.width * shape.inner + 2 * shape.width
    tables = shape.vocabulary * shape.width * (1 if shape.tied else 2)
    assert shape.layers * layer + tables + shape.width == WEIGHTS[name]


def test_a_folder_is_written_that_transformers_reads(tmp_path):
    write_shape(SHAPES["13B"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["num_attention_heads"]) == ("llama", 40, 40)


def test_names_have_any_case_and_paths_are_none():
    assert shape_of("70b") is SHAPES["70B"]
    assert shape_of("./70B") is shape_of("runs/70B") is None
    with pytest.raises(ThreestepError, match="or one of 0.5B, 1.5B, .*, got '71B'; did you mean '7B'"):
        shape_of("71B")
