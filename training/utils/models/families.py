"""Families of models: which class loads a language model and a scalar model, which parts of a model of images and text
are language, tower and projector, the files of its image processor, and checks of what a model reads.

Names of the parts (transformers 5.19):

| family | language model | tower | projector |
| --- | --- | --- | --- |
| Qwen2-VL, 2.5-VL, 3-VL | `language_model` | `visual` | `visual.merger`, `visual.deepstack_merger_list` |
| LLaVA, Gemma 3, InternVL | `language_model` | `vision_tower` | `multi_modal_projector` |
| LLaVA-NeXT, LLaVA-OneVision | `language_model` | `vision_tower` | `multi_modal_projector`, `image_newline` |
| Idefics 3, SmolVLM | `text_model` | `vision_model` | `connector` |

A scalar model has transformers' own class. Families of images and text without one get one with the family's body
under a linear head (`score`), as transformers builds those of text. Its folder is laid out like the family's language
model, with `score.weight` for the output layer: transformers renames what is in files by the name of a class, and this
one's gets the renamings of that language model.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from torch import nn


_PROJECTOR = re.compile(r"(^|[._])(merger|projector|connector|resampler|aligner|image_newline)([._]|$)")


def is_media_config(config: Any) -> bool:
    """Return whether a configuration is that of a model of images and text."""
    return media_architecture(config) is not None


def media_architecture(config: Any) -> str | None:
    """Return the name of the class that reads images too, of a configuration's family; None of one of text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)


def is_text_config(config: Any) -> bool:
    """Return whether transformers loads the model of a configuration as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def language_model_class(config: Any, with_media: bool) -> Any:
    """Return transformers' class that loads the model of a configuration.

    with_media: for rows with images. Without them, a model that transformers also takes for a causal language model is
        loaded as that.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = is_media_config(config) and (with_media or not is_text_config(config))
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def placeholder_id(config: Any) -> int:
    """Return the token that stands for each token of an image, of the configuration of a model of images and text."""
    return int(config.image_token_id)


def language_part(model: nn.Module) -> nn.Module:
    """Return the language model inside a model of images and text, without its output layer; any other model whole."""
    return model.get_submodule(_language_name(model))


def is_beside_language(model: nn.Module) -> Callable[[str], bool]:
    """Return whether the name of a parameter or linear layer of `model` is of its tower or projector."""
    language = _language_name(model)
    if not language:
        return lambda name: False
    head = model.get_output_embeddings()  # type: ignore[operator]
    heads = [name for name, module in model.named_modules() if head is not None and module is head]
    return lambda name: not any(name == part or name.startswith(f"{part}.") for part in (language, "score", *heads))


def is_of_projector(name: str) -> bool:
    """Return whether a name of tower or projector is of the projector, which makes embeddings of the tower's states."""
    return _PROJECTOR.search(name) is not None


def _language_name(model: nn.Module) -> str:
    """The name of the language model inside a model of images and text; "" of any other model."""
    from transformers import PreTrainedModel

    config: Any = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or not is_media_config(config):
        return ""
    text_config = config.get_text_config()
    parts = (name for name, part in model.named_modules() if name and getattr(part, "config", None) is text_config)
    return next(parts, "") if text_config is not config else ""


# As transformers 5.19 names them. A chat template is the tokenizer's.
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def processor_files(name_or_path: str | Path) -> list[Path]:
    """Return those that a model's folder has; of a hub name, those in its local snapshot, downloaded where they are not
    there yet."""
    folder = Path(name_or_path)
    if folder.is_dir():
        return [folder / name for name in _FILES if (folder / name).is_file()]
    from transformers.utils import cached_file

    found = [cached_file(str(name_or_path), name, _raise_exceptions_for_missing_entries=False) for name in _FILES]
    return [Path(path) for path in found if path is not None]


def copy_files(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        shutil.copyfile(file, folder / file.name)


def write_beside(write_more: Callable[[Path], None] | None, files: Iterable[Path], folder: Path) -> None:
    """Write what belongs into a model folder besides the model: files of its image processor, and what `write_more`
    writes."""
    copy_files(files, folder)
    if write_more is not None:
        write_more(folder)


def check_reads_text(config: Any, name_or_path: str, takes_media: bool = False) -> None:
    """ThreestepError for a model of images and text, unless transformers also takes it for a causal language model, and
    for one that writes no text.

    takes_media: what reads it trains such models too
    """
    if is_media_config(config) and not is_text_config(config) and not takes_media:
        raise ThreestepError(
            f"'{name_or_path}': expected a text-only causal language model, got an image-text model "
            f"({config.model_type}), which is not supported here yet; use a language model"
        )
    if is_media_config(config) and not hasattr(config.get_text_config(), "vocab_size"):
        raise ThreestepError(
            f"'{name_or_path}': expected a model that generates text, got one of the family {config.model_type}, "
            "whose config.json has no vocabulary; use a language model"
        )


def check_reads_media(config: Any, name_or_path: str) -> None:
    """ThreestepError if a model reads text alone, for rows with images."""
    if not is_media_config(config):
        raise ThreestepError(
            f"'{name_or_path}': expected an image-text model, because some rows have images, got "
            f"{config.model_type}, which accepts only text; use another model, or data without images"
        )


def refuse_without_projector(model: Any) -> NoReturn:
    """ThreestepError for a model without a projector."""
    raise ThreestepError(
        f"--freeze_projector expects an image-text model whose projector has a known name, got "
        f"{type(model).__name__}; remove it"
    )


_OF_LANGUAGE, _OF_SCORES = "ForConditionalGeneration", "ForSequenceClassification"


def scalar_model_class(config: Any) -> Any:
    """Return what loads the scalar model of a configuration, by `from_pretrained`, or makes it, by `from_config`."""
    from transformers import AutoModelForSequenceClassification

    return own_scalar_class(config) or AutoModelForSequenceClassification


def own_scalar_class(config: Any) -> Any | None:
    """Return the class of a family of images and text for which transformers has no scalar head; None of any other
    model, and where such a family is not built as a body under a head."""
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        PreTrainedModel,
    )
    from transformers.modeling_layers import GenericForSequenceClassification

    kind = type(config)
    if not is_media_config(config) or kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    language_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    prefix = GenericForSequenceClassification.base_model_prefix
    if (
        not language_class.__name__.endswith(_OF_LANGUAGE)
        or language_class.base_model_prefix != prefix
        or kind not in MODEL_MAPPING
    ):
        return None
    name = language_class.__name__.removesuffix(_OF_LANGUAGE) + _OF_SCORES
    family = next(parent for parent in language_class.__mro__ if PreTrainedModel in parent.__bases__)
    _rename_as(language_class, config.model_type, name)

    def from_config(cls: Any, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
        return cls._from_config(config, **options)

    own = {"__module__": __name__, "__doc__": f"A body of {family.__name__} under a scalar head."}
    return type(name, (GenericForSequenceClassification, family), {**own, "from_config": classmethod(from_config)})


def _rename_as(language_class: Any, model_type: str, name: str) -> None:
    """Have transformers rename the tensors in files of the class `name` as it does for the family's language model."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    renamings = get_checkpoint_conversion_mapping(language_class.__name__)
    if renamings is None:
        renamings = get_checkpoint_conversion_mapping(model_type)
    if renamings is not None:
        register_checkpoint_conversion_mapping(name, renamings, overwrite=True)
