"""Tokenizers that are loaded, and every mistake that is told in a sentence; they are those of their tokenizer.json,
whatever class transformers would build over it."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.tiny_models import tiny_causal_lm
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from tests.unit.utils.loading.conftest import edit_json
from training.utils.base.errors import ThreestepError
from training.utils.data.fingerprint import parts_of_tokenizer
from training.utils.loading import tokenizers
from training.utils.loading.tokenizers import (
    PROBES,
    add_tokens,
    load_padding_tokenizer,
    load_tokenizer,
    read_tokenizer,
    same_tokenizer,
    tokenizer_digest,
    with_pad_apart,
)

TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]


def test_a_tokenizer_is_loaded_from_the_models_own_folder(save_folder, tiny_tokenizer):
    loaded = load_tokenizer(save_folder())
    assert loaded.get_vocab() == tiny_tokenizer.get_vocab()
    assert loaded.padding_side == "right"


def test_no_pad_token_names_the_flag(save_folder):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None)
    with pytest.raises(ThreestepError, match=r"has no pad token; choose one .*--pad_token '<\|endoftext\|>'"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, "<|endoftext|>").pad_token == "<|endoftext|>"
    assert load_tokenizer(folder, end_may_pad=True).pad_token == "<|endoftext|>"
    assert load_tokenizer(save_folder(), end_may_pad=True).pad_token == "<|pad|>"
    with pytest.raises(ThreestepError, match="--pad_token expects a token of the tokenizer in .*, got 'no such'"):
        load_tokenizer(folder, "no such")
    edit_json(f"{folder}/tokenizer_config.json", eos_token=None)
    with pytest.raises(ThreestepError, match="has no end-of-sequence token; set eos_token"):
        load_tokenizer(folder)


def test_a_pad_token_is_added_where_a_model_is_trained(save_folder):
    """DeepSpeed-Chat's [PAD], which Llama 2 lacks."""
    folder = save_folder()
    given, new = load_padding_tokenizer(folder, None, False)
    assert (given.pad_token, new) == ("<|pad|>", 0)
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None)
    padded, new = load_padding_tokenizer(folder, None, False)
    assert (padded.pad_token, padded.pad_token_id, new) == ("[PAD]", len(given), 1)
    assert padded("Two.").input_ids == given("Two.").input_ids
    named, new = load_padding_tokenizer(folder, "<|endoftext|>", False)
    assert (named.pad_token, new) == ("<|endoftext|>", 0)


