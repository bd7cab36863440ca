"""Best of n by its command line, on models of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.data_flags import data_flags
from tests.support.saved_models import save_pair
from tests.support.scoring_server import judged, longer_wins, mostly_failing, scoring_server
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.evaluation import evaluate
from threestep.plugins.evaluation.best_of import __main__ as best_of
from threestep.plugins.evaluation.best_of import drawing
from threestep.plugins.evaluation.tests.conftest import judge_of
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase

WORDS = ("fig", "pear", "apple", "plum", "quince", "lemon", "cherry", "date")


@pytest.fixture
def flags(tmp_path, tiny_tokenizer):
    """A model, a reward model, eight questions, rules."""
    for seed, (name, make) in enumerate((("one", tiny_causal_lm), ("rm", tiny_scalar_model))):
        save_pair(tmp_path / name, tiny_tokenizer, make, seed=seed)
    rows = [{"prompt": f"Human: {word}? Assistant:", "ground_truth": word} for word in WORDS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rule.py").write_text(
        "def longest(prompts, responses, **columns):\n    return [float(len(r)) for r in responses]\n"
        "def shortest(prompts, responses, **columns):\n    return [-float(len(r)) for r in responses]\n"
        "def infinite(prompts, responses, **columns):\n    return [float('inf') for r in responses]\n"
    )
    line = f"--model_name_or_path {tmp_path}/one --data_path jsonl:{tmp_path}/rows.jsonl --eval_fraction 0 "
    line += f"--data_output_path {tmp_path}/cache --max_prompt_seq_len 64 --max_new_tokens 6 --keep_cut true "
    line += f"--per_device_eval_batch_size 3 --num_samples_per_prompt 4 --reward {tmp_path}/rule.py:longest"
    return [*line.split(), "--output_dir", f"{tmp_path}/out"]


def read_lines(path: Path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_best_are_kept_as_rows_that_steps_read(flags, tmp_path, tiny_tokenizer, capsys):
    best_of.main([*flags, "--checker", f"{tmp_path}/rule.py:shortest"])
    out = tmp_path / "out"
    answers, rows = read_lines(out / "answers.jsonl"), read_lines(out / "rows.jsonl")
    assert len(answers) == len(rows) == 8 and {len(line["responses"]) for line in answers} == {4}
    for prompt, row in zip(answers, rows, strict=True):
        assert prompt["reward"] == prompt["reward/longest"] == [len(text) for text in prompt["responses"]]
        assert prompt["check"] == [-number for number in prompt["reward"]]
        assert row["prompt"] == prompt["prompt"] and row["ground_truth"] in WORDS
        assert len(row["chosen"]) == row["chosen_reward"] == max(prompt["reward"])
        assert len(row["rejected"]) == row["rejected_reward"] == min(prompt["reward"])
    figures = json.loads((out / "best_of.json").read_text())
    assert figures["prompts"] == figures["rows"] == figures["pairs"] == 8 and figures["over_optimised"]
    assert [point["k"] for point in figures["curve"]] == [1, 2, 4]
    assert figures["curve"][-1]["check"]["value"] == -figures["curve"][-1]["reward"]["value"]
    said = capsys.readouterr().out
    assert "over-optimized" in said and "8 rows from 8 prompts with 32 responses; 8 rows are pairs" in said
    page = (out / "best_of.html").read_text()
    assert page.count('class="card sample"') == 8 and 'data-chart="curve-1"' in page
    # Steps 1 and 2 read the file without a flag; prompts have the ids that were answered.
    data = data_flags(
        data_path=[f"jsonl:{out}/rows.jsonl"], eval_fraction=0.0, data_output_path=str(tmp_path / "cache")
    )
    sentences = build_phase(1, data, tiny_tokenizer, seed=1).train
    assert sorted(tiny_tokenizer.decode(row.input_ids[row.loss_mask][:-1]) for row in sentences) == sorted(
        row["chosen"] for row in rows
    )
    pairs = build_phase(2, data, tiny_tokenizer, seed=1).train
    found = [[tiny_tokenizer.decode(ids[:-1]) for ids in row.response_ids] for row in pairs]
    assert sorted(found) == sorted([row["chosen"], row["rejected"]] for row in rows)


def test_the_responses_are_those_of_evaluate(flags, tmp_path):
    flags[flags.index("--eval_fraction") + 1] = "0.5"
    best_of.main([*flags, "--split", "eval"])
    lines = read_lines(tmp_path / "out/answers.jsonl")
    others = [word for word in flags if word not in ("--keep_cut", "true", "--num_samples_per_prompt", "4")]
    evaluate.main(["reward", *others, "--val_samples", "4"])
    evaluated = read_lines(tmp_path / "out/reward.jsonl")
    assert [text for line in lines for text in line["responses"]] == [line["answers"][0] for line in evaluated]
    assert [number for line in lines for number in line["reward"]] == [line["scores"][0] for line in evaluated]


def test_a_run_that_was_stopped_gives_the_same_bits(flags, tmp_path, monkeypatch):
    model = ["--reward", "model:0.5", "--reward_model", f"{tmp_path}/rm"]
    best_of.main([*flags, *model])
    whole = files_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    real, calls = drawing.scores_of, []

    def stops(*given, **named):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(drawing, "scores_of", stops)
    with pytest.raises(KeyboardInterrupt):
        best_of.main([*flags, *model])
    assert len(list((tmp_path / "out/batches").iterdir())) == 1 and not (tmp_path / "out/rows.jsonl").exists()
    best_of.main([*flags, *model])
    assert files_of(tmp_path / "out") == whole and len(calls) == 4  # one of three batches was there, one was lost
    # Finished, it draws nothing again, and keeps other rows on request.
    best_of.main([*flags, *model, "--keep_best", "2"])
    assert len(calls) == 4 and len(read_lines(tmp_path / "out/rows.jsonl")) > 8
    assert (tmp_path / "out/answers.jsonl").read_bytes() == whole["answers.jsonl"]


def test_other_settings_data_or_weights_are_refused_or_drawn_again_on_request(flags, tmp_path):
    best_of.main(flags)
    before = files_of(tmp_path / "out")
    best_of.main([*flags, "--seed", "5", "--overwrite"])
    after = files_of(tmp_path / "out")
    assert before.keys() == after.keys() and before["answers.jsonl"] != after["answers.jsonl"]
    best_of.main([*flags, "--overwrite"])
    with pytest.raises(
        ThreestepError, match="other settings: --temperature changed from 1.0 to 0.5; restore those settings"
    ):
        best_of.main([*flags, "--temperature", "0.5"])
    tiny_causal_lm("llama", seed=7, vocab_size=300).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path / "one/model.safetensors")
    with pytest.raises(ThreestepError, match="other settings: the files of .*/one changed "):
        best_of.main(flags)
    with open(tmp_path / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write('{"prompt": "Human: kiwi? Assistant:", "ground_truth": "kiwi"}\n')
    with pytest.raises(ThreestepError, match="other settings: the prompts changed "):
        best_of.main(flags)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--model_name_or_path=", "--model_name_or_path expects a model folder or hub name, got nothing"),
        ("--reward model", "--reward includes `model`, which needs --reward_model; add it"),
        ("--reward_model x", "--reward_model x is for `model` in --reward, but --reward is .*longest; add"),
        ("--temperature 0", "--num_samples_per_prompt 4 generates several responses, but --temperature 0 makes them"),
        ("--keep_best 5", r"--keep_best expects at most --num_samples_per_prompt \(4\), got 5; lower it"),
        ("--checker exact_mach", "--checker expects .* got 'exact_mach'; did you mean 'exact_match'"),
        ("--dry_run", "--dry_run plans training memory, but evaluate best_of does not train; remove it"),
        ("--split eval", "--split eval has no rows; raise --eval_fraction"),
        ("--min_reward 99", "no response was kept: 8 prompts left out because none of their responses reaches --min"),
        ("--reward PLACE/rule.py:infinite", "expected a number that is finite in float32, got inf"),
        (
            "--keep_cut false",
            "no response was kept: 8 prompts left out because all their responses are empty or cut off by --max_new",
        ),
    ],
)
def test_mistakes(flags, tmp_path, more, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        best_of.main([*flags, *more.replace("PLACE", str(tmp_path)).split()])


def test_a_judge_picks_by_comparing_the_responses(flags, tmp_path):
    """By shares of wins in both orders, the longest response has the highest."""
    with scoring_server(judged(longer_wins), fails=mostly_failing) as server:
        judge = judge_of(tmp_path, server, "duel.yaml", form="pairwise")
        own = [*flags, "--reward", judge, "--checker", f"{tmp_path}/rule.py:longest"]
        best_of.main(own)
        asked = [str(body["messages"]) for body in server.answered]
        assert len(asked) == len(set(asked)) > 30
    answers = read_lines(tmp_path / "out" / "answers.jsonl")
    for prompt in answers:
        lengths, count = prompt["check"], len(prompt["responses"])
        for own_length, share in zip(lengths, prompt["reward/duel"], strict=True):
            longer, equal = (sum(other > own_length for other in lengths), lengths.count(own_length) - 1)
            assert share == pytest.approx((count - 1 - longer - 0.5 * equal) / (count - 1))
    best_of.main([*own, "--reward_replay", f"{tmp_path}/out", "--output_dir", f"{tmp_path}/again"])
    assert read_lines(tmp_path / "again" / "answers.jsonl") == answers
    with pytest.raises(ThreestepError, match="--reward duel compares the responses to a prompt with each other"):
        best_of.main([*own, "--num_samples_per_prompt", "1", "--output_dir", f"{tmp_path}/one_each"])
