"""Any dataset on the Hugging Face hub as sequences of rows: `hub:OWNER/NAME`, with settings behind commas.

    hub:openai/gsm8k,config=main,split=train,eval_split=test,revision=main

Commas, because a shell takes `?` and `&` for itself. A revision (a branch, a tag, a commit; by default `main`) is
resolved to a commit before anything is read; a build depends on the commit. Knows nothing of formats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log, started_as_main_rank
from training.utils.base.errors import Mistakes, ThreestepError, first_line, nearest_names
from training.utils.base.hub import check_hub, is_offline
from training.utils.data.files.arrow_rows import ArrowRows
from training.utils.data.files.readers import JoinedFiles, names_evaluation, names_training

if TYPE_CHECKING:
    from training.utils.data.files.columns import Expected

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class HubAddress:
    """A dataset's name on the hub, and its settings; None: the dataset's only one, or the usual one."""

    name: str
    config: str | None = None
    split: str | None = None
    eval_split: str | None = None
    revision: str | None = None


_SETTINGS = tuple(field.name for field in fields(HubAddress))[1:]


def parse_hub_address(address: str, flag: str) -> HubAddress:
    """Read the text after `hub:`; ThreestepError for an invalid name, and for unknown, empty or doubled settings."""
    name, *given = re.split(r",(?=\w+=)", address)
    mistakes = Mistakes()
    if not _NAME.fullmatch(name):
        hint = "hub:OWNER/NAME" + "".join(f"[,{setting}=...]" for setting in _SETTINGS)
        mistakes.add(f"--{flag}: 'hub:{address}': expected {hint}, got '{name}' as the name")
    settings: dict[str, str] = {}
    for setting, _, value in (each.partition("=") for each in given):
        known = f"expected {', '.join(_SETTINGS)} after the name"
        if setting not in _SETTINGS:
            mistakes.add(f"--{flag}: 'hub:{address}': {known}, got '{setting}'{nearest_names(setting, _SETTINGS)}")
        elif not value or setting in settings:
            mistakes.add(
                f"--{flag}: 'hub:{address}': expected one value for {setting}, got {'two' if value else 'none'}"
            )
        settings[setting] = value
    if "eval_split" in settings and "split" not in settings:
        mistakes.add(f"--{flag}: 'hub:{address}': eval_split also needs a split to train on; add split=NAME")
    mistakes.raise_if_any()
    return HubAddress(name, **settings)


class HubRows:
    """The training and evaluation rows of a dataset on the hub, at one commit.

    The constructor asks the hub for the commit; rows are downloaded, into the cache of `datasets`, when they are
    opened. With HF_HUB_OFFLINE=1 there are no requests: rows and commit are those of that cache.
    """

    folder: str | None = None  # of files beside the rows
    notes: Sequence[str] = ()  # on files that are passed over

    def __init__(self, address: str, flag: str) -> None:
        self.address = f"hub:{address}"
        self._given = parse_hub_address(address, flag)
        self._flag = flag
        self._offline = is_offline()
        self.commit = self._cached_commit() if self._offline else self._resolved_commit()
        where = "cached; HF_HUB_OFFLINE is set" if self._offline else f"revision {self._given.revision or 'main'}"
        log(f"data: {self.address} is at commit {self.commit} ({where})", started_as_main_rank())

    @classmethod
    def check(cls, address: str, flag: str, *, reach: bool = False) -> None:
        """See `training.utils.data.files.readers`."""
        name = parse_hub_address(address, flag).name
        if reach:
            check_hub(f"--{flag}: 'hub:{address}'", "datasets", name)

    def fingerprint(self) -> str:
        """The dataset at this commit; the address holds its configuration and splits."""
        return f"{self.address} {self.commit}"

    def open(self, expected: Expected | None = None) -> tuple[ArrowRows | JoinedFiles, ArrowRows | JoinedFiles | None]:
        """The rows of the training split, and of the evaluation splits; None where there are none."""
        train, held_out = self._chosen_splits(list(self._splits))

        def rows_of(name: str) -> ArrowRows:
            return ArrowRows(f"{self.address} ({name})", self._splits[name].data.table, expected)

        parts = [rows_of(name) for name in held_out]
        return rows_of(train), parts[0] if len(parts) == 1 else JoinedFiles(parts) if parts else None

    def _chosen_splits(self, names: list[str]) -> tuple[str, list[str]]:
        """The split to train on, and those for evaluation. Without a setting: the one whose name begins with train (or
        the only one), and all whose names begin with test, validation and the like, as for a folder of files."""
        subject = f"{self.address}: its splits are {', '.join(names)}"
        wanted = self._given
        for setting, name in (("split", wanted.split), ("eval_split", wanted.eval_split)):
            if name is not None and name not in names:
                raise ThreestepError(
                    f"{subject}; {setting} expects one of them, got '{name}'{nearest_names(name, names)}"
                )
        if wanted.split is not None:
            return wanted.split, [] if wanted.eval_split is None else [wanted.eval_split]
        train = ["train"] if "train" in names else [name for name in names if names_training(name)] or names
        if len(train) != 1:
            raise ThreestepError(f"{subject}; name the training split, as in hub:{wanted.name},split={train[0]}")
        return train[0], [name for name in names if name not in train and names_evaluation(name)]

    def _resolved_commit(self) -> str:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        wanted = self._given
        start = f"--{self._flag}: '{self.address}'"
        try:
            info = HfApi().dataset_info(wanted.name, revision=wanted.revision, timeout=_TIMEOUT_SECONDS)
        except GatedRepoError as error:
            raise ThreestepError(
                f"{start}: the dataset's owners must grant access; request it at "
                f"https://huggingface.co/datasets/{wanted.name}, then log in with `hf auth login` or set HF_TOKEN"
            ) from error
        except RevisionNotFoundError as error:
            raise ThreestepError(
                f"{start}: the dataset has no revision '{wanted.revision}'; name a branch, a tag or a commit"
            ) from error
        except RepositoryNotFoundError as error:
            raise ThreestepError(
                f"{start}: the hub has no dataset of this name that you can read; correct the name or, for a private "
                "dataset, log in with `hf auth login`"
            ) from error
        except Exception as error:  # httpx's, which version of it depends on the hub's client, and the client's
            raise ThreestepError(
                f"{start}: the hub could not be reached ({type(error).__name__}: {first_line(error)}); check the "
                "network, or set HF_HUB_OFFLINE=1 to read what an earlier run downloaded here"
            ) from error
        return str(info.sha)

    def _cached_commit(self) -> str:
        commit, wanted = _commit_of(self._splits), self._given.revision
        if commit is None or wanted not in (None, "main", commit):
            raise ThreestepError(
                f"--{self._flag}: '{self.address}': HF_HUB_OFFLINE is set, but the cached copy is at "
                f"{f'commit {commit}' if commit else 'an unknown commit'}, which is not known to be revision "
                f"{wanted or 'main'}; remove revision, or unset HF_HUB_OFFLINE"
            )
        return commit

    @cached_property
    def _splits(self) -> dict[str, Any]:
        """Split -> dataset, each a memory-mapped Arrow table."""
        import datasets

        wanted = self._given
        try:
            # The prefix: without it a folder of that name below the current one would be read.
            name, revision = f"hf://datasets/{wanted.name}", None if self._offline else self.commit
            splits = dict(datasets.load_dataset(name, wanted.config, revision=revision))
        except Exception as error:  # the hub's client and the readers raise a dozen unrelated classes
            message = " ".join(str(error).split())[:300]
            remedy = "check the network and the dataset's page"
            if self._offline:
                remedy = "HF_HUB_OFFLINE is set: unset it, or download the dataset first"
            elif "onfig" in message:
                remedy = f"name a configuration, as in hub:{wanted.name},config=NAME"
            raise ThreestepError(
                f"--{self._flag}: '{self.address}' could not be loaded: {type(error).__name__}: {message}; {remedy}"
            ) from error
        stored = _commit_of(splits)
        if not self._offline and stored not in (None, self.commit):
            raise ThreestepError(
                f"--{self._flag}: '{self.address}': the hub became unreachable, and the cached copy is at commit "
                f"{stored}, not {self.commit}; check the network, or set HF_HUB_OFFLINE=1 to read that copy"
            )
        return splits


def _commit_of(splits: dict[str, Any]) -> str | None:
    """The commit in the paths of cached files: OWNER___NAME/CONFIG/VERSION/COMMIT/FILE.arrow."""
    files = [file["filename"] for split in splits.values() for file in split.cache_files]
    commit = os.path.basename(os.path.dirname(files[0])) if files else ""
    return commit if _COMMIT.fullmatch(commit) else None
