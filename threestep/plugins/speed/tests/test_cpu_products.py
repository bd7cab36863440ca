"""float32 products of another library: the same numbers but for rounding, in every form, and only inside; chosen by the
processor's name, and by nothing that a second start could find otherwise."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from tests.support.forked_programs import run_python
from threestep.plugins.speed import cpu_products
from threestep.plugins.speed.arguments import ONEDNN, TORCH
from threestep.plugins.speed.cpu_products import (
    LEAST_MULTIPLICATIONS,
    backend,
    chosen_products,
    float32_products,
    products_of_all,
)
from training.utils.base.errors import ThreestepError

CPU = torch.device("cpu")
ROWS, COLUMNS, INNER = 32, 72, 1025
assert ROWS * COLUMNS * INNER >= LEAST_MULTIPLICATIONS


@pytest.fixture(autouse=True)
def _this_pytorch_has_it():
    reason = cpu_products._why_not()
    if reason is not None and "has no such operation" in reason:
        pytest.skip(reason)


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size) + sum(size))).to(dtype)


def forms() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Factors as models multiply them: of all strides, and parts of larger tensors."""
    left, right = numbers(ROWS, INNER), numbers(INNER, COLUMNS)
    return {
        "plain": (left, right),
        "left turned": (left.t().contiguous().t(), right),
        "right turned": (left, right.t().contiguous().t()),
        "both turned": (left.t().contiguous().t(), right.t().contiguous().t()),
        "parts": (numbers(2 * ROWS, INNER + 7)[::2, 3:-4], numbers(INNER, COLUMNS + 5)[:, 5:]),
        "repeated": (left[:1].expand(ROWS, INNER), right),
    }


@pytest.mark.parametrize("form", forms())
def test_a_large_product_is_onednns_and_right_to_rounding(form):
    left, right = forms()[form]
    with float32_products(ONEDNN):
        found = left @ right
    assert torch.equal(found, torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], ""))
    exact = left.double() @ right.double()
    # At most about sqrt(1025) roundings of 2^-24 each, of sums of at most about 4 sqrt(1025): 2.4e-4
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2.4e-4)


def test_other_products_are_pytorchs_and_all_are_afterwards():
    large, small = forms()["plain"], (numbers(4, 5), numbers(5, 6))
    doubles = tuple(each.double() for each in large)
    pairs = {"small": small, "float64": doubles, "bfloat16": tuple(each.bfloat16() for each in large)}
    before, large_before = {name: a @ b for name, (a, b) in pairs.items()}, large[0] @ large[1]
    with float32_products(ONEDNN):
        assert all(torch.equal(a @ b, before[name]) for name, (a, b) in pairs.items())
    assert torch.equal(large[0] @ large[1], large_before)
    with float32_products(TORCH):
        assert torch.equal(large[0] @ large[1], large_before)


@pytest.mark.parametrize("bias", [None, "a number a column", "a number a row", "one number"])
def test_a_linear_layer_and_its_gradients_are_right(bias):
    sizes = {"a number a column": (COLUMNS,), "a number a row": (ROWS, 1), "one number": (1,)}
    leaves = [numbers(ROWS, INNER), numbers(INNER, COLUMNS)] + ([numbers(*sizes[bias])] if bias else [])
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float32, torch.float64):
        own = [each.detach().to(dtype).requires_grad_() for each in leaves]
        with float32_products(ONEDNN):
            out = torch.addmm(own[2], own[0], own[1]) if bias else own[0] @ own[1]
            (out * numbers(ROWS, COLUMNS, dtype=dtype)).sum().backward()
        found[dtype] = [out.detach().double(), *(each.grad.double() for each in own)]  # type: ignore[union-attr]
    for single, double in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(single, double, rtol=0, atol=5e-4)


def test_a_layer_of_three_dimensions_and_factors_of_addmm():
    states, weight, bias = numbers(2, ROWS, INNER), numbers(COLUMNS, INNER), numbers(COLUMNS)
    exact = linear(states.double(), weight.double(), bias.double())
    with float32_products(ONEDNN):
        found = linear(states, weight, bias)
        scaled = torch.addmm(bias, states[0], weight.t(), beta=0.5, alpha=2.0)
    assert torch.equal(found, torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], ""))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2.4e-4)
    torch.testing.assert_close(
        scaled.double(), 0.5 * bias.double() + 2.0 * (exact[0] - bias.double()), rtol=0, atol=5e-4
    )


def test_a_sum_of_products_in_place_is_onednns_and_stays_in_its_place():
    left, right = forms()["both turned"]
    total, doubled = numbers(ROWS, COLUMNS), numbers(ROWS, COLUMNS)
    exact = total.double() + left.double() @ right.double()
    product = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    expected = total + product
    with float32_products(ONEDNN):
        assert total.addmm_(left, right) is total
        doubled.addmm_(left, right, beta=2.0, alpha=0.5)
        small = numbers(4, 6).addmm_(numbers(4, 5), numbers(5, 6))
    assert torch.equal(total, expected)
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=2.4e-4)
    torch.testing.assert_close(
        doubled.double(), 2.0 * numbers(ROWS, COLUMNS).double() + 0.5 * product.double(), rtol=0, atol=2.4e-4
    )
    assert torch.equal(small, numbers(4, 6).addmm_(numbers(4, 5), numbers(5, 6)))


