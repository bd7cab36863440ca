"""Attention by document against the dense mask, weights' gradients included, in float64. Short runs of a bfloat16 model
are computed in float32 on a CPU: to the bit that, and whatever stands beside them."""

import pytest
import torch
import transformers as tf
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import AttentionRun, RunSpan
from training.utils.layout.rows import packed_rows
from training.utils.models import document_attention
from training.utils.models.document_attention import (
    BY_DOCUMENT,
    attention_by_document,
    attention_dtype,
    comparisons_with_sdpa,
    share_keys_of_few_tokens,
    use_document_attention,
)
from training.utils.models.token_model import PolicyModel

SHAPE = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, **SHAPE, **ENDS}
CONFIGS = {
    "llama": tf.LlamaConfig(**GROUPED),
    "qwen3": tf.Qwen3Config(**GROUPED, head_dim=8),
    "gemma3": tf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=64),
    "gpt2": tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **ENDS),
    "minicpm3": tf.MiniCPM3Config(
        **GROUPED | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    "opt": tf.OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, **ENDS),
}


def rows():
    generator = torch.Generator().manual_seed(0)

    def run(length, is_target):
        ids = torch.randint(3, 64, (length,), generator=generator)
        return TokenSequence(ids, torch.full((length,), is_target))

    several = shared_prompt(run(7, False), [run(length, True) for length in (4, 6, 3)])
    sequence = plain(TokenSequence(torch.arange(5), torch.tensor([False, False, True, True, True])))
    return packed_rows([[several, sequence], [shared_prompt(run(5, False), [run(3, True), run(2, True)])]], 0)


def read(model):
    model.zero_grad()
    logprobs_M = PolicyModel(model)(rows()).logprobs_M
    logprobs_M.square().sum().backward()
    return logprobs_M.detach(), {name: part.grad.clone() for name, part in model.named_parameters()}


@pytest.mark.parametrize("family", CONFIGS)
def test_it_gives_what_the_dense_mask_gives(family):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="sdpa").double().eval()
    logprobs_M, gradients = read(model)
    use_document_attention(model)
    assert model.config._attn_implementation == BY_DOCUMENT
    again_M, gradients_again = read(model)
    torch.testing.assert_close(again_M, logprobs_M, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_again[name], gradient, rtol=0, atol=1e-10, msg=name)


def test_a_large_mask_is_made_in_parts(monkeypatch):
    """A response of 6 tokens behind 7: of its mask of 6 x 13 two rows at a time, then one."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa").double().eval()
    logprobs_M, gradients = read(model)
    use_document_attention(model)
    made: list[int] = []
    ones = torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *sizes, **others: (made.append(sizes[0] * sizes[1]), ones(*sizes, **others))[1]
    )
    for most, largest in ((2**24, 6 * 13), (26, 26), (13, 13)):
        made.clear()
        monkeypatch.setattr(document_attention, "MOST_OF_A_MASK", most)
        again_M, gradients_again = read(model)
        assert max(made) == largest
        torch.testing.assert_close(again_M, logprobs_M, rtol=0, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradients_again[name], gradient, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_one_token_whose_heads_see_other_keys(key_heads):
    """As by the index of MiniMax-M3."""
    generator = torch.Generator().manual_seed(key_heads)
    query, key, value = (
        torch.randn(3, heads, count, 8, generator=generator, dtype=torch.float64)
        for heads, count in ((4, 1), (key_heads, 5), (key_heads, 5))
    )
    mask = torch.rand(3, 4, 1, 5, generator=generator) < 0.5
    mask[..., -1] = True
    module = torch.nn.Module().eval()
    module.num_key_value_groups, module.is_causal = 4 // key_heads, True
    given = (module, query, key, value, mask)
    want, got = sdpa_attention_forward(*given)[0], attention_by_document(*given)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_generation_and_the_saved_configuration_are_plain(tmp_path):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa").eval()
    prompt = {"input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), "attention_mask": torch.ones(2, 4).long()}
    prompt["attention_mask"][0, :2] = 0
    plain_ids = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    use_document_attention(model)
    assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False), plain_ids)
    model.save_pretrained(tmp_path)
    assert BY_DOCUMENT not in (tmp_path / "config.json").read_text()


@pytest.fixture
def computed(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Queries, keys and values of each call of torch's attention."""
    plain, noted = functional.scaled_dot_product_attention, []

    def noting(query, key, value, **others):
        noted.append((query, key, value))
        return plain(query, key, value, **others)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noting)
    return noted


