"""Trains a tiny model and its head while vLLM draws, and drafts by that head.

    python threestep/plugins/vllm/tests/vllm/draft_program.py MODEL_FOLDER

test_mtp.py runs it on one rank under ZeRO-3 (where the head is gathered for vLLM), and reads what it reports of each
update.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

UPDATES = 3
TOKENS = 12
DRAWN = 2000  # responses whose tokens are counted


def main(folder: Path) -> None:
    from tests.distributed.launch import report
    from tests.unit.utils.generation.decoding.test_hf import spelt
    from threestep.plugins.mtp.head import new_head
    from threestep.plugins.mtp.opening import open_head
    from threestep.plugins.mtp.settings import MtpSettings
    from threestep.plugins.mtp.training import WholeHead
    from threestep.plugins.vllm.draft import VllmDraft
    from threestep.plugins.vllm.tests.vllm.conftest import started
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.engine.whole_model import WholeModel
    from training.utils.loading.models import load_causal_lm
    from training.utils.models.settings import ModelSettings
    from training.utils.models.token_model import PolicyModel
    from training.utils.setup.setup import load_under

    with started_process_group() as ranks:
        settings = EngineSettings(dtype="fp32", zero_stage=3, learning_rate=3e-3, lr_scheduler_type="constant")
        model = load_under(
            settings, ranks, lambda dtype: load_causal_lm(ModelSettings(str(folder)), dtype, read_vocabulary(folder))
        )
        engine = TrainingEngine(PolicyModel(model), settings, ranks, UPDATES)
        mtp = open_head(MtpSettings(1, 1.0), str(folder), engine, model, total_steps=UPDATES, seed=0)
        assert mtp is not None
        actor, rollouts = WholeModel(engine, model), started(spelt)
        head = WholeHead(mtp.head.engine, partial(new_head, model, 1, 0))
        rollouts.draw_by(VllmDraft(1, head.lent))
        updates = [one_update(rollouts, actor, mtp, head) for _ in range(UPDATES)]
        with rollouts.lent(actor), actor.lent() as whole:
            report({"updates": updates, "verified": verified_tokens(rollouts, whole), **held_to(rollouts, whole)})


def read_vocabulary(folder: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).vocab_size)


def asked() -> tuple[Any, Any]:
    """Greedy and sampled."""
    from tests.unit.utils.generation.decoding.test_hf import GREEDY, PLAIN

    return (
        replace(GREEDY, max_new_tokens=TOKENS),
        replace(PLAIN, max_new_tokens=TOKENS, temperature=0.7, top_k=20, top_p=0.9),
    )


def drawn(rollouts: Any, model: Any, how: Any, samples: int = 1, batch: Any = None) -> Any:
    from tests.unit.utils.generation.decoding.test_hf import prompts
    from training.utils.contracts.rollout_engine import RolloutRequest

    ids_BP, mask_BP = prompts((3, 5, 2, 7)) if batch is None else batch
    seeds = range(len(ids_BP) * samples)
    return rollouts.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, seeds, samples))


def one_update(rollouts: Any, actor: Any, mtp: Any, head: Any) -> dict[str, Any]:
    """Draw, compare, and take one step of model and head on what was drawn."""
    from tests.unit.utils.generation.decoding.test_hf import responses, roll
    from threestep.plugins.hybrid.engine import _logprobs
    from threestep.plugins.vllm.tests.vllm.test_mtp import PROMPTS

    greedy, sampled = asked()
    known = torch.tensor(PROMPTS), torch.ones(len(PROMPTS), 3, dtype=torch.bool)
    with rollouts.lent(actor) as lent:
        got = drawn(rollouts, lent, greedy, batch=known)
        figures = rollouts.figures()
        some = drawn(rollouts, lent, sampled, samples=2)
    accepted = rollouts.figures()["rollout/guesses_accepted"]
    with actor.lent() as whole:
        same = responses(got) == responses(roll(whole, greedy, batch=known))
        with torch.no_grad():
            expected_M = _logprobs(whole, some, sampled)
    worst = float((some.sampled_logprobs_BR[some.response_mask_BR] - expected_M).abs().max())
    found = {"same": same, "worst": worst, "draft": differences(rollouts, head), "sampled": accepted, **figures}
    learn(actor.engine, mtp, got)
    return found


def differences(rollouts: Any, head: Any) -> dict[str, float]:
    """How far the draft's weights that vLLM keeps as they were loaded are from the trained head's, at most; "moved":
    its projection from the first that was asked about."""
    draft = dict(rollouts._vllm.llm.collective_rpc(draft_of)[0].named_parameters())
    kept = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    kept["trunk.norm"] = "final_layernorm"
    found = {}
    with head.lent() as lent:
        state = lent.state_dict()
        for ours, theirs in kept.items():
            (tensor,) = (tensor for name, tensor in draft.items() if name.endswith(f"{theirs}.weight"))
            own = state[f"depths.0.{ours}.weight"]
            if ours == "eh_proj":  # MiMo's reads the state first
                own = torch.cat([*reversed(own.chunk(2, dim=1))], dim=1)
            found[ours] = float((tensor - own).abs().max())
        projection = state["depths.0.eh_proj.weight"].clone()
    first = vars(rollouts).setdefault("first_projection", projection)
    return {**found, "moved": float((projection - first).abs().max())}


def draft_of(worker: Any) -> Any:
    return worker.model_runner.get_draft_model()


def learn(engine: Any, mtp: Any, rollout: Any) -> None:
    """The policy moves away from what it drew, and the head towards it."""
    from tests.unit.utils.generation.decoding.test_hf import PAD
    from threestep.plugins.mtp.reading import read_states
    from training.utils.contracts.documents import plain
    from training.utils.layout.rows import packed_rows

    engine.train()
    documents = [plain(sequence) for sequence in rollout.sequences()]
    rows = packed_rows([[document] for document in documents], PAD, with_before=True)
    step = mtp.begin([rows], engine, mtp.tally(documents))
    read = engine(rows, after_trunk=read_states)
    engine.backward(read.logprobs_M.sum() / 1000.0)
    step.after_backward(read, mtp.prepare(rows))
    engine.step()
    step.end("actor", dict.fromkeys(step.sums, 1.0))


def verified_tokens(rollouts: Any, model: Any) -> list[float]:
    """Of many responses to one prompt, for the second and the third token behind the most frequent tokens before: the
    largest distance, in standard deviations, of how often a token was drawn from how likely it is. The first token
    comes from the prompt; those behind it are drafted, or drawn in the place of a draft, or behind one."""
    from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts

    how = replace(PLAIN, max_new_tokens=4, temperature=0.8, top_k=12)
    ids_BP, mask_BP = prompts((5,))
    ids_CR = drawn(rollouts, model, how, DRAWN, (ids_BP, mask_BP)).response_ids_BR
    found, before = [], ids_BP
    for place in range(3):
        with torch.no_grad():
            logits_V = model(before).logits[0, -1] / 0.8
        logits_V[logits_V < logits_V.topk(12).values[-1]] = -torch.inf
        probability_V = torch.softmax(logits_V, dim=-1)
        count_V, total = torch.bincount(ids_CR[:, place], minlength=len(probability_V)), len(ids_CR)
        deviation_V = (total * probability_V * (1 - probability_V)).sqrt().clamp(min=1.0)
        found.append(float(((count_V - total * probability_V).abs() / deviation_V).max()))
        most = int(count_V.argmax())
        ids_CR, before = ids_CR[ids_CR[:, place] == most], torch.cat([before, torch.tensor([[most]])], dim=1)
    return found[1:]


def held_to(rollouts: Any, model: Any) -> dict[str, bool]:
    """Whether bad words, a stop string and an end token give the greedy responses of the transformers engine."""
    from tests.unit.utils.generation.decoding.test_hf import frequent_token, prompts, responses, roll, spelt
    from training.utils.contracts.rollout_engine import Ends

    greedy, batch = asked()[0], prompts((3, 5, 2, 7))
    free = responses(roll(model, greedy, batch=batch))
    ways = {
        "bad_words": replace(greedy, bad_words=((free[0][2],), tuple(free[1][3:5]))),
        "stop": replace(greedy, ends=Ends((spelt(free[2][4:6]),))),
        "end": replace(greedy, end_token_id=frequent_token(roll(model, greedy, batch=batch))),
    }
    found = {}
    for name, how in ways.items():
        got, expected = drawn(rollouts, model, how), roll(model, how, batch=batch, decode=spelt)
        found[name] = responses(got) == responses(expected) != free and torch.equal(got.ended_B, expected.ended_B)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
