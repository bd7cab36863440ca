"""Credentials in addresses: recognised in every form, left out of what is written, given back by the environment."""

from __future__ import annotations

import dataclasses
import io
import typing

import pytest
import yaml

from training.utils.base import credentials
from training.utils.base.console import log, note
from training.utils.base.credentials import (
    ADDRESSES_VARIABLE,
    RedactedStream,
    hide,
    hide_environment,
    lend,
    redacted,
    redacted_value,
    restored,
)
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import ProgramParser, parse_arguments, resolved_settings
from training.utils.flags.step import known_steps
from training.utils.run.run_folder import RunFolder

PASSWORD, SIGNATURE = "Pa55w0rd-of-mine", "0123456789abcdef0123456789abcdef"
ADDRESS = f"https://me:{PASSWORD}@host.example/rows.jsonl?X-Amz-Date=20261124&X-Amz-Signature={SIGNATURE}"
BARE = "https://***@host.example/rows.jsonl?X-Amz-Date=***&X-Amz-Signature=***"


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch):
    monkeypatch.setattr(credentials, "_hidden", set())


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (ADDRESS, BARE),
        (f"jsonl:{ADDRESS}", f"jsonl:{BARE}"),
        (f"error: '{ADDRESS}' could not be read", f"error: '{BARE}' could not be read"),
        (f"zip://rows.csv::{ADDRESS}", f"zip://rows.csv::{BARE}"),
        ("s3://AKIA:ab/cd+ef@bucket/rows.parquet", "s3://***@bucket/rows.parquet"),
        ("https://u:p@ss@host/x", "https://***@host/x"),
        ("https://u:p?a#ss@host/x", "https://***@host/x"),
        ("https://token-alone@host/x", "https://***@host/x"),
        ("https://me:a'b\"c<d>@host/x", "https://***@host/x"),
        ("'https://host/x' and \"https://host:80/y\",'a@b'", "'https://host/x' and \"https://host:80/y\",'a@b'"),
        ("https://h/x?sv=1&sig=a%2Fb%3D&download=true", "https://h/x?sv=***&sig=***&download=true"),
        ("https://h/x?c2VjcmV0LXNlY3JldA", "https://h/x?***"),
        ("https://h/x#access_token=abc", "https://h/x#access_token=***"),
        ("https://h:8080/path@v1/x", "https://h:8080/path@v1/x"),
        ("https://h/path@v1/x?download=true&versionId=3", "https://h/path@v1/x?download=true&versionId=3"),
        ("hub:a/b,config=main,revision=x", "hub:a/b,config=main,revision=x"),
        ("s3://bucket/part-?-*.jsonl", "s3://bucket/part-?-*.jsonl"),
        ("runs/a?b=c", "runs/a?b=c"),
        ("", ""),
    ],
)
def test_credentials_are_left_out_of_addresses_and_nothing_else_is(text, bare):
    assert redacted(text) == bare == redacted(bare)


def test_what_is_hidden_is_left_out_wherever_it_stands():
    hide([[{"x": ADDRESS}]])
    for form in (PASSWORD, SIGNATURE, "bWU6UGE1NXcwcmQtb2YtbWluZQ=="):
        assert redacted(f"401 for {form}!") == "401 for ***!"
    assert redacted("me") == "me" and redacted("20261124") == "20261124"
    given = {"a": [ADDRESS, 1, None], "b": {"c": (ADDRESS, True)}}
    assert redacted_value(given) == {"a": [BARE, 1, None], "b": {"c": (BARE, True)}}
    assert str(ThreestepError(f"'{ADDRESS}' is wrong")) == f"'{BARE}' is wrong"
    for whole, shown in ((False, "https://x/?a=1"), (True, "https://x/?a=***")):  # of errors every address
        stream = io.StringIO()
        wrapped = RedactedStream(stream, whole)
        wrapped.writelines([f"{PASSWORD} ", "https://x/?a=1"])
        assert stream.getvalue() == f"*** {shown}" and wrapped.getvalue() == stream.getvalue()


@pytest.mark.parametrize("secret", ["it's-a-pass", 'a"pass', "a<pass>"])
@pytest.mark.parametrize("reader", ["", "jsonl:"])
def test_a_flags_address_is_hidden_whatever_its_password_holds(secret, reader):
    hide([f"{reader}https://me:{secret}@host/x"])
    assert redacted(f"401 for {secret}!") == "401 for ***!"
    assert redacted(f"GET {reader}https://me:{secret}@host/x") == f"GET {reader}https://***@host/x"


