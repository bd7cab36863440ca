"""A model's configuration and the names of its files, without its weights.

A reward model's configuration also holds the mean and standard deviation of its scores on chosen responses: step 2
writes them, step 3 reads them, and plain transformers keeps both and ignores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.machine import is_out_of_memory
from training.utils.loading.folder_kinds import check_base, check_model_folder, nearest_folders, resaving_command
from training.utils.loading.weight_files import check_form, find_adapter, stored_form
from training.utils.models.families import check_reads_text
from training.utils.models.rope_scaling import scaled, scaled_positions, steady_positions
from training.utils.models.stop_tokens import stop_tokens_in

if TYPE_CHECKING:
    from training.utils.models.settings import ModelSettings


def load_config(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model, or of an adapter's base; ThreestepError if there is none, or if it is
    untrusted code."""
    from transformers import AutoConfig

    check_model_folder(name_or_path)
    adapter = find_adapter(name_or_path)
    if adapter is not None:
        check_base(adapter)
        if find_adapter(adapter.base) is not None:
            raise ThreestepError(
                f"'{adapter.name}' is an adapter of '{adapter.base}', which is itself an adapter; merge that one first "
                "(PEFT: merge_and_unload), and set base_model_name_or_path to the merged model"
            )
    base, what = (name_or_path, "model") if adapter is None else (adapter.base, adapter.base_in_words)
    with errors_explained(what, base, Exception):  # each value of config.json has an error of its own
        config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
        check_form(config, base)
        _check_sizes(config.get_text_config())
    return config


_MOST = {"num_hidden_layers": 10_000, "hidden_size": 10**7, "vocab_size": 10**8, "num_attention_heads": 10**6}


def _check_sizes(config: Any) -> None:
    """ValueError for sizes that no model has: what is computed with them would fail, or not end."""
    for name, most in _MOST.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not 1 <= value <= most:
            raise ValueError(f"{name} expects 1 to {most:,}, got {value:,}")
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and not 1 <= shared <= heads:
        raise ValueError(f"num_key_value_heads expects 1 to {heads:,} (the number of heads), got {shared:,}")


def config_of(settings: ModelSettings) -> Any:
    """Return the configuration that a model is loaded with: its own, with the positions that the settings give it."""
    config = load_config(settings.name_or_path, settings.trust_remote_code)
    return scaled(config, settings.rope_scaling, settings.name_or_path)


def saved_stop_tokens(name_or_path: str, trust_remote_code: bool = False) -> list[int]:
    """Return the ids at which a model stops by its generation configuration, or else its configuration: those that it
    has once it is loaded."""
    from transformers import GenerationConfig

    config = load_config(name_or_path, trust_remote_code)
    adapter = find_adapter(name_or_path)
    base = name_or_path if adapter is None else adapter.base
    with errors_explained("generation settings (generation_config.json)", base, Exception):
        try:
            saved: Any = GenerationConfig.from_pretrained(base)
        except OSError:  # it has none
            saved = config.get_text_config()
        return stop_tokens_in(saved, base)


def check_trains(settings: ModelSettings, generates: bool) -> None:
    """ThreestepError if the model's weights are stored in a form that cannot be trained, or its settings of generation
    are not read. generates: it is a language model"""
    config = load_config(settings.name_or_path, settings.trust_remote_code)
    adapter = find_adapter(settings.name_or_path)
    try:
        stored_form(config).check_trains(config, settings.name_or_path if adapter is None else adapter.base)
    except ThreestepError as mistake:
        if adapter is None:
            raise
        raise ThreestepError(
            f"the base model of the adapter '{adapter.name}': {mistake}, and set base_model_name_or_path in "
            f"'{adapter.settings_file}'"
        ) from mistake
    if generates:
        saved_stop_tokens(settings.name_or_path, settings.trust_remote_code)


def positions_of(config: Any) -> int | None:
    """The longest sequence that a model has positions for; None if unbounded."""
    return scaled_positions(config.get_text_config())


def set_pad_token(config: Any, pad_token_id: int | None) -> None:
    """Set the pad token of a configuration and of its part for text, where a model has one."""
    config.pad_token_id = config.get_text_config().pad_token_id = pad_token_id


