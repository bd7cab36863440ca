"""A step of a tiny Qwen2-VL: shares against a gradient for each token in plain float64 PyTorch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.recording.files import RecordHead, StepRecord
from threestep.plugins.explain.explanation import Questions, explain
from threestep.plugins.explain.forward.model import InDouble
from threestep.plugins.explain.page import page
from threestep.plugins.explain.shares import shares_of
from threestep.plugins.explain.tests.explained_steps import updated
from threestep.plugins.explain.updates import dot, update_of

IMAGE, START = 5, 6
GRIDS = [[1, 4, 4], [1, 4, 2], [1, 2, 2]]  # in patches, of which 2 x 2 make a token
SEQUENCES = [
    [1, START, *[IMAGE] * 4, 2, START, *[IMAGE] * 2, 3, 4, 9],
    [7, 8, 9, 10],
    [START, IMAGE, 8, 9, 10, 4],
    [1, START, *[IMAGE] * 4, 11, 12],
]
HELD = [[0, 1], [], [2], [0]]  # images of each sequence; two share one
BEGINS = [[2, 8], [], [1], [2]]


def _model() -> torch.nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(1)
    text = {
        "vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 1, "patch_size": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START,
        initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config).double().eval()


@cache
def _drawn() -> tuple[StepRecord, np.ndarray]:
    """A step of SFT on the last two tokens of each sequence, and each token's share."""
    model = _model()
    weights = dict(model.named_parameters())
    values = [torch.randn(np.prod(grid), 3 * 2 * 2 * 2).double() for grid in GRIDS]
    logprobs, masks = [], []
    for ids, held in zip(SEQUENCES, HELD, strict=True):
        ids_1T = torch.tensor([ids])
        media = {"mm_token_type_ids": (ids_1T == IMAGE).long()} if held else {}
        if held:
            media["pixel_values"] = torch.cat([values[place] for place in held])
            media["image_grid_thw"] = torch.tensor([GRIDS[place] for place in held])
        with InDouble():
            logits = model(input_ids=ids_1T, **media).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, ids_1T[0, 1:, None]).squeeze(1)
        logprobs.append(torch.nn.functional.pad(own, (1, 0)))
        masks.append(torch.arange(len(ids)) >= len(ids) - 2)
    read_T, mask_T = torch.cat(logprobs), torch.cat(masks)
    state, shares, settings, figures = updated(weights, -read_T[mask_T].mean(), [read_T], 100.0)
    ends = np.cumsum([0, *map(len, SEQUENCES)])
    held = [place for own in HELD for place in own]
    tensors = {
        "lengths": np.array([len(ids) for ids in SEQUENCES]),
        "token_ids": np.concatenate(SEQUENCES),
        "micro_batches": np.zeros(4, dtype=np.int64),
        "loss_mask": mask_T.numpy(), "data_mask": mask_T.numpy(), "logprobs": read_T.detach().numpy(),
        "media_begins": np.array([ends[row] + place for row, own in enumerate(BEGINS) for place in own]),
        "media_tokens": np.array([int(np.prod(GRIDS[place])) // 4 for place in held]),
        "media_counts": np.array([int(np.prod(GRIDS[place])) for place in held]),
        "media_grids": np.array([GRIDS[place] for place in held]),
        "media_values": torch.cat([values[place] for place in held]).numpy(),
    }  # fmt: skip
    settings |= {"dtype": "fp32", "reduction": "token mean"}
    head = RecordHead("sft", 4, 1, settings, figures, model=json.loads(model.config.to_json_string()))
    return StepRecord(head, [tensors], state), shares


def test_shares_equal_a_gradient_for_each_token():
    record, shares = _drawn()
    step = AuditedStep(record)
    update = update_of(step)
    found = shares_of(step, update, dtype=torch.float64)
    sizes = np.abs(shares).sum()
    np.testing.assert_allclose(found.whole, shares, atol=1e-9 * sizes)
    assert found.whole.sum() == pytest.approx(dot(step.state("gradients."), update.whole), abs=1e-9 * sizes)
    assert np.abs(found.parts["decay"]).max() > 0.0


def test_the_page_shows_the_images_of_each_sequence():
    found = explain([AuditedStep(_drawn()[0])], Questions())
    assert [len(own) for own in found.media] == [len(own) for own in HELD]
    assert found.media[0][0] == found.media[3][0] != found.media[0][1]
    shown = page(found)
    assert all(address in shown for own in found.media for address in own)


def test_a_record_without_its_pixels_is_refused():
    record = _drawn()[0]
    tensors = {name: values for name, values in record.ranks[0].items() if not name.startswith("media_")}
    with pytest.raises(LackingError, match="the images of its rows"):
        explain([AuditedStep(replace(record, ranks=[tensors]))], Questions())
