"""Checks before the first step that a run can save: all but the weights is saved once and loaded back.

What transformers loads it does not always save, and what it saves it does not always load.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, first_line
from training.utils.engine.ranks.collectives import on_main
from training.utils.models.families.parts import copy_files
from training.utils.models.saved.saving import mend_settings, save_without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class SavedModel(NamedTuple):
    """A model that the run will save, and the tokenizer beside it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def check_saving(
    folder: Path, saved: Sequence[SavedModel], processor: Sequence[Path], trust_remote_code: bool, *, is_main: bool
) -> None:
    """Mend each model's settings, in place and with a line of the log; write all but the weights to a folder inside
    `folder`, load it back, and remove it. A collective: rank 0 writes.

    processor: files that are saved with the models

    Raises ThreestepError, on every rank, for what cannot be saved, or is not loaded as it was.
    """
    for one in saved:
        for sentence in mend_settings(one.model):
            log(f"warning: {sentence}", is_main)
        scratch = folder / f".saved_{os.getpid()}"
        on_main(partial(_save_and_load, scratch, one, processor, trust_remote_code), is_main)


def _save_and_load(scratch: Path, saved: SavedModel, processor: Sequence[Path], trust_remote_code: bool) -> None:
    where = saved.model.name_or_path
    try:
        save_without_weights(scratch, saved.model, saved.tokenizer, partial(copy_files, processor))
        difference = _difference(scratch, saved, trust_remote_code)
    except Exception as problem:  # transformers and tokenizers raise many kinds
        raise ThreestepError(
            f"'{where}': a model trained from it could not be saved and loaded again ({type(problem).__name__}: "
            f"{first_line(problem)}); correct its configuration, tokenizer or chat template"
        ) from problem
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if difference is not None:
        raise ThreestepError(
            f"'{where}': a model trained from it would not be loaded as it was trained: {difference}; save its folder "
            "again with the installed transformers, and start from that"
        )


def _difference(scratch: Path, saved: SavedModel, trust_remote_code: bool) -> str | None:
    """The first part of the saved folder that is loaded as something else, in words; None if there is none."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from training.utils.models.families.tokenizer_files import PROBES, text_ids

    trust: Any = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(scratch, **trust)
    if type(config).__name__ != type(saved.model.config).__name__:
        return f"its config.json is read as a {type(config).__name__}, not a {type(saved.model.config).__name__}"
    if (scratch / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(scratch)
    ours, theirs = saved.tokenizer, AutoTokenizer.from_pretrained(scratch, **trust)
    if theirs.get_vocab() != ours.get_vocab():
        return f"its tokenizer has {len(theirs)} tokens, not {len(ours)}, or other numbers for some"
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(theirs, name) != getattr(ours, name):
            return f"its tokenizer has the {name} {getattr(theirs, name)}, not {getattr(ours, name)}"
    if text_ids(theirs) != text_ids(ours) or theirs(PROBES[0])["input_ids"] != ours(PROBES[0])["input_ids"]:
        return "its tokenizer cuts a text into other tokens"
    if theirs.chat_template != ours.chat_template:
        return "its tokenizer has another chat template"
    return None
