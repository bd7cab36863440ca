"""Templates that loop or multiply end in a sentence: at their first renderings, and at a row that they do so for."""

from __future__ import annotations

import threading
import time

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.chat import rendering
from training.utils.data.chat.rendering import ChatTemplate, TemplateRefused

GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG_ROW = [{"role": "user", "content": "a very particular question"}]


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    monkeypatch.setattr(rendering, "TRIAL_SECONDS", 1)
    monkeypatch.setattr(rendering, "MOST_BYTES", 256 << 20)
    monkeypatch.setattr(rendering, "MOST_CHARACTERS", 1 << 20)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LOOPS, "takes more than 1 seconds for three short conversations"),
        ("{% set x = namespace(n=2) %}{% for a in range(99) %}{% set x.n = x.n ** 9 %}{% endfor %}", "takes more than"),
        ("{{ 'a' * 10**10 }}", "takes more than 256 MiB of memory"),
        ("{{ 'a' * 10**12 }}", "takes more than 256 MiB of memory"),
        ("{{ messages[0].content * 100000000 }}", "takes more than 256 MiB of memory"),
        (GOOD + "{{ '%1000000000d' % 1 }}", "takes more than 256 MiB of memory"),
        (GOOD + "{{ 'a' * 2**20 }}", "writes more than 1,048,576 characters"),
        ("{% if tools %}" + LOOPS + "{% endif %}", "takes more than 1 seconds"),
        ("{% if add_generation_prompt %}" + LOOPS + "{% endif %}", "takes more than 1 seconds"),
        ("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}" + "{% for a in range(90000) %}{{ messages|tojson }}" * 3
         + "{% endfor %}" * 3, "takes more than"),
    ],
)  # fmt: skip
def test_a_template_without_bounds_is_refused(text, sentence):
    began = time.monotonic()
    with pytest.raises(ThreestepError, match=f"the chat template .*{sentence}"):
        ChatTemplate(text, {})
    assert time.monotonic() - began < 20


def test_a_good_template_is_tried_once_and_one_that_refuses_is_no_matter_here(monkeypatch):
    tried = []
    monkeypatch.setattr("training.utils.data.chat.rendering.check_first_renderings", tried.append)
    for _ in range(3):
        ChatTemplate(GOOD + "{# once #}", {})
    assert len(tried) == 1
    monkeypatch.undo()
    ChatTemplate("{{ raise_exception('no') }}{# refuses #}", {})
    assert ChatTemplate(GOOD, {}).render([{"role": "user", "content": "Hi"}]).text == "user: Hi\n"


def test_a_row_for_which_it_loops_ends_in_a_sentence_in_any_thread(monkeypatch):
    template = ChatTemplate(GOOD + "{% if 'particular' in messages[0].content %}" + LOOPS + "{% endif %}", {})
    monkeypatch.setattr(rendering, "RENDERING_SECONDS", 0.4)
    monkeypatch.setattr(rendering, "_watched_process", 0)  # a thread that looks so often
    problems = []

    def render():
        try:
            template.render(LONG_ROW)
        except ThreestepError as problem:
            problems.append(str(problem))

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    render()
    for thread in threads:
        thread.join(20)
    expected = "the chat template takes more than 0.4 seconds for a conversation of 1 messages; mend its loops"
    assert len(problems) == 3 and all(problem.startswith(expected) for problem in problems)
    assert rendering._deadlines == {}
    assert template.render([{"role": "user", "content": "Hi"}]).text == "user: Hi\n"


def test_a_template_that_calls_itself_for_ever_is_a_refusal(monkeypatch):
    # Jinja rewrites a traceback of a thousand frames, which takes half a second of an idle processor in the trial.
    monkeypatch.setattr(rendering, "TRIAL_SECONDS", 10)
    template = ChatTemplate("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", {})
    with pytest.raises(TemplateRefused, match="recursion"):
        template.render([{"role": "user", "content": "Hi"}])


def test_a_row_for_which_it_writes_too_much_is_a_sentence(monkeypatch):
    template = ChatTemplate(GOOD, {})
    monkeypatch.setattr(rendering, "MOST_CHARACTERS", 100)
    with pytest.raises(ThreestepError, match="writes 207 characters for a conversation of 1 messages, more than 100"):
        template.render([{"role": "user", "content": "a" * 200}])
