"""examples/ppo_in_one_file.py learns its task, and trains the very weights that step 3's program trains."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from examples import ppo_in_one_file as one_file
from tests.end_to_end.conftest import pair_rows, run_step, save_start
from threestep.plugins.replay.files import file_of
from training.utils.base.seeds import derived_seed
from training.utils.layout.order import ShuffledStream

pytestmark = pytest.mark.timeout(900)  # on a busy machine

SEED, END = 1234, 0
# Each shows in the weights: scores, ratios, values and gradients are clipped, responses end and are cut.
SETTINGS = one_file.Settings(
    max_train_steps=3,
    prompts_per_rollout=8,
    max_answer_seq_len=10,
    temperature=0.8,
    end_token_id=END,
    clip_reward=0.8,
    kl_coef=0.2,
    gamma=0.97,
    lam=0.9,
    ppo_epochs=2,
    sequences_per_minibatch=4,
    clip_range=0.05,
    clip_range_value=0.1,
    actor_learning_rate=2e-3,
    critic_learning_rate=5e-3,
    max_grad_norm=0.5,
)
FLAGS = {  # of the settings that step 3 calls otherwise
    "prompts_per_rollout": "per_device_generation_batch_size",
    "sequences_per_minibatch": "per_device_training_batch_size",
    "end_token_id": None,  # the tokenizer's
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder of the models, and of step 3's run on them with its rollouts."""
    place = tmp_path_factory.mktemp("one_file")
    actor, critic = (save_start(place / name, pad_is_eos=True) for name in ("actor", "scalar"))
    model = AutoModelForCausalLM.from_pretrained(actor)
    torch.manual_seed(1)
    direction = torch.nn.functional.normalize(torch.randn(64), dim=0)
    with torch.no_grad():  # all states share a direction, which the head reads as the end: some responses end
        model.get_input_embeddings().weight += 4.0 * direction
        model.get_input_embeddings().weight[END] += 1.2 * direction
    model.save_pretrained(actor)
    config = AutoConfig.from_pretrained(critic, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(critic)
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in pair_rows(24)))
    named = {FLAGS.get(name, name): value for name, value in vars(SETTINGS).items()}
    flags = [word for name, value in named.items() if name is not None for word in (f"--{name}", value)]
    ran = run_step(
        3,
        [
            *("--actor_model_name_or_path", actor, "--critic_model_name_or_path", critic, *flags),
            *("--data_path", f"jsonl:{rows}", "--data_output_path", place / "cache", "--output_dir", place / "run"),
            *("--rollout_dump", place / "rollouts", "--seed", SEED, "--dtype", "fp32"),
            *"--data_split 0,0,1 --eval_fraction 0 --lr_scheduler_type constant --max_prompt_seq_len 64".split(),
        ],
    )
    assert ran.code == 0, ran.words
    return place


def models_of(place: Path) -> one_file.Models:
    """The models before training, in float64."""
    actor, reference = (AutoModelForCausalLM.from_pretrained(place / "actor", dtype=torch.float64) for _ in range(2))
    reward_model, critic = (
        AutoModelForSequenceClassification.from_pretrained(place / "scalar", dtype=torch.float64) for _ in range(2)
    )
    return one_file.Models(actor, reference, reward_model, critic)


def rollouts_of(place: Path) -> list[one_file.Rollout]:
    """The rollouts of step 3's run."""
    found = []
    for number in range(SETTINGS.max_train_steps):
        dumped = load_file(file_of(place / "rollouts", number, rank=0))
        ids_BR = dumped["response_ids_BR"]
        mask_BR = torch.arange(ids_BR.shape[1]) < dumped["response_lengths_B"].unsqueeze(1)
        found.append(one_file.Rollout(dumped["prompt_ids_BP"], dumped["prompt_mask_BP"], ids_BR, mask_BR))
    return found


def orders() -> Iterator[torch.Tensor]:
    """Yield step 3's order of the sequences in each epoch of each rollout."""
    count = SETTINGS.prompts_per_rollout
    for rollout in range(1, SETTINGS.max_train_steps + 1):
        for epoch in range(SETTINGS.ppo_epochs):
            yield torch.tensor(ShuffledStream(count, derived_seed(SEED, "minibatch", rollout, epoch)).take(0, count))


def test_the_weights_are_those_of_step_3(place, monkeypatch):
    rollouts, models, before = rollouts_of(place), models_of(place), models_of(place)
    prompts = [[ids[mask].tolist() for ids, mask in zip(*each[:2], strict=True)] for each in rollouts]
    drawn, order = iter(rollouts), orders()

    def replayed(actor, prompt_ids_BP, prompt_mask_BP, settings) -> one_file.Rollout:
        rollout = next(drawn)
        assert torch.equal(prompt_ids_BP, rollout.prompt_ids_BP)
        assert torch.equal(prompt_mask_BP, rollout.prompt_mask_BP)
        return rollout

    with monkeypatch.context() as patch:
        patch.setattr(one_file, "roll_out", replayed)
        patch.setattr(torch, "randperm", lambda count: next(order))
        figures = [figures for _, figures in one_file.ppo(models, iter(prompts), SETTINGS)]

    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/policy_loss" in line]
    for got, step in zip(figures, steps, strict=True):
        names = ("rollout/score", "rollout/kl", "actor/policy_loss", "critic/value_loss")
        assert got == pytest.approx({name.split("/")[1]: step[name] for name in names}, rel=1e-4, abs=1e-5)
        assert step["actor/clip_fraction"] > 0.02
    lengths = {int(length) for rollout in rollouts for length in rollout.response_mask_BR.sum(dim=1)}
    assert len(lengths) > 3  # cut and ended
    assert_moved_alike(AutoModelForCausalLM.from_pretrained(place / "run" / "model"), models.actor, before.actor)
    critic = AutoModelForSequenceClassification.from_pretrained(place / "run" / "critic")
    assert_moved_alike(critic, models.critic, before.critic)


def assert_moved_alike(one: PreTrainedModel, other: PreTrainedModel, start: PreTrainedModel) -> None:
    """Every parameter of `other` has moved, and `one` differs from it by less than a ten-thousandth of that."""
    ones, others, starts = (dict(model.double().state_dict()) for model in (one, other, start))
    assert ones.keys() == others.keys()
    for name, weights in others.items():
        moved, apart = weights - starts[name], ones[name] - weights
        assert float(moved.abs().max()) > 1e-3, name
        assert float(apart.norm() / moved.norm()) < 1e-4, name


def test_the_program_learns(capsys):
    one_file.main()
    _, *lines = capsys.readouterr().out.splitlines()
    (_, score, vowels, kl, _, loss), last = ([float(word) for word in lines[row].split()[:6]] for row in (0, -1))
    assert len(lines) == one_file.Settings().max_train_steps
    assert last[1] > score + 1.5 and last[2] > 3.0 * vowels
    assert kl == 0.0 and 1.0 < last[3] < 10.0
    assert last[5] < 0.2 * loss


def test_it_imports_no_more_than_torch_and_transformers():
    source = Path(one_file.__file__).read_text()
    rooms = {name.split(".")[0] for name in re.findall(r"^ *(?:from|import) ([\w.]+)", source, re.MULTILINE)}
    assert rooms - sys.stdlib_module_names == {"torch", "transformers"}