def test_mistakes_are_told_in_pytorchs_words():
    with float32_products(ONEDNN):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            numbers(200, 128) @ numbers(129, 200)
        with pytest.raises(RuntimeError, match="must be a matrix|2D|2-D"):
            torch.mm(numbers(200, 200), numbers(200))
        with pytest.raises(RuntimeError, match="expand|must match|does not match|Bad in-place call"):
            numbers(9, 200).addmm_(numbers(1, 128 * 128), numbers(128 * 128, 200))
        with pytest.raises(RuntimeError, match="same dtype|expected"):
            numbers(200, 200) @ numbers(200, 200).double()
        assert (numbers(0, 128) @ numbers(128, 9)).shape == (0, 9)


def test_all_threads_and_derivatives_along_directions_take_it():
    left, right = forms()["plain"]
    found: list[torch.Tensor] = []
    with float32_products(ONEDNN):
        thread = threading.Thread(target=lambda: found.append(left @ right))
        thread.start()
        thread.join()
        _, along = torch.func.jvp(lambda part: part @ right, (left,), (left,))
        assert torch.equal(found[0], left @ right) and torch.equal(along, left @ right)


def test_the_processors_name_decides(monkeypatch):
    text = "processor\t: 0\nvendor_id\t: {}\n"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for vendor, library in (("AuthenticAMD", ONEDNN), ("GenuineIntel", TORCH)):
        monkeypatch.setattr(Path, "read_text", lambda self, vendor=vendor: text.format(vendor))
        assert chosen_products(None, CPU) == library
        assert chosen_products(ONEDNN, CPU) == ONEDNN and chosen_products(TORCH, CPU) == TORCH
    monkeypatch.setattr(Path, "read_text", lambda self: text.format("AuthenticAMD"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert chosen_products(None, CPU) == TORCH
    assert chosen_products(None, torch.device("cuda")) == chosen_products(ONEDNN, torch.device("cuda")) == TORCH


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (lambda left, right, bias=None: 1.001 * (left @ right), "its results are wrong on this machine"),
        (lambda left, right, bias=None: torch.ops.mkldnn.no_such_product(left), "this PyTorch has no such operation"),
    ],
)
def test_what_is_wrong_or_missing_is_not_taken(monkeypatch, product, words):
    monkeypatch.setattr(cpu_products, "_is_slow_for_mkl", lambda: True)
    monkeypatch.setattr(cpu_products, "_product", product)
    assert chosen_products(None, CPU) == TORCH
    with pytest.raises(ThreestepError, match=f"--cpu_products onednn is not available: {words}.* or set it to torch"):
        chosen_products(ONEDNN, CPU)
    assert chosen_products(None, CPU, begun=ONEDNN) == TORCH  # which nobody wanted by name


def test_a_resumed_run_keeps_what_it_began_with(monkeypatch):
    for is_slow in (True, False):
        monkeypatch.setattr(cpu_products, "_is_slow_for_mkl", lambda is_slow=is_slow: is_slow)
        for begun, other in ((TORCH, ONEDNN), (ONEDNN, TORCH)):
            assert chosen_products(None, CPU, begun=begun) == chosen_products(begun, CPU, begun=other) == begun


def test_ranks_take_what_all_of_them_choose(monkeypatch):
    for others, library in (([ONEDNN], ONEDNN), ([TORCH], TORCH)):
        monkeypatch.setattr(cpu_products, "gathered", lambda own, others=others: [own, *others])
        assert products_of_all(ONEDNN, CPU) == library
    assert products_of_all(ONEDNN, torch.device("cuda")) == TORCH


def test_a_run_has_what_it_is_given_or_began_with(monkeypatch, capsys):
    """Ranks without a wish take ONEDNN here. Runs from before the flag had PyTorch's."""
    monkeypatch.setattr(cpu_products, "_is_slow_for_mkl", lambda: True)
    for given, began, library in (
        (None, None, ONEDNN), (TORCH, None, TORCH), (None, {"cpu_products": TORCH}, TORCH), (None, {}, TORCH),
        (None, {"cpu_products": ONEDNN}, ONEDNN), (ONEDNN, {"cpu_products": TORCH}, ONEDNN),
    ):  # fmt: skip
        found = backend({"cpu_products": given}, CPU, None if began is None else began.get)
        assert found.decided == {"cpu_products": library} and library in (found.words or TORCH)
        with found.held():
            pass
    assert backend({}, torch.device("cuda"), None).decided == {} and not capsys.readouterr().out
    monkeypatch.setattr(cpu_products, "_product", lambda left, right, bias=None: 2 * (left @ right))
    backend({}, CPU, {"cpu_products": ONEDNN}.get)
    said = "auto: --cpu_products torch (onednn, which the run began with, is not available here)\n"
    assert capsys.readouterr().out == said


LENGTHS = """
import os, sys, torch
from threestep.plugins.speed.cpu_products import float32_products
from training.utils.engine.ranks.devices import bound_kept_products
if sys.argv[1] == "bound":
    bound_kept_products(os.environ)
weight = torch.randn(512, 512).requires_grad_()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
with float32_products("onednn"):
    for length in range(1000, 1040):
        if length == 1005:
            before = resident()
        (torch.randn(length, 512).requires_grad_() @ weight.t()).sum().backward()
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_rows_of_ever_new_lengths_take_no_ever_more_memory():
    """Of each length oneDNN prepares three products, whose rooms hold at least one factor: 2 MB of states each."""
    grown = {}
    for words in ("bound", "not"):
        done = run_python(["-c", LENGTHS, words])
        assert done.returncode == 0, done.stderr
        grown[words] = int(done.stdout)
    assert grown["bound"] < grown["not"] / 3 and grown["bound"] < 80e6
