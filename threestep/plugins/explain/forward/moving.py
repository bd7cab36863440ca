"""Tensors that carry their derivatives along several directions through a model's own code.

Each function of them is computed once, and its derivative along each direction by a rule (Baydin et al. 2018, section
3.1). Linear functions, products, sums, functions of each number and the softmax have rules here, with few passes over
memory; torch's `jvp` differentiates all others.

y = x W^T moves by x' W^T + x W'^T. A direction that is a multiple of the weights, W' = f W, as weight decay's is,
needs no second product: x W'^T = f y.

D directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import jvp
from torch.nn import functional

Move = torch.Tensor | float | None  # a derivative; a multiple of the tensor itself; None: it stands still

# In the one tensor that moves.
_LINEAR = {"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "__getitem__"}
_LINEAR |= {"contiguous", "clone", "to", "float", "double", "__get__", "chunk", "split"}
_LINEAR |= {"neg", "mean", "sum", "dropout", "embedding"}
_OF_NUMBERS = {"silu", "gelu", "relu", "sigmoid", "tanh", "exp", "log", "pow", "sqrt", "rsqrt"}


class CannotMoveError(RuntimeError):
    """A function writes into a tensor, whose derivatives would be lost."""


class MovingTensor(torch.Tensor):
    """point: the tensor itself. moves: [D], its derivatives."""

    point: torch.Tensor
    moves: Sequence[Move]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _Call(func, tuple(args), dict(kwargs or {})).result()


def moving(point: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor:
    """Return the tensor with its derivatives; as it is where it stands still along all directions."""
    if all(move is None for move in moves):
        return point
    found = point.as_subclass(MovingTensor)
    found.point, found.moves = point, moves
    return found


def moves_of(tensor: torch.Tensor, directions: int) -> list[torch.Tensor]:
    """Return [D] derivatives, zeros where the tensor stands still."""
    if not isinstance(tensor, MovingTensor):
        return [torch.zeros_like(tensor)] * directions
    found = [_full(tensor, move) for move in tensor.moves]
    return [torch.zeros_like(tensor.point) if move is None else move for move in found]


def _full(tensor: MovingTensor, move: Move) -> torch.Tensor | None:
    return tensor.point * move if isinstance(move, float) else move


class _Call:
    """A call of a function with moving tensors among its arguments.

    A rule takes the function's values, and [inputs] moves along one direction, and returns the move of the values.
    """

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs, self._name = func, args, kwargs, func.__name__
        self._inputs = list[MovingTensor]()

        def noted(tensor: MovingTensor) -> torch.Tensor:
            self._inputs.append(tensor)
            return tensor.point

        self._points, self._named_points = self._with(noted)

    def result(self) -> Any:
        """The function's values, with their derivatives where they have any."""
        writes = self._name.endswith("_") and not self._name.endswith("__")
        writes |= self._name in ("__setitem__", "__set__") or self._name.startswith("__i")
        if writes or "out" in self._kwargs or self._kwargs.get("inplace"):
            raise CannotMoveError(f"{self._name} writes into a tensor")
        found = self._func(*self._points, **self._named_points)
        is_one = isinstance(found, torch.Tensor)
        parts = [found] if is_one else found
        if not isinstance(parts, (list, tuple)) or not any(map(_is_real, parts)):
            return found
        rule = self._rule()
        moves = [rule(found, [each.moves[place] for each in self._inputs]) for place in range(self._directions)]
        if is_one:
            return moving(found, moves)
        return tuple(
            moving(part, [move[place] if isinstance(move, (list, tuple)) else move for move in moves])
            if _is_real(part)
            else part
            for place, part in enumerate(parts)
        )

    @property
    def _directions(self) -> int:
        return len(self._inputs[0].moves)

    def _with(self, of: Callable[[MovingTensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with others in place of those that move."""
        return _mapped(self._args, of), {name: _mapped(value, of) for name, value in self._kwargs.items()}

    def _full(self, moves: Sequence[Move]) -> list[torch.Tensor | None]:
        return [_full(tensor, move) for tensor, move in zip(self._inputs, moves, strict=True)]

    def _rule(self) -> Callable[[Any, Sequence[Move]], Any]:
        name, is_first = self._name, len(self._inputs) == 1 and self._inputs[0] is self._args[0]
        if len(self._inputs) == 1 and (name in _LINEAR or (name == "div" and is_first)):
            return self._linear
        if name in _OF_NUMBERS and is_first:
            return self._of_numbers()
        if name == "softmax" and is_first and isinstance(self._kwargs.get("dim"), int):
            return self._softmax
        if name in ("cat", "stack"):
            return self._joined
        binary = {"linear": self._matrix, "mul": self._product, "matmul": self._product, "bmm": self._product}
        binary |= {"add": self._sum, "sub": self._sum}
        return self._any if self._kwargs else binary.get(name, self._any)

    def _linear(self, found: Any, moves: Sequence[Move]) -> Any:
        move = moves[0]
        if not isinstance(move, torch.Tensor):
            return move
        args, kwargs = self._with(lambda _: move)
        return self._func(*args, **kwargs)

    def _of_numbers(self) -> Callable[[Any, Sequence[Move]], Any]:
        point = self._points[0]
        slope = jvp(lambda x: self._func(x, *self._points[1:], **self._kwargs), (point,), (torch.ones_like(point),))[1]

        def rule(found: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor | None:
            move = self._full(moves)[0]
            return None if move is None else slope * move

        return rule

    def _softmax(self, found: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor | None:
        """y (x' - the sum of y x'), which is symmetric, so that torch's derivative backwards is it, too."""
        move = self._full(moves)[0]
        if move is None:
            return None
        return torch._softmax_backward_data(move.to(found.dtype), found, self._kwargs["dim"], found.dtype)

    def _joined(self, found: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor | None:
        if all(move is None for move in moves):
            return None
        own = iter(self._full(moves))
        parts = []
        for part in self._args[0]:
            move = next(own) if isinstance(part, MovingTensor) else None
            parts.append(torch.zeros_like(part) if move is None else move)
        return self._func(parts, *self._args[1:], **self._kwargs)

    def _product(self, found: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor | None:
        """x' y + x y'."""
        given, total = iter(moves), None
        for place, (factor, other) in enumerate(zip(self._args, reversed(self._points), strict=True)):
            move = next(given) if isinstance(factor, MovingTensor) else None
            if move is None:
                continue
            if isinstance(move, float):
                own = found * move
            elif total is not None and self._name == "mul":
                total = torch.addcmul(total, move, other)
                continue
            else:
                own = self._func(move, other) if place == 0 else self._func(other, move)
            total = own if total is None else total + own
        return total

    def _matrix(self, found: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor | None:
        """The move of x W^T + b."""
        given = iter(moves)
        x, weight, bias = (next(given) if isinstance(each, MovingTensor) else None for each in (*self._args, None)[:3])
        point, weight_OC = self._points[:2]
        if isinstance(x, float):
            x = self._inputs[0].point * x
        total = None if x is None else functional.linear(x, weight_OC)
        if isinstance(weight, float):
            without = found if len(self._points) < 3 or self._points[2] is None else found - self._points[2]
            total = without * weight if total is None else total.add_(without, alpha=weight)
        elif total is None:
            total = None if weight is None else functional.linear(point, weight)
        elif weight is not None:
            total.view(-1, total.shape[-1]).addmm_(point.reshape(-1, point.shape[-1]), weight.T)
        if bias is None:
            return total
        own = self._inputs[-1].point * bias if isinstance(bias, float) else bias
        return own.expand(found.shape) if total is None else total.add_(own)

    def _sum(self, found: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor | None:
        given, total = iter(self._full(moves)), None
        for place, each in enumerate(self._args):
            move = next(given) if isinstance(each, MovingTensor) else None
            if move is not None:
                move = -move if place == 1 and self._name == "sub" else move
                total = move if total is None else total + move
        return None if total is None else total.expand(found.shape)

    def _any(self, found: Any, moves: Sequence[Move]) -> Any:
        """By torch's forward mode."""
        full = self._full(moves)
        moved = [(each.point, move) for each, move in zip(self._inputs, full, strict=True) if move is not None]
        if not moved:
            return None

        def of(*points: torch.Tensor) -> Any:
            given, own = iter(points), iter(full)
            args, kwargs = self._with(lambda each: each.point if next(own) is None else next(given))
            return self._func(*args, **kwargs)

        points, tangents = zip(*moved, strict=True)
        return jvp(of, points, tangents)[1]


def _mapped(value: Any, of: Callable[[MovingTensor], Any]) -> Any:
    """The value, or what it holds, with others in place of tensors that move."""
    if isinstance(value, MovingTensor):
        return of(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, of) for each in value)
    return value


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
