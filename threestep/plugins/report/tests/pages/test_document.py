"""The form of every page: its policy names the digests of its own scripts, and no text leaves its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from threestep.plugins.report.pages.document import document, scrolled, table, tiles

EVIL = "</script><script>alert(1)</script>"


def test_the_policy_names_each_script_and_no_other():
    text = document("t", "<p>b</p>", scripts=("let a = 1;", "let b = '<';"))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    digests = [
        base64.b64encode(hashlib.sha256(source).digest()).decode() for source in (b"let a = 1;", b"let b = '<';")
    ]
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'" in policy
    assert (
        "default-src 'none'" in policy and "connect-src" not in policy and "unsafe" not in policy.split("script-src")[1]
    )
    assert "script-src" not in document("t", "")
    assert "connect-src 'self'" in document("t", "", scripts=("1",), data={"live": {}})


def test_data_cannot_end_their_element():
    text = document(EVIL, "", scripts=("1",), data={"charts": {"label": EVIL}})
    assert text.count("<script>") == 1 and "alert(1)</script>" not in text.replace("&lt;", "")
    (held,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert json.loads(held) == {"label": EVIL}


def test_tables_and_tiles_hold_texts():
    text = table(["", EVIL], [(EVIL, "1")]) + tiles([(EVIL, "0.5 (0.4 to 0.6)")]) + scrolled("", EVIL)
    assert "<script" not in text
    assert text.startswith("<table><tr><td></td><th")  # a heading without a word is none
    assert '<b>0.5</b><span class="soft">0.4 to 0.6</span>' in text
    assert 'tabindex="0" role="region"' in text  # what scrolls does so by the keyboard too


def test_late_data_stand_after_the_scripts():
    text = document("t", "", scripts=("1",), data={"first": 1}, late={"last": EVIL})
    assert text.index('id="first"') < text.index("<script>1</script>") < text.index('id="last"')
    assert "alert(1)</script>" not in text
