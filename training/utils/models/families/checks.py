"""Checks of what a model reads: text alone, or images too."""

from __future__ import annotations

from typing import Any, NoReturn

from training.utils.base.errors import ThreestepError
from training.utils.models.families.parts import is_media_config, is_text_config


def check_reads_text(config: Any, name_or_path: str, takes_media: bool = False) -> None:
    """ThreestepError for a model of images and text, unless transformers also takes it for a causal language model, and
    for one that writes no text.

    takes_media: what reads it trains such models too
    """
    if is_media_config(config) and not is_text_config(config) and not takes_media:
        raise ThreestepError(
            f"'{name_or_path}': expected a causal language model of text, got a model of images and text "
            f"({config.model_type}), which is neither trained nor read here yet; give a language model"
        )
    if is_media_config(config) and not hasattr(config.get_text_config(), "vocab_size"):
        raise ThreestepError(
            f"'{name_or_path}': expected a model that writes text, got one of the family {config.model_type}, whose "
            "config.json has no vocabulary; give a language model"
        )


def check_reads_media(config: Any, name_or_path: str) -> None:
    """ThreestepError if a model reads text alone, for rows with images."""
    if not is_media_config(config):
        raise ThreestepError(
            f"'{name_or_path}': expected a model of images and text, as rows of the data have images, got "
            f"{config.model_type}, which reads text alone; give another model, or data without images"
        )


def refuse_without_projector(model: Any) -> NoReturn:
    """ThreestepError for a model without a projector."""
    raise ThreestepError(
        f"--freeze_projector expects a model of images and text with a projector that is known by its name, got "
        f"{type(model).__name__}; leave it out"
    )
