"""What a model is besides its weights, kept in a checkpoint: configuration, tokenizer, adapters' settings, dtype.

With the weights of the checkpoint's engine beside it, a checkpoint is enough to make a model folder of.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.models.lora import ADAPTER

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FACTS = "weights.json"
_ADAPTER_FILE = "adapter_config.json"  # PEFT's name


@dataclass(frozen=True)
class DescribedModel:
    """model: on the meta device, with adapters where it had them. dtype: of its floating-point weights. trained: the
    names of those that an optimizer changed, in the order of `model.parameters()`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    trained: tuple[str, ...]

    @property
    def has_lora(self) -> bool:
        return getattr(self.model, "_hf_peft_config_loaded", False)


def write_description(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write what `read_description` reads to `folder`: small, and nothing of it pickled."""
    folder.mkdir(parents=True)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    adapters = getattr(model, "peft_config", {})
    if ADAPTER in adapters:
        adapters[ADAPTER].save_pretrained(folder)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    facts = {"dtype": str(model.dtype).removeprefix("torch."), "trained": trained}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def read_description(folder: Path) -> DescribedModel:
    """The model that was described, empty: its weights are on the meta device."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        GenerationConfig,
    )

    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    dtype = getattr(torch, facts["dtype"])
    config = AutoConfig.from_pretrained(folder)
    scores = any("SequenceClassification" in name for name in config.architectures)
    auto_class: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype)
        if (folder / _ADAPTER_FILE).is_file():
            from peft import LoraConfig

            model.add_adapter(LoraConfig.from_pretrained(str(folder)), adapter_name=ADAPTER)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return DescribedModel(model, AutoTokenizer.from_pretrained(folder), dtype, tuple(facts["trained"]))