def test_secrets_of_the_environment_are_hidden_and_paths_are_not():
    secrets = {
        "HF_TOKEN": "hf_abcdefgh", "WANDB_API_KEY": "0f" * 20, "AWS_SECRET_ACCESS_KEY": "a/b" * 9,
        "X_PASSWORD": "hunter22", "PGPASSWORD": "postgres-secret", "MYSQL_PWD": "mysql-secret",
        "AZURE_STORAGE_CONNECTION_STRING": "AccountName=x;AccountKey=y", "SSHPASS": "ssh-secret",
        "GITHUB_PAT": "github_pat_1", "ANAPIKEY": "an-api-key", "DATABASE_PASS": "db-secret",
        "all_proxy": "me:proxy-secret@proxy:3128",
        "MLFLOW_TRACKING_PASSWORD": "mlflow-secret", "HTTPS_PROXY": "http://me:proxy-password@proxy:3128",
    }  # fmt: skip
    plain = {
        "TOKENIZERS_PARALLELISM": "falsefalse",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "A_KEY": "short",
        "PWD": "/home/me/runs",
        "COMPAT": "compatible",
    }
    hide_environment({**secrets, **plain})
    addresses = ("all_proxy", "HTTPS_PROXY")
    for value in (*(secrets[name] for name in secrets if name not in addresses), "proxy-password", "proxy-secret"):
        assert value not in redacted(f"it is {value}")
    for value in plain.values():
        assert redacted(value) == value


def test_a_redacted_address_is_restored_from_the_environment(monkeypatch):
    environment: dict[str, str] = {}
    lend({"data_path": [f"jsonl:{ADDRESS}", "plain.jsonl"], "other": 1}, environment)
    lend([f"jsonl:{ADDRESS}"], environment)
    assert environment == {ADDRESSES_VARIABLE: f"jsonl:{ADDRESS}"}
    assert restored(f"jsonl:{BARE}", environment) == f"jsonl:{ADDRESS}"
    assert restored(f"csv:{BARE}", {ADDRESSES_VARIABLE: ADDRESS}) == f"csv:{ADDRESS}"
    assert restored("jsonl:a.jsonl", {}) == "jsonl:a.jsonl"
    assert restored(f"jsonl:{BARE}", {}) is None
    assert restored(BARE, {ADDRESSES_VARIABLE: "https://me:pw@other.example/rows.jsonl"}) is None


@dataclasses.dataclass
class Named:
    data_path: str = "none"


def test_a_configuration_without_credentials_asks_for_them(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(ADDRESSES_VARIABLE, raising=False)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data_path": BARE}))
    with pytest.raises(ThreestepError) as raised:
        parse_arguments([Named], ["--config", str(config)], "")
    sentence = str(raised.value)
    assert sentence.startswith(f"--data_path: the credentials in '{BARE}' are not saved; pass the full address")
    (named,) = parse_arguments([Named], ["--config", str(config), "--data_path", ADDRESS], "")
    assert named.data_path == ADDRESS  # as the sentence says
    monkeypatch.setenv(ADDRESSES_VARIABLE, ADDRESS)
    (named,) = parse_arguments([Named], ["--config", str(config)], "")
    assert named.data_path == ADDRESS and resolved_settings([named]) == {"data_path": BARE}
    parser = ProgramParser("x", "x")
    parser.add_argument("--data_path")
    assert parser.parse(["--data_path", BARE]).data_path == ADDRESS
    log(f"reading {ADDRESS}")
    note(f"reading {PASSWORD}")
    said = capsys.readouterr()
    assert said.out == f"reading {BARE}\n" and said.err == "reading ***\n"


def flags_of_text(kind):
    """Yield every flag of a dataclass, or of those that it is made of, that takes a text."""
    kinds = [field.type for field in dataclasses.fields(kind)]
    members = [hint for hint in typing.get_type_hints(kind).values() if dataclasses.is_dataclass(hint)]
    if len(members) == len(kinds):
        yield from (flag for member in members for flag in flags_of_text(member))
    else:
        yield from (field.name for field in dataclasses.fields(kind) if "str" in str(field.type))


def check_flags_of_text(kinds, old_flags, place, capsys):
    """A secret in any flag of text is in no message and in no file."""
    flags = [flag for kind in kinds for flag in flags_of_text(kind)]
    for flag in flags:
        message, settings = "", {}
        try:
            settings = resolved_settings(parse_arguments(kinds, [f"--{flag}", f"jsonl:{ADDRESS}"], "", old_flags))
        except ThreestepError as mistake:
            message = str(mistake)
        folder = RunFolder(place / flag, True)
        folder.write_config({"settings": settings, "raw": {flag: ADDRESS}}, "a run")
        folder.write_json("environment.json", {"message": message, "raw": [ADDRESS]})
        left = "".join(path.read_text() for path in (place / flag).iterdir())
        said = capsys.readouterr()
        for secret in (PASSWORD, SIGNATURE):
            assert secret not in message + left + said.out + said.err + repr(settings), flag
    assert len(flags) >= 10


@pytest.mark.parametrize("program", known_steps())
def test_a_secret_in_any_flag_of_text_is_in_no_message_and_no_file(program, tmp_path, capsys):
    step = known_steps()[program]
    check_flags_of_text(step.groups, step.old_flags, tmp_path, capsys)
