"""A head: its flags, what it asks of a run, its folder, what it starts from, is exported and lent."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_causal_lm, tiny_config
from threestep.plugins.best_model.tests.test_checks import checked
from threestep.plugins.mtp.arguments import MtpArguments
from threestep.plugins.mtp.exported import write_trained_head
from threestep.plugins.mtp.feature import HeadFeature
from threestep.plugins.mtp.folder import FOLDER, layers_in, read_head, save_head
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.opening import _described, _read_stored
from threestep.plugins.mtp.planned import plan_head
from threestep.plugins.mtp.settings import MtpSettings, check_mtp
from threestep.plugins.mtp.tests.test_public_names import checkpoint, drawn_head
from threestep.plugins.mtp.training import WholeHead
from training.step1_sft.main import main
from training.step3_ppo.flags.checks import FORWARDS, VALUES, checked_components, why_apart
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.engine.checkpoint_files import write_state
from training.utils.engine.config.arguments import EngineSettings


def test_a_weight_without_a_head_is_a_mistake():
    mistakes = Mistakes()
    check_mtp(mistakes, MtpSettings(0, 0.3))
    with pytest.raises(
        ThreestepError, match="--mtp_loss_coef 0.3 sets the weight of a head's loss, but there is no head"
    ):
        mistakes.raise_if_any()


def test_the_flags_become_settings():
    assert MtpArguments().settings() == MtpSettings() and MtpSettings().layers == 0
    assert MtpArguments(2, 0.3).settings() == MtpSettings(2, 0.3)
    mistakes = Mistakes()
    MtpArguments(1, mtp_detach=False).validate(mistakes)  # of a step that trains by rewards
    assert "--mtp_detach false also trains the model on the head's loss. In this" in mistakes.sentences[0]


def test_what_a_head_asks_of_a_run():
    none, head = HeadFeature(MtpSettings()), HeadFeature(MtpSettings(2))
    assert none.needs_segments is None and not none.lends_guesser
    assert none.reuse_obstacle() is None and none.planned(None, None, 1, None) == ([], [], [])
    assert head.needs_segments == "--mtp_num_layers 2" and head.lends_guesser
    assert head.exact_weights() == {"--mtp_num_layers 2": "whose head starts as a copy of an unquantized layer"}
    checked("step1_sft", "mtp_loss")  # its loss may choose the best model


def test_without_a_head_nothing_is_asked():
    none, mistakes = HeadFeature(MtpSettings()), Mistakes()
    none.check_media(mistakes)
    assert mistakes.sentences == [] and none.needs_segments is None and not none.lends_guesser
    assert none.reuse_obstacle() is None and none.planned(None, None, 1, None) == ([], [], [])


@pytest.mark.parametrize(
    ("layers", "in_rollouts", "why"),
    [
        (0, False, None),
        (1, False, "with rows that have images: the head uses token embeddings, .* do not have; use 0"),
        (1, True, "with prompts that have images: it uses token embeddings, .* do not have; remove it"),
    ],
)
def test_a_head_reads_texts_alone(layers, in_rollouts, why):
    mistakes = Mistakes()
    HeadFeature(MtpSettings(layers), in_rollouts).check_media(mistakes)
    assert len(mistakes.sentences) == (why is not None)
    assert all(re.match(f"--mtp_num_layers 1 does not work {why}", said) for said in mistakes.sentences)


def test_adapters_are_not_trained_by_a_heads_loss():
    flags = "--model_name_or_path no/model --data_path embedded --mtp_num_layers 1 --mtp_detach false --lora_dim 4"
    with pytest.raises(
        ThreestepError, match="^--mtp_detach false trains the whole .* too, but --lora_dim 4 trains only adapters"
    ):
        main(flags.split())


PATHS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", "reward": "model:1.0"}


def test_forwards_that_keep_no_states_are_not_learned_from():
    sharded = {"actor_zero_stage": 3, "critic_zero_stage": 3, "actor_dropout": 0.1}
    flags = ppo_flags(**PATHS, **sharded, mtp_num_layers=1)
    assert why_apart(VALUES, flags, checked_components(flags).algorithm) is None  # the critic's do not meet the head
    flags = ppo_flags(**PATHS, mtp_num_layers=1)
    said = why_apart(FORWARDS, flags, checked_components(flags).algorithm) or ""
    assert said.startswith("true learns from forwards that keep no hidden states")
    sentence = "--reuse_forwards .*keep no hidden states, but --mtp_num_layers 1 reads them; remove one of"
    with pytest.raises(ThreestepError, match=sentence):
        checked_components(ppo_flags(**PATHS, reuse_forwards=True, mtp_num_layers=1))


def test_a_head_comes_back_and_transformers_does_not_see_it(tmp_path, capfd):
    model = tiny_causal_lm("llama")
    assert layers_in(tmp_path) == layers_in("a-name/on-a-hub") == 0
    model.save_pretrained(tmp_path)
    head, other, smaller = new_head(model, 2, seed=1), new_head(model, 2, seed=2), new_head(model, 1, seed=2)
    save_head(tmp_path, 2, dict(head.state_dict()))
    assert layers_in(tmp_path) == 2
    read_head(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))
    read_head(tmp_path, smaller)
    assert torch.equal(smaller.depths[0].eh_proj.weight, head.depths[0].eh_proj.weight)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format": 2, "num_layers": 1}', "[]"])
def test_a_damaged_description_is_said(tmp_path, text):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "config.json").write_text(text)
    with pytest.raises(ThreestepError, match="expected the description of a multi-token-prediction head"):
        layers_in(tmp_path)


def test_the_head_of_another_model_is_said(tmp_path):
    save_head(tmp_path, 1, dict(new_head(tiny_causal_lm("llama", hidden_size=48), 1, seed=1).state_dict()))
    with pytest.raises(ThreestepError, match="the head belongs to another model"):
        read_head(tmp_path, new_head(tiny_causal_lm("llama"), 1, seed=1))


@pytest.mark.parametrize("final_norm", [True, False])
def test_a_head_of_no_weights_counts_those_of_a_head(final_norm):
    """Float32 under ZeRO-0: 4 bytes a weight and 4 a gradient, 8 of Adam's moments."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    settings, device = EngineSettings(dtype="fp32", zero_stage=0, learning_rate=1e-3), PlannedDevice(is_cuda=False)
    [sentence], held, [stepping] = plan_head(model, MtpSettings(2, final_norm=final_norm), settings, 1, device=device)
    head = new_head(tiny_causal_lm("llama"), 2, seed=1, final_norm=final_norm)
    weights = sum(weight.numel() for weight in head.parameters())
    assert sentence == f"multi-token prediction: a head with 2 modules, {weights:,} weights"
    assert [line.device_bytes for line in held[:3]] == [4 * weights, 4 * weights, 8 * weights]
    assert held[0].name == "mtp: weights"
    assert stepping.doing == "in the head's optimizer step" and stepping.lines[0].name.startswith("mtp: ")
    assert plan_head(model, MtpSettings(), settings, 1, device=device) == ([], [], [])


