"""The task by its command line: scores are those of plain transformers on the same texts."""

from __future__ import annotations

import json

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
from training.utils.base.errors import ThreestepError

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
    assert capsys.readouterr().out.startswith("Math  ")


def test_long_texts_are_cut_from_the_right(flags, tmp_path, monkeypatch, capsys):
    evaluate.main(flags)
    whole = results(tmp_path)[1]
    monkeypatch.setattr(task, "_MOST_TOKENS", 3)
    evaluate.main(flags)
    found, cut = results(tmp_path)
    # All that is left is the beginning of the prompt, the same for each response.
    assert found["responses_cut"] == 21 and all(len(set(line["scores"])) == 1 for line in cut)
    assert cut[0]["result"] == 0.25 and whole[0]["scores"] != cut[0]["scores"]
    assert "21 responses were cut at 3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--benchmark", "rewardbench3"], "--benchmark expects one of rewardbench2, rewardbench, got 'rewardbench3'"),
        (["--eval_fraction", "0.5"], "--eval_fraction 0.5 has no use here: a benchmark takes all rows of its files"),
        (["--reward", "length"], "--reward length has no use here: the model that is judged is --model_name_or_path"),
        (["--val_samples", "2"], "--val_samples 2 has no use here: nothing is drawn; leave it out"),
    ],
)
def test_mistakes(flags, words, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        evaluate.main([*flags, *words])


def test_a_benchmark_is_named_for_reward_models_alone(flags):
    without = [word for word in flags if word not in ("--benchmark", "rewardbench2")]
    with pytest.raises(ThreestepError, match="^reward_model expects --benchmark, one of rewardbench2, rewardbench,"):
        evaluate.main(without)
    with pytest.raises(ThreestepError, match="--benchmark is only for reward_model, and gsm8k takes prompts; leave it"):
        evaluate.main(["gsm8k", *flags[1:]])


def judge_of(tmp_path, server, **changes):
    settings = {"model": "tiny", "base_url": f"{server.url}/v1", "rubric": "Longer is better.", "pause": 0.001}
    (tmp_path / "judge.yaml").write_text(json.dumps({**settings, **changes}))
    return f"judge:{tmp_path / 'judge.yaml'}"


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
    with pytest.raises(ThreestepError, match="shows the judge a row's ground_truth, and a benchmark has none; leave"):
        evaluate.main(flags)
