"""The form of every page: its policy names the digests of its own scripts, and no text leaves its place."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from threestep.plugins.report.pages.document import document

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
