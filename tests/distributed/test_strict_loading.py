"""Models that are born sharded (ZeRO-3) are judged as whole ones are, on every rank and in the same words.

Transformers itself reports neither unexpected tensors nor wrong shapes there, and those on the first rank alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.distributed.launch import run_ranks
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine

# name: the words of its sentence; none if it loads. A name that begins with `reward` is loaded as a reward model; one
# that holds `adapter` is an adapter of `whole`, and one that holds `going_on` is asked for as the run's own LoRA.
WORDS = {
    "whole": "",
    "tied_gpt2": "",
    "wrapped": "the names of 21 tensors contain a wrapper's 'module.'",
    "lacking": "lacks the tensor model.norm.weight",
    "misshapen": "model.layers.0.mlp.up_proj.weight expects the shape [48, 32] from config.json, got [47, 32]",
    "tied_apart": "the files hold both, with different values",
    "classifier": "expected a language model, got a model for sequence classification",
    "reward": "",
    "reward_headless": "got one without score.weight",
    "reward_two_labels": "got 2 labels",
    "adapter": "",
    "adapter_dora": "",
    "adapter_going_on": "",
    "adapter_lacking": "lacks the tensor base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
    "reward_adapter": "",
}
SCRIPT = """
    import sys, torch, deepspeed
    from tests.distributed.launch import report
    from tests.support.lora_settings import lora_settings
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.loading.models import load_causal_lm, load_scalar_model
    from training.utils.loading.tokenizers import load_tokenizer
    from training.utils.models.settings import ModelSettings
    from training.utils.setup.setup import load_under
    from training.utils.base.errors import ThreestepError
    from safetensors.torch import load_file

    def loaded(folder, stage, ranks):
        tokenizer = load_tokenizer(folder)
        settings = ModelSettings(folder)
        if "going_on" in folder:
            settings = lora_settings(folder, lora_dim=2, lora_module_name="q_proj", trains_adapter_on=True)
        scores = "/reward" in folder

        def load(dtype):
            if scores:
                return load_scalar_model(settings, dtype, tokenizer, must_have_head="labels" not in folder)
            return load_causal_lm(settings, dtype, len(tokenizer))

        try:
            model = load_under(EngineSettings(zero_stage=stage), ranks, load)
        except ThreestepError as mistake:
            return str(mistake)
        want = load_file(folder + "/model.safetensors")
        names = [name for name, _ in model.named_parameters()]
        assert set(names) == want.keys() or "tied" in folder, names
        for name, weight in model.named_parameters():
            with deepspeed.zero.GatheredParameters([weight]):
                assert torch.allclose(weight, want[name], atol=1e-6 if "adapter" in folder else 0), name
        return ""

    with started_process_group() as ranks:
        report({f"{stage} {folder}": loaded(folder, stage, ranks) for folder in sys.argv[1:] for stage in (0, 3)})
"""


def make_folders(place: Path) -> list[Path]:
    tokenizer = train_tokenizer(SENTENCES)
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    models = {
        "tied_gpt2": lambda: tiny_causal_lm("gpt2", **size),
        "tied_apart": lambda: tiny_causal_lm("llama", tie_word_embeddings=True, **size),
        "classifier": lambda: tiny_scalar_model("llama", **size),
        "reward": lambda: tiny_scalar_model("llama", **size),
        "reward_headless": lambda: tiny_scalar_model("llama", **size),
        "reward_two_labels": lambda: tiny_scalar_model("llama", num_labels=2, **size),
    }
    changes: dict[str, Callable] = {
        "wrapped": lambda name, tensor: (f"module.{name}", tensor),
        "lacking": lambda name, tensor: (None if name == "model.norm.weight" else name, tensor),
        "misshapen": lambda name, tensor: (name, tensor[:-1].clone() if "up_proj" in name else tensor),
        "reward_headless": lambda name, tensor: (None if name == "score.weight" else name, tensor),
    }
    adapters = [name for name in WORDS if "adapter" in name]
    for name in WORDS.keys() - set(adapters):
        models.get(name, lambda: tiny_causal_lm("llama", **size))().save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        file = place / name / "model.safetensors"
        tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
        changed = dict(changes.get(name, lambda key, tensor: (key, tensor))(*item) for item in tensors.items())
        if name == "tied_apart":
            changed["lm_head.weight"] = changed["model.embed_tokens.weight"] + 1
        save_file({key: tensor for key, tensor in changed.items() if key}, file, {"format": "pt"})
    for name in adapters:
        make_adapter(place / name, place / "whole")
    return [place / name for name in WORDS]


def make_adapter(folder: Path, base: Path) -> None:
    """With the weights that are wanted of it in model.safetensors."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    scores = folder.name.startswith("reward")
    shape = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj"], "init_lora_weights": False}
    config = LoraConfig(**shape, use_dora="dora" in folder.name, task_type="SEQ_CLS" if scores else "CAUSAL_LM")
    labels = {"num_labels": 1} if scores else {}
    auto_class = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    adapted = get_peft_model(auto_class.from_pretrained(base, **labels), config)
    adapted.save_pretrained(folder)
    model = adapted.get_base_model() if "going_on" in folder.name else adapted.merge_and_unload()
    save_file({name: weight.data for name, weight in model.named_parameters()}, folder / "model.safetensors")
    if "lacking" in folder.name:
        file = folder / "adapter_model.safetensors"
        lacking = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
        save_file({name: tensor for name, tensor in load_file(file).items() if name != lacking}, file)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_models_are_judged_as_whole_ones_are(tmp_path, ranks):
    folders = make_folders(tmp_path)
    told = run_ranks(SCRIPT, ranks, folders, timeout_seconds=600)
    assert all(one == told[0] for one in told)
    for folder in folders:
        said = told[0][f"3 {folder}"]
        assert said == told[0][f"0 {folder}"]
        assert WORDS[folder.name] in said and bool(said) == bool(WORDS[folder.name]), said
