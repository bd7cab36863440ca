"""Reference pages of plugins, from their tables: page() of `reference_page.py` in a plugin's folder."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pages() -> dict[str, str]:
    """Return each plugin's reference page by its name."""
    plugins = sorted(path.parent.name for path in ROOT.glob("threestep/plugins/*/reference_page.py"))
    return {
        f"reference/{name}/index.md": importlib.import_module(f"threestep.plugins.{name}.reference_page").page()
        for name in plugins
    }
