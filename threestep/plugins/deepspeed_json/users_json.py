"""The user's JSON of --deepspeed_config: read, checked against what Threestep honours, and made one with the flags'
configuration. Which key is honoured is in `keys`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.deepspeed_json import keys
from training.utils.base.errors import Mistakes, ThreestepError, nearest_names
from training.utils.engine.config.arguments import DTYPE_NAMES

if TYPE_CHECKING:
    from training.utils.engine.config.arguments import EngineSettings

_SECTIONS = ("zero_optimization", "bf16", "fp16", "comms_logger")  # that DeepSpeed checks by models
_LEVELS = ("debug", "info", "warning", "error", "critical")
# Keys whose output DeepSpeed logs at the level "info" alone.
_REPORTING = ("steps_per_print", "dump_state", "comms_logger.enabled")


@dataclass(frozen=True)
class UsersJson:
    """The configuration in the file `path` (`OwnConfig`)."""

    path: str

    def completed(self, ours: dict[str, Any], settings: EngineSettings, ranks: int) -> dict[str, Any]:
        """See `OwnConfig.completed`."""
        return with_flags(users_config(self.path), ours, settings, ranks, where=self.path)

    def notes(self, final: dict[str, Any]) -> list[str]:
        """See `OwnConfig.notes`: the keys that were filled in, and those that change nothing."""
        theirs = users_config(self.path)
        filled_in = f"filled in keys missing from {self.path}: {', '.join(filled_in_keys(theirs, final))}"
        return [filled_in, *(f"warning: {self.path}: {sentence}" for sentence in without_effect(theirs, final))]


def users_config(path: str) -> dict[str, Any]:
    """Return the object in the JSON file, each key under its first name; ThreestepError if there is none."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ThreestepError(f"cannot read --deepspeed_config {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:  # no JSON, no UTF-8, a number too long, nested too deep
        raise ThreestepError(f"--deepspeed_config {path} is not valid JSON: {problem}") from problem
    if not isinstance(values, dict):
        raise ThreestepError(f"--deepspeed_config {path}: expected an object, got {type(values).__name__}")
    zero = values.get("zero_optimization")
    for alias, first in keys.ALIASES.items():
        name, used = (dotted.rpartition(".")[2] for dotted in (alias, first))
        if isinstance(zero, dict) and name in zero:
            zero.setdefault(used, zero.pop(name))  # two names at once: DeepSpeed reads the first
    return values


def with_flags(
    theirs: dict[str, Any], ours: dict[str, Any], settings: EngineSettings, ranks: int, *, where: str
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`: the user's values, and the flags' where there are none.
    where: the user's file, for messages. ThreestepError with every mistake."""
    mistakes = Mistakes()
    _check_names(theirs, where, mistakes)
    _check_against_flags(theirs, where, settings, mistakes)
    mistakes.raise_if_any()  # what follows reads inside the sections
    honoured = _honoured(theirs)
    if not _at(honoured, "comms_logger.enabled"):
        honoured.pop("comms_logger", None)  # DeepSpeed takes the section for a yes, whatever its content
    final = _filled_in(honoured, ours)
    if any(_at(honoured, dotted) for dotted in _REPORTING):
        final.setdefault("log_level", "info")
    _check_values(final, where, mistakes)
    _check_together(final, where, ranks, mistakes)
    mistakes.raise_if_any()
    return final


def filled_in_keys(theirs: dict[str, Any], final: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of `final` that the user's configuration lacks or sets to "auto"."""
    names: list[str] = []
    for key, value in final.items():
        if theirs.get(key, "auto") == "auto":
            names.append(prefix + key)
        elif isinstance(value, dict):
            names += filled_in_keys(theirs[key], value, f"{prefix}{key}.")
    return names


def without_effect(theirs: dict[str, Any], final: dict[str, Any]) -> list[str]:
    """Return a sentence for each key of the user's that changes nothing in this run."""
    runs = _mode(final)
    lines = []
    for dotted, value in keys.walked(theirs):
        where = keys.ACCEPTED.get(dotted, runs).split()
        is_given = value is not None and value is not False and value != "auto"
        if dotted in keys.LEFT_OUT:
            lines.append(f"'{dotted}' changes nothing: {keys.LEFT_OUT[dotted]}")
        elif is_given and runs not in where:
            stages = ", ".join(stage.replace("bf16", " in bf16") for stage in where)
            lines.append(
                f"'{dotted}' changes nothing at ZeRO stage {runs.replace('bf16', ' in bf16')}; it is for stage {stages}"
            )
    return lines


def _check_names(theirs: dict[str, Any], where: str, mistakes: Mistakes) -> None:
    """Note keys that DeepSpeed has not, sections that are none, and keys that are refused or the flags'."""
    sections = keys.sections()
    known = {*keys.ACCEPTED, *keys.REFUSED, *keys.LEFT_OUT, *keys.OWNED}
    for dotted, value in keys.walked(theirs):
        section, _, name = dotted.rpartition(".")
        if dotted in keys.REFUSED:
            mistakes.require(keys.is_off(dotted, value), f"{where}: '{dotted}' {keys.REFUSED[dotted]}")
        elif dotted in keys.OWNED:
            allowed = value in ("auto", None)
            mistakes.require(allowed, f"{where}: '{dotted}' is set by Threestep's flags; remove it or write \"auto\"")
        elif dotted in sections:  # and no object, or `walked` would have gone in
            is_open = value is None or value == "auto"
            mistakes.require(is_open, f"{where}: '{dotted}' expects an object, got {type(value).__name__}")
        elif dotted not in known:
            beside = {key.removeprefix(section + ".").split(".")[0] for key in known if key.startswith(section)}
            mistakes.add(f"{where}: DeepSpeed has no key '{dotted}'{nearest_names(name, beside)}")


def _check_against_flags(theirs: dict[str, Any], where: str, settings: EngineSettings, mistakes: Mistakes) -> None:
    stage = _at(theirs, "zero_optimization.stage", "auto")
    if stage not in ("auto", settings.zero_stage):
        mistakes.add(f"{where} sets ZeRO stage {stage}, but --zero_stage is {settings.zero_stage}; make them agree")
    for dtype in ("bf16", "fp16"):
        enabled = _at(theirs, f"{dtype}.enabled", "auto")
        if enabled not in ("auto", settings.dtype == dtype):
            does = "enables" if enabled else "disables"
            mistakes.add(f"{where} {does} {dtype}, but --dtype is {settings.dtype}; make them agree")


def _check_values(final: dict[str, Any], where: str, mistakes: Mistakes) -> None:
    """Note values that DeepSpeed would refuse, most of them by a traceback."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
    from pydantic import ValidationError

    models = (DeepSpeedZeroConfig, DeepSpeedBF16Config, DeepSpeedFP16Config, CommsLoggerConfig)
    checked = [(section, model, final.get(section, {})) for section, model in zip(_SECTIONS, models, strict=True)]
    throughput = final.get("timers", {}).get("throughput", {})
    for section, model, values in [*checked, ("timers.throughput", DeepSpeedThroughputTimerConfig, throughput)]:
        try:
            model(**values)
        except ValidationError as problem:
            for error in problem.errors():
                dotted = ".".join([section, *(str(part) for part in error["loc"])])
                mistakes.add(f"{where}: '{dotted}' is {error['input']!r}; DeepSpeed says: {error['msg']}")
    for key in ("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"):
        value = final.get(key, False)
        mistakes.require(isinstance(value, bool), f"{where}: '{key}' expects true or false, got {value!r}")
    clip, each = final["gradient_clipping"], final["steps_per_print"]
    is_number = type(clip) in (int, float) and clip >= 0
    mistakes.require(is_number, f"{where}: 'gradient_clipping' expects 0 or more, got {clip!r}")
    is_count = type(each) is int and each > 0
    mistakes.require(is_count, f"{where}: 'steps_per_print' expects a whole number, 1 or more, got {each!r}")
    for dotted, names in (
        ("communication_data_type", DTYPE_NAMES),
        ("data_types.grad_accum_dtype", DTYPE_NAMES),
        ("log_level", _LEVELS),
    ):
        value = _at(final, dotted)
        if value is not None:
            mistakes.require_one_of(f"{where}: '{dotted}'", value, names)


def _check_together(final: dict[str, Any], where: str, ranks: int, mistakes: Mistakes) -> None:
    """Note accepted keys that DeepSpeed honours beside certain others alone, where it is silent or asserts."""
    zero, logger = final["zero_optimization"], final.get("comms_logger", {})
    stage = zero["stage"]
    dtype = next((name for name in ("bf16", "fp16") if _at(final, f"{name}.enabled")), "fp32")
    sums = _at(final, "data_types.grad_accum_dtype") or dtype
    mistakes.require(
        not (zero.get("overlap_comm") and stage == 1),
        f"{where}: 'zero_optimization.overlap_comm' expects ZeRO stage 2 or 3, got 1; remove it",
    )
    mistakes.require(
        sums == dtype or (sums == "fp32" and stage > 0),
        f"{where}: 'data_types.grad_accum_dtype' expects {dtype}{', or fp32' if stage > 0 else ''} with --dtype "
        f"{dtype} and ZeRO stage {stage}, got {sums}; remove it",
    )
    mistakes.require(
        not logger.get("enabled") or bool(logger.get("verbose")),
        f"{where}: 'comms_logger' writes nothing without \"verbose\": true; add it, or remove the section",
    )
    shared = zero.get("zero_hpz_partition_size", 1)
    mistakes.require(
        stage != 3 or not isinstance(shared, int) or shared <= 1 or ranks % shared == 0,
        f"{where}: 'zero_optimization.zero_hpz_partition_size' expects a divisor of the number of ranks ({ranks}), "
        f"got {shared}",
    )
    for section in ("offload_optimizer", "offload_param"):
        mistakes.require(
            _at(zero, f"{section}.device") != "nvme",
            f"{where}: 'zero_optimization.{section}.device' is nvme, which needs a compiled DeepSpeed operator; use "
            "cpu",
        )
    _check_masters(final, where, mistakes)


def _check_masters(final: dict[str, Any], where: str, mistakes: Mistakes) -> None:
    """bfloat16 master weights: DeepSpeed takes them with its Adam, or with states in bfloat16 too."""
    masters = _at(final, "bf16.bf16_master_weights_and_grads")
    states = _at(final, "bf16.bf16_optimizer_states")
    mistakes.require(
        bool(masters) == bool(states),
        f"{where}: 'bf16.bf16_master_weights_and_grads' and 'bf16.bf16_optimizer_states' work only together; set "
        "both, or remove both",
    )
    mistakes.require(
        not masters or _mode(final) in ("1", "2", "3"),
        f"{where}: 'bf16.bf16_master_weights_and_grads' expects ZeRO stage 2 or 3, or stage 1 with "
        "'data_types.grad_accum_dtype' bf16",
    )


def _mode(final: dict[str, Any]) -> str:
    """The word of `keys.ACCEPTED` for this configuration."""
    zero = final["zero_optimization"]
    is_own = (
        zero["stage"] == 1
        and _at(final, "bf16.enabled")
        and _at(final, "data_types.grad_accum_dtype") == "fp32"
        and _at(zero, "offload_optimizer.device", "none") in (None, "none")
    )
    return "1bf16" if is_own else str(zero["stage"])


def _honoured(theirs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration without keys that change nothing: DeepSpeed refuses some even so, and "auto" in most places."""
    honoured: dict[str, Any] = {}
    for key, value in theirs.items():
        dotted = prefix + key
        if value not in (None, "auto") and not any(
            dotted in names for names in (keys.REFUSED, keys.LEFT_OUT, keys.OWNED)
        ):
            honoured[key] = _honoured(value, dotted + ".") if isinstance(value, dict) else value
    return honoured


def _filled_in(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    final = dict(theirs)
    for key, value in ours.items():
        if key not in final:
            final[key] = value
        elif isinstance(value, dict) and isinstance(final[key], dict):
            final[key] = _filled_in(final[key], value)
    return final


def _at(config: dict[str, Any], dotted: str, otherwise: Any = None) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = value.get(name, otherwise) if isinstance(value, dict) else otherwise
    return value
