"""Sphinx's settings. It reads the folder of copies that pages.py made, and finds this file by -c."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import docstrings  # noqa: E402  (after the path)

project = "Threestep"
author = "the authors of Threestep"
copyright = author
release = re.search(r'^__version__ = "([^"]+)"', (ROOT / "training" / "__init__.py").read_text(), re.MULTILINE)[1]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # GitHub's names of headings, down to ####
myst_enable_extensions = []
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
highlight_language = "none"
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
autodoc_inherit_docstrings = False  # of nn.Module and others: written for other readers
autodoc_mock_imports = ["vllm", "gradio", "wandb", "trackio", "mlflow", "verifiers", "httpx"]
python_maximum_signature_line_length = 100
add_module_names = False

smartquotes = False  # "--flag" stays as it is

html_theme = "furo"
html_title = f"Threestep {release}"
html_static_path = [str(HERE / "static")]
html_css_files = ["threestep.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
templates_path = []


def setup(app):
    app.connect("autodoc-process-docstring", docstrings.process)
