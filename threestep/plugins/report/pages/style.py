"""The style sheet of every page: light or dark by the reader's setting, one column on a phone, plain on paper."""

from __future__ import annotations

from threestep.plugins.report.figures.sample_media import MEDIA_STYLE

STYLE = (
    """
:root { color-scheme: light dark;
  --back: #f7f7f5; --card: #ffffff; --text: #1c1c1a; --soft: #66655f; --edge: #e3e2dc; --grid: #eceae4;
  --good: #13795b; --bad: #b3372f; --mark: #f3efdf; --link: #1f66bd;
  --c0: #2a78d6; --c1: #d9622b; --c2: #179267; --c3: #a4561f;
  --c4: #c04f86; --c5: #5f7a12; --c6: #5a48b5; --c7: #b3372f; }
@media (prefers-color-scheme: dark) { :root {
  --back: #161615; --card: #1f1f1d; --text: #ecebe6; --soft: #a3a199; --edge: #34332f; --grid: #2c2b28;
  --good: #4cc39a; --bad: #ef8078; --mark: #35301c; --link: #5a9df0;
  --c0: #5a9df0; --c1: #f0875a; --c2: #3fbe90; --c3: #d6a05c;
  --c4: #e585b3; --c5: #a6c24a; --c6: #a597f2; --c7: #ef8078; } }
* { box-sizing: border-box; }
body { margin: 0; overflow-wrap: break-word; background: var(--back); color: var(--text); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  -webkit-text-size-adjust: 100%; }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 40px 0 12px; padding-top: 8px; }
h3 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
h3.kind { font-size: 17px; } p + h3.kind, .card + h3.kind, details + h3.kind { margin-top: 30px; }
[data-part] > h3, section > h3 { margin-top: 18px; }
.tiles + .card, .tiles + p { margin-top: 14px; }
h2.small { font-size: 15px; margin: 0 0 4px; padding: 0; }
p { margin: 0 0 8px; }
p.above { margin-top: 14px; } .above + .tiles { margin-top: 0; }
main > .card:first-child { margin-top: 14px; } h3 + .scroll { margin-top: 6px; }
p, li, dd, dt, summary, span.soft { overflow-wrap: anywhere; }
.soft, figcaption p, footer { color: var(--soft); font-size: 13px; }
.paths { overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 6px 16px; margin: 14px 0 0; font-size: 14px; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
.warning { background: var(--mark); border-radius: 8px; padding: 8px 12px; margin: 12px 0 0; font-size: 14px; }
p code { font: inherit; white-space: nowrap; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(var(--columns), minmax(0, 240px)); margin-top: 22px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile i { font-style: normal; color: var(--soft); font-size: 17px; font-weight: 400; white-space: nowrap; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 16px 0 0; font-size: 14px; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.set { list-style: none; display: flex; flex-wrap: wrap; gap: 3px 14px; margin: 0; padding: 0; }
.set span { color: var(--soft); } .set b { font-weight: 550; }
.card + .card, .card + details { margin-top: 14px; } .blocks .card { margin-top: 0; }
main > div > .card, header .scroll { margin-top: 18px; }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
figure { margin: 0; padding: 12px 12px 6px; min-width: 0; display: flex; flex-direction: column; }
.plot { margin-top: auto; min-height: 232px; touch-action: pan-y; border-radius: 4px; }
.title { display: flex; align-items: baseline; gap: 8px; min-height: 28px; }
.where { margin-left: auto; white-space: nowrap; font-variant-numeric: tabular-nums; }
button { font: inherit; font-size: 13px; color: var(--text); background: transparent; border: 1px solid var(--edge);
  border-radius: 6px; padding: 2px 9px; min-height: 26px; cursor: pointer; white-space: nowrap; }
button:hover { background: var(--grid); }
button[data-log][aria-pressed=true] { background: var(--text); color: var(--card); border-color: var(--text); }
.legend button { display: flex; align-items: center; gap: 6px; border: 0; padding: 1px 4px; margin: 0 -4px;
  text-align: left; overflow-wrap: anywhere; white-space: normal; min-height: 24px; }
.legend button[aria-pressed=false] { text-decoration: line-through; color: var(--soft); }
.legend button[aria-pressed=false] i { opacity: .3; }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums; min-width: 3.2em; }
.tools { display: flex; flex-wrap: wrap; align-items: center; gap: 6px; margin: 0 0 10px; }
.tools button { min-width: 32px; }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
figcaption p { margin: 1px 0 0; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 6px; padding: 0;
  font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; overflow-wrap: anywhere; color: var(--text); }
.legend i { flex: none; width: 14px; height: 3px; border-radius: 2px; background: currentColor; }
.legend i.dashed { background: repeating-linear-gradient(90deg, currentColor 0 5px, transparent 5px 8px); }
.legend i.block { height: 10px; width: 10px; }
svg { display: block; overflow: visible; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  fill: var(--soft); }
.name { text-anchor: end; }
.grid line { stroke: var(--grid); }
.axis line, .axis path { stroke: var(--edge); }
.grid path { display: none; }
.line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1; opacity: .35; }
.dashed { stroke-dasharray: 5 4; }
.area { fill: currentColor; fill-opacity: .3; stroke: currentColor; stroke-width: 1.3; }
.mark { fill: currentColor; stroke: var(--card); stroke-width: 1; }
.best { fill: none; stroke: currentColor; stroke-width: 1.8; }
.short { margin-top: 16px; } .short .sample { margin-top: 4px; } .short .text { max-height: 4.6em; }
.note { display: block; font-size: 13px; overflow-wrap: anywhere; }
.sentences { margin-top: 14px; font-size: 14px; } .sentences p:last-child { margin: 0; }
tr.chosen td { background: var(--mark); font-weight: 650; }
.dot { fill: currentColor; opacity: .55; }
.rule { stroke: var(--soft); stroke-dasharray: 2 3; }
.range { fill: var(--c0); fill-opacity: .15; }
.cursor { pointer-events: none; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); font-size: 14px; padding: 4px 0; }
.scroll { overflow-x: auto;  /* a shadow where more is to be seen */
  background: linear-gradient(90deg, var(--card) 40%, transparent) 0 0 / 40px 100% no-repeat local,
  linear-gradient(-90deg, var(--card) 40%, transparent) 100% 0 / 40px 100% no-repeat local,
  linear-gradient(90deg, var(--edge), transparent) 0 0 / 14px 100% no-repeat scroll,
  linear-gradient(-90deg, var(--edge), transparent) 100% 0 / 14px 100% no-repeat scroll, var(--card); }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
tr:last-child > td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.value { overflow-wrap: anywhere; font-size: 13px;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.scroll td.value { min-width: 130px; }
.scroll td.metric { white-space: nowrap; }
.card { padding: 12px 14px; min-width: 0; }
.blocks { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
.spark { width: 96px; height: 22px; }
.bars { display: grid; gap: 7px; margin-top: 8px; }
.bars div { display: grid; grid-template-columns: 1fr auto; gap: 0 10px; font-size: 14px; }
.bars span { font-variant-numeric: tabular-nums; color: var(--soft); }
.bars u { grid-column: 1 / -1; height: 8px; border-radius: 4px; background: var(--grid); overflow: hidden; }
.bars u i { display: block; height: 100%; border-radius: 4px; background: var(--c0); }
.sample { margin-top: 12px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16em; overflow-y: auto; unicode-bidi: isolate;
  background: linear-gradient(var(--card) 40%, transparent) 0 0 / 100% 40px no-repeat local,
  linear-gradient(0deg, var(--card) 40%, transparent) 0 100% / 100% 40px no-repeat local,
  linear-gradient(var(--edge), transparent) 0 0 / 100% 12px no-repeat scroll,
  linear-gradient(0deg, var(--edge), transparent) 0 100% / 100% 12px no-repeat scroll; }
.prompt { font-weight: 550; }
"""
    + MEDIA_STYLE
    + """.answers { display: grid; gap: 10px; margin-top: 8px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); }
.answer { border-left: 3px solid var(--edge); padding-left: 10px; min-width: 0; }
.said, .heard { display: grid; grid-template-columns: 84px 1fr; gap: 0 8px; padding: 2px 6px; border-radius: 6px; }
.heard { background: var(--grid); margin: 2px 0; }
.said .soft, .heard .soft { line-height: 23px; }
.said div, .heard div { min-width: 0; }
.marks { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 13px; color: var(--soft); margin-top: 3px; }
.answers + .marks { margin-top: 8px; }
.marks b { color: var(--text); font-weight: 600; font-variant-numeric: tabular-nums; }
.good, .marks b.good { color: var(--good); } .bad, .marks b.bad { color: var(--bad); }
footer { margin-top: 48px; padding-bottom: 32px; }
@media (max-width: 600px) {
  main, header, footer { padding-left: 12px; padding-right: 12px; }
  h1 { font-size: 22px; } h2 { margin-top: 30px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; } .tile:last-child:nth-child(odd) { grid-column: span 2; }
  .tile { padding: 9px 10px; } .tile b { font-size: 18px; } .tile i { font-size: 14px; }
  figure { padding: 10px 8px 4px; }
  .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: 6px; }
  button { min-height: 32px; }
  .scroll td.metric { white-space: normal; min-width: 150px; } .scroll td.value { min-width: 96px; }
  .scroll th, .scroll td { padding-right: 10px; }
}
@media print { .tools, button[data-log], nav { display: none; } .text { max-height: none; }
  .charts { grid-template-columns: repeat(2, 1fr); } figure, .card { break-inside: avoid; } }
"""
)
