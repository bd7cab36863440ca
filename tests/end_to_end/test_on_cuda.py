"""Every loop on a pretended GPU (`tests/support/cuda_stand_in`): none mixes devices, and none waits for the device
while it starts the work of a step.

What runs there is a whole program, from its flags to the saved model, so that the start-up check, the reading of
models, checkpoints and resuming run too. Its counts are upper bounds: a lower count is welcome, and then the new bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cuda_stand_in.device import Counts, counted
from tests.support.json_lines import read_lines

DATA = "--data_split 2,2,2 --eval_fraction 0.2 --max_prompt_seq_len 64 --max_seq_len 100 --num_workers 1 --dtype fp32"
STEPS = "--max_train_steps 2 --learning_rate 1e-3 --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
ROLLOUTS = (
    "--max_train_steps 2 --per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--max_answer_seq_len 6 --actor_learning_rate 1e-3"
)
# The kinds of Counts, in the order of a line of the tables below.
KINDS = ("waits", "to_device", "from_device", "operators")


# What runs where the pretended GPU is.


def files(place: str) -> bool:
    from tests.support.forked_runs import make_files

    make_files(Path(place), rows=60)
    return True


def step_counts(module: str, flags: list[str]) -> list[dict[str, Any]]:
    """Run the program; return for each optimizer step its micro-batches, and the counts before and from its update on,
    with the lines."""
    import importlib

    found: list[dict[str, Any]] = []
    with _noted_steps(found):
        importlib.import_module(f"training.{module}.main").main(flags)
    return found


@contextmanager
def _noted_steps(found: list[dict[str, Any]]) -> Iterator[None]:
    from training.step1_sft.trainer import SftTrainer
    from training.step2_dpo.trainer import DpoTrainer
    from training.step2_reward.trainer import RewardTrainer
    from training.step3_ppo.learning.learning import Learner
    from training.utils.engine.training_engine import TrainingEngine

    current: dict[str, Any] = {}

    def noted(step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with counted() as counts:
                current.update(counts=counts, micro_batches=0, before=None)
                result = step(*args, **kwargs)
            before, whole = current["before"], counts.totals()
            told = {"micro_batches": current["micro_batches"], "lines": counts.lines()}
            told["before"] = [before[kind] for kind in KINDS]
            found.append({**told, "update": [whole[kind] - before[kind] for kind in KINDS]})
            return result

        return wrapped

    backward, update = TrainingEngine.backward, TrainingEngine.step

    def noted_backward(self: Any, loss: Any) -> None:
        backward(self, loss)
        current["micro_batches"] = current.get("micro_batches", 0) + 1

    def noted_update(self: Any) -> Any:
        counts: Counts = current["counts"]
        if current["before"] is None:
            current["before"] = counts.totals()
        return update(self)

    TrainingEngine.backward, TrainingEngine.step = noted_backward, noted_update  # type: ignore[method-assign]
    for owner, name in (
        (SftTrainer, "_optimizer_step"), (RewardTrainer, "_optimizer_step"), (DpoTrainer, "_optimizer_step"),
        (Learner, "learn"),
    ):  # fmt: skip
        setattr(owner, name, noted(getattr(owner, name)))
    yield


def drawn_counts(start: str, way: str, tokens: int, top_p: float) -> list[dict[str, int]]:
    """Roll out responses that never end; return, for each look at which have ended, the counts since the look before
    and how many of the operators were in a graph."""
    import torch
    from transformers import AutoModelForCausalLM

    from threestep.plugins.captured import steps
    from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
    from training.utils.generation.decoding import decoding, drawn, hf
    from training.utils.models.document_attention import share_keys_of_few_tokens

    found, in_graph, last = list[dict[str, int]](), [0], dict[str, int]()

    class Graph:
        """Runs again what it would replay."""

        def __init__(self, function: Callable[[], torch.Tensor]) -> None:
            self.function, self.output = function, function()

        def replay(self) -> None:
            with counted() as inside:
                self.output.copy_(self.function())
            in_graph[0] += inside.total("operators")

    def graph_of(function: Callable[[], torch.Tensor], before: object) -> tuple[Graph, torch.Tensor]:
        graph = Graph(function)
        return graph, graph.output

    steps._graph_of = graph_of  # type: ignore[assignment]
    advance = drawn.DrawnResponses.advance

    def noted(*given: Any) -> Any:
        result = advance(*given)
        totals = {**counts.totals(), "in a graph": in_graph[0]}
        found.append({kind: count - last.get(kind, 0) for kind, count in totals.items()})
        last.update(totals)
        return result

    drawn.DrawnResponses.advance = noted  # type: ignore[method-assign]
    share_keys_of_few_tokens()  # as a rollout engine's check does
    model = AutoModelForCausalLM.from_pretrained(start).to("cuda").eval()
    ids_BP = torch.arange(3, 24).view(3, 7)
    mask_BP = ids_BP > 3  # the first prompt is padded
    never = model.config.vocab_size
    sampling = Sampling(tokens, 0.8, top_k=0, top_p=top_p, end_token_id=never, pad_token_id=0, bad_words=((5,), (6, 7)))
    request = RolloutRequest(ids_BP.to("cuda"), mask_BP.to("cuda"), sampling, list(range(6)), 2)
    engine = hf.TransformersRollout(None)
    engine._way = getattr(decoding, way)
    with counted() as counts:
        engine.roll_out(model, request)
    return found


def top_p_tokens(device: str) -> list[int]:
    """Return the tokens of 2,000 rows of 300 logits, of which top-p 0.5 sends about half back at least once."""
    import torch

    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.generation.decoding.sampling import draw

    sampling = Sampling(1, 1.0, top_k=0, top_p=0.5, end_token_id=1, pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    logits_AV = torch.randn(2_000, 300, generator=generator) * 2
    uniform_A = torch.rand(2_000, generator=generator, dtype=torch.float64)
    return draw(logits_AV.to(device), uniform_A.to(device), sampling)[0].tolist()


def said_fused(module: str, flags: list[str]) -> tuple[str, int]:
    """Run the program as if Liger Kernel were installed, whose operations are plain PyTorch here; return its log, and
    how many models were fused."""
    import contextlib
    import importlib
    import io

    import threestep.plugins.speed.fused.choice as choice
    from tests.support.plain_kernels import plain_kernels

    fuse, fused = choice.fuse, []
    choice.liger_kernels = lambda: plain_kernels("cuda")
    choice.fuse = lambda model, kernels: (fused.append(model), fuse(model, kernels))[1]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        importlib.import_module(f"training.{module}.main").main(flags)
    return said.getvalue(), len(fused)


# The tests.


@pytest.fixture(scope="module")
def place(on_cuda, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("on_cuda")
    on_cuda(files, folder)
    return folder


def flags_of(place: Path, name: str, more: str) -> list[str]:
    words = f"--data_path jsonl:{place}/pairs.jsonl --data_output_path {place}/cache --report_mfu false {DATA} {more}"
    return [*words.split(), "--output_dir", str(place / name)]


def counts_of(on_cuda, place: Path, module: str, name: str, more: str) -> list[dict[str, Any]]:
    start = "--actor_model_name_or_path" if module == "step3_ppo" else "--model_name_or_path"
    found = on_cuda(step_counts, module, flags_of(place, name, f"{start} {place}/start {more}"))
    assert (place / name / "model" / "config.json").exists() or (place / name / "actor" / "config.json").exists()
    return found


# Before the update nothing waits: the host must stay ahead of the GPU. transformers looks once whether the positions of
# one packed row restart (masking_utils.py); that line is not ours.
# The first step of a run times attention on its rows, for the log.
TIMED = "synchronize at threestep/plugins/kernels/forms.py"
THEIRS = "_local_scalar_dense at training/utils/models/token_model.py"
# From the update on: two copies and a number in DeepSpeed's clipping and our look at the norm, of each model that is
# updated, by which a bad step is skipped; and one for all figures.
UPDATE_WAITS = 3


def check(step: dict[str, Any], models: int = 1) -> None:
    theirs, timed = (sum(int(line.split()[0]) for line in step["lines"] if words in line) for words in (THEIRS, TIMED))
    waits, _, from_device, _ = step["before"]
    assert step["micro_batches"] >= models and theirs <= step["micro_batches"]
    assert (waits - theirs - timed, from_device) == (0, 0), step["lines"]
    copies = [line for line in step["lines"] if "to_device" in line and "engine/training_engine.py" not in line]
    assert copies and all("pinned, without waiting" in line for line in copies), step["lines"]
    assert step["update"][0] <= UPDATE_WAITS * models + 1, step["lines"]


# Operators of one micro-batch, forward and backward with plain attention, of a Llama of two layers: those that were
# counted, and a tenth. Less is welcome; more is a kernel that each micro-batch starts without need.
OPERATORS = {"step1_sft": 400, "step2_reward": 410, "step2_dpo": 445}


@pytest.mark.parametrize("module", list(OPERATORS))
def test_a_step_with_one_model_waits_for_its_figures_alone(on_cuda, place, module):
    found = counts_of(on_cuda, place, module, module, STEPS)
    assert len(found) == 2
    for step in found:
        check(step)
        assert step["micro_batches"] > 1
    assert TIMED not in " ".join(found[1]["lines"])
    assert found[1]["before"][3] <= OPERATORS[module] * found[1]["micro_batches"]


@pytest.mark.parametrize(
    ("name", "models", "flags"),
    [
        # The critic alone, then both; forwards that are reused have been copied to the device when they read.
        ("ppo", (1, 2), "--critic_warmup 1 --reuse_forwards false --reuse_values false"),
        ("grpo", (1, 1, 1, 1), "--advantage grpo --num_samples_per_prompt 2"),
    ],
)
def test_a_step_of_step_three_waits_for_its_figures_alone(on_cuda, place, name, models, flags):
    critic = f"--critic_model_name_or_path {place}/scorer --critic_learning_rate 1e-3"
    found = counts_of(on_cuda, place, "step3_ppo", name, f"{ROLLOUTS} {critic} {flags}")
    assert len(found) == len(models)
    for step, count in zip(found, models, strict=True):
        check(step, count)


LOOK_TOKENS, ROOM_TOKENS = 8, 128
# A way, top-p and tokens to draw; then the operators that the host starts for a token of a Llama of two layers, with a
# temperature and two banned words: those that were counted, and a tenth. In a captured graph is what each layer does.
DRAWN = [("MASKED", 1.0, ROOM_TOKENS + 5 * LOOK_TOKENS, 170), ("FIXED", 1.0, 40, 57), ("FIXED", 0.9, 24, 292)]


@pytest.mark.parametrize(("way", "top_p", "tokens", "most_operators"), DRAWN)
def test_a_drawn_token_waits_for_nothing_however_long_the_cache(on_cuda, place, way, top_p, tokens, most_operators):
    """The host waits once a look, for the tokens. A longer cache takes no operator more, but where its room grows."""
    _, *looks = on_cuda(drawn_counts, place / "start", way, tokens, top_p)
    assert len(looks) == tokens // LOOK_TOKENS - 1
    for look in looks:
        assert (look["waits"], look["to_device"], look["from_device"]) == (1, 0, 1), looks
    operators = [look["operators"] - look["in a graph"] for look in looks]
    usual = min(operators)
    assert operators[-1] == usual <= LOOK_TOKENS * most_operators, operators
    assert sum(count > usual for count in operators) <= tokens // ROOM_TOKENS, operators


def test_top_p_draws_the_tokens_of_a_cpu(on_cuda):
    tokens = on_cuda(top_p_tokens, "cuda")
    assert tokens == top_p_tokens("cpu") and len(set(tokens)) > 20


def test_a_stopped_run_resumes_to_the_same_metrics(on_cuda, place):
    """With the thread that lays out steps ahead: it draws nothing, and a checkpoint knows nothing of it."""
    flags = f"{STEPS.replace('_steps 2', '_steps 3')} --num_train_epochs 2 --dropout 0.1"
    counts_of(on_cuda, place, "step1_sft", "whole", flags)
    counts_of(on_cuda, place, "step1_sft", "saved", f"{flags} --save_every 2")
    resumed = counts_of(on_cuda, place, "step1_sft", "saved", f"{flags} --save_every 2 --resume")
    assert len(resumed) == 1
    config = (place / "saved" / "config.yaml").read_text()
    assert yaml.safe_load(config)["head_chunk_mb"] == 32  # the least, for so small a vocabulary
    losses = [_losses(place / name / "metrics.jsonl") for name in ("whole", "saved")]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def _losses(path: Path, name: str = "train/loss") -> list[float]:
    return [line[name] for line in read_lines(path) if name in line]


@pytest.mark.parametrize(
    ("module", "flags", "off", "on", "models", "told"),
    [  # by itself with one model; of step 3 where it is asked, of the actor and the reference
        ("step1_sft", STEPS, "--use_liger_kernel false", "", 1, "train/loss"),
        (
            "step3_ppo",
            f"{ROLLOUTS} --reward length --reward_length_characters 8 --advantage grpo --num_samples_per_prompt 2",
            "",
            "--use_liger_kernel true",
            2,
            "actor/grad_norm",
        ),
    ],
)
def test_fused_operations_reach_every_model_and_compute_the_same(on_cuda, place, module, flags, off, on, models, told):
    start = "--actor_model_name_or_path" if module == "step3_ppo" else "--model_name_or_path"
    found = []
    for name, more in (("fused", on), ("plain", off)):
        own = flags_of(place, f"{name}_{module}", f"{start} {place}/start {flags} {more}")
        said, count = on_cuda(said_fused, module, own)
        is_fused = name == "fused"
        assert (said.count("norms, gates and rotations use Liger's kernels"), count) == (is_fused, models * is_fused)
        found.append(_losses(place / f"{name}_{module}" / "metrics.jsonl", told))
    assert found[0] == pytest.approx(found[1], rel=1e-4 if told.startswith("actor") else 1e-5) and len(found[1]) >= 2


def estimates_and_losses() -> dict[str, list[str]]:
    """Every advantage estimator and policy loss on the device, and where its results lie."""
    import torch

    from training.step3_ppo.advantages import ESTIMATORS
    from training.step3_ppo.advantages.inputs import AdvantageInputs
    from training.step3_ppo.flags.algorithm import experience_settings, learning_settings, selected_algorithm
    from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
    from training.step3_ppo.losses import POLICY_LOSSES
    from training.step3_ppo.losses.losses import PolicyTokens
    from training.utils.base.errors import Mistakes
    from training.utils.layout.planner import PlanSettings
    from training.utils.layout.trie import SequenceLayout

    device = torch.device("cuda")
    ppo = PpoArguments(num_samples_per_prompt=2)
    values_BR = torch.linspace(0.0, 1.0, 12).view(4, 3).to(device)
    lengths_B = torch.tensor([3, 2, 3, 1], device=device)
    found = {}
    for name in ESTIMATORS:
        algorithm = selected_algorithm(AlgorithmArguments(advantage=name), ppo, Mistakes())
        settings = experience_settings(algorithm, ppo, SequenceLayout(PlanSettings(1), 1))
        group_B = torch.arange(4, device=device) // 2
        parts = (values_BR, lengths_B, group_B, values_BR, values_BR[:, 0], -values_BR, values_BR)
        inputs = AdvantageInputs(*parts, over_ranks=lambda part: part)
        made = settings.estimator.estimate(inputs, settings.advantage)
        found[name] = sorted({str(part.device) for part in made if part is not None})
    for name in POLICY_LOSSES:
        algorithm = selected_algorithm(AlgorithmArguments(policy_loss=name), ppo, Mistakes())
        settings = learning_settings(algorithm, ppo)
        flat_M = values_BR.flatten().requires_grad_()
        sequence_M = torch.arange(4, device=device).repeat_interleave(3)
        selected_M = sequence_M > 2 if settings.policy_loss.selects is not None else None
        tokens = PolicyTokens(flat_M, flat_M.detach() + 0.1, flat_M.detach(), sequence_M, selected_M)
        losses_M, clipped_M = settings.policy_loss.loss(tokens, settings.policy)
        losses_M.sum().backward()
        found[name] = sorted({str(part.device) for part in (losses_M, clipped_M, flat_M.grad)})
    return found


def test_every_estimator_and_policy_loss_stays_on_the_device(on_cuda):
    found = on_cuda(estimates_and_losses)
    assert len(found) > 12 and {name: places for name, places in found.items() if places != ["cuda:0"]} == {}
