"""Environments of verifiers (its package, 0.4) by name, and their tasks as rows: `--data_path verifiers:NAME`.

NAME is the name of an installed taskset, a Python file with one, or a TOML file with the `[env]` block of verifiers'
own programs. The environment that answers the rows: `threestep.plugins.environments.driven.verifiers`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.user_files import loaded_name
from training.utils.data.raw_dataset import PromptRawDataset

PREFIX = "verifiers:"
TASK_COLUMN = "task"  # of a row: the place of its task
MOST_TASKS = 10_000  # that are read of an endless taskset
HARNESS = "threestep_harness"  # under which verifiers' loader imports the harness of this package
_HARNESS_MODULE = "threestep.plugins.environments.driven.harness"
_HOSTED = "prime"  # the runtime that verifiers takes by default: machines of a company, for which one logs in
_ANSWERS = ("answer", "ground_truth", "reference", "target", "solution")  # fields of tasks


def check_verifiers(given: str, flag: str) -> None:
    """ThreestepError without the package, or without the file that `verifiers:NAME` names. Loads nothing of NAME."""
    verifiers_package(flag)
    name = given.removeprefix(PREFIX)
    if name.endswith((".py", ".toml")) and not os.path.isfile(os.path.expanduser(name)):
        raise ThreestepError(f"{flag} expects an existing file, got '{name}'")
    if not name:
        raise ThreestepError(f"{flag} expects verifiers:NAME, a taskset or its file, got '{given}'")


def verifiers_package(flag: str) -> Any:
    """The package's present interface. ThreestepError if it is not installed, or too old."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as problem:
        raise ThreestepError(
            f"{flag} verifiers:NAME needs the package verifiers, 0.4 or later; in the "
            f"checkout, run pip install -e '.[verifiers]' ({first_line(problem)})"
        ) from problem


def open_verifiers(name: str, flag: str) -> Any:
    """The environment of a name, its file or its TOML file. Its agents' programs are those that it
    pins, and the chat loop of this package otherwise; they run in this process's machine unless its TOML says where.

    Raises ThreestepError where it does not load, and for one of several agents.
    """
    verifiers_package(flag)
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    agents = importlib.import_module("verifiers.v1.configs.agent")
    sys.modules.setdefault(HARNESS, importlib.import_module(loaded_name(_HARNESS_MODULE)))
    try:
        given = _settings_of(name, flag)
        taskset, env_id = given.get("taskset", {}).get("id", ""), given.get("id", "")
        seats = agents.agent_config_fields(loaders.env_config_type(taskset, env_id)())
        roles = list(seats)
        if len(roles) != 1:
            raise ThreestepError(
                f"{flag} {PREFIX}{name} must have exactly one agent, because several would be trained as one model, "
                f"got {', '.join(roles) or 'none'}; use another environment"
            )
        role = dict(given.get(roles[0]) or {})
        if loaders.default_harness_id(taskset) == "bash":
            role.setdefault("harness", {"id": HARNESS})
        if seats[roles[0]].runtime.type == _HOSTED:
            role.setdefault("runtime", {"type": "subprocess"})
        return loaders.load_environment(loaders.resolve_env_config({**given, roles[0]: role}))
    except ThreestepError:
        raise
    except (Exception, SystemExit) as problem:
        raise ThreestepError(
            f"{flag} {PREFIX}{name} does not load: {type(problem).__name__}: {first_line(problem)}"
        ) from problem


def tasks_of(environment: Any) -> list[Any]:
    """The tasks of an environment in their order; of an endless taskset the first."""
    taskset = environment.taskset
    return list(taskset if taskset.bounded else itertools.islice(iter(taskset), MOST_TASKS))


def _settings_of(name: str, flag: str) -> dict[str, Any]:
    """The `[env]` block: of a TOML file, or with the taskset alone."""
    if name.endswith(".toml"):
        import tomllib

        values = tomllib.loads(Path(name).expanduser().read_text(encoding="utf-8"))
        env = values.get("env", values)
        if not isinstance(env, dict) or not env.get("taskset", {}).get("id"):
            raise ThreestepError(f"{flag} expects a TOML file with [env.taskset] and its id, but '{name}' has none")
        return env
    if not name.endswith(".py"):
        return {"taskset": {"id": name}}
    path = Path(name).expanduser().resolve()
    return {"taskset": {"id": _import_by_stem(path, flag)}}


def _import_by_stem(path: Path, flag: str) -> str:
    """Import a file by its name, or its folder's for `__init__.py`, as verifiers' loader does, and its tool servers,
    which are other processes. Return the name."""
    module = path.parent if path.name == "__init__.py" else path
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(module.parent) not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, folders), str(module.parent)])
    if str(module.parent) not in sys.path:
        sys.path.append(str(module.parent))
    found = getattr(importlib.import_module(module.stem), "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise ThreestepError(
            f"{flag} needs a file whose name no other module has, because verifiers imports it by that name, but "
            f"'{path}' has the name of {found or 'a Python module'}; rename it"
        )
    return module.stem


class VerifiersTasks(PromptRawDataset):
    """A taskset as rows: the task's prompt, and its place for the environment. A task whose user opens has none."""

    def load_raw_datasets(self, dataset_name: str) -> Any:
        return {"train": tasks_of(open_verifiers(dataset_name.removeprefix(PREFIX), "--data_path"))}

    def get_train_data(self) -> Sequence[Any]:
        tasks: list[Any] = self.raw_datasets["train"]
        return [{**task.data.model_dump(mode="json"), TASK_COLUMN: place} for place, task in enumerate(tasks)]

    def get_prompt_messages(self, sample: Any) -> list[dict[str, Any]] | None:
        prompt, system = sample["prompt"], sample["system_prompt"]
        if not prompt:
            return None
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        return ([{"role": "system", "content": system}] if system else []) + said

    def get_reference(self, sample: Any) -> Any:
        return next((sample[name] for name in _ANSWERS if sample.get(name) is not None), None)

    def get_extra(self, sample: Any) -> dict[str, Any]:
        return {TASK_COLUMN: sample[TASK_COLUMN]}

    def get_phases(self, sample: Any) -> tuple[int, ...]:
        return (3,)
