"""The environments of examples/environments: rows, games played to their end, and the template of small models."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest

from threestep.plugins.embedded.task import Draws
from threestep.plugins.environments.calling.parsers import parse_pythonic, read_message
from threestep.plugins.environments.interface import AssistantMessage, Call
from training.utils.base.user_files import load_module

FOLDER = Path(__file__).parents[3] / "examples" / "environments"
ROWS = {"lookup": "LookupRows", "calculator": "CalculatorRows", "guessing": "GuessingRows"}
NAMES = {"lookup": "Lookup", "calculator": "Calculator", "guessing": "Guessing"}


def file_of(name: str) -> ModuleType:
    return load_module(str(FOLDER / f"{name}.py"), "--environment")


def dataset_of(name: str):
    return getattr(file_of(name), ROWS[name])("cache", 1234, 0, name)


def row_of(dataset, sample) -> dict:
    """What a rollout passes to `reset`."""
    messages, reference = dataset.get_prompt_messages(sample), dataset.get_reference(sample)
    return {"messages": messages, "ground_truth": reference, **dataset.get_extra(sample)}


def played(name: str, row: dict, messages: list[AssistantMessage]) -> tuple[float, list]:
    """The sum of rewards, and what the environment said in the meantime; all messages are used."""
    environment = getattr(file_of(name), NAMES[name])()
    environment.reset(row)
    said, reward = [], 0.0
    for number, message in enumerate(messages, 1):
        reply = environment.step(message)
        reward += reply.reward
        assert reply.done == (number == len(messages)) and bool(reply.messages) != reply.done
        said += [own["content"] for own in reply.messages]
    return reward, said


def as_said(turns: list[dict]) -> list[AssistantMessage]:
    return [
        AssistantMessage(
            "",
            turn["content"],
            calls=tuple(Call(**call["function"]) for call in turn.get("tool_calls", ())),
        )
        for turn in turns
        if turn["role"] == "assistant"
    ]


@pytest.mark.parametrize("name", ROWS)
def test_demonstrations_are_what_the_environment_says(name):
    dataset = dataset_of(name)
    rewards, acting = [], []
    for sample in dataset.get_eval_data():
        turns, row = dataset.get_chosen_messages(sample), row_of(dataset, sample)
        assert row["environment"] == NAMES[name]
        if name == "guessing" and len(turns) >= 20:
            continue  # it loses
        reward, said = played(name, row, as_said(turns))
        assert said == [turn["content"] for turn in turns if turn["role"] != "assistant"]
        rewards.append(reward)
        acting.append(len(turns) > 1)
    # Something is learned from them, and something is left to learn.
    assert {"lookup": 0.2, "calculator": 0.35, "guessing": -0.2}[name] < sum(rewards) / len(rewards) < 0.75
    if name != "guessing":
        assert 0.2 < sum(acting) / len(acting) < 0.5
        called = [reward for reward, acts in zip(rewards, acting, strict=True) if acts]
        assert called == [1.0] * len(called)


@pytest.mark.parametrize("name", ROWS)
def test_rows_follow_from_the_seed(name):
    first, again = dataset_of(name), dataset_of(name)
    assert first.get_train_data()[:50] == again.get_train_data()[:50]
    assert len(first.get_train_data()) == 4_000 and len(first.get_eval_data()) == 200
    other = getattr(file_of(name), ROWS[name])("cache", 1235, 0, name)
    assert other.get_train_data()[:50] != first.get_train_data()[:50]


def test_a_look_up_answers_its_own_key_alone():
    row = {"messages": [], "ground_truth": "37", "key": "owl elk"}
    call = Call("look_up", {"key": "owl elk"})
    asked = [AssistantMessage("", "", calls=(Call("look_up", {"key": "elk"}), call, Call("f", {})), problems=("cut",))]
    reward, said = played("lookup", row, [*asked, AssistantMessage("37", "37")])
    assert said == ["unknown", "37", "Error: there is no tool 'f'", "Error: cut"] and reward == 1.0
    assert played("lookup", row, [AssistantMessage("", "37.")]) == (0.0, [])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 12", "84"), ("1,000 - 1", "999"), ("7 / 2", "3.5"), ("7 // 2 % 2", "1"), ("-2 ** 3", "-8"),
        ("2 ** 32", "4294967296"), ("1 / 3", "0.3333333333"), (" 4.0 ", "4"),
    ],
)  # fmt: skip
def test_the_calculator_computes(expression, value):
    assert file_of("calculator").calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "10 ** 16", "2 ** 0.5 ** -9999", "(-8) ** 0.5", "1 / 0", "1e400", "1e999 - 1e999", "x", "True",
     "__import__('os')", "[1] * 9", "'a' * 9", "1 if 1 else 2", "(" * 99, "-" * 199 + "1", "1 +", "1" * 201, "1j",
     "999999 ** 32 ** 2", "\x00", "1 << 99"],
)  # fmt: skip
def test_the_calculator_is_bounded(expression):
    begin = time.process_time()
    try:
        value = file_of("calculator").calculate(expression)
    except (ValueError, ArithmeticError) as error:
        value = str(error)
        assert value and "\n" not in value
    assert time.process_time() - begin < 0.1 and len(value) < 100
    row = {"messages": [], "ground_truth": "1"}
    calls = (Call("calculate", {"expression": expression}), Call("calculate", {}), Call("g", {}))
    _, said = played("calculator", row, [AssistantMessage("", "", calls=calls), AssistantMessage("", "#### 1")])
    assert said[1:] == ["Error: argument 'expression' is missing", "Error: there is no tool 'g'"]


def test_the_guessing_game_pays_for_few_guesses():
    row = {"messages": [], "ground_truth": "12"}

    def guesses(*texts: str) -> tuple[float, list]:
        return played("guessing", row, [AssistantMessage(text, text) for text in texts])

    assert guesses("12") == (1.0, [])
    reward, said = guesses("20", "9", "", "12")
    assert reward == pytest.approx(0.7) and said == ["lower", "higher", "Say a number from 1 to 32."]
    reward, said = guesses(*["²"] * 10)
    assert reward == pytest.approx(-1.0) and len(said) == 9


def test_halving_needs_fewer_guesses_than_the_demonstrations():
    dataset = dataset_of("guessing")
    shown = [(len(sample["turns"]) + 1) // 2 for sample in dataset.get_eval_data()]
    assert sum(shown) / len(shown) > 6 > 5  # 32 numbers are halved five times


def test_the_template_writes_what_its_parser_reads():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "template.jinja").read_text())
    row = next(row for row in dataset_of("lookup").get_train_data() if len(row["turns"]) == 3)
    messages = [{"role": "user", "content": row["question"]}, *row["turns"]]
    text = template.render(messages=messages, tools=row["tools"], eos_token="<eos>")
    key, code = row["key"], row["answer"]
    assert text == (
        f'Tools: look_up(key)\nHuman: Code of {key}?\nAssistant: [look_up(key="{key}")]<eos>Tool: {code}\n'
        f"Assistant: {code}<eos>"
    )
    opened = template.render(messages=messages[:1], tools=row["tools"], eos_token="<eos>", add_generation_prompt=True)
    assert text.startswith(opened) and opened.endswith("\nAssistant:")
    drawn = text[len(opened) :].split("<eos>")[0]
    assert read_message(drawn, parse_pythonic).calls == (Call("look_up", {"key": key}),)
    dataset = dataset_of("lookup")
    assert f"{dataset.get_prompt(row)}{dataset.get_chosen(row)}".startswith(
        opened.removeprefix("Tools: look_up(key)\n")
    )


def test_draws_do_not_depend_on_each_other():
    """A code says nothing about its key, and so nothing in the prompt does."""
    rows = [dataset_of("lookup").make_row(Draws(seed)) for seed in range(300)]
    assert len({row["answer"] for row in rows}) > 60 and len({row["key"] for row in rows}) > 100
