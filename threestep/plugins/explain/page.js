// The script of an explanation: sequences as coloured tokens, sorted, filtered, with the numbers of one token. Tokens
// are written when they come into view; a column is unpacked when it is first needed.
"use strict";
(async () => {
const data = JSON.parse(document.getElementById("explained").textContent);
const place = document.getElementById("sequences"), controls = document.getElementById("controls");
const unpacked = new Map();
// Columns that stand after this script are there once the page is read; the first tokens do not wait for them.
const early = new Set([...document.querySelectorAll("script[id]")].map(element => element.id));
const read = new Promise(done => document.addEventListener("DOMContentLoaded", done));
const FIRST_TOKENS = 4000;

function unbased(packed) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(packed);
  const letters = atob(packed), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}
async function unpack(id) {
  if (!early.has(id)) await read;
  const bytes = unbased(document.getElementById(id).textContent.slice(1, -1));  // a JSON string without escapes
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
// The number of each of the 65,536 halves (IEEE 754).
const halves = Float32Array.from({ length: 65536 }, (_, bits) => {
  const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, part = bits & 1023;
  if (power === 31) return part ? NaN : sign * Infinity;
  return sign * (power ? 2 ** (power - 15) * (1 + part / 1024) : 2 ** -14 * (part / 1024));
});
async function column(name) {
  if (!unpacked.has(name)) {
    const place = data.columns.indexOf(name), bits = new Uint16Array(await unpack(`column_${place}`));
    const values = new Float32Array(bits.length), largest = data.largest[place];
    for (let at = 0; at < bits.length; at++) values[at] = halves[bits[at]] * largest;
    unpacked.set(name, values);
  }
  return unpacked.get(name);
}
const range = name => data.ranges[data.columns.indexOf(name)];

const [text, role] = await Promise.all([unpack("text"), unpack("role")]).then(([texts, roles]) =>
  [data.texts.length > 65536 ? new Int32Array(texts) : new Uint16Array(texts), new Uint8Array(roles)]);
const begins = [0];
for (const sequence of data.sequences) begins.push(begins[begins.length - 1] + sequence.tokens);
const names = data.columns;
const shown = value => value == null || Number.isNaN(value) ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
  ? value.toExponential(2) : `${+value.toPrecision(4)}`;

// Blue below 0 and orange above: told apart by readers who see red and green alike. One colour where nothing is below 0.
const BELOW = [42, 120, 214], ABOVE = [230, 120, 20];
function colour(value, [low, high]) {
  if (!value || Number.isNaN(value)) return "";
  const most = low < 0 ? Math.max(-low, high) : high;
  const share = Math.min(1, Math.abs(value) / (most || 1));
  return `rgba(${(value < 0 ? BELOW : ABOVE).join(",")},${(0.08 + 0.72 * share).toFixed(3)})`;
}

function choice(label, options, chosen) {
  const box = document.createElement("label"), select = document.createElement("select");
  box.append(`${label} `, select);
  for (const [value, words] of options) select.append(new Option(words, value, value === chosen, value === chosen));
  controls.append(box);
  return select;
}
const by = choice("color by", names.map(name => [name, name]), "share");
const figures = Object.keys(data.sequences[0] ?? {}).filter(name => typeof data.sequences[0][name] === "number");
const order = choice("sort by", [["", "as they came"], ...figures.flatMap(name =>
  [[`-${name}`, `${name}, largest first`], [`+${name}`, `${name}, smallest first`]])], "");
const filters = [["", "all tokens"], ["trained", "tokens that carry loss"], ["negative", "share below 0"],
  ["positive", "share above 0"], ["masked", "tokens without loss"]];
if (names.includes("clipped")) filters.push(["clipped", "clipped tokens"]);
const only = choice("show", filters, "");
const together = ["group", "pair"].find(name => data.sequences.some(sequence => sequence[name] != null));
const scale = document.createElement("span"), told = document.createElement("p");
scale.className = "scale";
told.id = "told";
told.setAttribute("aria-live", "polite");
told.textContent = "Point at a token, or tap it.";
controls.append(scale, told);

const passes = {
  "": () => true,
  trained: at => data.roles[role[at]] === "trained" || data.roles[role[at]] === "the score is read here",
  masked: at => data.roles[role[at]] !== "trained" && data.roles[role[at]] !== "the score is read here",
  negative: at => unpacked.get("share")[at] < 0,
  positive: at => unpacked.get("share")[at] > 0,
  clipped: at => unpacked.get("clipped")[at] > 0,
};

const spans = box => box.getElementsByTagName("span");  // of its tokens, in order
// A part of a conversation, in the form that the report's samples have.
function part(who, share) {
  const box = document.createElement("div"), name = document.createElement("b"), tokens = document.createElement("div");
  box.className = who === "model" ? "said" : "heard";
  name.className = "who";
  name.textContent = share ? `${who}\nshare ${shown(share)}` : who;
  box.append(name, tokens);
  return box;
}
function fill(box) {
  const sequence = +box.dataset.sequence, values = unpacked.get(by.value), bounds = range(by.value);
  const lines = document.createDocumentFragment(), passing = passes[only.value];
  let at = begins[sequence], before = "";
  for (const [who, count, share] of data.sequences[sequence].parts ?? [["", begins[sequence + 1] - at, 0]]) {
    const turn = who ? part(who, share) : lines, inside = who ? turn.lastChild : lines;
    for (const end = at + count; at < end; at++) {
      const own = data.roles[role[at]];
      if (!who && before === "prompt" && own !== before) inside.append(document.createElement("hr"));
      before = own;
      const span = document.createElement("span");
      span.textContent = data.texts[text[at]];
      const tint = colour(values[at], bounds);
      if (tint) span.style.background = tint;
      if (own !== "trained") span.className = "still";
      if (!passing(at)) span.classList.add("faded");
      inside.append(span);
    }
    if (who) lines.append(turn);
  }
  box.replaceChildren(lines);
  box.style.minHeight = "";  // it held the place of what was not written yet
  box.dataset.filled = "yes";
}
const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting && !entry.target.dataset.filled) fill(entry.target);
}, { rootMargin: "400px" });

