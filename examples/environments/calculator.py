"""A calculator for word problems in GSM8K's form, whose answer stands behind "####".

    Human: Ann has 17 pens and buys 12 boxes of 38. How many has she?
    Assistant: [calculate(expression="17 + 12 * 38")]
    Tool: 473
    Assistant: #### 473

`--environment examples/environments/calculator.py:Calculator` with the rows below (`--dataset_module
examples/environments/calculator.py --data_path calculator`), with GSM8K (`examples/gsm8k.py`), or with your own rows
and their reference answers. The reward is 1.0 for the right number, 0.0 for any other. `--tools
examples/environments/calculator.py:calculate --reward gsm8k` does the same without a class.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from made_conversations import MadeConversations, call_message

from threestep.plugins.embedded.task import Draws
from threestep.plugins.environments.calling.schemas import argument_problem, schema_of
from threestep.plugins.environments.interface import AssistantMessage, Call, EnvironmentReply, Opening
from training.utils.data.registry import register_dataset
from training.utils.rewards.rules import gsm8k_reward

CALLS, GUESSES = 1, 2  # weights of the demonstrations
RIGHT_GUESSES, WRONG_GUESSES = 1, 3  # and of the answers without a call

LONGEST, LARGEST, LARGEST_BASE, LARGEST_EXPONENT = 200, 10**15, 10**6, 32
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as (3 + 4) * 12.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"expected at most {LONGEST} characters, got {len(expression)}")
    try:
        tree = ast.parse(expression.replace(",", "").strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("expected an arithmetic expression such as (3 + 4) * 12") from None
    value = _value(tree.body)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.AST) -> float:
    """The value of a node of numbers and operators; nothing else is run, and no number grows beyond LARGEST."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(left) > LARGEST_BASE or abs(right) > LARGEST_EXPONENT):
            raise ValueError(f"expected a base up to {LARGEST_BASE} and an exponent up to {LARGEST_EXPONENT}")
        return _bounded(OPERATORS[type(node.op)](left, right))
    raise ValueError("expected numbers, + - * / // % ** and parentheses")


def _bounded(value: float) -> float:
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError(f"expected numbers up to {LARGEST}")
    return value


@cache
def tool() -> dict[str, Any]:
    """The calculator's schema."""
    return schema_of(calculate, "calculator")


class Calculator:
    """A question, any number of calculations, and an answer behind ####."""

    def reset(self, row: Mapping[str, Any]) -> Opening:
        self._truth = row["ground_truth"]
        return Opening(row["messages"], [tool()])

    def step(self, message: AssistantMessage) -> EnvironmentReply:
        answers = [_answer(call) for call in message.calls] + [f"Error: {own}" for own in message.problems]
        if answers:
            return EnvironmentReply(
                [{"role": "tool", "content": answer} for answer in answers], figures={"calls": len(message.calls)}
            )
        (reward,) = gsm8k_reward([""], [message.content], [self._truth])
        right = reward or 0.0  # None where the row has no number
        return EnvironmentReply([], right, done=True, figures={"right": right})

    def close(self) -> None:
        pass


def _answer(call: Call) -> str:
    if call.name != "calculate":
        return f"Error: there is no tool '{call.name}'"
    problem = argument_problem(tool(), call.arguments)
    try:
        return f"Error: {problem}" if problem else calculate(**call.arguments)
    except (ValueError, ArithmeticError) as error:
        return f"Error: {error}"


# Each: a question, and the expression that answers it.
PROBLEMS = (
    ("Ann has {0} pens and buys {1} boxes of {2}. How many has she?", "{0} + {1} * {2}"),
    ("Tom has {0} coins and spends {1} a day for {2} days. How many must he borrow or keep?", "{0} - {1} * {2}"),
    ("A shop sells {0} cups a day for {1} coins each. How many coins in {2} days?", "{0} * {1} * {2}"),
    ("Two trains with {0} and {1} seats drive {2} times. How many seats?", "({0} + {1}) * {2}"),
)


@register_dataset("calculator")
class CalculatorRows(MadeConversations):
    """Word problems of two operations on numbers from 2 to 99."""

    def make_row(self, draws: Draws) -> dict[str, Any]:
        question, expression = draws.one_of(PROBLEMS)
        numbers = [2 + draws.below(98) for _ in range(3)]
        expression = expression.format(*numbers)
        right = calculate(expression)
        acts = draws.weighted((GUESSES, CALLS))
        calls = [call_message("calculate", expression=expression), {"role": "tool", "content": right}] if acts else []
        is_right = acts or draws.weighted((WRONG_GUESSES, RIGHT_GUESSES))
        said = right if is_right else str(int(right) + 1 + draws.below(99))
        return {
            "question": question.format(*numbers),
            "turns": [*calls, {"role": "assistant", "content": f"#### {said}"}],
            "tools": [tool()],
            "answer": right,
            "environment": "Calculator",
        }
