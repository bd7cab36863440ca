"""The pretended GPU (`tests/support/cuda_stand_in`): it computes what the CPU does, refuses mixtures, and counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cuda_stand_in.building import built_library, torch_installed_at, why_not
from tests.support.cuda_stand_in.device import counted


def trained() -> dict:
    """Weights of a tiny model after two steps, on cuda:0 and on the CPU; where they lie; what was counted."""
    import torch

    found = {}
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        torch.manual_seed(1)
        inputs = torch.randn(5, 4).to(device)
        with counted() as counts:
            for _ in range(2):
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[device] = {
            "weights": model[0].weight.flatten()[:4].tolist(),
            "places": sorted({str(part.device) for part in model.parameters()}),
            **counts.totals(),
            "backward": counts.found["operators"]["mm at backward"],
        }
    return found


def test_it_trains_as_the_cpu_does_and_without_a_wait(on_cuda):
    found = on_cuda(trained)
    assert found["cuda"]["places"] == ["cuda:0"] and found["cpu"]["places"] == ["cpu"]
    assert found["cuda"]["weights"] == found["cpu"]["weights"]
    assert found["cuda"]["waits"] == found["cuda"]["to_device"] == found["cuda"]["from_device"] == 0
    assert found["cuda"]["backward"] == 2 * 3  # two gradients of the last layer, one of the first
    assert found["cpu"]["operators"] == 0


def mixtures() -> list[str]:
    import torch

    here = torch.ones(3, device="cuda")
    said = []
    for mix in (
        lambda: here + torch.ones(3),
        lambda: torch.cat([here, torch.ones(1)]),
        lambda: here.index_select(0, torch.tensor([0])),
        lambda: torch.ones(3)[here.long()],
        lambda: here.numpy(),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), here[None]),
    ):
        try:
            mix()
            said.append("nothing")
        except (RuntimeError, TypeError) as error:
            said.append(str(error))
    said.append(str((here * torch.tensor(2.0)).sum().item()))  # a single number of the CPU is allowed
    return said


def test_it_refuses_to_be_mixed(on_cuda):
    *said, number = on_cuda(mixtures)
    assert [text for text in said if "same device" not in text and "cuda" not in text] == []
    assert float(number) == 6.0


WAITS = {
    "item": lambda torch, x: x.sum().item(),
    "tolist": lambda torch, x: x.tolist(),
    "bool": lambda torch, x: bool(x.any()),
    "cpu": lambda torch, x: x.cpu(),
    "nonzero": lambda torch, x: torch.nonzero(x),
    "mask": lambda torch, x: x[x > 0],
    "index": lambda torch, x: x[torch.tensor([0])],
    "tensor": lambda torch, x: torch.tensor([1.0], device="cuda"),
    "unique": lambda torch, x: torch.unique(x),
    "synchronize": lambda torch, x: torch.cuda.synchronize(),
    "pinned": lambda torch, x: torch.ones(3).pin_memory().to("cuda"),
}
FREE = {
    "pinned": lambda torch, x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "where": lambda torch, x: torch.where(x > 0, x, 0.0),
    "zeros": lambda torch, x: torch.zeros(3, device="cuda") + x.cumsum(0)[-1],
    "index": lambda torch, x: x[torch.arange(2, device="cuda")],
}


def waits() -> dict:
    import torch

    x = torch.ones(3, device="cuda")
    found = {}
    for kind, actions in (("waits", WAITS), ("free", FREE)):
        for name, act in actions.items():
            with counted() as counts:
                act(torch, x)
            found[f"{kind} {name}"] = counts.total("waits")
    with counted() as counts:
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    found["copy"] = list(counts.found["to_device"])
    return found


def test_it_counts_what_waits(on_cuda):
    found = on_cuda(waits)
    assert found.pop("copy") == ["pinned, without waiting at elsewhere"]
    assert {name: count for name, count in found.items() if (count != 1) == name.startswith("waits")} == {}
    assert {name: count for name, count in found.items() if name.startswith("free") and count} == {}


def failing() -> None:
    raise ValueError("as it must")


def test_a_case_that_fails_says_so_and_leaves_nothing_behind(on_cuda):
    import torch

    with pytest.raises(AssertionError, match="as it must"):
        on_cuda(failing)
    assert torch.version.cuda is not None or not torch.cuda.is_available()  # here nothing is patched


def test_the_library_is_linked_to_this_environments_torch():
    """One that an environment gone by now has left in the folder for temporary files would not load."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    libraries = Path(torch_installed_at()).parent / "lib"
    assert str(libraries).encode() in built_library().read_bytes()  # its RUNPATH
