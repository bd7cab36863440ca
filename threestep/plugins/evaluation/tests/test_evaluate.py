"""The tasks by their command lines, on models of random weights."""

from __future__ import annotations

import json
import math

import pytest

from tests.support.saved_models import save_pair
from tests.support.scoring_server import judged, longer_wins, scoring_server
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.evaluation import evaluate, tasks
from threestep.plugins.evaluation.tests.conftest import judge_of
from training.utils.base.errors import ThreestepError

WORDS = ("fig", "pear", "apple", "plum", "quince", "lemon", "cherry", "date")


@pytest.fixture
def flags(tmp_path, tiny_tokenizer):
    """Two models, a reward model, eight questions of which all are held out."""
    for seed, (name, make) in enumerate((("one", tiny_causal_lm), ("two", tiny_causal_lm), ("rm", tiny_scalar_model))):
        save_pair(tmp_path / name, tiny_tokenizer, make, seed=seed)
    rows = [
        {"prompt": f"Human: {word}? Assistant:", "chosen": f" {word}", "rejected": " no", "ground_truth": "7"}
        for word in WORDS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"--model_name_or_path {tmp_path}/one --data_path jsonl:{tmp_path}/rows.jsonl"
    line += f" --data_output_path {tmp_path}/cache --data_split 0,0,1 --eval_fraction 0.5 --max_prompt_seq_len 64"
    return [*line.split(), "--output_dir", f"{tmp_path}/out"]


def read(tmp_path, task: str):
    return json.loads((tmp_path / "out" / f"{task}.json").read_text())


def test_win_rate_by_a_reward_model(flags, tmp_path, capsys):
    own = ["--baseline", f"{tmp_path}/two", "--reward_model", f"{tmp_path}/rm", "--max_new_tokens", "6"]
    evaluate.main(["win_rate", *flags, *own])
    found = read(tmp_path, "win_rate")
    assert found["prompts"] == 4 == found["wins"] + found["ties"] + found["losses"]
    assert found["win_rate"]["value"] == (found["wins"] + 0.5 * found["ties"]) / 4
    assert found["models"] == [f"{tmp_path}/one", f"{tmp_path}/two"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "win_rate.jsonl").read_text().splitlines()]
    gains = [line["scores"][0] - line["scores"][1] for line in lines]
    assert found["reward_gain"]["value"] == pytest.approx(sum(gains) / 4)
    assert found["wins"] == sum(gain > 0 for gain in gains)
    page = (tmp_path / "out" / "win_rate.html").read_text()
    told = {"reward": "model", "reward model": f"{tmp_path}/rm", "split": "eval", "temperature": "1.0"}
    assert all(f"<td>{name}</td>" in page for name in told) and f"{tmp_path}/rm" in page
    assert page.count('class="card sample"') == 4 and "win_rate" in capsys.readouterr().out
    # A model against itself: every draw is the same, so every pair is a tie.
    evaluate.main(["win_rate", *flags, "--baseline", f"{tmp_path}/one", *own[2:]])
    found = read(tmp_path, "win_rate")
    assert (found["ties"], found["win_rate"]["value"], found["reward_gain"]["value"]) == (4, 0.5, 0.0)


def test_a_rule_is_a_share(flags, tmp_path):
    rule = tmp_path / "rule.py"
    rule.write_text("def short(prompts, responses, **columns):\n    return [float(len(r) < 12) for r in responses]\n")
    evaluate.main(["reward", *flags, "--reward", f"{rule}:short", "--max_new_tokens", "4", "--split", "eval"])
    found = read(tmp_path, "reward")
    assert 0 <= found["reward"]["low"] <= found["reward"]["value"] <= found["reward"]["high"] <= 1
    evaluate.main(["gsm8k", *flags, "--max_new_tokens", "4", "--dtype", "bf16"])
    found = read(tmp_path, "gsm8k")
    assert found["dtype"] == "bf16" and found["reward"]["value"] == 0.0 and found["reward"]["high"] > 0.3


