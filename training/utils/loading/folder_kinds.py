"""Checks of a folder that is given as a model, before any library is imported.

A model folder has a config.json and safetensors, or is an adapter whose base is one. Everything else that people have
under that name is recognised here, with the command that makes a model folder of it. A folder with a configuration and
no weights passes: dry runs need no more, and the loader of weights reports that they are missing.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.hub import check_hub
from training.utils.base.storage import parse_json, read_json_object
from training.utils.loading.weight_files import GivenAdapter, check_entries, find_adapter, read_header, weight_files
from training.utils.plugins.registry import added, owner_sentence

_GENERATION = "generation_config.json"
_MOST_LEVELS = 100  # of a configuration's JSON; Python copies and compares some three times as many
_LARGE_BYTES = 4 << 20
_MOST_NAMES = 6  # in a sentence on what a folder holds
_MOST_NEAR = 3  # folders that are suggested
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"}


def check_model_folder(name_or_path: str) -> None:
    """ThreestepError if a path holds no model, or damaged weights; hub names pass, unless they were meant as a path.
    Reads a few headers at most."""
    path = Path(name_or_path)
    if path.is_file():
        raise ThreestepError(_of_file(path))
    if not path.is_dir():
        return _check_hub_name(name_or_path)
    _check_levels(path)
    _check_generation(path / _GENERATION)
    adapter = find_adapter(str(path))
    if adapter is not None:
        read_header(adapter.weights)
        return check_base(adapter)
    if not (path / "config.json").is_file():
        raise ThreestepError(_without_config(path))
    config = _read_config(path)
    files = weight_files(path, config.get("transformers_weights"))
    for file in files:
        read_header(file)
    other = None if files else _of_other_weights(path, config)
    if other is not None:
        raise ThreestepError(other)


def check_base(adapter: GivenAdapter) -> None:
    """See `check_model_folder`; for the base that an adapter names."""
    try:
        check_model_folder(adapter.base)
    except ThreestepError as mistake:
        raise ThreestepError(f"the base model of the adapter '{adapter.name}': {mistake}") from mistake


def _check_hub_name(name_or_path: str) -> None:
    """ThreestepError if a name with no folder behind it was meant as a folder. OWNER/NAME was, where a folder OWNER is
    here and the hub's cache has no such model: otherwise the network would be tried, for minutes if there is none.
    """
    path, slashes = Path(name_or_path), name_or_path.count("/")
    if path.is_absolute() or name_or_path.startswith((".", "~")) or slashes > 1:
        raise ThreestepError(f"the model folder '{name_or_path}' does not exist{nearest_folders(name_or_path)}")
    if slashes == 1 and path.parent.is_dir() and not _is_in_hub_cache(name_or_path):
        raise ThreestepError(
            f"the model folder '{name_or_path}' does not exist, though '{path.parent}' does"
            f"{nearest_folders(name_or_path)}; to use the hub's model of that name, run from another folder"
        )
    try:
        check_hub(f"the model '{name_or_path}'", "models", name_or_path)
    except ThreestepError as unreachable:
        near = nearest_folders(name_or_path)
        if not near:
            raise
        raise ThreestepError(
            f"there is no folder '{name_or_path}'{near}? If you mean the hub's model: {unreachable}"
        ) from unreachable


def _is_in_hub_cache(name: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()


def nearest_folders(name_or_path: str) -> str:
    """ "; did you mean 'a' or 'b'": the existing folders whose path is nearest, those with a model first; "" if none is
    near. Each part of the path may be misspelt."""
    path = Path(name_or_path)
    near = [Path(path.anchor)]
    for part in path.parts[len(near[0].parts) :]:
        near = [folder for parent in near for folder in _children_like(parent, part)][:_MOST_NEAR]
    models = [folder / "model" if (folder / "model").is_dir() else folder for folder in near if folder != Path()]
    models.sort(key=lambda folder: not any((folder / name).is_file() for name in _settings_files()))
    return f"; did you mean {' or '.join(map(repr, map(str, models)))}" if models else ""


def _settings_files() -> tuple[str, ...]:
    """The names of files by which a folder is a model or an adapter."""
    return ("config.json", *added("adapters", ()))


def _children_like(parent: Path, part: str) -> list[Path]:
    """The folder of that name in `parent`, or those of the nearest names."""
    if (parent / part).is_dir():
        return [parent / part]
    try:
        names = [child.name for child in parent.iterdir() if child.is_dir()]
    except OSError:  # of somebody else
        return []
    return [parent / name for name in get_close_matches(part, names, n=_MOST_NEAR)]


def resaving_command(
    folder: str | Path, architectures: Any, key_mapping: str | None = None, num_labels: int | None = None
) -> str:
    """The command that reads a folder or hub name with transformers and writes it as a model folder, OUT.

    key_mapping: of from_pretrained, as Python; the tensors are saved by their new names
    num_labels: of a model for sequence classification; None: its configuration's
    """
    known = isinstance(architectures, list) and architectures and str(architectures[0]).isidentifier()
    name = architectures[0] if known else "AutoModelForCausalLM"
    load, save = f"'{folder}'", "'OUT'"
    if key_mapping is not None:
        load, save = f"{load}, key_mapping={key_mapping}", f"{save}, save_original_format=False"
    if num_labels is not None:
        load = f"{load}, num_labels={num_labels}"
    return (
        f'python -c "import transformers as t; t.{name}.from_pretrained({load}).save_pretrained({save}); '
        f"t.AutoTokenizer.from_pretrained('{folder}').save_pretrained('OUT')\""
    )


def _check_levels(folder: Path) -> None:
    """ThreestepError where a file that transformers will read nests values so deeply that Python gives up on it."""
    for path in sorted(folder.glob("*.json")):
        if not path.is_file() or path.stat().st_size > _LARGE_BYTES:  # a vocabulary or an index, by its reader
            continue
        try:
            parse_json(path.read_bytes(), _MOST_LEVELS)
        except ValueError as problem:  # other errors are explained by the file's reader
            if "too deeply" in str(problem):
                raise ThreestepError(f"'{path}': {problem}; download or copy it again") from problem


def _check_generation(path: Path) -> None:
    """ThreestepError for settings of generation that are no JSON object: transformers leaves them out in silence, and
    the model would stop elsewhere."""
    if path.exists() and read_json_object(str(path)) is None:
        raise ThreestepError(f"'{path}' is not a JSON object; download or copy it again")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"), _MOST_LEVELS)
    except ValueError as problem:
        raise ThreestepError(f"'{path}' is not JSON ({problem}); download or copy it again") from problem
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("auto_map")):
        raise ThreestepError(
            f"'{path}' has no model_type, such as \"llama\"; use the config.json of the model to which these weights "
            "belong"
        )
    check_entries(config, path)
    return config


def _of_file(path: Path) -> str:
    remedy = owner_sentence("model_files", path.suffix) or f"; use its folder, '{path.parent}'"
    return f"expected a model folder, got the file '{path}'{remedy}"


def _without_config(folder: Path) -> str:
    """Description of a folder without config.json; the most telling signs are tried first."""
    if not any(folder.iterdir()):
        return f"the model folder '{folder}' is empty; expected config.json and safetensors"
    if (folder / "model" / "config.json").is_file():
        models = [path for name in ("model", "critic") if (path := folder / name).is_dir()]
        return f"'{folder}' is the folder of a run; use its model, {' or '.join(map(str, models))}"
    if checkpoint := _checkpoint(folder):
        return (
            f"'{folder}' is a checkpoint or a folder of checkpoints; make a model folder from it: threestep export "
            f"{checkpoint} OUT"
        )
    weights = [*sorted(folder.glob("*.safetensors")), *_pickles(folder)]
    if (folder / "params.json").is_file() and weights:
        return (
            f"'{folder}' holds a model in its original format ({weights[0].name} and params.json); use its "
            "transformers version, with config.json and safetensors"
        )
    why = f"the folder '{folder}' holds no config.json, so it is not a model folder"
    if weights:
        return f"{why}: {weights[0].name} alone does not give the architecture; add the model's config.json"
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        return f"{why}: it holds only a tokenizer; add the model's config.json and safetensors"
    inside = sorted(path.parent for name in _settings_files() for path in folder.glob(f"*/{name}"))
    if inside:
        return f"{why}; did you mean '{inside[0]}'?"
    held = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    return (
        f"{why}: it holds {', '.join(held[:_MOST_NAMES])}"
        + (f" and {len(held) - _MOST_NAMES:,} more" if len(held) > _MOST_NAMES else "")
        + "; expected config.json and safetensors"
    )


def _of_other_weights(folder: Path, config: dict[str, Any]) -> str | None:
    """Description of a folder with a configuration and no safetensors; None for the configuration alone."""
    if (folder / "weights.json").is_file() and folder.parent.name == "models":
        return (
            f"'{folder}' describes a model in a checkpoint but holds no weights; make a model folder: threestep export "
            f"{folder.parents[1]} OUT" + (" --part critic" if folder.name == "critic" else "")
        )
    if pickles := _pickles(folder):
        return (
            f"'{folder}' holds pickled weights ({pickles[0].name}), which may run code when they are read; expected "
            f"safetensors; if you trust them, convert them: {resaving_command(folder, config.get('architectures'))}"
        )
    if (folder / "zero_to_fp32.py").is_file():
        return (
            f"'{folder}' holds a DeepSpeed checkpoint but no safetensors; join its shards: python "
            f"{folder / 'zero_to_fp32.py'} {folder} {folder} --safe_serialization"
        )
    if others := sorted(folder.glob("*.safetensors")):
        return (
            f"'{folder}' needs model.safetensors, or model.safetensors.index.json with the files it names, but holds "
            f"{others[0].name}; rename the file, or copy the index as well"
        )
    return None


def _pickles(folder: Path) -> list[Path]:
    paths = sorted(path for pattern in _PICKLES for path in folder.glob(pattern))
    return [path for path in paths if path.name not in _NO_WEIGHTS]


def _checkpoint(folder: Path) -> Path | None:
    """A folder that `threestep export` can read: a checkpoint, or a run with some; None for others."""
    if folder.name.startswith("step_") and (folder / "manifest.json").is_file():
        return folder
    run = folder.parent if folder.name == "checkpoints" else folder
    return run if any((run / "checkpoints").glob("step_*/manifest.json")) else None
