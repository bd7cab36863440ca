"""Weights of a file start where torch's own do."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import tiny_causal_lm
from training.utils.models.weights import align_weights


def test_weights_that_start_elsewhere_are_moved_and_no_others():
    """A weight at the second number of a line; what torch allocated stays where it is."""
    model = torch.nn.Linear(16, 3)
    own = model.bias.data_ptr()
    model.weight.data = torch.arange(49.0)[1:].view(3, 16)
    assert align_weights(model) == 1
    assert model.weight.data_ptr() % 64 == 0 and model.bias.data_ptr() == own
    assert torch.equal(model.weight, torch.arange(1.0, 49.0).view(3, 16))
    assert align_weights(model) == 0


def test_weights_that_share_memory_go_on_sharing_it():
    model = torch.nn.ModuleList(torch.nn.Linear(16, 3, bias=False) for _ in range(2))
    model[0].weight.data = torch.zeros(49)[1:].view(3, 16)
    model[1].weight.data = model[0].weight.data
    assert align_weights(model) == 0
    model[0].weight.data += 1
    assert torch.equal(model[1].weight, torch.ones(3, 16))


@pytest.mark.parametrize("ties", [False, True])
def test_a_loaded_models_weights_are_aligned(tmp_path, ties):
    """A header of any length puts them off the lines; tied ones stay tied."""
    from training.utils.loading.models import load_causal_lm
    from training.utils.models.settings import ModelSettings

    tiny = tiny_causal_lm("llama", tie_word_embeddings=ties)
    tiny.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    for note in ("", "x" * 8, "x" * 16):  # the header is padded to 8 bytes
        save_file(load_file(file), file, metadata={"format": "pt", "note": note})
        model = load_causal_lm(ModelSettings(str(tmp_path)), torch.float32, tiny.config.vocab_size)
        assert {weight.data_ptr() % 64 for weight in model.parameters()} == {0}
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == ties
        for (name, weight), other in zip(model.named_parameters(), tiny.parameters(), strict=True):
            assert torch.equal(weight, other), name
