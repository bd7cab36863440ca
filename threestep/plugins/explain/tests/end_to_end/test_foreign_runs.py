"""Runs and records of others are data: nothing of theirs is run or fetched without --trust_run."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest
import yaml

from tests.malformed_files import make_runs, outcome
from threestep.plugins.audit import __main__ as audit
from threestep.plugins.explain import __main__ as explain

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    make_runs(folder, ["sft"])
    return folder


@pytest.fixture
def foreign(runs: Path, tmp_path: Path) -> Path:
    """A copy of a run, whose code says where it ran: a dataset module, a tokenizer and a model with code."""
    run = tmp_path / "run"
    shutil.copytree(runs / "sft", run)
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n"
    (tmp_path / "module.py").write_text(code)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"dataset_module": [str(tmp_path / "module.py")], "data_path": [f"jsonl:{runs / 'rows.jsonl'}"]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "model" / "evil.py").write_text(code)
    return run


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_explain_runs_no_module_of_a_record(foreign: Path, tmp_path: Path):
    record = str(foreign / "records" / "step_000002")
    found = outcome(lambda: explain.main([record, "--out", str(tmp_path / "out")]))
    assert found.code == 0, found.said
    assert not (tmp_path / "ran").exists()
    assert "add --trust_run if you trust the run" in (tmp_path / "out" / "explained.html").read_text()
    found = outcome(lambda: explain.main([record, "--out", str(tmp_path / "out"), "--trust_run"]))
    assert (tmp_path / "ran").exists(), found.said


def test_explain_runs_no_code_of_a_tokenizer_and_asks_nobody(foreign: Path, tmp_path: Path, monkeypatch):
    def ask(*_: object) -> str:
        raise AssertionError("nobody is asked")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 1)
    record, out = str(foreign / "records" / "step_000002"), str(tmp_path / "out")
    _change(foreign / "model" / "config.json", auto_map={"AutoConfig": "evil.C"}, model_type="evil")
    found = outcome(lambda: explain.main([record, "--out", out]))
    assert found.code in (0, 2), found.said
    _change(foreign / "model" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    found = outcome(lambda: explain.main([record, "--out", out]))
    assert (
        found.code == 2
        and "has its own Python code, which is not run by default; choose another with --tokenizer" in found.said
    )
    assert not (tmp_path / "ran").exists()


def test_explain_fetches_no_address_of_a_record(foreign: Path, tmp_path: Path):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = yaml.safe_load((foreign / "config.yaml").read_text())
    address = f"jsonl:http://127.0.0.1:{server.server_port}/rows.jsonl"
    (foreign / "config.yaml").write_text(yaml.safe_dump({**config, "data_path": [address], "dataset_module": []}))
    record = str(foreign / "records" / "step_000002")
    found = outcome(lambda: explain.main([record, "--out", str(tmp_path / "out")]))
    server.shutdown()
    assert found.code == 0 and not asked, (found.said, asked)


def test_two_runs_are_compared_and_none_is_run(runs: Path, foreign: Path, tmp_path: Path):
    lines = (foreign / "digests.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    last["figures"]["train/loss"] = 123.0
    (foreign / "digests.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    found = outcome(lambda: audit.main([str(runs / "sft"), str(foreign)]))
    assert found.code == 1 and "next: --trust_run reruns both" in found.said, found.said
    assert not (tmp_path / "ran").exists()


def test_a_step_is_not_run_again_of_a_run_that_is_not_trusted(foreign: Path, tmp_path: Path):
    shutil.rmtree(foreign / "records")
    found = outcome(lambda: explain.main([str(foreign), "--step", "2", "--out", str(tmp_path / "out")]))
    assert found.code == 2 and "add --trust_run" in found.said
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out" / "again").exists()