@pytest.mark.parametrize(("tokens", "masked"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-14), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("key_heads", "value_size"), [(1, 8), (2, 8), (4, 8), (4, 6), (2, 10)])
def test_few_tokens(computed, key_heads, value_size, dtype, close, tokens, masked):
    """As transformers' own, which copies the keys for each head: query head h has keys h // (heads / key heads).
    Multi-head latent attention has narrower values than keys."""
    generator = torch.Generator().manual_seed(key_heads)
    query, key, value = (
        torch.randn(3, heads, count, size, generator=generator, dtype=torch.float64).to(dtype)
        for heads, count, size in ((4, tokens, 8), (key_heads, 5, 8), (key_heads, 5, value_size))
    )
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    mask = mask & torch.ones(tokens, 5, dtype=torch.bool).tril(5 - tokens)
    module = torch.nn.Module().eval()
    module.num_key_value_groups, module.is_causal = 4 // key_heads, True
    given = (module, query, key, value, mask if masked else None)
    want, _ = sdpa_attention_forward(*given, scaling=0.3)
    got, _ = attention_by_document(*given, scaling=0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=close)
    assert got.shape == (3, tokens, 4, value_size)
    if masked:  # as decoding gives it
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
        torch.testing.assert_close(attention_by_document(*given[:4], added, scaling=0.3)[0], got)
    computed.clear()
    attention_by_document(*given, scaling=0.3)
    if dtype is torch.bfloat16 and key_heads == 4 and tokens == 1:
        assert computed[0][0].dtype is torch.float32  # what comes out is rounded, as the tests below say
    else:
        assert computed[0][1] is key and computed[0][2] is value  # nothing is copied


def lone_queries(masked: str, rows: int = 5, heads: int = 3) -> list:
    """Queries, keys, values and a mask of a bfloat16 model's decode step, as a cache with room holds them."""
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(rows, heads, 400, 32, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(rows, heads, 1, 32, generator=generator).bfloat16()
    shape = (1 if masked == "alike" else rows, heads if masked == "by head" else 1, 1, 300)
    seen = torch.rand(shape, generator=generator) < 0.7
    seen[..., -1] = True
    added = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, float("-inf"))
    mask = {"not": None, "added": added}.get(masked, seen)
    return [query, key[:, :, :300], value[:, :, :300], mask]


