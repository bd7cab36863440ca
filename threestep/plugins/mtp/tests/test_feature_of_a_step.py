"""A head in the checks of a step that come before the model: adapters beside it, and its figures of evaluations."""

from __future__ import annotations

import pytest

from threestep.plugins.best_model.tests.test_checks import checked
from training.step1_sft.main import main
from training.utils.base.errors import ThreestepError


def test_adapters_are_not_trained_by_a_heads_loss():
    flags = "--model_name_or_path no/model --data_path embedded --mtp_num_layers 1 --mtp_detach false --lora_dim 4"
    with pytest.raises(ThreestepError, match="^--mtp_detach false trains all .* too, and --lora_dim 4 adapters"):
        main(flags.split())


def test_its_loss_may_choose_the_best_model():
    checked("step1_sft", "mtp_loss")
