"""Padded rows: what stands where, and that padding is never seen by a loss."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from training.utils.contracts.documents import TokenSequence, join, plain
from training.utils.contracts.token_rows import PAD_SEGMENT, TokenRows
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.models.token_model import PolicyModel

PAD, EOS = 0, 2


def sequence(ids: list[int], targets: list[int]) -> TokenSequence:
    is_target = torch.zeros(len(ids), dtype=torch.bool)
    is_target[targets] = True
    return TokenSequence(torch.tensor(ids), is_target)


def random_sequences(lengths: list[int]) -> list[TokenSequence]:
    """Prompts of about a third, then responses that end with eos."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        ids[-1] = EOS
        rows.append(join(ids[: length // 3], ids[length // 3 :]))
    return rows


def test_the_worked_example_of_the_record():
    rows = padded_rows([sequence([5, 6, 7], [2]), sequence([8, 9], [1])], pad_token_id=0)
    assert rows.input_ids_NT.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert rows.position_ids_NT.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert rows.segment_ids_NT.tolist() == [[0, 0, 0], [0, 0, PAD_SEGMENT]]
    assert rows.target_ids_M.tolist() == [7, 9]
    assert rows.predictor_M.tolist() == [1, 3]
    assert rows.sequence_M.tolist() == [0, 1]
    assert rows.end_B.tolist() == [2, 4]
    assert int((rows.segment_ids_NT >= 0).sum()) == 5
    assert rows.segments is None and rows.dense_mask() is None
    assert all(field.dtype == torch.int64 for name, field in vars(rows).items() if isinstance(field, torch.Tensor))


def test_a_target_has_a_token_before_it():
    joined = join(torch.tensor([5, 6]), torch.tensor([7, EOS]))
    assert (joined.input_ids.tolist(), joined.is_target.tolist()) == ([5, 6, 7, EOS], [False, False, True, True])
    for first in (sequence([5, 6], [0, 1]), join(torch.empty(0, dtype=torch.int64), torch.tensor([4, 5]))):
        with pytest.raises(AssertionError, match="the first token of a sequence has no predecessor"):
            padded_rows([first], 0)


def test_rows_move_whole():
    rows = padded_rows([sequence([5, 6, 7], [2])], 0).to("meta")
    assert isinstance(rows, TokenRows)
    assert all(field.device.type == "meta" for name, field in vars(rows).items() if isinstance(field, torch.Tensor))
    assert rows.segments is None
    packed = packed_rows([[plain(sequence([5, 6], [1])), plain(sequence([7, 8], [1]))]], 0).to("meta")
    assert packed.segments.run_lengths is not None and packed.segments.run_lengths.begins.device.type == "meta"
    tensors = [field for field in vars(packed).values() if isinstance(field, torch.Tensor)]
    tensors += [packed.segments.visible_NSS, packed.segments.copies_NS]
    assert all(field.device.type == "meta" for field in tensors)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "gemma3_text"])
def test_padded_rows_however_wide_equal_the_models_own_logits_padded_on_either_side(family):
    """Against transformers with an attention mask, right- and left-padded: log_softmax of the logits before. The
    forward is float64; a log-probability leaves the model as float32: relative steps of 6e-8."""
    model = tiny_causal_lm(family, torch.float64)
    policy, sequences = PolicyModel(model), random_sequences([19, 5, 12, 3])
    with torch.no_grad():
        right, left = (torch.cat(own_logprobs(model, sequences, side)) for side in (False, True))
        torch.testing.assert_close(left, right, rtol=3e-7, atol=1e-7)
        for pad, width in ((PAD, 1), (PAD, 40), (EOS, 23)):
            ours = policy(padded_rows(sequences, pad, min_width=width)).logprobs_M
            torch.testing.assert_close(ours.double(), right, rtol=3e-7, atol=1e-7)
        alone = torch.cat([policy(padded_rows([one], PAD)).logprobs_M for one in sequences])
    torch.testing.assert_close(alone.double(), right, rtol=3e-7, atol=1e-7)


def own_logprobs(model, sequences: list[TokenSequence], left: bool) -> list[torch.Tensor]:
    width = max(len(one) for one in sequences) + 3
    ids, mask = torch.full((len(sequences), width), PAD), torch.zeros(len(sequences), width, dtype=torch.int64)
    places = []
    for row, one in enumerate(sequences):
        first = width - len(one) if left else 0
        places.append(slice(first, first + len(one)))
        ids[row, places[row]] = one.input_ids
        mask[row, places[row]] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    result = []
    for row, one in enumerate(sequences):
        logprobs = torch.log_softmax(logits[row, places[row]][:-1], -1)
        chosen = logprobs.gather(-1, one.input_ids[1:, None])[:, 0]
        result.append(chosen[one.is_target[1:]])
    return result


def test_the_weights_get_the_gradient_of_eos_where_pad_is_eos():
    """DeepSpeed-Chat's mask, ids != pad, leaves the end of every response out of the loss."""
    rows = padded_rows([join(torch.tensor([5, 6]), torch.tensor([7, EOS])), sequence([8, EOS], [1])], pad_token_id=EOS)
    assert rows.target_ids_M.tolist() == [7, EOS, EOS]  # no padding among them, every real eos there
    assert rows.end_B.tolist() == [3, 5] and int((rows.segment_ids_NT >= 0).sum()) == 6
    model = tiny_causal_lm("llama", torch.float64, tie_word_embeddings=False, pad_token_id=EOS)
    sequences = random_sequences([7, 4])
    gradients = []
    for pad in (EOS, PAD):
        model.zero_grad()
        PolicyModel(model)(padded_rows(sequences, pad, min_width=9)).logprobs_M.sum().backward()
        gradients.append(model.get_output_embeddings().weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-8)
    assert gradients[0][EOS].abs().max() > 0.1
