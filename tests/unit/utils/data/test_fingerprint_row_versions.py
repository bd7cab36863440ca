"""Rows of every form of data, by recorded digests: where one changes, its version in `fingerprint` must change too.

The tokenizer has one token for each byte and is written down here, so that every version of tokenizers gives the same
ids. Pictures are left out of rows: their tokens follow from the library's processors.
"""

from __future__ import annotations

import csv
import hashlib
import json

import pytest

from tests.support.data_flags import raw_dataset_of
from tests.support.pair_rows import Own, all_rows
from tests.support.said import says
from training.utils.contracts.rows import ResponsesRow, SentenceRow
from training.utils.data.build.build import build_phase
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.fingerprint import CLASSES
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.rows.tokenize import TextTokenizer

END, PAD = "<|endoftext|>", "<|pad|>"
TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAIRS = [
    {
        "prompt": f"Human: {'Tell me more about it. ' * (i % 4)}What is {i} + {i % 7}? é中 Assistant:",
        "chosen": f" {i} + {i % 7} is {i + i % 7}." + " Sure." * (i % 3),
        "rejected": f" It is {i}.",
    }
    for i in range(24)
]
QUESTIONS = [{"question": f"What comes after {i}?", "answer": f"{i + 1}", "rejected": f"{i - 1}"} for i in range(24)]


SYSTEM, HELLO = says("system", "Be brief."), says("assistant", "Hello.")
CHATS = [
    {
        "messages": [
            SYSTEM,
            says("user", f"Hi {i}"),
            HELLO,
            says("user", "Bye" * (1 + i % 3)),
            says("assistant", f"Bye {i}."),
        ]
    }
    for i in range(24)
]
CHAT_PAIRS = [
    {
        "prompt": [says("user", f"Count to {i}")],
        "chosen": [says("assistant", " ".join(map(str, range(1, i + 1))))],
        "rejected": [says("assistant", "No.")],
    }
    for i in range(1, 25)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"Hi {i}"}, {"from": "gpt", "value": "Hello" + "!" * (i % 4)}]}
    for i in range(24)
]
RANKED = [
    {"prompt": f"Human: {i}? Assistant:", "responses": [f" {i}", f" {i}.", " no"][: 2 + i % 2], "margin": i / 4}
    for i in range(24)
]
VERL = [
    {
        "data_source": "sums",
        "prompt": [says("user", f"{i} + 1 =")],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"level": i % 3},
    }
    for i in range(24)
]
SHARED = {"data_split": "2,4,4", "eval_fraction": 0.25}
CUT = {"max_seq_len": 80, "max_prompt_seq_len": 60}
PLAIN = {"prompt_style": "human_assistant"}

# phase, rows, flags, digest
BUILT = {
    "1 pairs": (1, PAIRS, {}, "854515a527db1423"),
    "1 pairs, cut right": (1, PAIRS, CUT, "0a9261e64ea21c92"),
    "1 pairs, cut left": (1, PAIRS, {**CUT, "truncation": "left"}, "14494bc95097cbde"),
    "1 pairs, cut in the middle": (1, PAIRS, {**CUT, "truncation": "middle"}, "154aedb7c3864947"),
    "1 pairs, long ones dropped": (1, PAIRS, {**CUT, "truncation": "drop"}, "208c9c68a6757c7b"),
    "1 pairs, loss on the conversation": (1, PAIRS, {"loss_on": "conversation"}, "ae1cf58ec7510052"),
    "1 pairs of a chat template": (1, QUESTIONS, {"prompt_style": "chat_template"}, "a342e3e876f60a71"),
    "1 questions": (1, QUESTIONS, {}, "5edbf5129b20a7a5"),
    "1 messages": (1, CHATS, {}, "02d0b70befefa321"),
    "1 messages, the last turn": (1, CHATS, {"train_turns": "last"}, "ab3cd5c872453ad4"),
    "1 messages, cut left": (1, CHATS, {"max_seq_len": 72, "truncation": "left"}, "8d71eeed112cac56"),
    "1 ShareGPT": (1, SHAREGPT, {"prompt_style": "chat_template"}, "8cf64efb43493d8e"),
    "2 pairs": (2, PAIRS, {}, "a0a290a69c99b79c"),
    "2 pairs, cut right": (2, PAIRS, CUT, "2763355b68691422"),
    "2 pairs, cut left": (2, PAIRS, {**CUT, "truncation": "left"}, "53d694a2702e4e22"),
    "2 pairs, cut in the middle": (2, PAIRS, {**CUT, "truncation": "middle"}, "1185a7a682bc4794"),
    "2 pairs of messages": (2, CHAT_PAIRS, {}, "6f3242546e1bbee5"),
    "2 ranked": (2, RANKED, {"responses_column": "responses", "margin_column": "margin"}, "73a80b93e06b67bb"),
    "3 pairs": (3, PAIRS, {}, "8f7397d4993a9714"),
    "3 pairs, cut left": (3, PAIRS, {**CUT, "prompt_truncation": "left"}, "1a9561bd3426c2c0"),
    "3 pairs, cut in the middle": (3, PAIRS, {**CUT, "prompt_truncation": "middle"}, "3c21ffca81154994"),
    "3 pairs, long ones dropped": (3, PAIRS, CUT, "98b1d7074069240c"),
    "3 messages, all that is passed on": (
        3,
        CHATS,
        {"return_columns": ["raw_prompt_ids", "raw_prompt", "full_prompts"]},
        "572767ed45ec811a",
    ),
    "3 verl": (3, VERL, {}, "0b7fe07fd1e72ad7"),
    "1 pairs split 2,4,4": (1, PAIRS, SHARED, "8fb466be128418cf"),
    "2 pairs split 2,4,4": (2, PAIRS, SHARED, "5e2410951bb00128"),
    "3 pairs split 2,4,4": (3, PAIRS, SHARED, "cbb653c31eb2add7"),
}
RECORDED = {name: case[-1] for name, case in BUILT.items()} | {
    "unsupervised": "f086dd483beba974",
    "class raw_dataset": "fc164c8714758587",
    "class file_dataset": "5b0cd14e0839953e",
    "class row_maker": "46ed5f554ce77229",
}