def test_perplexity_of_responses_and_of_text(flags, tmp_path, tiny_tokenizer):
    flags[flags.index("0,0,1")] = "1,0,0"
    evaluate.main(["perplexity", *flags, "--max_seq_len", "64"])
    found = read(tmp_path, "perplexity")
    assert found["perplexity"]["value"] == pytest.approx(math.exp(found["loss"]["value"]))
    assert found["rows"] == 4 and not (tmp_path / "out" / "perplexity.html").exists()
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": "pear apple fig " * 9}) + "\n") * 4)
    more = ["--max_seq_len", "16", "--unsupervised_dataset_name", f"jsonl:{tmp_path}/text.jsonl"]
    evaluate.main(["perplexity", *flags, *more])
    found = read(tmp_path, "perplexity")
    assert found["tokens"] == 15 * found["rows"]


def test_several_answers_to_each_prompt(flags, tmp_path):
    evaluate.main(["gsm8k", *flags, "--max_new_tokens", "4"])
    alone = [json.loads(line) for line in (tmp_path / "out/gsm8k.jsonl").read_text().splitlines()]
    evaluate.main(["gsm8k", *flags, "--max_new_tokens", "4", "--val_samples", "3"])
    found = read(tmp_path, "gsm8k")
    assert found["val_samples"] == 3 and {"reward_best@2", "reward_best@3", "reward_majority@3"} <= found.keys()
    lines = [json.loads(line) for line in (tmp_path / "out/gsm8k.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == [0, 1, 2] * found["prompts"]
    # The first sample is the one that is drawn alone.
    assert [line["answers"] for line in lines[::3]] == [line["answers"] for line in alone]
    assert "reward best@3" in (tmp_path / "out/gsm8k.html").read_text()


@pytest.mark.parametrize(
    ("task", "more", "sentence"),
    [
        ("winrate", "", "expected a task first, one of win_rate, .* got 'winrate'; did you mean 'win_rate'"),
        ("win_rate", "--reward length", "win_rate expects --baseline, the model to compare against, got none"),
        ("gsm8k", "--baseline x", "--baseline is only for win_rate, not for gsm8k; remove it"),
        ("reward", "", "--reward includes `model`, which needs --reward_model; add it, or use a"),
        ("reward", "--split all", "--split expects one of eval, train, got 'all'"),
        ("gsm8k", "--per_device_eval_batch_size 0", "--per_device_eval_batch_size expects 1 or more"),
        ("gsm8k", "--model_name_or_path=", "--model_name_or_path expects a model folder or hub name, got nothing"),
        ("gsm8k", "--val_samples 0", "--val_samples expects 1 or more, got 0"),
        (
            "perplexity",
            "--val_samples 2",
            "--val_samples 2 is not used here, because perplexity generates no answers; remove it",
        ),
        ("perplexity", "--rollout_engine vllm", "^--rollout_engine is not used here, because perplexity generates no"),
        ("gsm8k", "--dry_run", "--dry_run plans training memory, but evaluate does not train; remove it"),
        ("gsm8k", "--val_samples 2 --temperature 0", "--val_samples 2 samples several answers, but --temperature 0"),
        ("gsm8k", "--eval_fraction 0", "--split eval has no rows; raise --eval_fraction"),
    ],
)
def test_mistakes(flags, task, more, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        evaluate.main([task, *flags, *more.split()])


def test_data_and_a_reward_that_are_missing_are_named_at_once(capsys):
    line = ["win_rate", "--model_name_or_path_finetune", "x", "--model_name_or_path_baseline", "y"]
    with pytest.raises(ThreestepError) as caught:
        evaluate.main(line)
    _, first, second = str(caught.value).splitlines()
    assert "--data_path expects at least one dataset, got none" in first and "needs --reward_model" in second


def test_prompts_of_two_tokenizers_meet_by_their_rows(capsys):
    from types import SimpleNamespace

    one, two = ([SimpleNamespace(row_id=row) for row in rows] for rows in ([1, 2, 3], [3, 1]))
    shared = tasks.shared_prompts([one, two])
    assert [[row.row_id for row in side] for side in shared] == [[1, 3], [1, 3]]
    assert "left out: 1 prompt above" in capsys.readouterr().err
    with pytest.raises(ThreestepError, match="no prompt fits both models; raise --max_prompt_seq_len"):
        tasks.shared_prompts([one[1:2], two])


@pytest.mark.parametrize("task", ["gsm8k", "perplexity"])
def test_a_place_that_takes_no_figures_is_refused_before_they_are_made(task, tmp_path):
    flags = [task, "--model_name_or_path", str(tmp_path / "none"), "--data_path", "embedded", "--output_dir"]
    (tmp_path / f"{task}.json").mkdir()
    with pytest.raises(ThreestepError, match=f"^--output_dir expects a file, got '.*{task}.json', which is a folder"):
        evaluate.main([*flags, str(tmp_path)])
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(ThreestepError, match="^--output_dir '.*' cannot be written: .*file: a file is in the way"):
        evaluate.main([*flags, str(tmp_path / "file")])


def test_win_rates_by_a_judge_that_compares(flags, tmp_path):
    """The judge prefers what stands first where lengths are equal, and asking in both orders makes these ties."""
    own = ["--baseline", f"{tmp_path}/two", "--max_new_tokens", "6", "--val_samples", "2"]
    with scoring_server(judged(longer_wins)) as server:
        judge = judge_of(tmp_path, server, form="pairwise")
        evaluate.main(["win_rate", *flags, *own, "--reward", judge])
        lines = [json.loads(line) for line in (tmp_path / "out" / "win_rate.jsonl").read_text().splitlines()]
        pairs = {(line["prompt"], *line["answers"]) for line in lines if line["answers"][0] != line["answers"][1]}
        assert len(server.asked) == 2 * len(pairs)
    found = read(tmp_path, "win_rate")
    for line in lines:
        one, two = map(len, line["answers"])
        assert line["scores"] == [0.5 * ((one > two) - (one < two)) + 0.5, 0.5 * ((two > one) - (two < one)) + 0.5]
        assert [each["reward/judge"] for each in line["rewards"]] == line["scores"]
    assert found["wins"] == sum(line["scores"][0] > 0.5 for line in lines) > 0
    assert found["win_rate"]["value"] == sum(line["scores"][0] for line in lines) / len(lines)
    # The same verdicts, added to a rule of each answer alone.
    more = f"--reward {judge}:2,length:0.5 --reward_length_characters 9 --reward_replay {tmp_path}/out"
    evaluate.main(["win_rate", *flags, *own, *more.split(), "--output_dir", f"{tmp_path}/again"])
    again = [json.loads(line) for line in (tmp_path / "again" / "win_rate.jsonl").read_text().splitlines()]
    for line, first in zip(again, lines, strict=True):
        for total, parts, share in zip(line["scores"], line["rewards"], first["scores"], strict=True):
            assert parts["reward/judge"] == share and total == 2 * share + 0.5 * parts["reward/length"]
    with pytest.raises(
        ThreestepError, match="--reward judge compares the responses .*, but --val_samples 1 allows one"
    ):
        evaluate.main(["reward", *flags, "--reward", judge])


def test_an_ensemble_of_rewards(flags, tmp_path):
    rules = tmp_path / "rules.py"
    rules.write_text(
        "def one(p, r, **c):\n    return [1.0] * len(r)\ndef two(p, r, **c):\n    return [len(x) for x in r]\n"
    )
    own = ["--reward", f"{rules}:one,{rules}:two:0.5", "--max_new_tokens", "6", "--reward_combine", "minimum"]
    evaluate.main(["reward", *flags, *own])
    lines = [json.loads(line) for line in (tmp_path / "out" / "reward.jsonl").read_text().splitlines()]
    assert all(line["scores"] == [min(1.0, 0.5 * len(line["answers"][0]))] for line in lines)
