"""All mistakes in the data flags are found at once, before data is read."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from training.utils.base.errors import Mistakes
from training.utils.contracts.drawing import TextForm
from training.utils.data import arguments
from training.utils.data.arguments import DataArguments, OptionalDataArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import note_mistakes
from training.utils.plugins.plugin import RowFormEntry


def sentences_of(arguments: DataArguments) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences


@pytest.mark.needs_plugin("embedded")
def test_flags_by_deepspeed_chats_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "chosen": "c"}\n')
    (arguments,) = parse_arguments(
        (DataArguments,),
        "--data_path embedded jsonl:a.jsonl --data_split 6,2,2 --sft_only_data_path jsonl:a.jsonl "
        "--max_seq_len 99 --max_prompt_seq_len 33 --data_output_path out "
        "--max_eval_rows 7 --rebuild_cache".split(),
        "",
    )
    assert arguments.source.data_path == ["embedded", "jsonl:a.jsonl"]
    assert arguments.source.sft_only_data_path == ["jsonl:a.jsonl"]
    assert arguments.split.data_split == "6,2,2"
    assert (arguments.rows.max_seq_len, arguments.rows.max_prompt_seq_len) == (99, 33)
    assert arguments.cache.rebuild_cache is True and arguments.split.max_eval_rows == 7


@pytest.mark.parametrize(
    ("flag", "name"),
    [("max_samples", "max_train_rows"), ("train_max_samples", "max_train_rows"), ("val_max_samples", "max_eval_rows")],
)
def test_rows_by_verls_names(tmp_path, flag, name):
    (by_flag,) = parse_arguments((OptionalDataArguments,), [f"--{flag}", "7"], "")
    (tmp_path / "run.yaml").write_text(f"{flag}: 7\n")
    (by_file,) = parse_arguments((OptionalDataArguments,), ["--config", str(tmp_path / "run.yaml")], "")
    assert getattr(by_flag.split, name) == getattr(by_file.split, name) == 7


def test_the_defaults_are_sound(flags):
    assert sentences_of(flags()) == []
    assert DataArguments().split.data_split == "auto"
    words = ["--prompt_style", "chat_template", "--chat_template_kwargs", '{"a": 1, "enable_thinking": false}']
    (arguments,) = parse_arguments((OptionalDataArguments,), words, "")
    assert arguments.chat.template_kwargs == {"a": 1, "enable_thinking": False}
    assert DataArguments().chat.template_kwargs == {} and DataArguments().chat.prompt_style == "auto"
    assert "~" not in DataArguments().cache.cache_dir and not DataArguments().cache.cache_dir.startswith("/tmp")


@pytest.mark.needs_plugin("embedded")
def test_every_mistake_at_once(flags):
    wrong = flags(
        data_path=["jsonl:missing.jsonl", "embeded"],
        data_split="1,2",
        sft_only_data_path=["Dahoas/rm-statik"],
        dataset_module=["no_such_file.py"],
        truncation="rigth",
        prompt_truncation="none",
        loss_on="prompt",
        eval_fraction=1.0,
        max_seq_len=1,
        max_prompt_seq_len=0,
        max_train_rows=0,
        max_eval_rows=-1,
        data_format="sharegtp",
    )
    found = sentences_of(wrong)
    for fragment in (
        "does not exist",
        "there is no file or dataset 'embeded'; did you mean 'embedded'",
        "--data_split expects three numbers",
        "--dataset_module expects a Python file, got 'no_such_file.py', which does not exist; correct the path",
        "--truncation expects one of right, left, middle, error, drop, got 'rigth'; did you mean 'right'",
        "--prompt_truncation expects one of",
        "--loss_on expects one of response, conversation",
        "--eval_fraction expects 0 or more and less than 1, got 1.0",
        "--max_seq_len expects 2 or more, got 1",
        "--max_prompt_seq_len expects 1 or more, got 0",
        "--max_train_rows expects 1 or more, got 0",
        "--max_eval_rows expects 1 or more, got -1",
        "--data_format expects one of preference, ",
        "got 'sharegtp'; did you mean 'sharegpt'",
    ):
        assert any(fragment in sentence for sentence in found), fragment
    assert len(found) == 14


def test_an_end_token_that_the_tokenizer_gains(flags):
    added = flags(end_of_conversation_token="<end>", add_end_of_conversation_token=True)
    assert added.tokens_in_need == ["<end>"] and sentences_of(added) == []
    assert flags(end_of_conversation_token="<end>").tokens_in_need == []
    assert sentences_of(flags(add_end_of_conversation_token=True)) == [
        "--add_end_of_conversation_token needs --end_of_conversation_token; set it to the token to add"
    ]


def test_two_plugins_that_each_ask_for_a_form_of_responses(flags, monkeypatch):
    class Asked(TextForm):
        def __init__(self, flag):
            self.flag = flag

        def check_model(self, model, masks_are_ours): ...

        def opened(self, tokenizer):
            return tokenizer

    forms = {name: RowFormEntry("", f"{__name__}:{name}") for name in ("one", "other")}
    monkeypatch.setattr(arguments, "added", lambda table, known: forms)
    monkeypatch.setattr(arguments, "named_object", lambda place: lambda given: Asked(f"--{place.rpartition(':')[2]}"))
    assert sentences_of(flags()) == ["--one and --other each set the form of the responses; keep only one of them"]
    forms.popitem()
    assert sentences_of(flags()) == [] and flags().opened_form("tokens") == "tokens"
    forms.clear()
    assert flags().opened_form("tokens") is None


@pytest.mark.needs_plugin("embedded")
def test_no_dataset_at_all(flags):
    (sentence,) = sentences_of(DataArguments())
    assert sentence.startswith("--data_path expects at least one dataset, got none; pass files (jsonl:PATH, ")
    assert "embedded" in sentence and "hub:" in sentence
    assert sentences_of(OptionalDataArguments()) == []
    assert sentences_of(flags(data_path=[], sft_only_data_path=["embedded"])) == []


def test_importing_the_flags_is_cheap():
    program = (
        "import sys; import training.utils.data.arguments, training.utils.data.registry;"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules]);"
        "import training.utils.setup.step_program; print('torch' in sys.modules)"
    )
    got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert got.stdout.split() == ["[]", "False"]


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"prompt_style": "chatml"}, "--prompt_style expects one of auto, human_assistant, .*, got 'chatml'"),
        ({"train_turns": "first"}, "--train_turns expects one of all, last, got 'first'"),
        ({"bad_conversations": "skip"}, "--bad_conversations expects one of error, drop, got 'skip'"),
        ({"chat_template_kwargs": "{}", "prompt_style": "human_assistant"},
         "--chat_template_kwargs needs --prompt_style chat_template, got human_assistant"),
        ({"chat_template": "no.jinja"}, "--chat_template expects a file, got 'no.jinja', which does not exist"),
        ({"chat_template": sys.executable}, "--chat_template expects a UTF-8 text file, got '.*': 'utf-8' codec"),
        ({"chat_template_kwargs": "{a: 1}"}, "--chat_template_kwargs expects a JSON object .* got '{a: 1}'"),
        ({"chat_template_kwargs": "[1]"}, "--chat_template_kwargs expects a JSON object"),
        ({"chat_template_kwargs": '{"tools": []}'}, "--chat_template_kwargs: tools come from the data"),
    ],
)  # fmt: skip
def test_mistakes_in_the_chat_flags(flags, given, fragment):
    (sentence,) = sentences_of(flags(**{"prompt_style": "chat_template", **given}))
    assert re.search(fragment, sentence)
