"""GSM8K in the layout its authors publish: a small copy of that shape, and the real files where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from examples.gsm8k import MODELS, final_answer
from tests.support.data_flags import data_flags, raw_dataset_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.build.build import build_phase

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
