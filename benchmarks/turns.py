"""What drawing conversations costs in rounds, and with kept caches: tokens computed, processor seconds, and how long a
rollout takes whose tool sleeps.

    python -m benchmarks.turns --model runs/lookup/sft/model [--task lookup] [--sleep 1.0] [--rounds 3]

--model: one that has seen the task's demonstrations (README.md of the plugin, Examples). Both ways draw the same
conversations, in turns; medians. --sleep: each answer takes a part of so many seconds, uneven, the same in both ways.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from threestep.plugins.environments.acting import ActingSettings, acting_engine
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.calling.calls import Caller
from threestep.plugins.environments.conversation_arguments import ConversationArguments
from threestep.plugins.environments.episodes import Episode, EpisodeSettings
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.data.rows.arguments import ChatArguments
from training.utils.generation.decoding.decoding import MASKED
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.document_attention import share_keys_of_few_tokens

EXAMPLES = Path(__file__).parent.parent / "examples" / "environments"
TASKS = {"lookup": ("LookupRows", "Lookup"), "guessing": ("GuessingRows", "Guessing")}


class InRounds(TransformersRollout):
    """Each turn reads its conversation so far."""

    _way = MASKED


class Kept(InRounds):
    """As `check` leaves it."""

    _keeps_turns = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", choices=TASKS, default="lookup")
    parser.add_argument("--sleep", type=float, default=0.0)
    for name, value in (("--prompts", 16), ("--samples", 8), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    share_keys_of_few_tokens()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    computed = [0, 0]  # tokens, with the padding beside them; forwards
    model.register_forward_pre_hook(
        lambda _model, _given, named: _count(computed, named["input_ids"]), with_kwargs=True
    )
    found: dict[str, list[tuple[float, ...]]] = {kind.__name__: [] for kind in (InRounds, Kept)}
    responses: dict[str, torch.Tensor] = {}
    for _ in range(given.rounds + 1):
        for kind in (InRounds, Kept):
            computed[:] = 0, 0
            wall, used = time.perf_counter(), time.process_time()
            rollout = _rolled_out(kind(), model, given)
            seconds = time.perf_counter() - wall, time.process_time() - used
            found[kind.__name__].append((*computed, *seconds))
            responses[kind.__name__] = rollout.response_ids_BR
    drawn = int(rollout.drawn.lengths_B.sum())
    turns = statistics.mean(record.turns for record in rollout.conversations or ())
    same = torch.equal(*responses.values())
    print(f"{given.task}: {drawn:,} drawn tokens, {turns:.2f} turns a conversation, the same in both: {same}")
    for name, runs in found.items():
        tokens, forwards, wall, used = (statistics.median(column) for column in zip(*runs[1:], strict=True))
        print(f"{name}: {tokens:,.0f} tokens in {forwards:,.0f} forwards, {used:.2f} s of processor, {wall:.2f} s")


def _count(computed: list[int], ids: torch.Tensor) -> None:
    computed[0] += ids.numel()
    computed[1] += 1


def _rolled_out(engine: TransformersRollout, model: Any, given: argparse.Namespace) -> Rollout:
    sys.path.insert(0, str(EXAMPLES))
    module = __import__(given.task)
    rows_name, environment_name = TASKS[given.task]
    rows = getattr(module, rows_name)("", 1234, 0, given.task)
    make, caller = _sleeping(getattr(module, environment_name), given.sleep), Caller()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    settings = ActingSettings(
        ChatArguments(prompt_style="chat_template", chat_template=str(EXAMPLES / "template.jinja")),
        EnvironmentArguments(environment="example", tool_parser="pythonic"),
        ConversationArguments(),
        64,
    )
    episode = EpisodeSettings(given.task, make, 60.0, 1000, print)

    def partner_of(row: Any, seed: int) -> Episode:
        return Episode(episode, row, seed, caller)

    acting = acting_engine(engine, partner_of, settings, tokenizer, end_token_ids=[tokenizer.eos_token_id])
    samples = [
        {**each, **rows.get_extra(each), "messages": rows.get_prompt_messages(each), "ground_truth": each["answer"]}
        for each in rows.get_eval_data()[: given.prompts]
    ]
    ids_BP = torch.zeros(len(samples), 1, dtype=torch.int64)  # environments write the prompts
    sampling = Sampling(64, 1.0, 0, 1.0, end_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    seeds = [derived_seed(7, row) for row in range(len(samples) * given.samples)]
    return acting.roll_out(model, RolloutRequest(ids_BP, ids_BP.bool(), sampling, seeds, given.samples, samples))


def _sleeping(kind: type, longest: float) -> type:
    """An environment whose answers take times of their own, by its seed and the turn."""

    class Sleeping(kind):  # type: ignore[misc]
        def reset(self, row: Any, seed: int) -> Any:
            self._seed, self._turn = seed, 0
            return super().reset(row)

        def step(self, message: Any) -> Any:
            self._turn += 1
            if longest:
                time.sleep(longest * (derived_seed(self._seed, self._turn) % 1000) / 1000)
            return super().step(message)

    return Sleeping


if __name__ == "__main__":
    main()
