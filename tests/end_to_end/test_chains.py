"""Step 1, step 2, step 3 by their command lines, on one process and on two ranks: what they say and leave behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.conftest import MODULES, TIMEOUT_SECONDS, Chain
from tests.support.json_lines import read_lines

pytestmark = pytest.mark.timeout(900)  # on a busy machine

CHAINS = pytest.mark.parametrize("name", ["alone", "together"])
STEPS = pytest.mark.parametrize("step", [1, 2, 3])
# Figures of every step, by the words before and behind the slash.
EVERY_STEP = {
    1: {"train": "loss token_accuracy learning_rate tokens_per_second mfu"},
    2: {"train": "loss accuracy learning_rate tokens_per_second mfu"},
    3: {
        "actor": "policy_loss clip_fraction ratio learning_rate",
        "critic": "value_loss learning_rate",
        "rollout": "score kl response_tokens ended_share logprob_mismatch",
    },
}
EVALUATION = {
    1: {"eval": "loss perplexity token_accuracy"},
    2: {"eval": "loss accuracy score_gap"},
    3: {"eval": "reward"},
}


def with_figures(lines: list[dict], wanted: dict[str, str]) -> list[int]:
    """The steps of the lines that have all of them."""
    names = {f"{group}/{name}" for group, words in wanted.items() for name in words.split()}
    return [line["step"] for line in lines if line.keys() >= names]


@CHAINS
@STEPS
def test_settings_and_metrics(chain_named, name: str, step: int):
    chain: Chain = chain_named(name)
    folder = chain.folders[step]
    text = (folder / "config.yaml").read_text()
    assert {"alone": "1 rank.", "together": "2 ranks."}[name] in text
    settings = yaml.safe_load(text)
    assert settings["dtype"] == chain.dtypes[step] and settings["data_split"] == "2,2,2" and settings["seed"] == 1234
    assert settings["lr_scheduler_type"] == "cosine"  # a default, written out

    lines = read_lines(folder / "metrics.jsonl")
    assert with_figures(lines, EVERY_STEP[step]) == [1, 2] and with_figures(lines, EVALUATION[step]) == [0, 2]
    assert all(isinstance(value, (int, float)) for line in lines for value in line.values())
    assert json.loads((folder / "summary.json").read_text())["seconds"] > 0


@CHAINS
@STEPS
def test_the_report_is_written_at_the_end(chain_named, name: str, step: int):
    chain: Chain = chain_named(name)
    folder = chain.folders[step]
    assert f"report: {folder / 'report.html'}" in chain.ran[step].stdout
    assert "padded rows" not in chain.ran[step].stdout  # the models of these runs pack
    text = (folder / "report.html").read_text(encoding="utf-8")
    words = {1: ["Token accuracy"], 2: ["Scores after training", "rejected"], 3: ["Length and reward", "Human: Sort"]}
    assert all(word in text for word in [*words[step], "training rows dropped", "learning_rate"])


@STEPS
def test_the_settings_read_back_as_a_configuration(chain_named, step: int):
    """`--config OUTPUT_DIR/config.yaml` is the same run again."""
    from importlib import import_module

    from training.utils.flags.arguments import parse_arguments, resolved_settings

    path = chain_named("alone").folders[step] / "config.yaml"
    groups = parse_arguments(import_module(MODULES[step]).STEP.groups, ["--config", str(path)], "")
    assert resolved_settings(groups) == yaml.safe_load(path.read_text())


@CHAINS
@STEPS
def test_tensorboard_has_the_same_numbers(chain_named, name: str, step: int):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = chain_named(name).folders[step]
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = {(tag, event.step): event.value for tag in board.Tags()["scalars"] for event in board.Scalars(tag)}
    written = {
        (key, line["step"]): value
        for line in read_lines(folder / "metrics.jsonl")
        for key, value in line.items()
        if key not in ("step", "seconds")
    }
    assert shown.keys() == written.keys() and len(shown) > 5
    assert shown == pytest.approx(written, rel=1e-6)


@CHAINS
def test_samples(chain_named, name: str):
    folder = chain_named(name).folders[3]
    samples = read_lines(folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 12 + [2] * 12
    for sample in samples:
        assert sample["prompt"].startswith("Human: Sort") and sample["prompt"].endswith("Assistant:")
        assert isinstance(sample["response"], str) and "<|endoftext|>" not in sample["response"]
        assert 1 <= sample["response_tokens"] <= 8
    rewards = {
        line["step"]: line["eval/reward"] for line in read_lines(folder / "metrics.jsonl") if "eval/reward" in line
    }
    for step in (0, 2):
        own = [sample["reward"] for sample in samples if sample["step"] == step]
        assert sum(own) / len(own) == pytest.approx(rewards[step], abs=1e-6)


NEW_HEAD = "has no scalar head; initialized at random: score.weight"


@CHAINS
@STEPS
def test_only_the_first_rank_speaks(chain_named, name: str, step: int):
    """Lines of the launcher's command, the flags of other steps, the ranks' device, what `auto` chose, the data, the
    prompt style, step 2's new head, the machine's rate, the evaluations, the report's place, the result; on stderr the
    progress alone."""
    ran = chain_named(name).ran[step]
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    label, unit = {1: ("SFT", "step"), 2: ("reward model", "step"), 3: ("PPO", "rollout")}[step]
    evaluations = f"{label}: evaluation "
    starts = tuple(f"{what}: " for what in ("auto", "data", "prompt style", "model", "mfu", "sample", "report"))
    starts += ("ignored because ", f"step {step}: ")
    launched = lines[0].startswith("+ ")  # where the program is not a fork
    ranks = "2 ranks" if name == "together" else "1 rank"
    told = [line for line in lines[launched:] if not line.startswith((*starts, evaluations, "warning: "))]
    assert [line.split(" on ")[0] for line in told] == [ranks]
    # The models of these runs have not learned to end a response.
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(warnings) == (step == 3) and all(
        " cut off at --max_answer_seq_len 8 tokens " in line for line in warnings
    )
    assert len(set(lines)) == len(lines)
    evaluated = [line.removeprefix(evaluations).split(": ")[0] for line in lines if line.startswith(evaluations)]
    assert evaluated == ["before training", f"after {unit} 2"]
    assert sum(line.startswith(f"step {step}: ") for line in lines) == 1
    assert [line[-len(NEW_HEAD) :] for line in lines if line.startswith("model: ")] == [NEW_HEAD] * (step == 2)
    samples = [line for line in lines if line.startswith("sample: ")]
    assert [line.split(": ")[1] for line in samples] == (["before training", "after rollout 2"] if step == 3 else [])
    bars = [line for line in ran.stderr.splitlines() if line.strip()]
    assert [line.split(", ")[0] for line in bars] == [f"{label}: {unit} {done} of 2" for done in (1, 2)], ran.stderr


@pytest.fixture(scope="module")
def read_plainly(chain_named, place: Path) -> dict:
    """What transformers alone makes of the models of both chains, on the trainers' evaluation rows."""
    wanted = {}
    for name in ("alone", "together"):
        chain: Chain = chain_named(name)
        dtype = {"fp32": "float32", "bf16": "bfloat16"}
        sentences = [[row.input_ids.tolist(), row.loss_mask.tolist()] for row in eval_rows(chain, 1)]
        ranked = [
            [row.prompt_ids.tolist(), [response.tolist() for response in row.response_ids]]
            for row in eval_rows(chain, 2)
        ]
        for label, kind, folder, step, rows in (
            ("step 1", "causal", chain.folders[1] / "model", 1, sentences),
            ("step 2", "scalar", chain.folders[2] / "model", 2, ranked),
            ("step 3", "causal", chain.folders[3] / "model", 3, sentences),
            ("critic", "scalar", chain.folders[3] / "critic", 3, ranked),
        ):
            own = {"kind": kind, "folder": str(folder), "dtype": dtype[chain.dtypes[step]], "rows": rows}
            wanted[f"{name} {label}"] = own
    (place / "wanted.json").write_text(json.dumps(wanted))
    command = [sys.executable, str(Path(__file__).parent / "plain_load.py"), str(place / "wanted.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=place)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def eval_rows(chain: Chain, phase: int) -> list:
    """The rows that the step was evaluated on, out of the cache that it left."""
    from transformers import AutoTokenizer

    from training.utils.data.arguments import DataArguments
    from training.utils.data.build.build import build_phase
    from training.utils.flags.arguments import parse_arguments

    tokenizer = AutoTokenizer.from_pretrained(chain.folders[phase] / "model")
    (data,) = parse_arguments([DataArguments], chain.data_flags[phase], "")
    built = build_phase(phase, data, tokenizer, seed=1234)
    assert built.report.from_cache, "the model folder's tokenizer is not the one that the step's data was built with"
    return list(built.eval)


def last_evaluation(chain: Chain, step: int) -> dict:
    return [line for line in read_lines(chain.folders[step] / "metrics.jsonl") if "eval/loss" in line][-1]


@CHAINS
def test_the_model_reproduces_its_evaluation_loss_in_plain_transformers(chain_named, read_plainly, name: str):
    told = last_evaluation(chain_named(name), 1)
    assert read_plainly[f"{name} step 1"]["loss"] == pytest.approx(told["eval/loss"], rel=1e-5)
    # The PPO model is near the one it started from and not the same; it loads as plainly.
    assert read_plainly[f"{name} step 3"]["loss"] == pytest.approx(told["eval/loss"], rel=0.1)
    assert read_plainly[f"{name} step 3"]["loss"] != pytest.approx(told["eval/loss"], rel=1e-6)


@CHAINS
def test_the_reward_model_gives_the_trainers_scores_in_plain_transformers(chain_named, read_plainly, name: str):
    """Pairs of different lengths in one padded batch, so that plain transformers has to find the last token; in
    `alone` the language model's pad is eos."""
    chain = chain_named(name)
    told = last_evaluation(chain, 2)
    scores = read_plainly[f"{name} step 2"]["scores"]
    gaps = [better - worse for better, worse in scores]
    assert len(gaps) == 12 and max(abs(gap) for gap in gaps) > 0.05
    tolerance = 1e-5 if chain.dtypes[2] == "fp32" else 2e-2
    assert sum(gaps) / len(gaps) == pytest.approx(told["eval/score_gap"], abs=tolerance)
    losses = [math.log1p(math.exp(-gap)) for gap in gaps]
    assert sum(losses) / len(losses) == pytest.approx(told["eval/loss"], abs=tolerance)
    assert sum(gap > 0 for gap in gaps) / len(gaps) == pytest.approx(told["eval/accuracy"], abs=1e-9)
    critic = [score for pair in read_plainly[f"{name} critic"]["scores"] for score in pair]
    assert critic != pytest.approx([score for pair in scores for score in pair], abs=1e-6)


def test_the_reward_report_is_the_last_evaluation_and_its_scale_is_in_the_models_configuration_alone(chain_named):
    folders = chain_named("alone").folders
    report = json.loads((folders[2] / "reward_report.json").read_text())
    last, told = last_evaluation(chain_named("alone"), 2), report["evaluation"]
    assert told["pairs"] == told["prompts"] == 12 and told["accuracy"] == last["eval/accuracy"]
    assert told["chosen"]["mean"] == last["eval/chosen_mean"] and told["rejected"]["count"] == 12
    assert told["chosen"]["percentiles"]["p50"] == last["eval/chosen_p50"]
    assert sum(told["histogram"]["chosen"]) == sum(one["pairs"] for one in told["by_length"]) == 12
    assert report["before"]["score_gap"] != told["score_gap"]
    config, scale = json.loads((folders[2] / "model" / "config.json").read_text()), report["training_chosen"]
    assert config["threestep_score_mean"] == scale["mean"] and config["threestep_score_std"] == scale["std"] > 0
    assert scale["count"] == 16  # all rows of step 2
    assert "threestep_score_mean" not in (folders[3] / "critic" / "config.json").read_text()


def test_nothing_was_compiled(chain_named, without_compiler: dict[str, str]):
    """Two ranks, ZeRO-2 with offload, ZeRO-3: with no compiler in sight, and no extension built or looked for."""
    assert chain_named("together").ran[1].code == 0
    extensions = Path(without_compiler["TORCH_EXTENSIONS_DIR"])
    assert not extensions.exists() or not list(extensions.rglob("*.so"))


def test_losses_fall_and_the_data_of_the_steps_is_apart(chain_named):
    chain = chain_named("alone")
    summary = json.loads((chain.folders[1] / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.1
    prompts = [sample["prompt"] for sample in read_lines(chain.folders[3] / "samples.jsonl")]
    assert len(set(prompts)) == 12
