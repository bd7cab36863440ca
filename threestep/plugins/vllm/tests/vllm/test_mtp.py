"""Heads under vLLM: drafts are accepted and tokens stay the model's, exported and while they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.launch import run_ranks
from tests.support.tiny_models import VOCABULARY
from threestep.plugins.mtp.folder import save_head
from threestep.plugins.mtp.head import new_head
from threestep.plugins.vllm.tests.test_head_folder import told_by
from threestep.plugins.vllm.tests.vllm.draft_program import UPDATES

pytestmark = pytest.mark.timeout(900)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
PROMPTS = [[5, 9, 3], [7, 7, 20], [30, 11, 6]]
NEW_TOKENS = 40


def trained(family, final_norm, **more):
    """A random model, and a head that has learnt some of what the model itself writes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **{**SHAPE, **more}, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None  # responses of one length
    with torch.no_grad():  # a norm that is not all ones: see `head_folder` about MiMo's
        model.model.norm.weight.mul_(1 + 0.2 * torch.randn(SHAPE["hidden_size"]))
        starts = torch.cat([torch.randint(3, VOCABULARY, (48, 3)), torch.tensor(PROMPTS)])
        ids_BT = model.generate(starts, max_new_tokens=NEW_TOKENS, do_sample=False)
        hidden_BTH, embeddings_BTH = model.model(ids_BT)[0], model.get_input_embeddings()(ids_BT)
    head = new_head(model, 1, seed=1, final_norm=final_norm)
    module, optimizer = head.depths[0], torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(150):
        joined = torch.cat([module.enorm(embeddings_BTH[:, 1:]), module.hnorm(hidden_BTH[:, :-1])], dim=-1)
        states = module.trunk(inputs_embeds=module.eh_proj(joined), use_cache=False)[0]
        logits = functional.linear(states[:, :-1], model.lm_head.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, head, float((logits.argmax(-1) == ids_BT[:, 2:]).float().mean())


def drawn(folder, speculative=None):
    """vLLM's greedy responses of the folder, drafts and accepted tokens."""
    from threestep.plugins.vllm.instance import _ENVIRONMENT, _global_state_restored

    with pytest.MonkeyPatch.context() as patched, _global_state_restored():
        for name, value in _ENVIRONMENT.items():
            patched.setenv(name, value)
        from vllm import LLM, SamplingParams

        settings = {"max_model_len": 64, "enable_chunked_prefill": False, "max_num_batched_tokens": 256}
        llm = LLM(
            str(folder), speculative_config=speculative, dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
            generation_config="vllm", kv_cache_memory_bytes=2**26, block_size=32, disable_log_stats=False, **settings
        )  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        llm.llm_engine.engine_core._finalizer.detach()
    parts = ("drafts", "accepted_tokens")
    return [output.outputs[0].token_ids for output in outputs], *(
        counts.get(f"vllm:spec_decode_num_{part}", 0) for part in parts
    )


@pytest.mark.parametrize(
    ("family", "final_norm"),
    [("qwen2", True), ("llama", True), ("llama", False)],
    ids=["mimo", "llama_as_mimo", "ernie"],
)
def test_an_exported_head_drafts_and_changes_no_token(family, final_norm, tmp_path):
    model, head, share = trained(family, final_norm)
    model.save_pretrained(tmp_path)
    save_head(tmp_path, 1, dict(head.state_dict()))
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False) for prompt in PROMPTS
    ]
    told = told_by(tmp_path)
    plain, drafts, _ = drawn(tmp_path)
    assert not drafts
    got, drafts, accepted = drawn(tmp_path, told)
    assert share > 0.95
    assert got == plain
    assert [list(ids) for ids in got] == [ids[0, 3:].tolist() for ids in expected]
    print(f"{family}, final norm {final_norm}: accepted {accepted} of {drafts}")
    assert accepted > 0.8 * drafts > 0  # the head knows these texts by heart


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    model, head, _ = trained("llama", final_norm=True, tie_word_embeddings=True)
    model.save_pretrained(folder)
    save_head(folder, 1, dict(head.state_dict()))
    (report,) = run_ranks(Path(__file__).with_name("draft_program.py"), 1, [folder], timeout_seconds=840)
    print(report)
    return report


def test_after_each_update_the_draft_is_the_trained_head(found):
    assert len(found["updates"]) == UPDATES
    for update in found["updates"]:  # bit sums of all its weights were compared as well
        draft = dict(update["draft"])
        moved = draft.pop("moved")
        assert set(draft.values()) == {0.0}, draft
        assert update is found["updates"][0] or moved > 1e-3


def test_drafts_are_accepted_and_counted(found):
    assert found["updates"][0]["rollout/guesses_accepted"] > 0.7  # the head knows these responses by heart
    for update in found["updates"]:
        assert 0 < update["sampled"] < 1
        assert update["rollout/tokens_per_forward"] == pytest.approx(1 + update["rollout/guesses_accepted"])


def test_greedy_responses_and_log_probabilities_are_the_models(found):
    for update in found["updates"]:
        assert update["same"] and update["worst"] < 1e-4
    assert found["bad_words"] and found["stop"] and found["end"]


def test_sampled_tokens_are_drawn_as_often_as_they_are_likely(found):
    assert max(found["verified"]) < 5
