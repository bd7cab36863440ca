"""The examples: environments, GSM8K in the layout its authors publish, parallel thinking, a curriculum."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from examples.curriculum import SureQuestions, WorstAgain
from examples.gsm8k import MODELS, final_answer
from examples.parallel_thinking import EmbeddedInParallel, answer
from examples.real_model import checked, exact, table
from tests.support.data_flags import data_flags, raw_dataset_of
from threestep.plugins.curriculum.prompts import RolloutResults
from threestep.plugins.embedded.task import Draws, generate
from threestep.plugins.environments.calling.parsers import parse_pythonic, read_message
from threestep.plugins.environments.interface import AssistantMessage, Call
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import load_module
from training.utils.contracts.rows import PromptRow
from training.utils.data.arguments import DataArguments
from training.utils.data.build.build import build_phase

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


ROOT = Path(__file__).parents[3]
SHARED = Path(os.environ.get("THREESTEP_SHARED_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """12 training questions, 10 test questions; of each test question one wrong solution twice, one other."""
    where = tmp_path / "gsm8k"
    where.mkdir()
    write(where / "train.jsonl", [{"question": f"T{i}?", "answer": f"It is\n#### {i}"} for i in range(12)])
    write(where / "test.jsonl", [{"question": f"E{i}?", "answer": f"It is\n#### {i}"} for i in range(10)])
    write(
        where / "model_solutions.jsonl",
        [
            {
                "question": f"E{i}?",
                "ground_truth": f"It is\nA: {i}",
                MODELS[0]: {"is_correct": True, "solution": f"Yes\nA: {i}"},
                MODELS[1]: {"is_correct": False, "solution": f"Hm\nA: {i + 1}"},
                MODELS[2]: {"is_correct": False, "solution": f"Hm\nA: {i + 1}"},
                MODELS[3]: {"is_correct": False, "solution": f"Well\nA: {i + 2}"},
            }
            for i in range(10)
        ],
    )
    return where


def flags(tmp_path, folder, **given) -> DataArguments:
    given = {"data_path": [str(folder)], **given}
    return data_flags(
        dataset_module=[str(ROOT / "examples" / "gsm8k.py")],
        data_output_path=str(tmp_path / "cache"),
        **given,
    )


def test_which_rows_serve_which_phase(tmp_path, folder, tiny_tokenizer):
    data = flags(tmp_path, folder, data_split="2,4,4")
    sft, pairs, ppo = (build_phase(phase, data, tiny_tokenizer, seed=3) for phase in (1, 2, 3))
    # 12 training questions by weights 2 and 4; 8 of 10 test questions with two different wrong solutions
    # each.
    assert (len(sft.train), len(pairs.train), len(ppo.train)) == (4, 16, 8)
    # Test questions 0 and 5 are held out from all phases: their texts, and their two pairs each.
    assert (len(sft.eval), len(pairs.eval), len(ppo.eval)) == (2, 4, 2)
    assert not {row.row_id for row in sft.train} & {row.row_id for row in ppo.train}


def test_no_question_is_both_trained_on_and_evaluated_on(tmp_path, folder, tiny_tokenizer):
    data = flags(tmp_path, folder)
    trained, evaluated = set(), set()
    for phase in (1, 2, 3):
        built = build_phase(phase, data, tiny_tokenizer, seed=3)
        for split, questions in ((built.train, trained), (built.eval, evaluated)):
            for row in split:
                ids = {1: "input_ids", 2: "prompt_ids", 3: "flipped_prompt_ids"}[phase]
                ids = getattr(row, ids)[:: -1 if phase == 3 else 1]
                questions.add(tiny_tokenizer.decode(ids).split("?")[0])
    assert trained and evaluated == {"Human: E0", "Human: E5"} and not trained & evaluated


def test_texts(tmp_path, folder):
    raw = raw_dataset_of(str(folder), flags(tmp_path, folder), seed=1)
    solution, pair = raw.get_train_data()[2], raw.get_train_data()[12]
    assert raw.get_prompt(solution) == "Human: T2? Assistant:"
    assert raw.get_chosen(solution) == " It is\n#### 2" and raw.get_rejected(solution) is None
    assert raw.get_phases(solution) == (1, 3) and raw.get_phases(pair) == (2,)
    assert raw.get_reference(solution) == "2"
    # Both of a pair end the same way: a reward model must not tell them by "A:" against "####".
    assert (raw.get_chosen(pair), raw.get_rejected(pair)) == (" It is\n#### 1", " Hm\n#### 2")


def test_the_final_answer():
    assert final_answer("a #### 3\n#### 1,080 ") == "1080"
    assert final_answer("#### -2.5") == "-2.5"
    assert final_answer("no mark") == ""


def test_a_folder_without_the_files(tmp_path, folder):
    """One sentence says which file is missing, and where all of them are to be had."""
    (folder / "test.jsonl").unlink()
    with pytest.raises(ThreestepError, match="gsm8k: there is no file '.*test.jsonl'; download .* from https://github"):
        raw_dataset_of(str(folder), flags(tmp_path, folder), 1)


def test_a_folder_that_is_not_there_is_said_before_anything_runs(tmp_path):
    mistakes = Mistakes()
    flags(tmp_path, tmp_path / "nowhere" / "gsm8k").source.validate(mistakes)
    (sentence,) = mistakes.sentences
    assert sentence.startswith(
        f"--data_path: '{tmp_path}/nowhere/gsm8k' ends in the registered name 'gsm8k', but does not exist; download"
    )
    assert "train.jsonl, test.jsonl, example_model_solutions.jsonl from https://github.com/openai" in sentence


def test_the_solutions_may_have_their_published_name(tmp_path, folder):
    as_it_was = raw_dataset_of(str(folder), flags(tmp_path, folder), 1).get_train_data()
    (folder / "model_solutions.jsonl").rename(folder / "example_model_solutions.jsonl")
    assert raw_dataset_of(str(folder), flags(tmp_path, folder), 1).get_train_data() == as_it_was


def test_a_model_solution_of_another_shape(tmp_path, folder):
    path = folder / "model_solutions.jsonl"
    path.write_text(path.read_text().replace('"is_correct": true', '"right": true'))
    raw = raw_dataset_of(str(folder), flags(tmp_path, folder), 1)
    with pytest.raises(ThreestepError, match="expected an object with is_correct and solution"):
        raw.get_train_data()


def test_a_changed_file_is_another_dataset(tmp_path, folder):
    before = raw_dataset_of(str(folder), flags(tmp_path, folder), 1).get_fingerprint()
    path = folder / "model_solutions.jsonl"
    path.write_text(path.read_text().replace("Well", "Weil"))
    assert raw_dataset_of(str(folder), flags(tmp_path, folder), 1).get_fingerprint() != before


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the published GSM8K files are not at {SHARED}")
def test_the_published_files(tmp_path, tiny_tokenizer):
    data = flags(tmp_path, SHARED)
    raw = raw_dataset_of(str(SHARED), data, 1)
    train, held_out = raw.get_train_data(), raw.get_eval_data()
    solutions = [row for row in train if row["wrong"] is None]
    pairs = [row for row in train if row["wrong"] is not None]
    assert len(solutions) == 7473 and 2_000 < len(pairs) < 3_275
    assert sum(row["wrong"] is None for row in held_out) == 264
    assert all(raw.get_reference(row) for row in train)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert not any(row["wrong"] == row["answer"] for row in pairs)
    assert all("\nA: " not in row["answer"] for row in pairs)

    ppo = build_phase(3, flags(tmp_path, SHARED, max_train_rows=100), tiny_tokenizer, seed=1234)
    assert len(ppo.train) <= 100 and ppo.train[0].reference


def rows(count):
    ids = np.zeros(1, np.int32)
    return [PromptRow(i, ids, f"Human: {i}? Assistant:", str(i), {"level": i}) for i in range(count)]


def test_every_prompt_once_and_then_the_worst():
    prompts = rows(4)
    sampler = WorstAgain(prompts, seed=1)
    assert sampler.take(0, 3) == [0, 1, 2]
    sampler.update([row.uid for row in prompts[:3] for _ in range(2)], [1, 1, -1, 0, 0, 1])  # means 1, -0.5, 0.5
    assert sampler.take(3, 3) == [3, 1, 2]
    sampler.update([prompts[1].uid, prompts[3].uid], [9.0, 0.75])
    assert sampler.take(6, 6) == [2, 3, 0, 1, 2, 3]


def test_scores_of_prompts_that_it_did_not_take():
    """As of dynamic sampling: they count once the prompt is taken, and again if it is worst."""
    prompts = rows(3)
    sampler = WorstAgain(prompts, seed=1)
    assert sampler.take(0, 1) == [0]
    sampler.update([prompts[0].uid, prompts[2].uid], [1.0, -1.0])
    assert sampler.take(1, 3) == [1, 2, 0]
    sampler.update([prompts[1].uid], [0.0])
    assert sampler.take(4, 3) == [2, 1, 0]


def test_the_best_response_is_asked_about():
    class Maker:
        def make(self, prompt, ground_truth, row_id, **columns):
            return PromptRow(row_id, np.zeros(1, np.int32), prompt, ground_truth, columns)

    prompts = rows(2)
    dataset = SureQuestions(prompts, Maker(), seed=1)
    dataset.on_batch_end(RolloutResults(rows=prompts, responses=[" a", " b"], scores=[0.0, 2.0]))
    assert len(dataset) == 3 and dataset[2].prompt_text == "Human: 1? Assistant: b Human: Are you sure? Assistant:"
    assert dataset[2].reference == "1" and dataset[2].columns == {"level": 1, "asked_again": True}


def test_attempts_stand_in_a_block_and_the_answer_behind_it():
    rows = generate(1, 50, 5)["train"]
    dataset = EmbeddedInParallel.__new__(EmbeddedInParallel)
    first = set()
    for row in rows:
        text = dataset.get_chosen(row)
        block, _, behind = text.partition("</Parallel>")
        paths = block.removeprefix(" <Parallel><Path>").removesuffix("</Path>").split("</Path><Path>")
        assert sorted(paths) == sorted([row.chosen, row.rejected]) and behind == row.chosen
        assert dataset.get_rejected(row) == f"{block}</Parallel>{row.rejected}"
        first.add(paths[0] == row.chosen)
    assert first == {True, False}  # or the answer would be known from the place


def test_the_reward_reads_what_stands_behind_the_last_block():
    prompt = "Human: Put owl last: fox elk Assistant:"
    right, wrong = "<Path> fox elk owl</Path>", "<Path> owl</Path>"
    responses = [
        f" <Parallel>{wrong}{wrong}</Parallel> fox elk owl", f" <Parallel>{right}{right}</Parallel> fox owl",
        " fox elk owl", f" <Parallel>{right}{wrong}",
    ]  # fmt: skip
    scores, values = answer([prompt] * 4, responses, ground_truth=[None] * 4)
    assert scores[:3] == pytest.approx([1.0, 2 / 3, 1.0]) and scores[3] < 0.5
    assert values == {"with_block": [1.0, 1.0, 0.0, 0.0]}


ANNA = '{"name": "Anna", "age": 34, "town": "Rome"}'


@pytest.mark.parametrize(
    ("response", "expected", "reward"),
    [
        (" 39\n", "39", 1.0),
        ("14 + 25 = 39", "39", 0.5),
        ("2", "39", 0.0),  # a number alone earns nothing
        (ANNA, ANNA, 1.0),
        (ANNA.replace(", ", ",\n"), ANNA, 1.0),
        (f"Here it is: {ANNA}", ANNA, 0.5),
        ("{}", ANNA, 0.0),
        ("{Anna}", ANNA, 0.0),
        ("apple, river", "apple, river", 1.0),
        ("Apple and river", "apple, river", 0.0),
        ("Apple, river.", "apple, river", 0.5),
        ("river, apple", "apple, river", 0.0),
        ("A river and bread.", "4 words: river bread", 1.0),
        ("A river and a bread.", "4 words: river bread", 0.5),
        ("A river and. Bread.", "4 words: river bread", 0.0),
        ("A river and a cloud.", "4 words: river bread", 0.0),
    ],
)
def test_a_checkable_task_pays_for_a_right_answer(response, expected, reward):
    assert checked([""], [response], expected=[expected]) == [reward]
    assert exact([""], [response], expected=[expected]) == [float(reward == 1)]


def test_results_over_seeds_have_the_interval_of_the_mean_gain(tmp_path):
    for seed, after in ((1, 0.5), (2, 0.6), (3, 0.7)):
        (tmp_path / f"{seed}" / "reward").mkdir(parents=True)
        figures = {"eval_accuracy_before": 0.5, "eval_accuracy": after, "seconds": 60.0}
        (tmp_path / f"{seed}" / "reward" / "summary.json").write_text(json.dumps(figures))
    row = "| reward | held-out pair accuracy | 3 | 0.500 | 0.600 | +0.100 ± 0.248 | 60 |"  # 4.303 * 0.1 / sqrt(3)
    assert table([tmp_path / f"{seed}" for seed in (1, 2, 3, 4)]).splitlines()[2:] == [row]
