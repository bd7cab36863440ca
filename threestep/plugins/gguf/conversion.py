"""From a GGUF file to a model folder: transformers dequantizes the weights; `tokenizer` reads the metadata.

transformers skips settings and tensors that it does not know, without an error. The model would then compute something
else, so both are checked here. A family joins FAMILIES once its logits equal those of the model from which llama.cpp's
own converter wrote a file.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.gguf.tokenizer import ORIGINAL, tokenizer_of
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import publish_folder, remove

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3")
# Settings, without the family's name, that must equal the width of a head.
_HEAD_WIDTHS = ("rope.dimension_count", "attention.key_length", "attention.value_length")


def write_folder(file: Path, folder: Path, source_name: str) -> None:
    """Write the model folder of a GGUF file: configuration, float32 weights as safetensors, and tokenizer.

    source_name: of a JSON file in it, with the name of the file, its most frequent type, and the number of weights
    ThreestepError where the file cannot be read whole; nothing is left at `folder` then.
    """
    reader = _reader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise ThreestepError(
            f"'{file}' contains a model of the family '{family}', but only GGUF files of {', '.join(FAMILIES)} can be "
            f"read; {ORIGINAL}"
        )
    tokenizer = tokenizer_of(metadata, file)
    model = _model(file, reader, metadata, family)
    beside = folder.with_name(f".{folder.name}")
    remove(beside)
    try:
        with _quiet():
            model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
        source = {"file": file.name, "type": kinds.most_common(1)[0][0], "weights": model.num_parameters()}
        (beside / source_name).write_text(json.dumps(source), encoding="utf-8")
        publish_folder(beside, folder)
    finally:
        remove(beside)


def _reader(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as problem:
        raise ThreestepError(f"'{file}' needs the package gguf; install it: pip install gguf") from problem
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as problem:
        raise ThreestepError(
            f"'{file}' is not a complete GGUF file ({problem}); download or copy it again"
        ) from problem
    if not reader.tensors:
        raise ThreestepError(f"'{file}' holds no tensors, only metadata; download the file with the weights")
    parts = reader.fields.get("split.count")
    if parts is not None and parts.contents() > 1:
        raise ThreestepError(
            f"'{file}' is one of {parts.contents()} parts; join them with llama.cpp's llama-gguf-split --merge, or "
            f"{ORIGINAL}"
        )
    return reader


def _model(file: Path, reader: GGUFReader, metadata: dict[str, Any], family: str) -> PreTrainedModel:
    """The model of the file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    with _quiet():
        model, loading = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    unread = _unread(reader, metadata, family, model)
    if unread or loading["missing_keys"]:
        raise ThreestepError(
            f"'{file}': transformers does not read {unread or 'all of its weights'}, so the model would compute "
            f"different results; {ORIGINAL}"
        )
    del model.config.quantization_config
    model.hf_quantizer = None  # otherwise save_pretrained refuses
    stops = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(each for each in stops if each is not None))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None
    return model


def _unread(reader: GGUFReader, metadata: dict[str, Any], family: str, model: PreTrainedModel) -> str:
    """The settings or weights of a file that are not in the model made of it, in words; "" if there are none."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    config = model.config
    mapped = GGUF_TO_TRANSFORMERS_MAPPING["config"][family].items()
    read = {f"{family}.{key}" for key, name in mapped if name is not None}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    read |= {f"{family}.{key}" for key in _HEAD_WIDTHS if metadata.get(f"{family}.{key}") == width}
    if metadata.get(f"{family}.rope.scaling.type") == "none":
        read.add(f"{family}.rope.scaling.type")
    unread = [name for name in metadata if name.startswith(f"{family}.") and name not in read]
    if unread:
        return f"its settings {', '.join(unread)}"
    missing = sum(int(tensor.n_elements) for tensor in reader.tensors) - model.num_parameters()
    names = (tensor.name for tensor in reader.tensors)
    odd = ", ".join(name for name in names if not name.startswith(("blk.", "token_embd", "output")))
    return f"{abs(missing):,} of its weights ({odd})" if missing else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and notes of transformers meanwhile; the bars take no setting."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
