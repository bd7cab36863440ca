"""The scale of a reward model's scores is kept in its configuration, where plain transformers leaves it alone."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.support.tiny_models import FAMILIES, tiny_config, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import ScoreScale, read_score_scale, set_score_scale


@pytest.mark.parametrize("family", FAMILIES)
def test_it_comes_back_and_plain_transformers_loads_the_model(tmp_path, family):
    model = tiny_scalar_model(family)
    set_score_scale(model.config, ScoreScale(0.1 + 0.2, 1 / 3))
    model.save_pretrained(tmp_path)
    assert read_score_scale(str(tmp_path), "--flag") == ScoreScale(0.1 + 0.2, 1 / 3)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert (loaded.config.threestep_score_mean, loaded.config.threestep_score_std) == (0.1 + 0.2, 1 / 3)
    set_score_scale(loaded.config, None)
    set_score_scale(loaded.config, None)  # nothing is there any more
    loaded.save_pretrained(tmp_path)
    assert "threestep" not in json.dumps(AutoConfig.from_pretrained(tmp_path).to_dict())


def test_a_model_without_a_scale(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ThreestepError) as caught:
        read_score_scale(str(tmp_path), "--normalize_reward_scores")
    assert str(caught.value) == (
        "--normalize_reward_scores needs threestep_score_mean and threestep_score_std in the configuration of "
        f"'{tmp_path}', which has none: train it with step 2 (--normalization_rows above 0), or leave the flag out"
    )


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan")])
def test_scores_that_do_not_vary(tmp_path, std):
    config = tiny_config("llama")
    set_score_scale(config, ScoreScale(1.0, std))
    config.save_pretrained(tmp_path)
    with pytest.raises(ThreestepError, match="has threestep_score_std .*, scores that do not vary and cannot be"):
        read_score_scale(str(tmp_path), "--normalize_reward_scores")
