"""Tokenizers are those of their tokenizer.json, whatever class transformers would build over it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.utils.base.errors import ThreestepError
from training.utils.data.fingerprint import parts_of_tokenizer
from training.utils.loading import tokenizers
from training.utils.loading.tokenizers import PROBES, load_tokenizer, read_tokenizer, same_tokenizer

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
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": tokenizer_class}))
    return str(folder)


def ids(tokenizer, texts, special=False):
    return tokenizer(list(texts), add_special_tokens=special)["input_ids"]


def of_file(folder, texts, special=False):
    raw = Tokenizer.from_file(f"{folder}/tokenizer.json")
    return [each.ids for each in raw.encode_batch(list(texts), add_special_tokens=special)]


@pytest.mark.parametrize(("file", "family", "tokenizer_class"), MISREAD)
def test_the_file_counts(file, family, tokenizer_class, tmp_path):
    folder = folder_of(FILES[file], family, tokenizer_class, tmp_path / "model")
    plain = AutoTokenizer.from_pretrained(folder)
    read, sentence = read_tokenizer(folder)
    assert f"'{folder}' is its tokenizer.json; transformers' {type(plain).__name__} would " in sentence
    for special in (False, True):
        assert ids(read, TEXTS, special) == of_file(folder, TEXTS, special)
    assert ids(read, ["a<tool>b</s>"]) == of_file(folder, ["a<tool>b</s>"])
    assert len(read) == Tokenizer.from_file(f"{folder}/tokenizer.json").get_vocab_size()
    assert (read.bos_token, read.eos_token, read.pad_token) == tuple(TOKENS)
    assert (read.chat_template, read.model_max_length) == (TEMPLATE, 77)
    assert read.init_kwargs["threestep"] == {"prompt_style": "human_assistant"}
    assert ids(load_tokenizer(folder), TEXTS) == of_file(folder, TEXTS)


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


def test_rows_of_another_reading_are_not_taken_from_the_cache(tmp_path):
    folder = folder_of(FILES["cl100k"], "llama", "LlamaTokenizerFast", tmp_path)
    read, plain = read_tokenizer(folder)[0], AutoTokenizer.from_pretrained(folder)
    assert parts_of_tokenizer(read)["tokenizer"] != parts_of_tokenizer(plain)["tokenizer"]
    assert not same_tokenizer(read, plain) and same_tokenizer(read, read_tokenizer(folder)[0])


def test_a_class_adds_no_tokens_and_names_those_that_the_file_has(tmp_path):
    """Llama's bos and eos are those of its class, where tokenizer_config.json leaves them out."""
    folder = folder_of(FILES["gpt2"], "llama", "LlamaTokenizer", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: value for name, value in config.items() if name not in ("bos_token", "eos_token")})
    )
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
    with pytest.raises(ThreestepError, match="has a tokenizer.model and no tokenizer.json, and transformers makes"):
        tokenizers._check_sentencepiece(tiny_tokenizer, tmp_path)


def test_a_line_is_logged_once(tmp_path, capsys):
    folder = folder_of(FILES["cl100k"], "llama", "LlamaTokenizerFast", tmp_path)
    for _ in range(2):
        load_tokenizer(folder)
    assert capsys.readouterr().out.count("is its tokenizer.json; transformers' LlamaTokenizer would") == 1


def test_a_class_of_the_models_own_code_is_kept(tmp_path):
    folder = folder_of(FILES["gpt2"], "llama", "Shouting", tmp_path)
    (tmp_path / "shouting.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n"
        "class Shouting(PreTrainedTokenizerFast):\n"
        "    def __init__(self, **settings):\n"
        "        super().__init__(**settings)\n"
    )
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": [None, "shouting.Shouting"]}})
    )
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