const heads = ["from", "side", "score", "share", "turns"];
function card(index) {
  const sequence = data.sequences[index], box = document.createElement("article");
  box.className = "sequence";
  const title = document.createElement("h3"), facts = document.createElement("p"), tokens = document.createElement("div");
  title.textContent = sequence.name;
  facts.className = "soft";
  const said = heads.filter(name => sequence[name] != null && sequence[name] !== "")
    .map(name => `${name} ${typeof sequence[name] === "number" ? shown(sequence[name]) : sequence[name]}`);
  said.push(`${sequence.trained} of ${sequence.tokens} tokens carry loss`);
  if (sequence.counts === false) said.push("left out of the loss");
  if (sequence.ended === false) said.push("cut at the length limit");
  facts.textContent = said.join(" · ");
  tokens.className = "tokens";
  const media = document.createElement("div");
  media.className = "pictures";
  (sequence.media ?? []).forEach((address, place, all) => {
    const picture = new Image();
    picture.src = address;
    picture.alt = `image ${place + 1} of ${all.length}`;
    media.append(picture);
  });
  tokens.tabIndex = 0;
  tokens.dataset.sequence = index;
  tokens.style.minHeight = `${Math.min(30, 1.75 * Math.ceil(sequence.tokens / 14))}em`;
  tokens.setAttribute("role", "group");
  tokens.setAttribute("aria-label", `${sequence.name}: its tokens`);
  box.append(title, facts, ...(media.childElementCount ? [media] : []), tokens);
  watcher.observe(tokens);
  return box;
}

function draw() {
  const indices = data.sequences.map((_, index) => index), way = order.value[0] === "-" ? -1 : 1;
  if (order.value) indices.sort((a, b) =>
    way * (data.sequences[a][order.value.slice(1)] - data.sequences[b][order.value.slice(1)]) || a - b);
  watcher.disconnect();
  const content = document.createDocumentFragment(), groups = new Map();
  for (const index of indices) {
    const key = together ? data.sequences[index][together] : index;
    if (!groups.has(key)) {
      groups.set(key, document.createElement("div"));
      if (together) groups.get(key).className = "beside";
      content.append(groups.get(key));
    }
    groups.get(key).append(card(index));
  }
  for (const group of groups.values()) {  // no card alone in a row, where that can be
    const number = group.children.length;
    group.classList.toggle("even", together && number % 3 !== 0 && (number % 2 === 0 || number % 3 === 1));
  }
  place.replaceChildren(content);
  let written = 0;  // the first screen at once: the watcher is told of it a frame later
  for (const box of place.querySelectorAll(".tokens")) {
    if (written > FIRST_TOKENS) break;
    fill(box);
    written += spans(box).length;
  }
}

async function again() {
  await Promise.all([column(by.value), column("share"), ...(only.value === "clipped" ? [column("clipped")] : [])]);
  const [low, high] = range(by.value), most = low < 0 ? Math.max(-low, high) : high;
  const bar = document.createElement("i");
  bar.style.background = `linear-gradient(90deg, ${[...(low < 0 ? [-1, -0.5] : []), 0, 0.5, 1]
    .map(share => colour(share * most, [low, high]) || "transparent").join(", ")})`;
  scale.replaceChildren(low < 0 ? shown(-most) : "0", bar, shown(most));
  for (const box of place.querySelectorAll("[data-filled]")) fill(box);
}

let cursor = null, telling = 0;
async function tell(box, number) {
  const span = spans(box)[number];
  if (!span) return;
  cursor?.classList.remove("at");
  cursor = span;
  span.classList.add("at");
  const at = begins[+box.dataset.sequence] + number, mine = ++telling;
  const values = await Promise.all(names.map(column));
  if (mine !== telling) return;
  const parts = [document.createElement("b"), ` token ${number}, ${data.roles[role[at]]}`];
  parts[0].textContent = JSON.stringify(data.texts[text[at]]);
  names.forEach((name, index) => {
    if (!Number.isNaN(values[index][at])) parts.push(` · ${name} ${shown(values[index][at])}`);
  });
  told.replaceChildren(...parts);
}
place.addEventListener("pointerover", event => {
  const box = event.target.closest?.(".tokens");
  if (box && event.target.tagName === "SPAN") tell(box, [...spans(box)].indexOf(event.target));
});
place.addEventListener("keydown", event => {
  const box = event.target.closest?.(".tokens");
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!box || step === undefined) return;
  event.preventDefault();
  const now = box.contains(cursor) ? [...spans(box)].indexOf(cursor) : -1;
  const next = Math.max(0, Math.min(spans(box).length - 1, now + step));
  tell(box, next);
  spans(box)[next]?.scrollIntoView({ block: "nearest" });
});
by.addEventListener("change", again);
only.addEventListener("change", again);
order.addEventListener("change", draw);
await again();
draw();
})();
