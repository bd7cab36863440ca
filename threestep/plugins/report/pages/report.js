// The script of a report: draws its charts with D3 (https://d3js.org), zooms them, and follows a run that goes on.
// script.py puts it into the page; data come from the elements "charts" and "live".
"use strict";
(() => {
const HEIGHT = 232, LEFT = 50, RIGHT = 12, TOP = 10, BOTTOM = 34;
const read = id => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const drawings = read("charts") ?? {}, live = read("live");
const views = new WeakMap();  // of a figure: what the pointer needs
const zooms = new Map();      // of a section: the steps that are shown
const logs = new Set(), hidden = new Set();  // charts with a log axis; lines that are switched off

const shown = value => {
  if (value == null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return d3.format(".3~e")(value).replace("e+", "e");
  return d3.format(size >= 1000 ? ",.0f" : ".4~r")(value);
};
const tick = (value, most = 0) => {  // most: the largest on the axis, whose small numbers are written like it
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e4 && size < 1e6) return `${+(value / 1000).toPrecision(6)}k`;
  return size >= (most >= 1e-3 ? 1e-5 : 1e-3) && size < 1e6 ? `${+value.toPrecision(6)}` : shown(value);
};
const bounds = values => {
  const [low, high] = d3.extent(values);
  if (high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low, high];
  const room = Math.abs(low) * 0.1 || 1;
  return [low - room, high + room];
};
const withRoom = ([low, high]) => {
  const room = 0.05 * (high - low);
  return [low >= 0 ? Math.max(low - room, 0) : low - room, high + room];  // nothing below 0 for shares and losses
};
const sectionOf = figure => figure.closest("section")?.id ?? "";

function axes(svg, x, y, chart, log) {
  const whole = chart.x === "step";  // there is no step 1.5
  const xs = x.ticks(Math.max(2, Math.floor((x.range()[1] - LEFT) / 80))).filter(v => !whole || Number.isInteger(v));
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${HEIGHT - BOTTOM})`)
    .call(d3.axisBottom(x).tickValues(xs).tickFormat(value => tick(value)).tickSize(4));
  const scale = d3.axisLeft(y).ticks(5).tickSize(LEFT - x.range()[1]).tickPadding(6);
  svg.append("g").attr("class", "grid").attr("transform", `translate(${LEFT},0)`)
    .call(log ? onLog(scale, y) : scale.tickFormat(value => tick(value, d3.max(y.domain(), Math.abs))));
  svg.append("text").attr("class", "name").attr("x", x.range()[1]).attr("y", HEIGHT - 3).text(chart.x);
}

// Powers of ten and parts of them; of less than a decade, round numbers.
function onLog(scale, y) {
  const [low, high] = y.domain();
  if (high / low >= 10) return scale.tickFormat(y.tickFormat(4, value => tick(value)));
  return scale.tickValues(d3.scaleLinear().domain([low, high]).ticks(5)).tickFormat(value => tick(value));
}

function lines(svg, chart, figure, width) {
  const id = figure.dataset.chart, log = logs.has(id), section = sectionOf(figure);
  const all = bounds(chart.lines.flatMap(line => [line.xs[0], line.xs[line.xs.length - 1]]));
  const domain = zooms.get(section) ?? all;
  const on = chart.lines.filter((_, place) => !hidden.has(`${id}/${place}`));
  const fits = y => y != null && (!log || y > 0);
  const inside = [];
  for (const line of on) line.xs.forEach((at, i) => {
    if (at >= domain[0] && at <= domain[1] && fits(line.ys[i])) inside.push(line.ys[i]);
  });
  const range = inside.length ? bounds(inside) : [0.1, 1];
  const x = d3.scaleLinear().domain(domain).range([LEFT, width - RIGHT]);
  const y = log ? d3.scaleLog().domain(range[0] > 0 ? range : [range[1] / 10, range[1]]).range([HEIGHT - BOTTOM, TOP])
    : d3.scaleLinear().domain(withRoom(range)).range([HEIGHT - BOTTOM, TOP]);
  axes(svg, x, y, chart, log);
  svg.append("clipPath").attr("id", `clip-${id}`).append("rect")
    .attr("x", LEFT - 4).attr("y", 0).attr("width", width - RIGHT - LEFT + 8).attr("height", HEIGHT - BOTTOM + 4);
  const body = svg.append("g").attr("clip-path", `url(#clip-${id})`);
  const path = (columns, kind) => body.append("path").attr("class", kind).attr("d",
    d3.line().defined(i => fits(columns.ys[i])).x(i => x(columns.xs[i])).y(i => y(columns.ys[i]))(d3.range(columns.xs.length)));
  const compares = chart.lines.length > 1 && chart.lines.every(line => line.held);  // two values of each run
  for (const line of on) {
    const known = d3.range(line.xs.length).filter(i => fits(line.ys[i])), few = known.length < 3;
    const colour = `c${line.colour}`, dashes = line.held ? " dashed" : "";
    if (!few || compares && known.length > 1) path(line, `line ${colour}${dashes}${line.mean ? " faint" : ""}`);
    if (line.mean) path(line.mean, `line ${colour}`);
    if (few || line.held)
      for (const i of known.filter((_, place) => place % Math.ceil(known.length / 60) === 0 || place === known.length - 1))
        body.append("circle").attr("class", `mark ${colour}`).attr("cx", x(line.xs[i])).attr("cy", y(line.ys[i])).attr("r", 3);
  }
  for (const line of on) if (line.best && fits(line.best[1]) && line.best[0] >= domain[0] && line.best[0] <= domain[1])
    svg.append("circle").attr("class", `best c${line.colour}`).attr("cx", x(line.best[0])).attr("cy", y(line.best[1])).attr("r", 7);
  const cursor = body.append("g").attr("class", "cursor");
  views.set(figure, {chart, x, y, all, domain, cursor, fits});
}

function histogram(svg, chart, figure, width) {
  const x = d3.scaleLinear().domain(d3.extent(chart.edges)).range([LEFT, width - RIGHT]);
  const most = d3.max(chart.kinds, kind => d3.max(kind.shares));
  const y = d3.scaleLinear().domain([0, most * 1.08]).range([HEIGHT - BOTTOM, TOP]);
  axes(svg, x, y, chart);
  for (const kind of chart.kinds) {
    const tops = [...kind.shares, kind.shares[kind.shares.length - 1]];
    svg.append("path").attr("class", `area c${kind.colour}`)
      .attr("d", d3.area().curve(d3.curveStepAfter).x((_, i) => x(chart.edges[i])).y0(y(0)).y1(v => y(v))(tops));
  }
  views.set(figure, {chart, x, y, cursor: svg.append("g").attr("class", "cursor")});
}

function scatter(svg, chart, figure, width) {
  const xs = bounds(chart.clouds.flatMap(cloud => cloud.xs)), ys = bounds(chart.clouds.flatMap(cloud => cloud.ys));
  const x = d3.scaleLinear().domain([xs[0] - 0.5, xs[1] + 0.5]).range([LEFT, width - RIGHT]);
  const y = d3.scaleLinear().domain(withRoom(ys)).range([HEIGHT - BOTTOM, TOP]);
  axes(svg, x, y, chart);
  for (const cloud of chart.clouds) cloud.xs.forEach((at, i) => svg.append("circle")
    .attr("class", `dot c${cloud.colour}`).attr("cx", x(at)).attr("cy", y(cloud.ys[i])).attr("r", 2.6));
}

function draw(figure) {
  const chart = drawings[figure.dataset.chart], plot = figure.querySelector(".plot");
  if (!chart || !plot) return;
  const width = Math.max(plot.clientWidth, 160), at = views.get(figure)?.at ?? null;
  const svg = d3.create("svg").attr("width", width).attr("height", HEIGHT).attr("role", "img").attr("aria-label", chart.label);
  ({lines, histogram, scatter})[chart.kind](svg, chart, figure, width);
  plot.replaceChildren(svg.node());
  tell(figure, at);
}

// The values at a place of the pointer, or the last ones, in the legend. `at`: a step (or a value of a histogram's axis).
function tell(figure, at) {
  const view = views.get(figure), where = figure.querySelector(".where");
  const cells = figure.querySelectorAll(".legend b");
  if (!view || !cells.length) return;
  view.cursor.selectAll("*").remove();
  view.at = at;
  if (view.chart.kind === "histogram") {
    const edges = view.chart.edges, bin = Math.min(Math.max(d3.bisectRight(edges, at ?? NaN) - 1, -1), edges.length - 2);
    view.chart.kinds.forEach((kind, i) => cells[i].textContent = at == null || bin < 0 ? `${d3.format(",")(d3.sum(kind.counts))} responses`
      : `${shown(kind.shares[bin])} % (${kind.counts[bin]})`);
    where.textContent = at == null || bin < 0 ? "" : `${shown(edges[bin])} to ${shown(edges[bin + 1])}`;
    return;
  }
  if (view.chart.kind !== "lines") return;
  const nearest = line => {
    const i = d3.bisectCenter ? d3.bisectCenter(line.xs, at) : Math.min(d3.bisectLeft(line.xs, at), line.xs.length - 1);
    return i > 0 && Math.abs(line.xs[i - 1] - at) < Math.abs(line.xs[i] - at) ? i - 1 : i;
  };
  const on = (_, place) => !hidden.has(`${figure.dataset.chart}/${place}`);
  const steps = at == null ? [] : view.chart.lines.filter(on).map(line => line.xs[nearest(line)]);
  const step = steps.length ? steps.reduce((best, one) => Math.abs(one - at) < Math.abs(best - at) ? one : best) : null;
  view.chart.lines.forEach((line, place) => {
    const i = step == null ? d3.range(line.ys.length - 1, -1, -1).find(k => line.ys[k] != null) : nearest(line);
    const near = step == null || Math.abs(view.x(line.xs[i]) - view.x(step)) <= 6;
    cells[place].textContent = near ? shown(line.ys[i]) : "";
    if (step != null && near && on(line, place) && view.fits(line.ys[i]))
      view.cursor.append("circle").attr("class", `mark c${line.colour}`)
        .attr("cx", view.x(line.xs[i])).attr("cy", view.y(line.ys[i])).attr("r", 4);
  });
  if (step != null) view.cursor.insert("path", "circle").attr("class", "rule")
    .attr("d", `M${view.x(step)} ${TOP}V${HEIGHT - BOTTOM}`);
  where.textContent = step == null ? "" : `${view.chart.x} ${d3.format(",")(step)}`;
}

function zoom(section, domain) {
  if (domain && domain[1] - domain[0] >= 1) zooms.set(section, domain); else zooms.delete(section);
  for (const figure of document.querySelectorAll(`section[id="${CSS.escape(section)}"] figure[data-kind=lines]`)) draw(figure);
}

function zoomBy(section, factor, figure) {
  const view = views.get(figure ?? document.querySelector(`section[id="${CSS.escape(section)}"] figure[data-kind=lines]`));
  if (!view) return;
  const [low, high] = view.domain, [least, most] = view.all, width = Math.min((high - low) * factor, most - least);
  if (width >= most - least) return zoom(section, null);
  const start = Math.min(Math.max((view.at ?? high) - width / 2, least), most - width);
  zoom(section, [start, start + width]);
}

function pressed(button) {
  const figure = button.closest("figure"), section = button.closest("section")?.id;
  if (button.dataset.zoom) return button.dataset.zoom === "all" ? zoom(section, null) : zoomBy(section, +button.dataset.zoom);
  const [set, key] = button.dataset.log !== undefined ? [logs, figure.dataset.chart]
    : [hidden, `${figure.dataset.chart}/${button.dataset.line}`];
  if (!set.delete(key)) set.add(key);
  button.setAttribute("aria-pressed", String(set.has(key) === (set === logs)));
  draw(figure);
}

function pointed(event) {
  const plot = event.target.closest?.(".plot"), figure = plot?.closest("figure"), view = figure && views.get(figure);
  return view ? {plot, figure, view, at: view.x.invert(event.clientX - plot.getBoundingClientRect().left)} : null;
}

let drag = null;  // a range of steps that is being marked
document.addEventListener("click", event => {
  const button = event.target.closest?.("figure button, .tools button");
  if (button) pressed(button);
});
document.addEventListener("pointerdown", event => {
  const found = pointed(event);
  if (!found || event.button || found.view.chart.kind !== "lines") return;
  drag = {...found, left: event.clientX};
  if (event.pointerType !== "touch") event.preventDefault();
});
document.addEventListener("pointermove", event => {
  const found = pointed(event);
  if (found) tell(found.figure, found.at);
  if (!drag) return;
  const box = drag.plot.getBoundingClientRect(), inside = v => Math.min(Math.max(v - box.left, LEFT), box.width - RIGHT);
  const [from, to] = [inside(drag.left), inside(event.clientX)].sort((a, b) => a - b);
  d3.select(drag.plot).selectAll(".range").remove();
  d3.select(drag.plot).select("svg").append("rect").attr("class", "range")
    .attr("x", from).attr("y", TOP).attr("width", to - from).attr("height", HEIGHT - TOP - BOTTOM);
});
document.addEventListener("pointerup", event => {
  if (!drag) return;
  const {view, figure, plot, left} = drag, box = plot.getBoundingClientRect();
  drag = null;
  d3.select(plot).selectAll(".range").remove();
  if (Math.abs(event.clientX - left) < 8) return tell(figure, view.x.invert(event.clientX - box.left));
  const ends = [left, event.clientX].map(v => Math.min(Math.max(view.x.invert(v - box.left), view.domain[0]), view.domain[1]));
  zoom(sectionOf(figure), ends.sort((a, b) => a - b));
});
document.addEventListener("pointercancel", () => { if (drag) d3.select(drag.plot).selectAll(".range").remove(); drag = null; });
document.addEventListener("pointerout", event => {
  const found = pointed(event);
  if (found && !found.plot.contains(event.relatedTarget) && event.pointerType === "mouse") tell(found.figure, null);
});
document.addEventListener("dblclick", event => { const found = pointed(event); if (found) zoom(sectionOf(found.figure), null); });
document.addEventListener("keydown", event => {
  const found = event.target.matches?.(".plot") ? event.target.closest("figure") : null, view = found && views.get(found);
  if (!view || view.chart.kind !== "lines") return;
  const section = sectionOf(found), way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (way) {
    const [low, high] = view.domain;
    const steps = [...new Set(view.chart.lines.flatMap(line => line.xs))].filter(x => x >= low && x <= high)
      .sort((a, b) => a - b);
    const at = view.at == null ? (way > 0 ? -1 : steps.length) : d3.bisectLeft(steps, view.at);
    tell(found, steps[Math.min(Math.max(at + way, 0), steps.length - 1)]);
  } else if (event.key === "+" || event.key === "-") zoomBy(section, event.key === "+" ? 0.5 : 2, found);
  else if (event.key === "Escape") zoom(section, null);
  else return;
  event.preventDefault();
});

const watcher = new ResizeObserver(entries => { for (const entry of entries) draw(entry.target.closest("figure")); });
const begin = () => { for (const plot of document.querySelectorAll(".plot")) { draw(plot.closest("figure")); watcher.observe(plot); } };

// --- a run that goes on: what changed since `version`, section by section
function apply(update) {
  live.version = update.version;
  if (update.reload) return location.reload();
  Object.assign(drawings, update.charts);
  for (const [name, html] of Object.entries(update.parts)) {
    const part = document.querySelector(`[data-part="${CSS.escape(name)}"]`);
    if (!part) return location.reload();
    const open = new Set([...part.querySelectorAll("details[open]")].map(d => d.querySelector("summary").textContent));
    part.innerHTML = html;
    for (const d of part.querySelectorAll("details")) d.open = open.has(d.querySelector("summary").textContent);
    for (const button of part.querySelectorAll("figure button")) {
      const id = button.closest("figure").dataset.chart;
      if (button.dataset.log !== undefined) button.setAttribute("aria-pressed", String(logs.has(id)));
      else button.setAttribute("aria-pressed", String(!hidden.has(`${id}/${button.dataset.line}`)));
    }
    for (const plot of part.querySelectorAll(".plot")) watcher.observe(plot);
  }
  for (const id of Object.keys(update.charts)) {
    const figure = document.querySelector(`figure[data-chart="${CSS.escape(id)}"]`);
    if (figure) draw(figure); else return location.reload();
  }
}
async function follow() {
  const status = document.getElementById("following");
  if (!document.hidden) try {
    const answer = await fetch(`update?have=${encodeURIComponent(live.version)}`, {cache: "no-store"});
    if (answer.status === 200) apply(await answer.json());
    else if (answer.status !== 204) throw new Error(String(answer.status));
    status.textContent = `live, looked at ${new Date().toLocaleTimeString()}`;
  } catch (problem) { status.textContent = "no longer live: the program that serves this page has ended"; }
  setTimeout(follow, 1000 * live.seconds);
}

begin();
if (live) follow();
})();