def test_the_folders_own_head_comes_before_a_public_one_and_a_new_one(tmp_path):
    model = tiny_causal_lm("llama")
    model.save_pretrained(tmp_path)
    head = new_head(model, 2, seed=3)
    assert _read_stored(head, str(tmp_path), model) == (0, "")
    assert _described(0, 2, "") == "a head with 2 modules: 2 new, initialized from the model's last block"

    public = drawn_head(model, "deepseek", 1)
    checkpoint(tmp_path, model, "deepseek", public)
    found = _read_stored(head, str(tmp_path), model)
    assert found == (1, f"{tmp_path}: model.layers.2.* (the names of DeepSeek-V3 and GLM-4.5)")
    assert torch.equal(head.depths[0].eh_proj.weight, public.depths[0].eh_proj.weight)
    assert _described(*found[:1], 2, found[1]) == (
        f"a head with 2 modules: 1 loaded from {tmp_path}: model.layers.2.* (the names of DeepSeek-V3 and GLM-4.5) and "
        "1 new, initialized from the model's last block"
    )

    own = drawn_head(model, "deepseek", 2, seed=5)
    save_head(tmp_path, 2, dict(own.state_dict()))
    assert _read_stored(head, str(tmp_path), model) == (2, f"{tmp_path}/mtp")
    assert torch.equal(head.depths[1].eh_proj.weight, own.depths[1].eh_proj.weight)


@pytest.mark.parametrize("joint", [False, True], ids=["beside", "by_one_loss"])
def test_a_head_is_exported(tiny_tokenizer, tmp_path, joint):
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer), dtype=torch.bfloat16)
    head, state = new_head(model, 2, seed=1), dict(model.state_dict(prefix="model."))
    if joint:
        state |= {f"mtp_head.{name}": weight for name, weight in head.float().state_dict().items()}
    else:
        (tmp_path / "mtp").mkdir()
        write_state({"module": head.float().state_dict()}, tmp_path / "mtp" / "mp_rank_00_model_states.safetensors")
    folder = tmp_path / "out"
    folder.mkdir()
    write_trained_head(folder, "model", {"model.weight": torch.ones(1)}, torch.float32, out=folder)
    assert list(folder.iterdir()) == []  # without a head
    write_trained_head(tmp_path, "model", state, torch.bfloat16, out=folder)
    assert layers_in(folder) == 2
    stored = load_file(folder / "mtp" / "model.safetensors")
    assert stored.keys() == head.state_dict().keys()
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    read_head(folder, again := new_head(model, 2, seed=2))
    assert torch.equal(again.depths[1].eh_proj.weight, head.depths[1].eh_proj.weight.bfloat16())


def test_what_is_lent():
    model = tiny_causal_lm("llama")
    head = new_head(model, 1, 0).train()

    def whole_of(stage: int) -> WholeHead:
        engine = SimpleNamespace(
            module=head,
            settings=SimpleNamespace(zero_stage=stage),
            ranks=SimpleNamespace(device=torch.device("cpu")),
            full_tensors=lambda module: iter(module.state_dict().items()),
        )
        return WholeHead(engine, lambda: new_head(model, 1, 1))

    with whole_of(2).lent() as lent:
        assert lent is head and not head.training
    assert head.training
    whole = whole_of(3)
    for _ in range(2):
        with torch.no_grad():
            head.depths[0].eh_proj.weight.add_(1.0)
        with whole.lent() as lent:
            assert lent is not head and not lent.training
            for name, weight in lent.named_parameters():
                assert torch.equal(weight, head.get_parameter(name)) and not weight.requires_grad


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_coef": 0.3}, "--mtp_loss_coef 0.3 sets the weight of a head's loss, but there is no head"),
        ({"final_norm": False}, "--mtp_final_norm false applies to a head, but there is no head"),
        ({"detach": False}, "--mtp_detach false applies to a head, but there is no head; add --mtp_num_lay"),
        ({"loss_coef": 0.1}, None),
        ({"layers": 1, "loss_coef": 0.3, "final_norm": False}, None),
    ],
)
def test_settings_without_a_head_are_mistakes(given, said):
    mistakes = Mistakes()
    check_mtp(mistakes, MtpSettings(**given))
    assert len(mistakes.sentences) == (said is not None) and all(said in each for each in mistakes.sentences)
