"""docs/conformance.md from the results that are kept. Knows no trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.conformance.field import KINDS, PROPERTIES, TRAINERS
from benchmarks.conformance.threads import THREADS
from benchmarks.conformance.verdicts import DISPUTED, NO, NOT_RUN, YES

Results = Mapping[str, Mapping[str, dict[str, Any]]]
OPENING = """\
# Conformance: a table of the field

What released trainers do with the same rows, measured and not read. `python -m benchmarks.conformance` writes this page
from the results in `benchmarks/conformance/results`. Every trainer gets the same tiny Llama (two layers, 32 wide,
float32), a tokenizer trained on the spot and the same conversations, on a CPU, in its own environment. Under plain SGD
without clipping the update of the weights is the gradient, so that a trainer is seen from outside.

- **yes**: the property holds by every method that looked, to 1e-3 of the gradient (rounding is 3e-5).
- **no**: two methods at least say so. Both are below the table, with the maintainers' thread where we know one.
- **disputed**: one method says no and the others do not, so nothing is claimed.
- **not run**: with the reason.

"yes with ..." is a setting that the trainer documents; its default does not hold. A "no" may be a documented choice: it
says that numbers differ, not that a trainer is bad. Threestep's cells are made by the same code, and its "no" stands
like everybody's. Answers have 3 to 37 tokens, so a mean over rows and a mean over tokens are far apart.

Each cell by itself, with the names of its row and of its column:

```bash
python -m benchmarks.conformance.environments trl116            # once: the trainer's environment, from the registry
python -m benchmarks.conformance --trainer trl-1.16 --property accumulation
```
"""


def write_page(path: Path, folder: Path) -> None:
    """Write the page."""
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in TRAINERS
        if (folder / f"{name}.json").exists()
    }
    path.write_text(page(results))


def page(results: Results) -> str:
    """The whole page."""
    parts = [OPENING]
    for kind, title in KINDS.items():
        lines = _table(kind, results)
        if lines:
            parts.append("\n".join([f"## {title}", "", *lines, "", *_details(kind, results)]))
    parts.append("\n".join(["## Versions", "", *_versions(results)]))
    return "\n".join(parts).rstrip("\n") + "\n"


def _table(kind: str, results: Results) -> list[str]:
    trainers = [name for name in results if kind in TRAINERS[name].kinds]
    names = [
        name
        for name, known in PROPERTIES.items()
        if known.kind == kind and any(name in results[each] for each in trainers)
    ]
    if not names:
        return []
    lines = [f"| property | {' | '.join(f'`{name}`' for name in trainers)} |", f"| --- {'| --- ' * len(trainers)}|"]
    for name in names:
        cells = [_cell(results[trainer].get(name)) for trainer in trainers]
        lines.append(f"| `{name}`: {PROPERTIES[name].claim} | {' | '.join(cells)} |")
    return lines


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if cell["answer"] == NOT_RUN:
        return f"not run: {_short(cell['why'])}"
    if cell["answer"] == YES and cell["settings"]:
        return f"yes with `{cell['settings']}`"
    if cell["answer"] == NO:
        against = [view for view in cell["views"] if not view["holds"]]
        shown = next((view for view in against if view["method"].startswith(("gradient", "update"))), against[0])
        return f"**no**: {shown['figure'].split(' (')[0]}"
    return cell["answer"]


def _short(why: str) -> str:
    line = why.replace("\n", " ").replace("|", "/")
    return line if len(line) <= 90 else f"{line[:87]}..."


def _details(kind: str, results: Results) -> list[str]:
    """A line for every cell that is not a plain yes, and for notes."""
    lines = []
    for name, known in PROPERTIES.items():
        for trainer in results:
            cell = results[trainer].get(name)
            if known.kind == kind and kind in TRAINERS[trainer].kinds and cell is not None:
                lines += _detail(trainer, name, cell)
    return [*lines, ""] if lines else []


def _detail(trainer: str, name: str, cell: Mapping[str, Any]) -> list[str]:
    words = []
    if cell["answer"] in (NO, DISPUTED):
        words.append(f"{cell['answer']}: {_seen(cell['views'])}")
        words += [f"seen with {cell['settings']}"] if cell["settings"] else []
    if cell["by_default"] and cell["answer"] == YES:
        words.append(f"by default {_seen(cell['by_default'])}")
    if cell["note"]:
        words.append(cell["note"])
    if (trainer, name) in THREADS:
        address, said = THREADS[trainer, name]
        words.append(f"{said} ([thread]({address}))" if address else said)
    return [f"- `{trainer}` `{name}`: {'. '.join(words)}."] if words else []


def _seen(views: list[dict[str, Any]]) -> str:
    return "; ".join(f"{view['method']}: {view['figure']}" for view in views)


def _versions(results: Results) -> list[str]:
    lines = ["| trainer | what ran | dates |", "| --- | --- | --- |"]
    for name, cells in results.items():
        versions = [cell["versions"] for cell in cells.values() if cell.get("versions")]
        dates = sorted({cell["date"] for cell in cells.values()})
        last = versions[-1] if versions else {}
        shown = ", ".join(f"{package} {version}" for package, version in last.items())
        span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        lines.append(f"| {TRAINERS[name].title} | {shown} | {span} |")
    return lines