@pytest.mark.parametrize(
    ("more", "token"),
    [
        ({"unk_token": "!"}, "!"),  # users of Llama 2 pad with <unk>
        # unk, bos and eos are one token in GPT-2, OPT, Pythia and StarCoder
        ({"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, "<|endoftext|>"),
        ({"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, "<|pad|>"),
    ],
)
def test_the_unknown_token_may_pad(save_folder, more, token):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None, **more)
    assert load_tokenizer(folder, token).pad_token == token


def test_a_pad_token_that_ends_no_response_stays(tiny_tokenizer, tiny_tokenizer_pad_is_eos):
    assert with_pad_apart(tiny_tokenizer, None).pad_token == "<|pad|>"
    size = len(tiny_tokenizer)
    assert len(with_pad_apart(tiny_tokenizer, None)) == size
    other_end = train_tokenizer(SENTENCES, pad_is_eos=True)
    assert with_pad_apart(other_end, "!").pad_token == "<|endoftext|>"  # responses end with another token
    ends_with_pad = train_tokenizer(SENTENCES)
    ends_with_pad.pad_token = "!"
    assert with_pad_apart(ends_with_pad, "!").pad_token == "<|pad|>"


def test_tokenizers_that_may_meet():
    one = train_tokenizer(SENTENCES)
    same_with_pad_is_eos = train_tokenizer(SENTENCES)
    same_with_pad_is_eos.pad_token = same_with_pad_is_eos.eos_token
    grown = with_pad_apart(train_tokenizer(SENTENCES, pad_is_eos=True), None)
    assert same_tokenizer(one, train_tokenizer(SENTENCES))
    assert same_tokenizer(one, same_with_pad_is_eos) and same_tokenizer(same_with_pad_is_eos, one)
    assert same_tokenizer(grown, train_tokenizer(SENTENCES, pad_is_eos=True))
    assert same_tokenizer(train_tokenizer(SENTENCES, pad_is_eos=True), grown)


def test_tokenizers_that_differ():
    one = train_tokenizer(SENTENCES)
    assert not same_tokenizer(one, train_tokenizer(SENTENCES[:2]))
    assert not same_tokenizer(one, train_tokenizer(SENTENCES, vocab_size=len(one) - 5))
    as_many = [train_tokenizer(sentences, vocab_size=290) for sentences in (SENTENCES[:2], SENTENCES[2:])]
    assert len(as_many[0]) == len(as_many[1]) and not same_tokenizer(*as_many)
    other_end = train_tokenizer(SENTENCES)
    other_end.eos_token = "!"
    assert not same_tokenizer(one, other_end)


def test_added_tokens_are_one_token_each_and_stay_in_the_text():
    tokenizer = train_tokenizer(SENTENCES)
    size = len(tokenizer)
    assert add_tokens(tokenizer, TAGS) == 4 and len(tokenizer) == size + 4
    ids = tokenizer("Think.<Parallel><Path> 5</Path></Parallel>", add_special_tokens=False)["input_ids"]
    assert [token for token in ids if token >= size] == tokenizer.convert_tokens_to_ids(TAGS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Think.<Parallel><Path> 5</Path></Parallel>"
    assert add_tokens(tokenizer, TAGS) == 0 and len(tokenizer) == size + 4
    # In the vocabulary, and yet cut by the pre-tokenizer where it stands in a text.
    word = next(token for token in tokenizer.get_vocab() if token.isalpha() and len(token) > 3)
    assert add_tokens(tokenizer, [word]) == 0
    assert tokenizer.convert_tokens_to_ids(word) in tokenizer(f"a{word}b", add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_is_read_and_cannot_be_used(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path)
    tiny_causal_lm("llama").config.save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": {}}')
    with pytest.raises(ThreestepError, match="no tokenizer could be loaded from"):
        load_tokenizer(str(tmp_path))


def test_a_digest_is_shared_by_tokenizers_that_read_alike(tiny_tokenizer):
    padded = copy.deepcopy(tiny_tokenizer)
    padded.add_special_tokens({"pad_token": "<|another pad|>"})
    by_end = copy.deepcopy(tiny_tokenizer)
    by_end.pad_token = by_end.eos_token
    longer = copy.deepcopy(tiny_tokenizer)
    longer.add_tokens(["quince"])
    other_end = copy.deepcopy(tiny_tokenizer)
    other_end.eos_token = other_end.convert_ids_to_tokens(5)
    bare = copy.deepcopy(by_end)
    bare.add_special_tokens({"pad_token": "<|another pad|>"})
    other_words = copy.deepcopy(tiny_tokenizer)
    other_words.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    own = tokenizer_digest(tiny_tokenizer)
    assert tokenizer_digest(copy.deepcopy(tiny_tokenizer)) == own and tokenizer_digest(bare) == tokenizer_digest(by_end)
    assert len({own, *map(tokenizer_digest, (longer, other_end, other_words))}) == 4
    assert not same_tokenizer(tiny_tokenizer, other_words)


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXTS = [*PROBES, "don't add 123 and 456\n\n\n  so it is 579, isn't it? IT'S 1234567890 " * 8]
TOKENS = ["<s>", "</s>", "<|pad|>"]
TEMPLATE = "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"


def byte_level(split: str | None, *more: str) -> Tokenizer:
    """GPT-2's splits, or those of a regular expression."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), bytes_alone])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*TOKENS, *more], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def sentence_piece() -> Tokenizer:
    """As Llama 2's file: a space goes before every text, also before one that begins with a space."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", *TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        [text.replace(" ", "▁") for text in TEXTS[-1:]],
        trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


FILES = {
    "gpt2": byte_level(None),
    "gpt2 with its end": byte_level(None, "<|endoftext|>"),
    "cl100k": byte_level(CL100K),
    "llama2": sentence_piece(),
}
# Of the file, of the model, the class that tokenizer_config.json names: transformers builds another tokenizer of these.
MISREAD = [
    ("cl100k", "llama", "LlamaTokenizerFast"),  # deepseek-math, R1-Distill-Llama
    ("cl100k", "llama", "GPT2Tokenizer"),
    ("cl100k", "phi", "GPT2Tokenizer"),
    ("cl100k", "gpt_neox", "GPTNeoXTokenizer"),
    ("gpt2", "gpt_neox", "GPTNeoXTokenizerFast"),  # which composes letters and accents
    ("gpt2", "gemma", "GemmaTokenizer"),
    ("gpt2", "qwen2", "PreTrainedTokenizerFast"),  # transformers takes Qwen2Tokenizer whatever the class
    ("cl100k", "qwen3_5", "TokenizersBackend"),
    ("llama2", "llama", "LlamaTokenizer"),
]
READ_RIGHT = [
    ("gpt2 with its end", "gpt2", "GPT2Tokenizer"),
    ("gpt2 with its end", "opt", "GPT2Tokenizer"),
    ("cl100k", "llama", "PreTrainedTokenizerFast"),
    ("cl100k", "granite", "GPT2Tokenizer"),  # transformers 5 takes the file for this family
    ("llama2", "mistral", "TokenizersBackend"),
]


def folder_of(made: Tokenizer, family: str, tokenizer_class: str, folder: Path) -> str:
    given = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>", model_max_length=77
    )
    given.chat_template = TEMPLATE
    given.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    given.init_kwargs["threestep"] = {"prompt_style": "human_assistant"}
    given.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    edit_json(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    return str(folder)


def ids(tokenizer, texts, special=False):
    return tokenizer(list(texts), add_special_tokens=special)["input_ids"]


def of_file(folder, texts, special=False):
    raw = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return [each.ids for each in raw.encode_batch(list(texts), add_special_tokens=special)]


@pytest.mark.parametrize(("file", "family", "tokenizer_class"), MISREAD)
def test_the_file_counts(file, family, tokenizer_class, tmp_path, capsys):
    folder = folder_of(FILES[file], family, tokenizer_class, tmp_path / "model")
    plain = AutoTokenizer.from_pretrained(folder)
    read, sentence = read_tokenizer(folder)
    assert f"of '{folder}' as its tokenizer; transformers' {type(plain).__name__} would " in sentence
    for special in (False, True):
        assert ids(read, TEXTS, special) == of_file(folder, TEXTS, special)
    assert ids(read, ["a<tool>b</s>"]) == of_file(folder, ["a<tool>b</s>"])
    assert len(read) == Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab_size()
    assert (read.bos_token, read.eos_token, read.pad_token) == tuple(TOKENS)
    assert (read.chat_template, read.model_max_length) == (TEMPLATE, 77)
    assert read.init_kwargs["threestep"] == {"prompt_style": "human_assistant"}
    for _ in range(2):
        assert ids(load_tokenizer(folder), TEXTS) == of_file(folder, TEXTS)
    assert capsys.readouterr().out.count("as its tokenizer; transformers' ") == 1  # the line is logged once
    # Rows of the other reading are not taken from the cache.
    assert parts_of_tokenizer(read)["tokenizer"] != parts_of_tokenizer(plain)["tokenizer"]
    assert not same_tokenizer(read, plain) and same_tokenizer(read, read_tokenizer(folder)[0])


@pytest.mark.parametrize(("file", "family", "tokenizer_class"), MISREAD)
def test_what_is_saved_is_read_alike_by_plain_transformers(file, family, tokenizer_class, tmp_path):
    folder = folder_of(FILES[file], family, tokenizer_class, tmp_path / "0")
    before = of_file(folder, TEXTS, special=True)
    for generation in ("1", "2", "3"):  # SFT, a reward model of it, PPO
        read, _ = read_tokenizer(folder)
        folder = str(tmp_path / generation)
        read.save_pretrained(folder)
        shutil.copy(tmp_path / "0" / "config.json", folder)
        plain = AutoTokenizer.from_pretrained(folder)
        assert ids(plain, TEXTS, special=True) == of_file(folder, TEXTS, special=True) == before
        assert plain.get_vocab() == read.get_vocab() and plain.special_tokens_map == read.special_tokens_map
        assert plain.init_kwargs["threestep"] == {"prompt_style": "human_assistant"}


@pytest.mark.parametrize(("file", "family", "tokenizer_class"), READ_RIGHT)
def test_what_transformers_reads_right_stays(file, family, tokenizer_class, tmp_path):
    folder = folder_of(FILES[file], family, tokenizer_class, tmp_path)
    (read, sentence), plain = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert sentence is None and type(read) is type(plain)
    assert parts_of_tokenizer(read) == parts_of_tokenizer(plain)
    assert ids(read, TEXTS, special=True) == of_file(folder, TEXTS, special=True)


def test_a_class_adds_no_tokens_and_names_those_that_the_file_has(tmp_path):
    """Llama's bos and eos are those of its class, where tokenizer_config.json leaves them out."""
    folder = folder_of(FILES["gpt2"], "llama", "LlamaTokenizer", tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", bos_token=None, eos_token=None)
    read, _ = read_tokenizer(folder)
    assert (read.bos_token, read.eos_token, read.unk_token) == ("<s>", "</s>", None)
    assert "<unk>" in AutoTokenizer.from_pretrained(folder).get_vocab() and "<unk>" not in read.get_vocab()


def test_a_sentencepiece_model_that_transformers_misreads_is_refused(tiny_tokenizer, tmp_path, monkeypatch):
    """As Mistral's tokenizer.model without a tokenizer.json, of whose texts transformers leaves out the first space."""
    (tmp_path / "tokenizer.model").write_bytes(b"a model")
    read = SimpleNamespace(encode=lambda text: tokenizers.text_ids(tiny_tokenizer, [text])[0])
    package = SimpleNamespace(SentencePieceProcessor=lambda model_file: read)
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: package)
    monkeypatch.setattr(tokenizers, "import_module", lambda name: package)
    tokenizers._check_sentencepiece(tiny_tokenizer, tmp_path)
    read.encode = lambda text: [0]
    with pytest.raises(ThreestepError, match="has a tokenizer.model but no tokenizer.json, and transformers splits"):
        tokenizers._check_sentencepiece(tiny_tokenizer, tmp_path)


def test_a_class_of_the_models_own_code_is_kept(tmp_path):
    folder = folder_of(FILES["gpt2"], "llama", "Shouting", tmp_path)
    (tmp_path / "shouting.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\nclass Shouting(PreTrainedTokenizerFast):\n    pass\n"
    )
    edit_json(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "shouting.Shouting"]})
    read, sentence = read_tokenizer(folder, trust_remote_code=True)
    assert type(read).__name__ == "Shouting" and sentence is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text(alphabet=st.sampled_from("aI'Sdn't 0123\n\r\té\u0301你🍐_-.▁<>"), max_size=12), min_size=1, max_size=4
    )
)
@pytest.mark.parametrize("case", MISREAD[:2] + MISREAD[-3:])
def test_any_text(case, tmp_path_factory, texts):
    name = "any_" + "_".join(case)
    folder = tmp_path_factory.getbasetemp() / name
    if not folder.is_dir():
        folder_of(FILES[case[0]], case[1], case[2], folder)
        _READ[name] = read_tokenizer(folder)[0]
    assert ids(_READ[name], texts, special=True) == of_file(folder, texts, special=True)


_READ: dict[str, PreTrainedTokenizerFast] = {}
