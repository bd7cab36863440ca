"""The library of float32 matrix products on a CPU.

PyTorch takes MKL for float32 on x86, and oneDNN for bfloat16 (2.13, native/LinearAlgebra.cpp). On AMD's processors
MKL's products stay far below what AVX-512 gives: oneDNN's take less than half of the time (docs/lab_book.md). Inside
`float32_products` PyTorch's kernels `mm`, `addmm` and `addmm_` are oneDNN's, under autograd and all else that uses
them, so that models, adapters and optimizers need to know nothing of it. Sums come in another order, as between two
processors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from threestep.plugins.speed.arguments import ONEDNN, TORCH
from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.ranks.devices import Backend
from training.utils.flags.flags import AutoChoice, sentence

# Multiplications from which on oneDNN's product is faster, though it is called from Python: 15 microseconds a call
# beside 2, on one thread and two (docs/lab_book.md).
LEAST_MULTIPLICATIONS = 2**21
_VENDOR = "AuthenticAMD"
_TRIED = ((24, 48, 65), (1, 33, 70))  # rows, columns, inner


def backend(settings: Mapping[str, Any], device: torch.device, began_with: Callable[[str], Any] | None) -> Backend:
    """Return the library as --cpu_products asks, which on a CPU is a setting of the run. A collective there."""
    wanted, begun = settings.get("cpu_products"), None
    if wanted is None and began_with is not None:  # before this flag, runs had PyTorch's
        begun = began_with("cpu_products") or TORCH
    found = products_of_all(wanted, device, begun)
    if begun not in (None, found):
        choice = AutoChoice("cpu_products", found, f"{begun}, which the run began with, is not available here")
        log_on_main(sentence([choice]))
    words = "" if found == TORCH else f"float32 products use {found} (--cpu_products {TORCH} turns this off)"
    return Backend(partial(float32_products, found), {"cpu_products": found} if device.type == "cpu" else {}, words)


def chosen_products(wanted: str | None, device: torch.device, begun: str | None = None) -> str:
    """Return the library for this process, TORCH or ONEDNN. wanted: by the user; None: ONEDNN on an AMD processor with
    AVX-512, by its name alone, so that every start chooses alike. begun: of the run that is resumed, which is kept
    where it can be had. ThreestepError if ONEDNN is wanted and cannot be had."""
    kept = wanted or begun
    if device.type != "cpu" or kept == TORCH or (kept is None and not _is_slow_for_mkl()):
        return TORCH
    reason = _why_not()
    if reason is not None and wanted == ONEDNN:
        raise ThreestepError(
            f"--cpu_products {ONEDNN} is not available: {reason}; remove --cpu_products, or set it to {TORCH}"
        )
    return TORCH if reason is not None else ONEDNN


def products_of_all(wanted: str | None, device: torch.device, begun: str | None = None) -> str:
    """Return `chosen_products` where all ranks choose alike, otherwise TORCH. A collective on CPUs."""
    if device.type != "cpu":
        return TORCH
    found = gathered(chosen_products(wanted, device, begun))
    return found[0] if len(set(found)) == 1 else TORCH


@contextlib.contextmanager
def float32_products(library: str) -> Iterator[None]:
    """Inside, this process's float32 products on the CPU are those of `library`, in all threads."""
    if library == TORCH:
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            kernels.impl("mm", _mm, "CPU")
            kernels.impl("addmm", _addmm, "CPU")
            kernels.impl("addmm_", _addmm_in_place, "CPU")
        yield


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The kernel of aten::mm."""
    if _is_large(left, right):
        return _product(left, right)
    # Another operator, whose kernel is PyTorch's.
    return torch.mm(left, right, out=left.new_empty(0))


def _addmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """The kernel of aten::addmm, a linear layer with a bias."""
    if (
        added.shape == right.shape[1:]
        and added.dtype == torch.float32
        and beta == alpha == 1
        and _is_large(left, right)
    ):
        return _product(left, right, added)
    return torch.addmm(added, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))


def _addmm_in_place(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """The kernel of aten::addmm_, the sum of a weight's gradients."""
    if left.dim() == right.dim() == 2 and added.shape != (wanted := torch.Size((len(left), right.shape[1]))):
        # Otherwise the sum would be repeated, or the tensor get another shape.
        raise RuntimeError(f"Bad in-place call: input tensor size {added.shape} and output {wanted} should match")
    if added.dtype == torch.float32 and beta == alpha == 1 and _is_large(left, right):
        return added.add_(_product(left, right))
    return torch.addmm(added, left, right, beta=beta, alpha=alpha, out=added)


def _is_large(left: torch.Tensor, right: torch.Tensor) -> bool:
    if not (left.dtype == right.dtype == torch.float32 and left.dim() == right.dim() == 2):
        return False
    rows, inner = left.shape
    return rows * inner * right.shape[1] >= LEAST_MULTIPLICATIONS and inner == right.shape[0]


def _product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """oneDNN's, of any strides. What torch.compile makes of linear layers on a CPU (2.13, mkldnn_fusion.py)."""
    return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), bias, "none", [], "")


def _is_slow_for_mkl() -> bool:
    """True on an AMD processor with AVX-512."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("vendor_id") and line.endswith(_VENDOR) for line in lines)


def _why_not() -> str | None:
    """Return why oneDNN's products are not to be taken here, None if they are right in every form that is used."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns, inner in _TRIED:
        left, right, bias = (
            torch.randn(*size, generator=generator) for size in ((rows, inner), (inner, columns), (columns,))
        )
        exact = left.double() @ right.double()
        # The largest error of a sum of `inner` products (Higham 2002, section 3.1).
        most = inner * torch.finfo(torch.float32).eps * (left.double().abs() @ right.double().abs())
        turned: Any = (left.t().contiguous().t(), right.t().contiguous().t())
        try:
            found = [_product(left, right), _product(*turned), _product(left, right, bias) - bias]
        except (AttributeError, RuntimeError, TypeError) as problem:  # PyTorch without oneDNN, or with another one
            return f"this PyTorch has no such operation ({type(problem).__name__}: {first_line(problem)})"
        if not all(bool(((each.double() - exact).abs() <= 2 * most).all()) for each in found):
            return "its results are wrong on this machine"
    return None