def byte_tokenizer():
    """A tokenizer of one token for each byte and each special token; no training, no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    made.chat_template = TEMPLATE
    return made


def content(row):
    """A row as JSON values; what it says of pictures is left out."""
    if isinstance(row, SentenceRow):
        return [row.row_id, row.input_ids.tolist(), row.loss_mask.tolist(), row.form and row.form.numbers]
    if isinstance(row, ResponsesRow):
        margins = None if row.margins is None else row.margins.tolist()
        responses = [ids.tolist() for ids in row.response_ids]
        return [row.row_id, row.prompt_ids.tolist(), responses, margins, row.form and row.form.numbers]
    return [row.row_id, row.flipped_prompt_ids.tolist(), row.prompt_text, row.reference, row.columns]


def digest(values):
    text = json.dumps(list(values), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(what, entry, values):
    """Fail with what to do where rows differ from the recorded ones."""
    got = digest(values)
    assert got == RECORDED[what], (
        f"{what}: rows changed. Where that is meant, give {entry} in training/utils/data/fingerprint.py "
        f"another text, so that caches are built again, and record the new digest here: {got!r}"
    )


@pytest.mark.parametrize("name", BUILT)
def test_rows_of_a_phase(name, flags, write_rows, tmp_path, monkeypatch):
    phase, rows, given, _ = BUILT[name]
    write_rows(rows)
    monkeypatch.chdir(tmp_path)  # the address stands in the rows of phase 3
    style = {} if rows in (CHATS, CHAT_PAIRS, VERL) else PLAIN
    given = {"data_split": {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}[phase], "eval_fraction": 0.0, **style, **given}
    data = flags(data_path=["jsonl:rows.jsonl"], **given)
    built = build_phase(phase, data, byte_tokenizer(), seed=1)
    assert (built.report.train.truncated > 0) == ("cut" in name)
    assert built.report.train.dropped or "dropped" not in name
    compare(name, "ROWS", map(content, all_rows(built)))


def texts_of(raw):
    """Everything that rows of a dataset class are made from."""
    getters = (
        raw.get_prompt, raw.get_chosen, raw.get_rejected, raw.get_prompt_and_chosen, raw.get_prompt_and_rejected,
        raw.get_prompt_messages, raw.get_chosen_messages, raw.get_rejected_messages, raw.get_responses,
        raw.get_margin, raw.get_mark, raw.get_reference, raw.get_extra,
    )  # fmt: skip
    for rows in (raw.get_train_data(), raw.get_eval_data()):
        for row in [] if rows is None else [rows[place] for place in range(min(len(rows), 64))]:
            yield [getter(row) for getter in getters]


def of_generated(flags, **_):
    maker = PromptMaker(flags(data_path=[], **PLAIN), byte_tokenizer())
    yield content(maker.make("Human: 2 + 3? Assistant:", {"answer": 5}, 7, level=2))
    yield content(maker.make([{"role": "user", "content": "2 + 3?"}], "5", 8))
    yield dict(maker.counts.dropped)


def of_files(flags, write_rows, tmp_path, **_):
    with open(tmp_path / "rows.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(QUESTIONS[0]))
        writer.writeheader()
        writer.writerows(QUESTIONS)
    every = {"pairs": PAIRS, "chats": CHATS, "chat_pairs": CHAT_PAIRS, "sharegpt": SHAREGPT, "verl": VERL}
    names = [f"jsonl:{write_rows(rows, f'{name}.jsonl')}" for name, rows in every.items()]
    for name in [*names, f"csv:{tmp_path / 'rows.csv'}"]:
        yield list(texts_of(raw_dataset_of(name, flags(data_path=[name]), 1)))


class Talks(PromptRawDataset):
    """Messages alone, from which the contract's defaults make the prompt's and the response's."""

    def load_raw_datasets(self, dataset_name):
        return None

    def get_train_data(self):
        return [row["messages"] for row in CHATS]

    def get_messages(self, sample):
        return sample


def of_contract(**_):
    for made in (Own, Talks):
        yield list(texts_of(made("", 1, 0, "own")))


MADE_BY = {
    "raw_dataset": of_contract,
    "file_dataset": of_files,
    "row_maker": of_generated,
}


@pytest.mark.parametrize("entry", CLASSES)
def test_rows_of_the_package_s_classes(entry, flags, write_rows, tmp_path, monkeypatch):
    values = MADE_BY[entry](flags=flags, write_rows=write_rows, tmp_path=tmp_path, monkeypatch=monkeypatch)
    compare(f"class {entry}", f"CLASSES[{entry!r}]", values)


def test_other_rows_are_noticed(flags, write_rows, tmp_path, monkeypatch):
    """A sentence without its end-of-conversation token is another row, and the message says what to do."""
    encode = TextTokenizer.encode_answers
    monkeypatch.setattr(TextTokenizer, "encode_sentences", lambda self, *words: encode(self, *words))
    with pytest.raises(AssertionError, match=r"1 pairs: rows changed. Where that is meant, give ROWS in training/.*"):
        test_rows_of_a_phase("1 pairs", flags, write_rows, tmp_path, monkeypatch)
