"""Random conversations that fork: sequences with equal beginnings, some tokens of which several of them train, and
rollouts in parts, each token of which is trained once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tests.support.tiny_models import VOCABULARY
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import trie_document


def forked_sequences(seed: int, most_nodes: int = 64, longest: int = 5, most_tokens: int = 100) -> list[TokenSequence]:
    """Up to `most_nodes` turns of 1 to `longest` tokens, each behind another, in sequences of up to `most_tokens`. A
    sequence ends in every last turn, and in some before it, and some are there
    twice. Who shares a turn may train it or not, each for itself, even in part."""
    random = np.random.default_rng(seed)
    turns = [_turn(random, None, longest)]
    for _ in range(int(random.integers(0, most_nodes))):
        before = turns[int(random.integers(max(0, len(turns) - 8), len(turns)))]
        if sum(map(len, before)) <= most_tokens - longest:
            turns.append(_turn(random, before, longest))
    has_more = {id(turn[-2]) for turn in turns if len(turn) > 1}
    found = []
    for turn in turns:
        ends = 1 if id(turn[-1]) not in has_more else int(random.random() < 0.15)
        found += [_sequence(random, turn) for _ in range(ends + (ends and int(random.random() < 0.15)))]
    return [found[place] for place in random.permutation(len(found))]


def _turn(random: np.random.Generator, before: list[np.ndarray] | None, longest: int) -> list[np.ndarray]:
    """The turns up to a new one."""
    ids = random.integers(1, VOCABULARY, int(random.integers(1, longest + 1)))
    return [*(before or []), ids]


def _sequence(random: np.random.Generator, turns: list[np.ndarray]) -> TokenSequence:
    is_target = [
        (random.random(len(ids)) < 0.7) & (random.random() < 0.8) if random.random() < 0.3
        else np.full(len(ids), bool(random.random() < 0.6))
        for ids in turns
    ]  # fmt: skip
    flat = np.concatenate(is_target)
    flat[0] = False
    return TokenSequence(torch.from_numpy(np.concatenate(turns)), torch.from_numpy(flat))


class Conversation(NamedTuple):
    """A rollout that forks, and what was drawn in it, in the order of time."""

    tokens: TokenSequence
    drawn: list[int]


def forked_conversations(seed: int, most_nodes: int = 64, longest: int = 5) -> list[Conversation]:
    """Samples of up to three prompts: turns that are drawn and answered, up to `most_nodes` of either. Samples of a
    prompt may begin with the same turns. An answer may come with a rewritten history, of which the drawn turns have
    lost tokens; then the prompt may have become another too."""
    random, nodes, found = np.random.default_rng(seed), 0, list[Conversation]()
    for _ in range(int(random.integers(1, 4))):
        prompt, samples = random.integers(1, VOCABULARY, int(random.integers(1, 3 * longest))), list[list]()
        for _ in range(int(random.integers(1, 5))):
            steps: list = []
            if samples and random.random() < 0.4:  # as another sample, up to one of its answers
                other = samples[int(random.integers(0, len(samples)))]
                steps = other[: 2 * int(random.integers(0, 1 + len(other) // 2))]
            while not steps or len(steps) % 2 == 0:
                drawn, said = (random.integers(1, VOCABULARY, int(random.integers(1, longest + 1))) for _ in range(2))
                steps, nodes = [*steps, drawn], nodes + 2
                if nodes < most_nodes and random.random() < 0.75:
                    steps.append((said, _rewritten(random, prompt, steps) if random.random() < 0.4 else None))
            samples.append(steps)
            found.append(_conversation(prompt, steps))
    return found


def _rewritten(random: np.random.Generator, prompt: np.ndarray, steps: list) -> np.ndarray:
    kept = [each[random.random(len(each)) < 0.6] if isinstance(each, np.ndarray) else each[0] for each in steps]
    begin = prompt if random.random() < 0.8 else random.integers(1, VOCABULARY, len(prompt))
    return np.concatenate([begin, *kept])


def _conversation(prompt: np.ndarray, steps: list) -> Conversation:
    ids, is_target, forks = [prompt], [np.zeros(len(prompt), bool)], list[int]()
    for each in steps:
        drew = isinstance(each, np.ndarray)
        if not drew and each[1] is not None:
            forks.append(sum(map(len, ids)))
        new = each if drew else each[0] if each[1] is None else np.concatenate(each[::-1])
        ids.append(new)
        is_target.append(np.full(len(new), drew))
    drawn = np.concatenate([each for each in steps if isinstance(each, np.ndarray)]).tolist()
    tokens = (torch.from_numpy(np.concatenate(each)) for each in (ids, is_target))
    return Conversation(TokenSequence(*tokens, forks=tuple(forks)), drawn)


def weights_of(sequences: list[TokenSequence], seed: int) -> list[torch.Tensor]:
    """float64 for each target of each sequence: what its owner's loss weighs it by."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(int(each.is_target.sum()), generator=generator, dtype=torch.float64) for each in sequences]


def trie_row(seed: int = 2) -> TokenRows:
    """One row of two tries."""
    tries = [trie_document(forked_sequences(one, longest=longest), 1) for one, longest in ((seed, 5), (seed + 1, 20))]
    return packed_rows([tries], 0)
