"""Texts as HTML, with the tokens that carry loss marked. Serves threestep.plugins.inspect and
threestep.plugins.inspect.preview."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MARKED_STYLE = """
:root { --loss: #d4ecdd; --loss-edge: #13795b; }
@media (prefers-color-scheme: dark) { :root { --loss: #173d2e; --loss-edge: #4cc39a; } }
mark { background: var(--loss); color: inherit; box-shadow: inset 0 -1px var(--loss-edge); border-radius: 2px;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.fed { font: 13px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  max-height: 26em; margin-top: 6px; }
.break::before { content: "\\21b5"; color: var(--soft); opacity: .7; }
.lines { white-space: pre-wrap; }
.parts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); }
.part { min-width: 0; }
.lengths { display: grid; grid-template-columns: auto 1fr auto; align-items: center; gap: 4px 10px; margin-top: 8px;
  font-size: 13px; font-variant-numeric: tabular-nums; color: var(--soft); }
.lengths div { display: contents; }
.lengths span { text-align: right; white-space: nowrap; }
.lengths u { height: 10px; border-radius: 4px; background: var(--grid); overflow: hidden; }
.lengths i { display: block; height: 100%; background: var(--c0); }
.lengths .over i { background: var(--c1); }
@media print { .fed { max-height: none; } mark { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

Run = tuple[str, bool]  # a text, and whether it carries loss


def marked_texts(texts: Sequence[tuple[str, Sequence[Run]]]) -> str:
    """The parts of a row beside each other: (name, its runs); a single part needs no name."""
    several = len(texts) > 1
    parts = "".join(
        f'<div class="part">{f"<p class=soft>{escape(name)}</p>" if several else ""}'
        f'<div class="text fed" dir="auto" tabindex="0" role="group" aria-label="{escape(name)}">'
        f"{''.join(map(_run, runs))}</div></div>"
        for name, runs in texts
    )
    return f'<div class="parts">{parts}</div>'


def shown_media(media: Sequence[tuple[str, str, str]]) -> str:
    """The media of a row: (kind, words, address of a small copy) of each."""
    return "".join(
        f'<p class="soft paths">{kind} {number}: {escape(words)}<br><img src="{escape(uri)}" alt="{kind} {number}"></p>'
        for number, (kind, words, uri) in enumerate(media, start=1)
    )


def length_chart(bars: Sequence[tuple[int, int, int]], limit: int | None = None) -> str:
    """A bar for each (from, to, rows); those beyond `limit` tokens have another colour."""
    most = max((count for _, _, count in bars), default=0)
    lines = "".join(
        f'<div class="{"over" if limit is not None and begin > limit else "within"}">'
        f"<span>{f'{begin:,} – {end:,}' if end > begin else f'{begin:,}'}</span>"
        f'<u><i style="width:{count / most:.1%}"></i></u><span>{count:,}</span></div>'
        for begin, end, count in bars
    )
    return f'<div class="lengths">{lines}</div>'


def _run(run: Run) -> str:
    """HTML of a run. A line break at the end of one that carries loss is drawn, as it is a token that counts."""
    text, carries_loss = run
    shown = escape(text)
    if text.endswith("\n"):
        shown = f'{shown[:-1]}<i class="break"></i>\n'
    return f"<mark>{shown}</mark>" if carries_loss else shown
