"""What learning from samples costs that share their first turns: laid out apart, with the prompt once, and
as a trie.

    python -m benchmarks.tries [--samples 8] [--turns 3] [--rounds 5] [--shape 25m]

float32, attention run by run, one thread. A sample is a prompt, turns of a response and of what an
environment says to it, and a last response of its own. A round lays the samples out and runs forward, PPO's loss and
backward in each form, in turns; processor seconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import LlamaForCausalLM

from benchmarks.workload import SHAPES, VOCABULARY, config_of
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, ppo
from training.utils.contracts.documents import TokenSequence
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.models.document_attention import use_document_attention
from training.utils.models.token_model import PolicyModel

PROMPT, RESPONSE, OBSERVATION = 128, 64, 32  # tokens
FORMS = {"apart": (False, 0), "prompt": (True, 0), "trie": (True, 64)}  # packed, tokens from which on they are shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--samples", 8), ("--turns", 3), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--shape", choices=SHAPES, default="25m")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = PolicyModel(_model(given.shape))
    sequences = samples(given.samples, given.turns)
    every = sum(map(len, sequences))
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    tokens = {}
    for _ in range(given.rounds + 1):
        for form in FORMS:
            start = time.process_time()
            tokens[form] = learn(policy, sequences, form)
            seconds[form].append(time.process_time() - start)
    for form, found in seconds.items():
        median = statistics.median(found[1:])  # the first round warms up
        share, of_tokens = median / statistics.median(seconds["apart"][1:]), tokens[form] / every
        print(
            f"{form}: {median:.2f} s, {share:.3f} of apart; {tokens[form]:,} tokens, {of_tokens:.3f} of all; "
            f"{share / of_tokens:.3f} times their share"
        )


def samples(count: int, turns: int) -> list[TokenSequence]:
    """Samples of one prompt that share `turns` turns."""
    shared = [_part(PROMPT, False)]
    for _ in range(turns):
        shared += [_part(RESPONSE, True), _part(OBSERVATION, False)]
    found = []
    for _ in range(count):
        ids, is_target = zip(*shared, _part(RESPONSE, True), strict=True)
        found.append(TokenSequence(torch.cat(ids), torch.cat(is_target)))
    return found


def _part(tokens: int, is_target: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(1, VOCABULARY, (tokens,)), torch.full((tokens,), is_target)


def learn(policy: PolicyModel, sequences: list[TokenSequence], form: str) -> int:
    """Lay out, read and learn; return how many tokens were computed."""
    packed, least = FORMS[form]
    most = sum(map(len, sequences))
    plan = PlanSettings(1, most, len(sequences), packed, most if packed else 0, least_shared_tokens=least)
    computed = 0
    policy.zero_grad()
    for _, rows in rank_share(sequences, SequenceLayout(plan, 0), torch.device("cpu")):
        logprobs_M = policy(rows).logprobs_M
        advantages_M = torch.linspace(-1.0, 1.0, len(logprobs_M))  # each sample has its own
        tokens = PolicyTokens(logprobs_M, logprobs_M.detach(), advantages_M, rows.sequence_M)
        policy_M, _ = ppo(tokens, PolicyLossSettings(0.2, 0.2))
        policy_M.mean().backward()
        computed += rows.input_ids_NT.numel()
    return computed


def _model(shape: str) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config_of(shape)).eval()
    use_document_attention(model)
    return model


if __name__ == "__main__":
    main()
