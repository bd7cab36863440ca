"""DeepSpeed's checkpoint files of one engine: tensors and plain values alone, so that reading one runs no code.

A file is a safetensors file: its header has the state as JSON, in which each tensor is a number, its name in the body.
DeepSpeed writes and reads its checkpoints through `plain_checkpoint_engine`, its extension point, and through
`plain_torch_files` where its code calls torch.save and torch.load. Knows nothing of a run's checkpoints.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from training.utils.base.errors import ThreestepError, disk_errors

# Of weights and engine, below ZeRO-3 and in it (deepspeed 0.19, engine.py: _get_ckpt_name).
WHOLE_FILE = "mp_rank_00_model_states.pt"
SHARD_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_SUFFIX = ".safetensors"
_PICKLED_SUFFIX = ".pt"  # of DeepSpeed's names
_STATE = "state"  # its place in the header
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_TYPES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = (type(None), bool, int, float, str)
_PAIRS = {"dict": dict, "ordered": OrderedDict}
_ITEMS = {"tuple": tuple, "size": torch.Size}


def _known_classes() -> dict[str, type]:
    """DeepSpeed's classes in its optimizers' states, by name: numbers with a name each (deepspeed 0.19)."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return {known.__name__: known for known in (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)}


def write_state(state: Any, path: str | Path) -> None:
    """Write a state of tensors, numbers, texts and containers to `path`. A tensor on a GPU is on the host only while it
    is written (safetensors' save_file would have all of them there at once).

    Raises OSError, which names the file, and ThreestepError for anything else in the state.
    """
    tensors: dict[tuple[Any, ...], tuple[int, torch.Tensor]] = {}
    text = json.dumps(_encoded(state, tensors, _known_classes()))
    # The largest elements first, so that each tensor begins at a multiple of its element's size, as in safetensors'.
    ordered = sorted(tensors.values(), key=lambda each: (-each[1].element_size(), each[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _STATE: text}}
    end = 0
    for number, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[str(number)] = {"dtype": _TYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with disk_errors(path), open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _encoded(value: Any, tensors: dict[tuple[Any, ...], tuple[int, torch.Tensor]], classes: dict[str, type]) -> Any:
    """`value` as JSON holds it: a list as a list, anything that JSON lacks as {kind: content}. Adds to `tensors`, where
    a tensor that two places share stands once."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in _TYPES:
        place = value.data_ptr() if value.numel() else len(tensors)
        key = (place, value.device, value.dtype, value.shape, value.stride())
        return {"tensor": tensors.setdefault(key, (len(tensors), value.detach()))[0]}
    if kind is list:
        return [_encoded(each, tensors, classes) for each in value]
    for name, container in _ITEMS.items():
        if kind is container:
            return {name: [_encoded(each, tensors, classes) for each in value]}
    for name, container in _PAIRS.items():
        if kind is container:
            return {name: [[_encoded(each, tensors, classes) for each in pair] for pair in value.items()]}
    if kind is torch.dtype:
        return {"dtype": _TYPES[value]}
    if classes.get(kind.__name__) is kind:
        content = value.value if isinstance(value, enum.Enum) else vars(value)
        return {kind.__name__: _encoded(content, tensors, classes)}
    raise ThreestepError(
        f"a checkpoint holds only tensors, numbers and strings, but DeepSpeed's state has a {kind.__module__}."
        f"{kind.__qualname__}; use the DeepSpeed version in constraints.txt"
    )


def read_state(path: str | Path, mapped: bool = False) -> Any:
    """The state in a file of `write_state`, on the CPU.

    mapped: tensors are read where they are used, and stay good only while the file stays on its disk
    Raises ThreestepError where the file holds anything else, OSError where it cannot be read.
    """
    try:
        with safe_open(str(path), framework="pt") as body:
            tensors = {name: body.get_tensor(name) for name in body.keys()}  # noqa: SIM118  # it is no dict
            state = json.loads(body.metadata()[_STATE])
        if not mapped:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return _decoded(state, tensors, _known_classes())
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        reason = f"{type(problem).__name__}: {str(problem)[:200]}"
        raise ThreestepError(f"{path} is not a state file written by Threestep ({reason})") from problem


def _decoded(value: Any, tensors: dict[str, torch.Tensor], classes: dict[str, type]) -> Any:
    """Inverse of `_encoded`."""
    if isinstance(value, list):
        return [_decoded(each, tensors, classes) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "dtype":
        return _DTYPES[content]
    if kind in _ITEMS:
        return _ITEMS[kind](_decoded(each, tensors, classes) for each in content)
    if kind in _PAIRS:
        return _PAIRS[kind](
            (_decoded(key, tensors, classes), _decoded(each, tensors, classes)) for key, each in content
        )
    fields, known = _decoded(content, tensors, classes), classes[kind]
    if issubclass(known, enum.Enum):
        return known(fields)
    made = known.__new__(known)
    vars(made).update(fields)
    return made


def file_of(path: str | Path) -> Path:
    """Path of the state that DeepSpeed calls `path`; of a universal checkpoint that is its name too."""
    ours = Path(path).with_suffix(_SUFFIX)
    return Path(path) if not ours.exists() and Path(path).exists() else ours


def plain_checkpoint_engine() -> Any:
    """A `checkpoint_engine` of a DeepSpeed engine, which writes and reads its files by the functions above."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class PlainCheckpointEngine(TorchCheckpointEngine):
        def save(self, state_dict: Any, path: str) -> None:
            write_state(state_dict, Path(path).with_suffix(_SUFFIX))

        def load(self, path: str, map_location: object = None) -> Any:
            return read_state(file_of(path))

    return PlainCheckpointEngine()


@contextlib.contextmanager
def plain_torch_files() -> Iterator[None]:
    """Inside, torch.save and torch.load are the functions above: DeepSpeed's universal checkpoints and its
    zero_to_fp32 call them, the latter with weights_only=False (deepspeed 0.19)."""
    load, save = torch.load, torch.save

    def plain_load(path: Any, *ignored: Any, mmap: bool | None = None, **others: Any) -> Any:
        return read_state(path, mapped=bool(mmap))

    def plain_save(state: Any, path: Any, *ignored: Any, **others: Any) -> None:
        write_state(state, path)

    torch.load, torch.save = plain_load, plain_save  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load, torch.save = load, save


def load_engine(inner: Any, folder: Path, name: str) -> None:
    """Load folder/name, written by as many ranks in the same ZeRO stage. inner: DeepSpeed's engine. A collective."""
    # This rank's file alone: DeepSpeed takes any whose name fits a pattern.
    rank = "0" if inner.load_universal_checkpoint() else None
    file = file_of(inner._get_ckpt_name(str(folder), name, pp_placeholder=rank))
    if not file.exists():
        raise ThreestepError(f"--resume: {folder} has no state for '{name}'; resume from another checkpoint")
    inner._get_all_ckpt_names = lambda folder, tag: [str(file)]
    try:
        with plain_torch_files():
            inner.load_checkpoint(str(folder), tag=name)
    finally:
        del inner._get_all_ckpt_names  # the class's method is visible again
    set_rates(inner.lr_scheduler)


def set_rates(schedule: Any) -> None:
    """Give the optimizer the rates of a loaded schedule, which may be of another length than the saved one."""
    for group, peak, share in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = peak * share(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def engine_state(folder: Path) -> dict[str, torch.Tensor]:
    """All weights and buffers in DeepSpeed's checkpoint `folder`, by the names of the engine's module; from ZeRO-3 in
    float32."""
    if (file := file_of(folder / WHOLE_FILE)).is_file():
        state = read_state(file, mapped=True)
        found = state.get("module") if isinstance(state, dict) else None
        if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
            raise ThreestepError(f"{file} should hold the weights of an engine, but holds something else")
        return found
    if file_of(folder / SHARD_FILE).is_file():
        return joined_shards(folder)
    raise ThreestepError(f"{folder} has neither {WHOLE_FILE} nor {SHARD_FILE}, so DeepSpeed did not write it")


def joined_shards(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of ZeRO-3's shards in `folder`, in float32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with for_deepspeed(folder) as named:
        return get_fp32_state_dict_from_zero_checkpoint(*os.path.split(named))


@contextlib.contextmanager
def for_deepspeed(folder: Path) -> Iterator[str]:
    """A folder of links to the files in `folder`, by the names that DeepSpeed's programs look for; inside, they read
    and write plain files, and print nothing."""
    with contextlib.ExitStack() as inside:
        place = inside.enter_context(tempfile.TemporaryDirectory())
        for path in folder.iterdir():
            Path(place, path.stem + _PICKLED_SUFFIX).symlink_to(path.resolve())
        inside.enter_context(plain_torch_files())
        inside.enter_context(contextlib.redirect_stdout(io.StringIO()))
        inside.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield place
