"""A model folder with a head for multi-token prediction as vLLM runs it. Serves `threestep export --mtp vllm`, and
rollouts by vLLM that draft with the head that is trained.

vLLM knows heads by the families that were published with one. Two forms stand for dense models (read and run in vLLM
0.32, mimo_mtp.py and ernie_mtp.py):

MiMo: the folder itself, a Qwen2 with the head's tensors in a file of their own, `mtp.safetensors`: vLLM reads every
    safetensors file of a folder without an index, transformers `model.safetensors` alone. A Llama is a Qwen2 whose
    queries, keys and values have biases of 0.
ERNIE-4.5: a folder of the head's own inside the model's, DRAFT, for a Llama. As vLLM runs it, it has no final norm, and
    reads the state after the model's (Baidu's own code does otherwise: see `public_names`).

MiMo's head reads the state before the model's final norm, and ours the state after it: see `public_names`.

In rollouts the head has a folder of its own in both forms (`write_draft`), and the model stays of its own family:
MiMo's head then reads the state after the norm, as ours does, and nothing is folded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.loading.weight_files import INDEX, ONE_FILE, weight_files
from training.utils.plugins.registry import check_plugin, plugin_module

if TYPE_CHECKING:
    import torch

DRAFT = "draft"
MTP_FILE = "mtp.safetensors"
_LAYERS_FLAG = {"num_nextn_predict_layers": 1}
_RUN_MODULES = 1  # vLLM's MiMo and ERNIE run the first alone, for each further token again
_BIASED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_NO_FIELDS_OF_QWEN2 = ("attention_bias", "mlp_bias", "head_dim", "pretraining_tp", "qkv_bias")


def write_for_vllm(folder: Path) -> str:
    """Change a model folder that holds a head into one that vLLM drafts with; return a sentence with what vLLM is to be
    told, its `speculative_config`. transformers loads the folder as before.

    ThreestepError if there is no head, or no form for it.
    """
    check_plugin("mtp", "--mtp vllm")
    layers = _heads().layers_in(folder)
    if not layers:
        raise ThreestepError(
            f"--mtp vllm needs a model with a multi-token-prediction head, but '{folder}' has none; train one with "
            "--mtp_num_layers 1, or remove --mtp"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    form = check_form(config, _has_final_norm(_heads().stored_state(folder, _RUN_MODULES)), "--mtp vllm")
    _one_file(folder)
    settings = {"mimo": _write_as_mimo, "ernie": _write_beside_ernie}[form](folder, config)
    return f"to let vLLM draft with the head, run it with: --speculative-config '{json.dumps(settings)}'"


def write_draft(folder: Path, state: Mapping[str, torch.Tensor], tokens: int) -> dict[str, Any]:
    """Write into `folder`, which has the configuration of a model that vLLM gets its weights of later, what vLLM needs
    to draft `tokens` tokens beside it; return its `speculative_config`.

    state: of the MtpHead. Its weights are `draft_tensors`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    draft = folder / DRAFT
    draft.mkdir()
    own = _mimo_config(config) if _has_final_norm(state) else _ernie_config(config)
    _write_config(draft, own)
    _write_config(folder, {**config, **_LAYERS_FLAG})
    return {"model": str(draft), "method": "mtp", "num_speculative_tokens": tokens}


