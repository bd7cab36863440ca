"""One seed for a whole run: every random stream has a name and derives its seed from it."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any


def derived_seed(seed: int, *names: object) -> int:
    """Return a 63-bit seed for the stream called `names`, e.g. derived_seed(1234, "rollout", step, row)."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch differently on each rank, so that their dropout differs."""
    import numpy
    import torch

    value = derived_seed(seed, "process", rank)
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's generators at the end, those of GPUs too if CUDA is in use."""
    import numpy
    import torch

    python, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    # Asked of an unused GPU, its state would take memory there.
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


def random_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators in this process, as JSON values."""
    import numpy
    import torch

    version, words, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=False)
    state = numpy_state["state"]
    return {
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {"key": state["key"].tolist(), "pos": int(state["pos"])}},
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().tolist()).hex() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    import numpy
    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    saved = state["numpy"]["state"]
    key = numpy.array(saved["key"], dtype=numpy.uint32)
    numpy.random.set_state({**state["numpy"], "state": {"key": key, "pos": saved["pos"]}})
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(state["cuda"])), dtype=torch.uint8))
