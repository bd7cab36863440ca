"""Settings of step 3 drawn at random, each run in three layouts, which have to train the same weights.

    python -m tests.random_settings 7                64 settings under seed 7
    python -m tests.random_settings 7 --count 16     fewer
    python -m tests.random_settings 7 --only 12,40   some of them again

The layouts of a setting: packed rows on one rank; padded rows and smaller micro-batches on one rank; two ranks, with a
ZeRO stage and micro-batches of their own. A line is printed for each setting: the largest difference from the first
layout, as a share of the largest change that training made. A setting that is refused in a sentence is drawn anew, and
so is one that moves no weights in any layout: nothing would be compared. So is one whose first layout draws a token by
a uniform number closer than NEAREST_EDGE to the end of the token's interval: rounding, which differs between layouts,
decides which of two tokens that is. The exit code is 1 where a run ends with a traceback, or where layouts differ by
more than LARGEST_DIFFERENCE, in weights or in what was counted.

Float32, and Adam with an epsilon of the gradients' own size: where it is far below them, Adam's first step is their
sign, and a gradient of 0 but for rounding moves a weight as far as any other.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.forked_runs import Files, import_everything, make_files, run

LARGEST_DIFFERENCE = 2.5e-4
LEAST_CHANGE = 1e-4  # of a weight; float32 rounds weights of the size of 1 by 6e-8
NEAREST_EDGE = 1e-7  # of a number in [0, 1); the ends of intervals differ by some 1e-8 between layouts
ROLLOUTS, PROMPTS = 2, 4  # prompts of a rollout, over all ranks
COUNTS = (
    "rollout/equal_groups",
    "rollout/left_out",
    "rollout/response_tokens",
    "train/minibatches",
    "dynamic_sampling/",
)
_REDRAWS = 200
_ENDS = "--stop a e i o t s n"  # or a model of random weights ends nothing

REWARDS = '''
def even(prompts, responses, **columns):
    """Half of the responses have the same score."""
    return [float(sum(letter.isalpha() for letter in response) % 2) for response in responses]


def share(prompts, responses, *, ground_truth, **columns):
    """Scores of any size."""
    return [sum(map(ord, response)) % 17 / 10 for response in responses]


class Counts:
    """Two turns at most; each is worth its letters."""

    turns = 0

    def reset(self, row):
        return row["messages"], None

    def step(self, message):
        self.turns += 1
        reward = sum(map(ord, message.text)) % 7 / 3
        return [{"role": "user", "content": "more"}], reward, self.turns == 2

    def close(self):
        pass
'''


@dataclass(frozen=True)
class Setting:
    """flags: of all layouts. layouts: flags of each, and the number of its ranks."""

    flags: list[str]
    layouts: list[tuple[str, int, list[str]]] = field(default_factory=list)


@dataclass(frozen=True)
class Places:
    files: Files
    chat: Path
    chat_rows: Path
    rewards: Path


def make_places(place: Path) -> Places:
    from tests.end_to_end.conftest import save_start
    from tests.support.chat_templates import chat_template, chat_tokenizer

    files = make_files(place, rows=120)
    chat = save_start(place / "chat", tokenizer=chat_tokenizer(chat_template("chatml")))
    rewards, rows = place / "rewards.py", place / "chat.jsonl"
    rewards.write_text(REWARDS)
    rows.write_text("".join(json.dumps({"prompt": f"Say {n}.", "ground_truth": str(n)}) + "\n" for n in range(60)))
    return Places(files, chat, rows, rewards)


# A setting at random.


def drawn_setting(dice: random.Random, places: Places) -> Setting:
    """Return a setting; it may be one that is refused."""
    from training.step3_ppo.advantages import ESTIMATORS, NO_ADVANTAGE

    advantage = dice.choice(
        [*(name for name in ESTIMATORS if name != NO_ADVANTAGE), "gae"]
    )  # the one with a critic twice
    estimator = ESTIMATORS[advantage]
    samples = dice.choice([2, 3, 4] if estimator.needs_groups else [1, 2, 3])
    flags = [
        *f"--advantage {advantage} --num_samples_per_prompt {samples} --dtype fp32".split(),
        *f"--max_train_steps {ROLLOUTS}".split(),
        *f"--seed {dice.randint(1, 10**6)} --max_answer_seq_len {dice.choice([3, 6, 10])} --report_mfu false".split(),
        *f"--temperature {dice.choice([0.7, 1.0, 1.3])} --report false --report_samples 0".split(),
        *"--val_before_train false --eval_fraction 0.05 --adam_epsilon 1e-3 --num_train_epochs inf".split(),
        *f"--actor_learning_rate {dice.choice([3e-3, 1e-2])} --critic_learning_rate 1e-2".split(),
        *f"--lr_scheduler_type {dice.choice(['constant', 'linear', 'cosine'])}".split(),
    ]
    flags += _scored(dice, places, needs_model=estimator.needs_critic)
    flags += _algorithm(dice, advantage, samples)
    flags += _policy(dice) + _mismatch(dice)
    epochs = dice.choice([1, 1, 2])
    flags += ["--ppo_epochs", str(epochs)]
    if dice.random() < 0.25:
        flags += ["--actor_lora_dim", "4"] + (["--critic_lora_dim", "2"] if estimator.needs_critic else [])
    if dice.random() < 0.15:
        flags += "--enable_ema --ema_decay 0.5".split()
    if dice.random() < 0.15:
        flags += f"--unsupervised_dataset_name jsonl:{places.files.texts} --unsup_coef 0.3 --max_seq_len 32".split()
    if dice.random() < 0.15:
        flags += ["--prompt_sampler", "examples/curriculum.py:WorstAgain"]
    return Setting(flags, _layouts(dice, samples, epochs))


def _scored(dice: random.Random, places: Places, needs_model: bool) -> list[str]:
    split = "--data_split 2,2,2 --max_prompt_seq_len 64"
    own = f"{places.rewards}:"
    if not needs_model and dice.random() < 0.15:  # a reward model would need the chat's tokens
        return [
            *f"--actor_model_name_or_path {places.chat} --data_path jsonl:{places.chat_rows}".split(),
            *"--data_split 0,0,1".split(),
            *f"--environment {own}Counts --reward {dice.choice(['environment', f'environment,{own}even:0.5'])}".split(),
            *f"--max_prompt_seq_len 64 --max_turns 2 --stop {' '.join(string.ascii_lowercase)}".split(),
        ]
    rewards = [
        "model",
        f"{own}even",
        f"{own}even",
        f"{own}share",
        f"model:0.5,{own}even:0.3",
        f"{own}share:0.1,length:0.2",
    ]
    reward = dice.choice(rewards)
    flags = f"--actor_model_name_or_path {places.files.start} --data_path jsonl:{places.files.pairs} {split}".split()
    flags += ["--reward", reward, "--reward_length_characters", "12"] if "length" in reward else ["--reward", reward]
    if needs_model or "model" in reward:
        flags += ["--critic_model_name_or_path", str(places.files.scorer)]
    return flags


def _algorithm(dice: random.Random, advantage: str, samples: int) -> list[str]:
    """KL, advantages, lengths and dynamic sampling."""
    from training.step3_ppo.kl import KL_ESTIMATORS

    flags = []
    if dice.random() < 0.7:
        flags += f"--kl_coef {dice.choice([0.02, 0.2])} --kl_in {dice.choice(['reward', 'loss'])}".split()
        flags += ["--kl_estimator", dice.choice(list(KL_ESTIMATORS))] if dice.random() < 0.7 else []
        flags += "--kl_control adaptive --kl_target 0.1 --kl_horizon 50".split() if dice.random() < 0.3 else []
    else:
        flags += ["--kl_coef", "0"]
    if samples > 1 and dice.random() < 0.5:
        flags += ["--dynamic_sampling_tries", str(dice.randint(1, 5))]
    if dice.random() < 0.3:
        flags += ["--whiten_advantages", dice.choice(["true", "false"])]
    if advantage in ("grpo", "grpo_passk", "rloo") and dice.random() < 0.5:
        flags += dice.choice(["--norm_adv_by_std false", "--norm_adv_over batch", "--norm_adv_over group"]).split()
    if advantage in ("gae", "reinforce++") and dice.random() < 0.5:
        flags += f"--gamma {dice.choice([0.9, 0.99])} --lam {dice.choice([0.5, 1.0])}".split()
    for chance, words in (
        (0.2, "--missing_eos_penalty 0.3"),
        (0.2, "--overlong_buffer_tokens 2"),
        (0.1, f"--mask_truncated_responses true {_ENDS}"),
        (0.15, "--otb_zero_tail false" if "optimal" in advantage else ""),
        (0.1, "--report_variance true"),
        (0.1, "--entropy_coef 0.02"),
    ):
        flags += words.split() if dice.random() < chance else []
    return flags


def _policy(dice: random.Random) -> list[str]:
    from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES

    loss = dice.choice(["ppo", *POLICY_LOSSES])
    flags = ["--policy_loss", loss]
    if loss in ("kl_cov", "clip_cov"):
        flags += ["--cov_share", "0.2"]
    if dice.random() < 0.4:
        flags += ["--loss_aggregation", dice.choice(list(AGGREGATIONS))]
    if loss == "ppo" and dice.random() < 0.3:
        flags += "--clip_range_high 0.28 --dual_clip 3".split()
    return flags


def _mismatch(dice: random.Random) -> list[str]:
    from threestep.plugins.mismatch.recipes import RECIPES

    return ["--mismatch_recipe", dice.choice(list(RECIPES))] if dice.random() < 0.35 else []


def _layouts(dice: random.Random, samples: int, epochs: int) -> list[tuple[str, int, list[str]]]:
    """How the same minibatches are computed: the numbers are those of a rank."""
    sequences = PROMPTS * samples
    minibatches = dice.choice([1, 1, 2])
    size = sequences // minibatches

    def of(name: str, ranks: int, forward: int, more: str) -> tuple[str, int, list[str]]:
        accumulated = size // ranks // forward
        words = (
            f"--per_device_generation_batch_size {PROMPTS // ranks} --per_device_training_batch_size {forward} "
            f"--gradient_accumulation_steps {accumulated} {more}"
        )
        return name, ranks, words.split()

    divisors = [forward for forward in range(1, size + 1) if size % forward == 0]
    of_two = [forward for forward in range(1, size // 2 + 1) if size // 2 % forward == 0]
    stage, limit = dice.randint(0, 3), dice.choice(["", "--max_tokens_per_micro_batch 90"])
    reuse = " --reuse_forwards true" if minibatches == epochs == 1 and dice.random() < 0.3 and stage < 3 else ""
    return [
        of("packed", 1, size, "--reuse_forwards false --reuse_values false"),
        of("padded", 1, dice.choice(divisors), f"--padded true --actor_zero_stage {dice.choice([0, 2])}"),
        of("ranks", 2, dice.choice(of_two), f"--actor_zero_stage {stage} --critic_zero_stage {stage} {limit}" + reuse),
    ]


# Runs and their comparison.


@dataclass
class Outcome:
    """refused: the sentence; or that no layout moved the weights. problems: what is wrong. differences: of each other
    layout from the first, by model."""

    refused: str | None = None
    problems: list[str] = field(default_factory=list)
    change: float = 0.0
    differences: dict[str, float] = field(default_factory=dict)


def tried(setting: Setting, place: Path) -> Outcome:
    outcome, ended, edge = Outcome(), [], place / "edge.txt"
    for name, ranks, own in setting.layouts:
        folder = place / name
        flags = [*setting.flags, *own, "--output_dir", str(folder), "--data_output_path", str(place.parent / "cache")]
        log = place / f"{name}.txt"
        done = run("ppo", ranks, flags, log, prepare=None if ended else lambda rank: watch_draws(edge))
        if any(done.codes):
            said = [line for line in done.said.splitlines() if line.startswith("error: ")]
            is_sentence = set(done.codes) <= {2} and said and "Traceback" not in done.said
            if is_sentence and " raised " not in said[0]:  # not of a sampler or a reward, which do no wrong
                outcome.refused = f"{name}: {said[0]}"
            else:
                outcome.problems.append(f"{name} ended with {done.codes}: {done.said[-2500:]}")
            return outcome
        ended.append((name, folder))
        if edge.exists() and (nearest := float(edge.read_text())) < NEAREST_EDGE:
            outcome.refused = f"edge: a number is {nearest:.1e} from another token's interval"
            return outcome
    for name, folder in ended[1:]:
        _compare(outcome, setting, name, ended[0][1], folder)
    failures = sum(line.get("conversation/aborted_share", 0.0) for line in _lines(ended[0][1]))
    if failures:
        outcome.problems.append("its environment failed, so that conversations paid nothing")
    return outcome


def watch_draws(path: Path) -> None:
    """Write to `path`, from now on in this process, how close any uniform number has come to an end of the interval of
    the token that it drew."""
    import torch

    from training.utils.generation.decoding import sampling

    drawn, nearest = sampling._inverted_at, float("inf")

    def watched(weights_AV: torch.Tensor, uniform_A1: torch.Tensor, rows_A: torch.Tensor) -> torch.Tensor:
        nonlocal nearest
        token_A1 = drawn(weights_AV, uniform_A1, rows_A)
        wide_AV = weights_AV.double()
        ends_AV = wide_AV.cumsum(dim=-1)
        end_A1, total_A1 = ends_AV.gather(1, token_A1), ends_AV[:, -1:]
        begin_A1 = end_A1 - wide_AV.gather(1, token_A1)
        # Nothing is beyond 0 and 1.
        above_A1 = torch.where(begin_A1 > 0, uniform_A1 - begin_A1 / total_A1, 1.0)
        below_A1 = torch.where(end_A1 < total_A1, end_A1 / total_A1 - uniform_A1, 1.0)
        closest = float(torch.minimum(above_A1, below_A1).min())
        if closest < nearest:
            nearest = closest
            path.write_text(repr(nearest))
        return token_A1

    sampling._inverted_at = watched


def _compare(outcome: Outcome, setting: Setting, name: str, first: Path, other: Path) -> None:
    from safetensors.torch import load_file

    words = setting.flags
    starts = {"model": "--actor_model_name_or_path", "critic": "--critic_model_name_or_path"}
    for model, flag in starts.items():
        if not (first / model / "model.safetensors").exists():
            continue
        start = load_file(Path(words[words.index(flag) + 1]) / "model.safetensors")
        one, two = (load_file(folder / model / "model.safetensors") for folder in (first, other))
        change = max(float((one[key].float() - start[key].float()).abs().max()) for key in one if key in start)
        apart = max(float((one[key].float() - two[key].float()).abs().max()) for key in one)
        outcome.change = change if model == "model" else outcome.change
        if change < LEAST_CHANGE and apart < LARGEST_DIFFERENCE * LEAST_CHANGE:
            outcome.refused = f"hollow: {model} moved by {change:.1e} in all layouts"
            return
        outcome.differences[f"{name} {model}"] = apart / max(change, LEAST_CHANGE)
        if change < LEAST_CHANGE:
            outcome.problems.append(f"{name}: {model} moves by {apart:.1e}, and not in the first layout")
        elif not apart <= LARGEST_DIFFERENCE * change:
            outcome.problems.append(f"{name}: {model} differs by {apart / change:.1e} of the largest change")
    mine, its = (_counts(folder) for folder in (first, other))
    if mine != its:
        odd = sorted(key for key in {*mine, *its} if mine.get(key) != its.get(key))
        outcome.problems.append(f"{name}: " + ", ".join(f"{key} {mine.get(key)} and {its.get(key)}" for key in odd))


def _counts(folder: Path) -> dict[str, Any]:
    return {
        f"{line['step']} {name}": round(value, 6)
        for line in _lines(folder)
        for name, value in line.items()
        if name.startswith(COUNTS) and not name.endswith("_std")
    }


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--only", help="numbers of settings, with commas")
    parser.add_argument("--place", type=Path, help="an empty folder that is kept; default: a temporary one")
    asked = parser.parse_args(argv)
    only = {int(number) for number in asked.only.split(",")} if asked.only else None
    import_everything()
    refused = hollow = edges = wrong = 0
    worst, least = 0.0, float("inf")
    with tempfile.TemporaryDirectory(prefix="random_settings_") as temporary:
        place = asked.place or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        places = make_places(place)
        for number in range(asked.count):
            if only is not None and number not in only:
                continue
            for redraw in range(_REDRAWS):
                started = time.monotonic()
                setting = drawn_setting(random.Random(f"{asked.seed} {number} {redraw}"), places)
                root = place / f"setting_{number}"
                shutil.rmtree(root, ignore_errors=True)
                root.mkdir()
                outcome = tried(setting, root)
                if outcome.refused is None or outcome.problems:
                    break
                is_hollow, is_edge = (outcome.refused.startswith(word) for word in ("hollow", "edge"))
                hollow, edges, refused = hollow + is_hollow, edges + is_edge, refused + (not (is_hollow or is_edge))
                print(f"| {number} | drawn anew | {outcome.refused} |", flush=True)
            verdict = "; ".join(outcome.problems) or "agree"
            told = ", ".join(f"{name} {apart:.1e}" for name, apart in outcome.differences.items())
            spent = time.monotonic() - started
            print(f"| {number} | {verdict} | {told} | moved {outcome.change:.1e} | {spent:.0f} s |", flush=True)
            if outcome.problems:
                wrong += 1
                print(" ".join(setting.flags))
                print(
                    "\n".join(f"{name}, {ranks}: {' '.join(own)}" for name, ranks, own in setting.layouts), flush=True
                )
            else:
                worst = max([worst, *outcome.differences.values()])
                least = min(least, outcome.change)
                shutil.rmtree(root)
    print(
        f"seed {asked.seed}: {wrong} wrong; {refused} refused, {hollow} hollow ones and {edges} with a draw at an edge "
        f"drawn anew; largest difference {worst:.1e}, least change {least:.1e}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
