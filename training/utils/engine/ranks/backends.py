"""Settings of PyTorch's own that hold while a run trains, such as which library multiplies: plugins have some."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    import torch


class Backend(NamedTuple):
    """One of them.

    held: opens what holds in this process, in all its threads.
    decided: settings that the flags left open, by the flags' names.
    words: on the device, for the log; "" for none.
    """

    held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    decided: Mapping[str, Any] = {}
    words: str = ""


class Backends(tuple[Backend, ...]):
    """Those of a run."""

    __slots__ = ()

    @property
    def decided(self) -> dict[str, Any]:
        return {name: value for each in self for name, value in each.decided.items()}

    @property
    def words(self) -> list[str]:
        return [each.words for each in self if each.words]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, all of them hold."""
        with contextlib.ExitStack() as stack:
            for each in self:
                stack.enter_context(each.held())
            yield


def backends_of(
    settings: Mapping[str, Any], device: torch.device, began_with: Callable[[str], Any] | None = None
) -> Backends:
    """Return what plugins set (`backends` of `Plugin.tables`). A collective.

    settings: by the flags' names. began_with: the setting of the run that is resumed, by its name; None where none is
    """
    return Backends(named_object(place)(settings, device, began_with) for place in added("backends", ()).values())