def check_positions(settings: ModelSettings, longest_tokens: int, flags: str) -> None:
    """ThreestepError if `longest_tokens`, which `flags` allow, exceeds the positions in the model's configuration, or
    if that is not a configuration that `check_reads_text` lets pass."""
    config = config_of(settings)
    check_reads_text(config, settings.name_or_path, settings.takes_media)
    positions = positions_of(config)
    if positions is not None and longest_tokens > positions:
        raise ThreestepError(
            f"sequences may have {longest_tokens} tokens ({flags}), but the model '{settings.name_or_path}' has only "
            f"{positions} positions; lower the limit, or use a model with more positions (or, in steps 1 and 2, "
            "--rope_scaling)"
        )
    steady = steady_positions(config.get_text_config())
    if steady is not None and longest_tokens > steady:
        raise ThreestepError(
            f"sequences may have {longest_tokens} tokens ({flags}), but '{settings.name_or_path}' (longrope) changes "
            f"the rotary angles of the whole batch if one sequence exceeds {steady}, so sequences would affect each "
            f"other; lower the limit to {steady}, or use a model with other positions (default, linear, yarn, llama3)"
        )


@contextlib.contextmanager
def errors_explained(what: str, name_or_path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn `errors` of transformers inside into a ThreestepError; those of memory, and of operations without values
    (on the meta device), stay."""
    try:
        yield
    except ThreestepError:
        raise
    except errors as problem:
        if is_out_of_memory(problem) or isinstance(problem, NotImplementedError):
            raise
        if "trust_remote_code" in str(problem):
            raise ThreestepError(
                f"'{name_or_path}' comes with its own Python code, which is not run by default: read it, then set "
                "--trust_remote_code true, or use an architecture that is part of transformers"
            ) from problem
        if "use_safetensors=True" in str(problem):  # transformers' advice where a hub has pickles alone
            raise ThreestepError(
                f"'{name_or_path}' has no safetensors files on the hub; pickled weights are refused, because loading "
                f"them may run code; if you trust them, convert them: {resaving_command(name_or_path, None)}"
            ) from problem
        near = "" if Path(name_or_path).is_dir() else nearest_folders(name_or_path)
        folder = f", and there is no such folder{near}?" if near else ":"
        raise ThreestepError(
            f"no {what} could be loaded from '{name_or_path}'{folder} {_in_words(problem)}"
        ) from problem


def _in_words(problem: Exception) -> str:
    """The first line of an error, with the second if the first only announces it, and its kind if the line alone does
    not explain it."""
    lines = str(problem).strip().splitlines()
    said = " ".join(line.strip() for line in lines[:2])[:200] if lines and lines[0].endswith(":") else ""
    said = said or first_line(problem)
    return said if isinstance(problem, (OSError, ValueError, ImportError)) else f"{type(problem).__name__}: {said}"


def model_files(name_or_path: str) -> list[str]:
    """Return the files that a loaded model's output depends on: its configuration and safetensors; of an adapter, its
    and its base's."""
    from transformers.utils import cached_file

    adapter = find_adapter(name_or_path)
    if adapter is not None:
        return [str(adapter.settings_file), str(adapter.weights), *model_files(adapter.base)]
    folder = Path(name_or_path)
    if not folder.is_dir():  # a hub name: its local snapshot
        folder = Path(str(cached_file(name_or_path, "config.json", local_files_only=True))).parent
    return [str(folder / "config.json"), *sorted(str(path) for path in folder.glob("*.safetensors"))]


_MEAN, _STD = "threestep_score_mean", "threestep_score_std"


@dataclass(frozen=True)
class ScoreScale:
    """mean, std: of the scores of the training prompts' chosen responses. Normalized, a score s is (s - mean) / std."""

    mean: float
    std: float


def set_score_scale(config: Any, scale: ScoreScale | None) -> None:
    """Write `scale` into a model's configuration; None removes it."""
    for name, value in ((_MEAN, scale and scale.mean), (_STD, scale and scale.std)):
        if value is not None:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


def read_score_scale(name_or_path: str, flag: str) -> ScoreScale:
    """Return the scale in the configuration of a folder or hub name, which the flag `flag` needs.

    Raises ThreestepError if it has none, or a standard deviation that is not positive.
    """
    config = load_config(name_or_path)
    mean, std = getattr(config, _MEAN, None), getattr(config, _STD, None)
    if mean is None or std is None:
        raise ThreestepError(
            f"{flag} needs {_MEAN} and {_STD} in the configuration of '{name_or_path}', which lacks them: train it "
            "with step 2 (--normalization_rows above 0), or remove the flag"
        )
    if not std > 0:
        raise ThreestepError(
            f"{flag}: the configuration of '{name_or_path}' has {_STD} {std}: its scores do not vary and "
            "cannot be normalized; remove the flag"
        )
    return ScoreScale(float(mean), float(std))
