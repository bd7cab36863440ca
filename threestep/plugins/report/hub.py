"""The finished model to the hub (--push_to_hub): its repository is opened before training, the upload follows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threestep.plugins.report.card import write_card
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.hub import is_offline


def open_repository(settings: Mapping[str, Any], api: Any = None) -> None:
    """Make the model's repository, or find it, if --push_to_hub is given: better now than after days of training.
    ThreestepError if the hub cannot be reached or refuses. api: huggingface_hub's HfApi, or what stands for it"""
    if not settings.get("push_to_hub"):
        return
    name = _named(settings)
    if is_offline():
        raise ThreestepError(
            "--push_to_hub needs the hub, but HF_HUB_OFFLINE is set; unset it, or leave --push_to_hub out"
        )
    try:
        _api(api).create_repo(name, private=settings.get("hub_private_repo"), exist_ok=True)
    except Exception as problem:  # (the client's errors have no common class)
        raise ThreestepError(
            f"--push_to_hub cannot open the repository {name} ({type(problem).__name__}: {first_line(problem)}); "
            "log in with `hf auth login` or set HF_TOKEN, check the name, or leave --push_to_hub out"
        ) from problem


def publish_model(folder: Path, settings: Mapping[str, Any], api: Any = None) -> None:
    """Write the card of OUTPUT_DIR/model, and upload both if --push_to_hub is given. A failure is one line: the model
    is on disk."""
    model = folder / "model"
    if not model.is_dir():
        return
    write_card(folder)
    if not settings.get("push_to_hub"):
        return
    name = _named(settings)
    try:
        name = _whole_name(name, _api(api))
        _api(api).upload_folder(repo_id=name, folder_path=str(model), commit_message="Model trained by Threestep")
    except Exception as problem:  # noqa: BLE001 (an upload must not fail the run that it follows)
        log(
            f"warning: the model was not uploaded to {name} ({type(problem).__name__}: {first_line(problem)}); it "
            f"is in {model}. To upload it: hf upload {name} {model}"
        )
        return
    log(f"uploaded the model to {name}")


def _named(settings: Mapping[str, Any]) -> str:
    """The repository, without its owner where none is given: it is then the account's that is logged in."""
    return settings["hub_model_id"] or Path(settings["output_dir"]).absolute().name


def _whole_name(name: str, api: Any) -> str:
    return name if "/" in name else f"{api.whoami()['name']}/{name}"


def _api(given: Any) -> Any:
    if given is not None:
        return given
    from huggingface_hub import HfApi

    return HfApi()