def draft_tensors(model_type: str, model_layers: int, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of what `write_draft` describes, under the names that vLLM loads. model_type, model_layers: of
    the model's configuration."""
    first = {name: tensor for name, tensor in state.items() if name.startswith("depths.0.")}
    if not _has_final_norm(first):
        return _public("ernie", first, model_layers)
    if model_type == "llama":
        _add_zero_biases(first)
    return _public("mimo", first, model_layers)


def check_form(config: dict[str, Any], has_final_norm: bool, flag: str) -> str:
    """Return the form that holds such a head of such a model: mimo or ernie. ThreestepError, which names `flag`, if
    none does. config: of the model, as in its config.json."""
    family = config.get("model_type")
    split_evenly = config.get("head_dim") in (
        None,
        config.get("hidden_size", 0) // config.get("num_attention_heads", 1),
    )
    is_plain = not (config.get("attention_bias") or config.get("mlp_bias"))
    if has_final_norm and (family == "qwen2" or (family == "llama" and is_plain and split_evenly)):
        return "mimo"
    if not has_final_norm and family == "llama":
        return "ernie"
    got = f"{family} with a head {'that ends in a norm' if has_final_norm else 'without a norm at its end'}"
    if family == "llama" and has_final_norm:
        got += ", plus biases or attention heads whose width is not hidden_size / num_attention_heads"
    raise ThreestepError(
        f"{flag} needs a Qwen2, or a Llama without biases, whose head ends in a norm (exported as MiMo), or a "
        f"Llama whose head was trained with --mtp_final_norm false (exported as ERNIE-4.5), got {got}; "
        f"remove {flag}, or train a head of the other kind"
    )


def _write_as_mimo(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    if config["model_type"] == "llama":
        _give_biases(folder)
    norm_H = load_file(folder / ONE_FILE)["model.norm.weight"]
    first = _heads().stored_state(folder, _RUN_MODULES)
    before_the_norm = plugin_module("mtp", "public_names").before_the_norm
    public = _public("mimo", before_the_norm(first, norm_H), config["num_hidden_layers"])
    save_file(public, folder / MTP_FILE, metadata={"format": "pt"})
    _write_config(folder, _mimo_config(config))
    return {"method": "mtp", "num_speculative_tokens": 1}


def _give_biases(folder: Path) -> None:
    """Make a Llama and its head a Qwen2, by biases of 0 in the folder's files."""
    from safetensors.torch import load_file, save_file

    layers = _heads().layers_in(folder)
    weights, state = load_file(folder / ONE_FILE), _heads().stored_state(folder, layers)
    for tensors in (weights, state):
        _add_zero_biases(tensors)
    save_file(weights, folder / ONE_FILE, metadata={"format": "pt"})
    _heads().save_head(folder, layers, state)


def _add_zero_biases(tensors: dict[str, torch.Tensor]) -> None:
    """To the queries, keys and values of a Llama's tensors."""
    for name in [name for name in tensors if name.endswith(_BIASED)]:
        tensors[name.removesuffix("weight") + "bias"] = tensors[name].new_zeros(len(tensors[name]))


def _mimo_config(config: dict[str, Any]) -> dict[str, Any]:
    if config["model_type"] == "llama":
        kept = {name: value for name, value in config.items() if name not in _NO_FIELDS_OF_QWEN2}
        config = {**kept, "model_type": "qwen2", "use_sliding_window": False}
    return {**config, **_LAYERS_FLAG, "architectures": ["MiMoForCausalLM"]}


def _ernie_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **_LAYERS_FLAG, "architectures": ["ErnieMTPModel"], "model_type": "ernie4_5_moe"}


def _has_final_norm(state: Mapping[str, torch.Tensor]) -> bool:
    return f"depths.0{_heads().FINAL_NORM}" in state


def _write_beside_ernie(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    weights, draft = load_file(folder / ONE_FILE), folder / DRAFT
    tensors = _public("ernie", _heads().stored_state(folder, _RUN_MODULES), config["num_hidden_layers"])
    of_the_model = ("model.embed_tokens.weight", "lm_head.weight")
    tensors |= {name: weights[name] for name in of_the_model if name in weights}
    draft.mkdir()
    save_file(tensors, draft / ONE_FILE, metadata={"format": "pt"})
    _write_config(draft, _ernie_config(config))
    _write_config(folder, {**config, **_LAYERS_FLAG})
    return {"model": str(draft), "method": "mtp", "num_speculative_tokens": 1}


def _one_file(folder: Path) -> None:
    """Join the files of a model that an index names: beside an index vLLM reads no other file."""
    from safetensors.torch import load_file, save_file

    files = weight_files(folder)
    if [file.name for file in files] == [ONE_FILE]:
        return
    weights = {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}
    for file in (*files, folder / INDEX):
        file.unlink()
    save_file(weights, folder / ONE_FILE, metadata={"format": "pt"})


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _heads() -> Any:
    """The folders of heads, of the plugin that trains them."""
    return plugin_module("mtp", "folder")


def _public(form: str, state: Mapping[str, torch.Tensor], model_layers: int) -> dict[str, torch.Tensor]:
    """The tensors of a head under the names of a public form."""
    names = plugin_module("mtp", "public_names")
    found: dict[str, torch.Tensor] = names.to_public(names.FORMS[form], state, model_layers)
    return found
