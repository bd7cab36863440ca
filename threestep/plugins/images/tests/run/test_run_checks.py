"""Flags of step 3 that do not go with prompts that have images are named."""

from __future__ import annotations

import pytest
import torch

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.pixels import ImagePixels
from training.step3_ppo.flags.checks import check_beside_media, checked_components
from training.utils.base.errors import ThreestepError


def beside_images(**given) -> None:
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    flags = ppo_flags(**{**paths, "advantage": "grpo", "num_samples_per_prompt": 2, "reward": "gsm8k", **given})
    components = checked_components(flags)
    check_beside_media(flags, components, None)
    check_beside_media(flags, components, RowImages(lambda keys: ImagePixels(torch.zeros(1)), ()))


def test_what_reads_images_goes_with_them():
    beside_images()
    beside_images(advantage="gae", reward="model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not read images, and prompts of the data have so"),
        ({"speculate": "2", "speculate_by": "ngram"}, "--speculate 2 does not go with prompts that have images: it gu"),
        ({"parallel_thinking": True}, "--parallel_thinking does not go with prompts that have images: it draws paths"),
        ({"mtp_num_layers": 1}, "--mtp_num_layers 1 does not go with prompts that have images: it reads embeddings"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_images_is_named(given, said):
    with pytest.raises(ThreestepError, match=said):
        beside_images(**given)