@pytest.mark.parametrize("masked", ["not", "added", "seen", "alike", "by head"])
@pytest.mark.parametrize("numbers", [1, 2 * 300 * 32, 6 * 300 * 32, 2**18])
def test_a_lone_query_of_bfloat16_is_rounded_once(monkeypatch, masked, numbers):
    """Of one head at a time, of two of three, of two rows of five, of all at once. What is rounded is float32's result:
    within half a unit in the last place of float64's, which bfloat16's own kernel is not."""
    monkeypatch.setattr(document_attention, "_CONVERTED_NUMBERS", numbers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    query, key, value, mask = lone_queries(masked)
    with torch.no_grad():
        got = attention_by_document(torch.nn.Module(), query, key, value, mask)[0]
    assert got.dtype is torch.bfloat16
    exact_mask = mask.double() if masked == "added" else mask
    parts = (part.double() for part in (query, key, value))
    want = functional.scaled_dot_product_attention(*parts, attn_mask=exact_mask).transpose(1, 2)
    plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    unit = torch.exp2(want.abs().log2().floor() - 7)  # bfloat16 has 8 digits

    def off(found: torch.Tensor) -> float:
        return float((((found.double() - want).abs() - 1e-6) / unit).max())  # less what float32 may be off itself

    assert off(got) <= 0.5 < off(plain)


def test_parts_of_a_lone_query_change_no_bit(monkeypatch):
    """Nor does a backward, which converts all at once."""
    query, key, value, mask = lone_queries("added")
    found = []
    with torch.no_grad():
        for numbers in (1, 300 * 32, 6 * 300 * 32, 2**30):
            monkeypatch.setattr(document_attention, "_CONVERTED_NUMBERS", numbers)
            found.append(attention_by_document(torch.nn.Module(), query, key, value, mask)[0])
    monkeypatch.setattr(document_attention, "_CONVERTED_NUMBERS", 1)
    parts = [part.clone().requires_grad_() for part in (query, key, value)]
    found.append(attention_by_document(torch.nn.Module(), *parts, mask)[0])
    assert all(torch.equal(found[0], other) for other in found[1:])
    found[-1].float().square().sum().backward()
    exact = [part.detach().double().requires_grad_() for part in parts]
    functional.scaled_dot_product_attention(*exact, attn_mask=mask.double()).square().sum().backward()
    for part, other in zip(parts, exact, strict=True):
        assert part.grad is not None and other.grad is not None
        torch.testing.assert_close(part.grad.double(), other.grad, rtol=2e-2, atol=2e-3)


def test_a_lone_query_converts_little_at_a_time(monkeypatch, computed):
    """The whole cache in float32 would be as large as what it saves: one room for keys and one for values, which no
    part outgrows, at least one head for each thread."""
    query, key, value, mask = lone_queries("seen")
    for threads, numbers, wanted in ((1, 1, (1, 1)), (2, 1, (1, 2)), (7, 1, (2, 3)), (1, 6 * 300 * 32, (2, 3))):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(document_attention, "_CONVERTED_NUMBERS", numbers)
        computed.clear()
        with torch.no_grad():
            attention_by_document(torch.nn.Module(), query, key, value, mask)
        sizes = [keys.shape[:2] for _, keys, _ in computed]
        assert max(sizes) == wanted and sum(rows * heads for rows, heads in sizes) == 5 * 3
        assert len({part.data_ptr() for _, *parts in computed for part in parts}) == 2
    computed.clear()
    with torch.no_grad():
        attention_by_document(torch.nn.Module(), query.float(), key.float(), value.float(), mask)
    assert [keys.shape[:2] for _, keys, _ in computed] == [(5, 3)]  # a float32 model's


def test_transformers_own_sdpa_shares_keys_too(monkeypatch, computed):
    """On CUDA most models keep its name: a decoded token copies no keys there either, and all else is transformers'."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa").eval()
    ids, mask = torch.arange(20).view(2, 10), torch.ones(2, 10).long()
    mask[0, :2] = 0
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    heads = {(query.shape[2], key.shape[1]) for query, key, _ in computed}
    assert heads == {(10, 4), (1, 4)}  # the prompts, and a token: four heads of keys, of two
    computed.clear()
    share_keys_of_few_tokens()
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False), generated)
    heads = {(query.shape[2], key.shape[1]) for query, key, _ in computed}
    assert heads == {(10, 4), (2, 2)}  # two queries of each head of keys


def test_a_family_that_asks_for_the_name_is_noted():
    """DeepSeek-V3.2 and its relatives mask by their index where the implementation is called "eager" or "sdpa" alone.
    In half precision rounding hides the difference."""
    model = tf.LlamaForCausalLM(CONFIGS["llama"])
    use_document_attention(model)
    config = model.model.layers[0].self_attn.config
    with comparisons_with_sdpa(model) as files:
        assert config._attn_implementation == BY_DOCUMENT and config._attn_implementation != "flash_attention_2"
        model(torch.arange(3, 9)[None])
        assert files == []
        assert config._attn_implementation not in ("eager", "sdpa")
        assert files == [__file__]
    assert type(config._attn_implementation) is str and config._attn_implementation == BY_DOCUMENT


SIZE = 80  # of a head: bfloat16 from 384 queries
LONG, SHORT = AttentionRun(390, (), False), AttentionRun(9, (), False)
LATER = AttentionRun(6, (RunSpan(1, 0, 5),), False)  # sees 5 tokens of the second run


def parts(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, tokens, SIZE, generator=generator).bfloat16() for _ in range(3)]
    return [part.requires_grad_() for part in drawn]


def attended(given: list[torch.Tensor], runs: tuple[AttentionRun, ...]) -> torch.Tensor:
    """[T, A, D]"""
    return attention_by_document(torch.nn.Module(), *given, None, runs=runs)[0][0]


@pytest.mark.parametrize(
    ("size", "queries", "dtype"),
    [
        (32, 1399, torch.float32),
        (32, 1400, torch.bfloat16),
        (64, 767, torch.float32),
        (64, 768, torch.bfloat16),
        (128, 383, torch.float32),
        (128, 384, torch.bfloat16),
    ],
)
def test_the_table(size, queries, dtype):
    part = torch.zeros(1, 1, 1, size, dtype=torch.bfloat16)
    assert attention_dtype(queries, part) == dtype
    assert attention_dtype(queries, part.to("meta")) == torch.bfloat16  # measured on CPUs alone
    for other in (torch.float16, torch.float32, torch.float64):
        assert attention_dtype(queries, part.to(other)) == other


def test_short_runs_are_rounded_once_at_the_end():
    given = parts(LONG.tokens + SHORT.tokens + LATER.tokens)
    output = attended(given, (LONG, SHORT, LATER))
    assert output.dtype == torch.bfloat16

    def plainly(own: slice, seen: slice, dtype: torch.dtype) -> torch.Tensor:
        query = given[0][:, :, own].to(dtype)
        key, value = (torch.cat([part[:, :, seen], part[:, :, own]], 2).to(dtype) for part in given[1:])
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        causal = key.shape[2] == query.shape[2]
        options = {"is_causal": True} if causal else {"attn_mask": mask}
        return functional.scaled_dot_product_attention(query, key, value, **options)[0].transpose(0, 1)

    nothing = slice(0, 0)
    assert torch.equal(output[:390], plainly(slice(0, 390), nothing, torch.bfloat16))
    assert torch.equal(output[390:399], plainly(slice(390, 399), nothing, torch.float32).bfloat16())
    assert torch.equal(output[399:], plainly(slice(399, 405), slice(390, 395), torch.float32).bfloat16())


def test_neighbours_change_no_bit():
    """Neither of the output nor of the gradients, though the long run is computed in another precision."""
    beside, alone = parts(LONG.tokens + SHORT.tokens), parts(LONG.tokens + SHORT.tokens)
    weights = torch.randn(SHORT.tokens, 2, SIZE, generator=torch.Generator().manual_seed(1))
    with_long = attended(beside, (LONG, SHORT))[390:]
    by_itself = attended([part[:, :, 390:] for part in alone], (SHORT,))
    assert torch.equal(with_long, by_itself)
    for output in (with_long, by_itself):
        (output.float() * weights).sum().backward()
    for one, other in zip(beside, alone, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad[:, :, 390:], other.grad[:, :, 390:])


def test_rows_of_one_document_each_as_well():
    """They come without runs, by transformers' own function."""
    given = parts(40)
    module = torch.nn.Module()
    module.is_causal = True
    output, _ = attention_by_document(module, *given, None)
    want = functional.scaled_dot_product_attention(*(part.float() for part in given), is_causal=True)
    assert torch.equal(output, want.transpose(1, 2).bfloat16())
    # torch takes a mask of the queries' type, or float32; conversations give one of bfloat16 where several tokens join.
    seen = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    added = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, float("-inf"))
    got, want = (attention_by_document(module, *given, mask)[0] for mask in (added, seen))
    assert torch.equal(got, want) and got.dtype is torch.bfloat16
