"""Weights that transformers merges from several of the files, such as the experts of a mixture, under ZeRO-3: one at a
time, and by the first rank alone.

By itself transformers merges all of them on every rank before it copies the first one (transformers 5.19,
integrations/deepspeed.py: _apply_weight_conversions_to_state_dict): more than a whole model a rank of host memory.
Here a merged weight stands for itself by its shape until it is copied, into the weight that is gathered for it, and is
freed then. It is merged by the same function from the same tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from training.utils.base.console import log_on_main
from training.utils.base.errors import first_line

_MERGE = "_apply_weight_conversions_to_state_dict"
_Tensors = Mapping[str, Any]
_Merge = Callable[[Any, dict[str, Any], Sequence[Any]], dict[str, Any]]


@contextlib.contextmanager
def merged_when_copied() -> Iterator[None]:
    """Inside, from_pretrained under ZeRO-3 holds one merged weight at a time; other loads do not change.

    A family, or a transformers, with which that cannot be done merges in its usual way, and a line of the log notes it.
    """
    from transformers.integrations import deepspeed as sharding

    if not sharding.is_deepspeed_zero3_enabled():
        yield
        return
    original = getattr(sharding, _MERGE, None)
    if original is None:
        _log_whole(f"this version of transformers has no {_MERGE}")
        yield
        return
    setattr(sharding, _MERGE, partial(_converted, original))
    try:
        yield
    finally:
        setattr(sharding, _MERGE, original)


def _converted(original: _Merge, model: Any, state_dict: _Tensors, weight_mapping: Sequence[Any]) -> dict[str, Any]:
    """Return the result of `original`, with merged weights that are made when they are copied.

    Arguments: those of transformers' function, whose `state_dict` holds the files' tensors by their names there.
    """
    try:
        merged = dict(_merged(original, model, state_dict, weight_mapping))
    except (ImportError, TypeError, AttributeError, RuntimeError) as problem:
        _log_whole(f"{type(model).__name__}: {type(problem).__name__}: {first_line(problem)}")
        return original(model, dict(state_dict), weight_mapping)
    sources = {source for weight in merged.values() for source in weight.sources}
    others = {name: tensor for name, tensor in state_dict.items() if name not in sources}
    return {**original(model, others, weight_mapping), **merged}


def _log_whole(why: str) -> None:
    log_on_main(
        "warning: weights that are merged from several of the files, such as the experts of a mixture, are merged on "
        f"every rank at once, which holds them all while it loads ({why})"
    )


class MergedWeight:
    """A weight of a model, not made yet: `copy_` from it makes it.

    sources: the tensors of the files that it is made of, by name; a view of the mapped files
    """

    is_meta = False  # torch's Module reads it before it copies

    def __init__(self, name: str, shape: torch.Size, sources: dict[str, Any], merge: Callable[[dict[str, Any]], Any]):
        self.name, self.shape, self.sources, self._merge = name, shape, sources, merge

    def made(self) -> torch.Tensor:
        return self._merge(dict(self.sources))[self.name]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = (one.made() if isinstance(one, cls) else one for one in args)
        return function(*made, **(kwargs or {}))


def _merged(
    original: _Merge, model: Any, state_dict: _Tensors, weight_mapping: Sequence[Any]
) -> Iterator[tuple[str, MergedWeight]]:
    """Yield the name of each weight that is made of several tensors, or one of several that are made of one."""

    def merge(tensors: dict[str, Any]) -> dict[str, Any]:
        return original(model, tensors, weight_mapping)

    for names in _made_together(model, state_dict, weight_mapping):
        sources = {name: state_dict[name] for name in names}
        shapes = merge({name: torch.empty_like(tensor, device="meta") for name, tensor in sources.items()})
        for name, weight in shapes.items():
            yield name, MergedWeight(name, weight.shape, sources, merge)


def _made_together(model: Any, state_dict: _Tensors, weight_mapping: Sequence[Any]) -> list[list[str]]:
    """Return the names of the files' tensors that one converter takes at once, by transformers' rules."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    if not converters:
        return []
    together: dict[str, list[str]] = {}
    names = model.state_dict()
    for name in state_dict:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if pattern is not None and target in names:
            together.setdefault(target, []).append(name)
    return list(together.values())
