"""The class that loads and makes a scalar model: transformers' own, and for families of images and text that have none,
one with the family's body under a linear head (`score`), as transformers makes those of texts.

Its folder is laid out like the family's language model, with `score.weight` for the output layer: transformers renames
what is in files by the name of a class, and this one's gets the renamings of that language model.
"""

from __future__ import annotations

from typing import Any

from training.utils.models.families.parts import is_media_config

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
