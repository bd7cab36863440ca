"""The models of a run on disk: before its first step a check that they can be saved and loaded again, at its end their
writing. What transformers loads it does not always save, and what it saves it does not always load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, first_line
from training.utils.engine.ranks.collectives import on_main
from training.utils.loading.saving import mend_settings, save_model, save_without_weights
from training.utils.models.families import copy_files, write_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.checkpoints.parts import CheckpointParts
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.run import RunCourse
    from training.utils.engine.ranks.startup import Ranks


@dataclass
class FinalModels:
    """Writes the models of a finished run into OUTPUT_DIR, or where a part of the run's course writes what that
    refuses. elsewhere: places of the models that it did not take, by name"""

    output_dir: Path
    course: Sequence[RunCourse]
    ranks: Ranks
    elsewhere: dict[str, Path] = field(default_factory=dict)

    def write_all(self, parts: CheckpointParts, guests: Guests) -> None:
        """Write model/, further engines' folders by their names, and then those of other weights, which take the place
        of the first engine's. A collective. guests: of the first model"""
        saved = _saved(parts)
        first = next(iter(saved))
        folders = {"model" if name == first else name: name for name in saved}
        others = {each.folder: each for each in parts.others}
        for folder, name in {**folders, **dict.fromkeys(others, first)}.items():
            if folder in others:
                others[folder].put_in_place()
            model, tokenizer = saved[name]
            tensors = parts.engines[name].full_state(model)
            beside = partial(write_beside, guests.model_writer() if folder == "model" else None, parts.processor)
            save = partial(save_model, model=model, tensors=tensors, tokenizer=tokenizer, write_more=beside)
            self.write(folder, save)

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Call save(folder) on rank 0 for OUTPUT_DIR/name, or for the folders of `RunCourse.write_refused`. A
        collective. save raises OSError where the disk refuses, and leaves nothing half-written.

        ThreestepError, on every rank, if no place takes it.
        """
        own = self.output_dir / name

        def written() -> Path:
            try:
                save(own)
            except OSError as refusal:
                tried = (part.write_refused(own, save, refusal) for part in self.course)
                found = next((place for place in tried if place is not None), None)
                if found is None:
                    raise
                return found
            return own

        place = on_main(written, self.ranks.is_main, patient=True)
        if place != own:
            self.elsewhere[name] = place

    def check(self) -> None:
        """At the end of a run: ThreestepError if a model is not where it belongs."""
        if self.elsewhere:
            moves = "; ".join(f"mv {place} {self.output_dir / name}" for name, place in self.elsewhere.items())
            raise ThreestepError(
                f"training is complete, but {' and '.join(self.elsewhere)} could not be written to {self.output_dir}: "
                f"free space there, then {moves}"
            )


def _saved(parts: CheckpointParts) -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """The models that are saved, each with its tokenizer, by the engines' names."""
    return {
        name: (engine.module.model, tokenizer)  # type: ignore[misc]
        for name, engine in parts.engines.items()
        if (tokenizer := parts.tokenizers.get(name)) is not None  # a guest's engine has none
    }


def check_saving(folder: Path, parts: CheckpointParts, trust_remote_code: bool) -> None:
    """Mend the settings of each model that is saved, in place and with a line of the log; write all but the weights to
    a folder inside `folder`, load it back, and remove it. A collective: rank 0 writes.

    Raises ThreestepError, on every rank, for what cannot be saved, or is not loaded as it was.
    """
    is_main = parts.ranks.is_main
    for model, tokenizer in _saved(parts).values():
        for sentence in mend_settings(model):
            log(f"warning: {sentence}", is_main)
        scratch = folder / f".saved_{os.getpid()}"
        check = partial(_save_and_load, scratch, model, tokenizer, parts.processor, trust_remote_code=trust_remote_code)
        on_main(check, is_main)


def _save_and_load(
    scratch: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processor: Sequence[Path],
    *,
    trust_remote_code: bool,
) -> None:
    where = model.name_or_path
    try:
        save_without_weights(scratch, model, tokenizer, partial(copy_files, processor))
        difference = _difference(scratch, model, tokenizer, trust_remote_code)
    except Exception as problem:  # transformers and tokenizers raise many kinds
        raise ThreestepError(
            f"'{where}': a model trained from it could not be saved and loaded again ({type(problem).__name__}: "
            f"{first_line(problem)}); correct its configuration, tokenizer or chat template"
        ) from problem
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if difference is not None:
        raise ThreestepError(
            f"'{where}': a model trained from it would change when it is loaded: {difference}; save its folder again "
            "with the installed transformers, and start from that"
        )


def _difference(
    scratch: Path, model: PreTrainedModel, ours: PreTrainedTokenizerBase, trust_remote_code: bool
) -> str | None:
    """The first part of the saved folder that is loaded as something else, in words; None if there is none."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from training.utils.loading.tokenizers import PROBES, text_ids

    trust: Any = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(scratch, **trust)
    if type(config).__name__ != type(model.config).__name__:
        return f"its config.json is read as a {type(config).__name__}, not a {type(model.config).__name__}"
    if (scratch / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(scratch)
    theirs = AutoTokenizer.from_pretrained(scratch, **trust)
    if theirs.get_vocab() != ours.get_vocab():
        return f"its tokenizer has {len(theirs)} tokens, not {len(ours)}, or other ids for some"
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(theirs, name) != getattr(ours, name):
            return f"its tokenizer has the {name} {getattr(theirs, name)}, not {getattr(ours, name)}"
    if text_ids(theirs) != text_ids(ours) or theirs(PROBES[0])["input_ids"] != ours(PROBES[0])["input_ids"]:
        return "its tokenizer splits a text into different tokens"
    if theirs.chat_template != ours.chat_template:
        return "its tokenizer has a different chat template"
    return None
