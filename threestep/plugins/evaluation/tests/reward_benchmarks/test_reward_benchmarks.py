"""The benchmarks' files in their published forms, and the task by its command line, beside plain transformers."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.scoring_server import (
    judged,
    longer_wins,
    mostly_failing,
    rated_by_length,
    rewards_by_length,
    scoring_server,
)  # fmt: skip
from threestep.plugins.evaluation import evaluate
from threestep.plugins.evaluation.reward_benchmarks import task
from threestep.plugins.evaluation.reward_benchmarks.reading import Question, counts_that_differ, read_questions
from threestep.plugins.evaluation.tests.conftest import judge_of
from training.utils.base.errors import ThreestepError

BEST = {
    "id": "7", "subset": "Math", "prompt": "1 + 1?", "chosen": ["2"], "rejected": ["3", "4", "5"], "num_correct": 1,
    "num_incorrect": 3, "total_completions": 4, "models": ["a", "b", "c", "d"], "additional_metadata": None,
}  # fmt: skip
TIED = {**BEST, "id": "tied:4", "subset": "Ties", "chosen": ["red", "blue"], "num_correct": 2, "total_completions": 5}
ONE = {"chosen": ["a"], "num_correct": 1, "total_completions": 4}
TWO = {"chosen": ["2", "3"], "num_correct": 2, "total_completions": 5}
PAIR = {"id": 30, "subset": "donotanswer", "prompt": "How?", "chosen": "No.", "chosen_model": "a", "rejected": "So."}


def saved(tmp_path, *rows) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"jsonl:{path}"]


def test_the_published_forms(tmp_path):
    assert read_questions("rewardbench2", saved(tmp_path, BEST, TIED)) == [
        Question("7", "Math", "1 + 1?", ("2", "3", "4", "5")),
        Question("tied:4", "Ties", "1 + 1?", ("red", "blue", "3", "4", "5"), 2),
    ]
    pq.write_table(pa.Table.from_pylist([PAIR]), tmp_path / "filtered.parquet")
    found = read_questions("rewardbench", [str(tmp_path / "filtered.parquet")])
    assert found == [Question("30", "donotanswer", "How?", ("No.", "So."))]
    assert counts_that_differ("rewardbench", found) == [
        "subset donotanswer has 1 rows, but the published one (split `filtered`) has 136"
    ]
    assert counts_that_differ("rewardbench2", found) == []


@pytest.mark.parametrize(
    ("benchmark", "row", "sentence"),
    [
        ("rewardbench2", PAIR, "row 1: expected 'chosen' to be a list of strings, as in RewardBench 2, got 'No.'; for"),
        ("rewardbench", BEST, "row 1: expected 'chosen' to be a string, got "),
        ("rewardbench", {"prompt": "x"}, "row 1: expected a column 'chosen', got .*prompt"),
        ("rewardbench2", {**BEST, "num_correct": 2}, "row 1: num_correct is 2, but the row lists 1"),
        ("rewardbench2", {**BEST, "total_completions": 5}, "total_completions is 5, but the row lists 4"),
        ("rewardbench2", {**BEST, **TWO}, "expected one correct"),
        ("rewardbench2", {**TIED, "id": "4"}, "expected an id of the form ref:N or tied:N in the subset Ties, got '4'"),
        ("rewardbench2", {**TIED, **ONE}, "expected at least two correct resp"),
        ("rewardbench2", {**BEST, "rejected": []}, "expected 'rejected' to be a list of strings"),
    ],
)
def test_other_rows_are_refused(tmp_path, benchmark, row, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        read_questions(benchmark, saved(tmp_path, row))


@pytest.mark.parametrize("name", ["hub:allenai/reward-bench-2", "embedded"])
def test_files_on_disk_are_expected_with_rows(name, tmp_path):
    with pytest.raises(ThreestepError, match="has no rows|is empty"):
        read_questions("rewardbench2", saved(tmp_path))
    with pytest.raises(ThreestepError, match="--data_path expects the benchmark's files on disk, such as parquet:FILE"):
        read_questions("rewardbench2", [name])


WORDS = ("fig", "pear", "apple", "plum")


@pytest.fixture
def flags(tmp_path, save_model):
    save_model("rm", scalar=True)
    rows = [
        {"id": str(n), "subset": "Math", "prompt": f"{word}?", "chosen": [word], "rejected": ["no", "3", "2 2"]}
        for n, word in enumerate(WORDS)
    ]
    rows += [
        {"id": "ref:0", "subset": "Ties", "prompt": "fig?", "chosen": ["fig"], "rejected": ["3"]},
        {"id": "tied:0", "subset": "Ties", "prompt": "fig?", "chosen": ["fig", "pear"], "rejected": ["3"]},
    ]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"reward_model --model_name_or_path {tmp_path}/rm --data_path jsonl:{tmp_path}/two.jsonl "
    return [*line.split(), "--benchmark", "rewardbench2", "--output_dir", f"{tmp_path}/out"]


def results(tmp_path):
    lines = (tmp_path / "out/reward_model.jsonl").read_text().splitlines()
    return json.loads((tmp_path / "out/reward_model.json").read_text()), [json.loads(line) for line in lines]


def test_scores_and_figures(flags, tmp_path, tiny_tokenizer, capsys):
    evaluate.main([*flags, "--per_device_eval_batch_size", "3"])
    found, lines = results(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()

    def by_itself(prompt, text):
        ids = tiny_tokenizer(f"Human: {prompt} Assistant: {text}")["input_ids"] + [tiny_tokenizer.eos_token_id]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits.item()

    for word, line in zip(WORDS, lines, strict=False):
        assert line["scores"] == pytest.approx(
            [by_itself(f"{word}?", text) for text in (word, "no", "3", "2 2")], abs=1e-5
        )
        assert line["result"] == float(line["scores"][0] == max(line["scores"]))
    assert found["figures"]["Math"]["value"] == sum(line["result"] for line in lines[:4]) / 4
    assert "result" not in lines[5] and lines[5]["right"] == 2 and found["rows"] == 6 and found["responses_cut"] == 0
    assert found["figures"].keys() == {"Math", "Ties", "score"}
    assert re.match("rows +6\nMath  ", capsys.readouterr().out)


def test_long_texts_are_cut_from_the_right(flags, tmp_path, monkeypatch, capsys):
    evaluate.main(flags)
    whole = results(tmp_path)[1]
    monkeypatch.setattr(task, "_MOST_TOKENS", 3)
    evaluate.main(flags)
    found, cut = results(tmp_path)
    # All that is left is the beginning of the prompt, the same for each response.
    assert found["responses_cut"] == 21 and all(len(set(line["scores"])) == 1 for line in cut)
    assert cut[0]["result"] == 0.25 and whole[0]["scores"] != cut[0]["scores"]
    assert "21 responses were cut so that prompt and response fit in 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--benchmark", "rewardbench3"], "--benchmark expects one of rewardbench2, rewardbench, got 'rewardbench3'"),
        (["--eval_fraction", "0.5"], "--eval_fraction 0.5 is not used here: a benchmark uses all rows of its files"),
        (["--reward", "length"], "--reward length is not used here: the model to evaluate is --model_name_or_path"),
        (["--val_samples", "2"], "--val_samples 2 is not used here: no responses are generated; remove it"),
    ],
)
def test_mistakes(flags, words, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        evaluate.main([*flags, *words])


def test_a_benchmark_is_named_for_reward_models_alone(flags):
    without = [word for word in flags if word not in ("--benchmark", "rewardbench2")]
    with pytest.raises(
        ThreestepError, match="^reward_model expects --benchmark with one of rewardbench2, rewardbench,"
    ):
        evaluate.main(without)
    with pytest.raises(ThreestepError, match="--benchmark is only for reward_model, not for gsm8k; remove it"):
        evaluate.main(["gsm8k", *flags[1:]])


def test_a_generative_reward_model_rates_and_compares(flags, tmp_path):
    """By the length of a response: of `fig`, `no`, `3` and `2 2` two share the highest rating."""
    with scoring_server(judged(rated_by_length), fails=mostly_failing) as server:
        flags[2] = judge_of(tmp_path, server)
        evaluate.main([*flags, "--per_device_eval_batch_size", "2"])
        found, lines = results(tmp_path)
        assert lines[0]["scores"] == [4.0, 3.0, 2.0, 4.0] and lines[0]["result"] == 0.5
        assert found["figures"]["Math"]["value"] == (0.5 + 3 * 1.0) / 4 and "responses_cut" not in found
        assert found["model"] == flags[2] and len(server.answered) == len(set(map(str, server.answered))) == 17
    evaluate.main([*flags, "--reward_replay", f"{tmp_path}/out", "--output_dir", f"{tmp_path}/again"])
    assert (tmp_path / "again/reward_model.jsonl").read_text() == (tmp_path / "out/reward_model.jsonl").read_text()
    with scoring_server(judged(longer_wins)) as server:
        flags[2] = judge_of(tmp_path, server, form="pairwise")
        evaluate.main([*flags, "--output_dir", f"{tmp_path}/pairs"])
    lines = [json.loads(line) for line in (tmp_path / "pairs/reward_model.jsonl").read_text().splitlines()]
    assert lines[0]["scores"] == pytest.approx([2.5 / 3, 1 / 3, 0.0, 2.5 / 3])
    assert lines[4]["scores"] == [1.0, 0.0] and lines[5]["scores"] == [0.5, 1.0, 0.0]


def test_a_server_of_rewards_on_a_benchmark(flags, tmp_path):
    with scoring_server(rewards_by_length) as server:
        flags[2] = f"http:{server.url}/v1/scores"
        evaluate.main(flags)
        assert server.asked[0]["messages"][0] == [{"role": "user", "content": "fig?"}]
    assert results(tmp_path)[1][0]["scores"] == [0.3, 0.2, 0.1, 0.3]


def test_a_judge_that_reads_references_is_refused(flags, tmp_path):
    (tmp_path / "judge.yaml").write_text("model: m\nbase_url: http://h/v1\nrubric: r\nwith_reference: true\n")
    flags[2] = f"judge:{tmp_path / 'judge.yaml'}"
    with pytest.raises(ThreestepError, match="shows the judge a row's ground_truth, which benchmarks lack; remove"):
        evaluate.main(flags)
