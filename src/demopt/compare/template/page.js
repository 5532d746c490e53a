// Sorts the table, hides rows, and draws the plots for the reader's link and machine. No library: those that redraw for a
// slider are half a megabyte and more, in every page.

const { link, rows } = JSON.parse(document.getElementById("data").textContent); // rows: lowest loss first
const [STEP, MEAN, LEAST, MOST, SENT, RECEIVED] = [0, 1, 2, 3, 4, 5]; // places in a point of a curve
const find = (id) => document.getElementById(id);
const alive = rows.filter((row) => row.mean !== null); // the others diverged
const base = alive.find((row) => row.tag === "AdamW-DDP") ?? alive[0];
const mine = { bits: link, latency: 0, scale: 1, reference: alive.find((row) => row.ours) ?? base };
const order = { key: "mean", sign: 1 };
const hidden = new Set();

// Numbers as text

const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en");
const time = (value) => (value < 1 ? `${digits(value * 1e3)} ms` : value < 1e3 ? `${digits(value)} s` : `${Math.round(value).toLocaleString("en")} s`);

function scaled(value, unit) {
  const power = value < 1 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${["", "k", "M", "G", "T"][power]}${unit}`;
}

// Time on the reader's link

const latencySeconds = (row) => (row.exchanges * (row.workers - 1) * mine.latency) / 2; // of a step, on average
const wireSeconds = (sent, received) => (8 * Math.max(sent, received)) / mine.bits;
const stepSeconds = (row) => row.seconds * mine.scale + latencySeconds(row) + wireSeconds(row.sent, row.received);
const secondsAt = (row, point) =>
  point[STEP] * (row.seconds * mine.scale + latencySeconds(row)) + wireSeconds(point[SENT], point[RECEIVED]);
const lastStep = (row) => row.curve.at(-1)[STEP];
const runSeconds = (row) => secondsAt(row, row.curve.at(-1));
const between = (a, b, part) => a + (b - a) * part;

function lossAfter(row, seconds) {
  const next = row.curve.findIndex((point) => secondsAt(row, point) >= seconds);
  if (next < 0) return { loss: row.mean, step: lastStep(row) };
  const [before, after] = [row.curve[Math.max(0, next - 1)], row.curve[next]];
  const length = secondsAt(row, after) - secondsAt(row, before);
  const part = length > 0 ? (seconds - secondsAt(row, before)) / length : 1;
  return { loss: between(before[MEAN], after[MEAN], part), step: Math.floor(between(before[STEP], after[STEP], part)) };
}

function secondsTo(row, loss) {
  const next = row.curve.findIndex((point) => point[MEAN] <= loss);
  if (next < 0) return Infinity;
  const [before, after] = [row.curve[Math.max(0, next - 1)], row.curve[next]];
  const part = before[MEAN] > after[MEAN] ? (before[MEAN] - loss) / (before[MEAN] - after[MEAN]) : 1;
  return between(secondsAt(row, before), secondsAt(row, after), part);
}

function update() {
  const budget = runSeconds(mine.reference);
  for (const row of alive) {
    const { loss, step } = lossAfter(row, budget);
    Object.assign(row, { step: stepSeconds(row), at: loss, done: step, reaches: secondsTo(row, mine.reference.mean) });
    row.line.querySelector(".step").textContent = time(row.step);
    row.line.querySelector(".at").textContent = loss.toFixed(3);
    row.line.querySelector(".reaches").textContent = row.reaches < Infinity ? time(row.reaches) : "never";
  }
  tell(budget);
  sort();
  pictures.forEach(draw);
}

function tell(budget) {
  const bandwidth = scaled(mine.bits, "bit/s");
  find("bandwidth-text").textContent = bandwidth;
  find("latency-text").textContent = `${digits(mine.latency * 1e3)} ms`;
  find("computing-text").textContent = time(base.seconds * mine.scale);
  document.querySelectorAll(".link").forEach((node) => (node.textContent = bandwidth));
  document.querySelectorAll(".reference").forEach((node) => (node.textContent = mine.reference.name));
  document.querySelectorAll(".base").forEach((node) => (node.textContent = base.name));
  const [best, ...rest] = [...alive].sort((a, b) => a.at - b.at);
  const level = rest.filter((row) => row.at - best.at <= Math.max(row.spread, best.spread, 5e-4));
  const others = [...new Set([...(level.length ? level : rest.slice(0, 1)), ...alive.filter((row) => main(row) && !row.ours)])].filter((row) => row !== best);
  const place = (row) => `${row.at.toFixed(3)} ${row.done < lastStep(row) ? `at step ${row.done} of ${lastStep(row)}` : `after all ${lastStep(row)} steps`}`;
  find("budget").textContent = time(budget);
  find("winner").textContent = best.name;
  find("how").textContent = `${place(best)}${level.length ? `, level with ${level.map((row) => row.name).join(", ")} within the spread` : ""}.`;
  find("others").textContent = others.map((row) => `${row.name} has ${place(row)}`).join("; ") + (others.length ? "." : "");
}

// The table

function sort() {
  const value = (row) => row[order.key] ?? Infinity;
  const compare = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b), "en", { numeric: true }) : value(a) - value(b) || 0);
  find("results").tBodies[0].append(...[...rows].sort((a, b) => order.sign * compare(a, b)).map((row) => row.line));
  for (const button of find("results").querySelectorAll("th button")) {
    const heading = button.parentNode;
    if (button.dataset.key !== order.key) heading.removeAttribute("aria-sort");
    else heading.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
  }
}

// Colours and the legend

const main = (row) => row.tag !== "";
const color = (light, dark, chroma, hue) => `light-dark(oklch(${light} ${chroma} ${hue}), oklch(${dark} ${chroma} ${hue}))`;

function paint() {
  const vivid = rows.filter((row) => (rows.some((other) => other.ours) ? row.ours : !row.tag));
  const muted = rows.filter((row) => !row.tag && !vivid.includes(row));
  for (const row of rows) row.color = color(0.25, 0.95, 0, 0); // baselines
  vivid.forEach((row, place) => (row.color = color(0.56, 0.76, 0.16, 45 + (330 * place) / vivid.length)));
  muted.forEach((row, place) => (row.color = color(0.62, 0.64, 0.06, (360 * place) / muted.length)));
}

function chip(row) {
  const button = document.createElement("button");
  const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
  swatch.style.color = row.line.querySelector(".swatch").style.color = row.color;
  button.append(swatch, row.name);
  button.setAttribute("aria-pressed", true);
  button.onclick = () => show((other) => (other === row ? hidden.has(row) : !hidden.has(other)));
  return button;
}

function show(wanted) {
  const shown = alive.filter(wanted);
  alive.forEach((row) => (shown.includes(row) ? hidden.delete(row) : hidden.add(row)));
  alive.forEach((row) => row.chip.setAttribute("aria-pressed", !hidden.has(row)));
  pictures.forEach(draw);
}

// The plots

const pictures = [
  { id: "by-time", title: "time", log: true, unit: time, x: secondsAt, points: (row) => row.curve },
  { id: "by-steps", title: "step", log: false, unit: String, x: (row, point) => point[STEP], points: (row) => row.curve },
  { id: "by-bytes", title: "uploaded a step by one worker", log: true, unit: (value) => scaled(value, "B"), x: (row) => row.sent, points: (row) => row.curve.slice(-1) },
];

function add(parent, tag, attributes, text = "") {
  const node = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function ticks(low, high, log) {
  const found = [];
  if (log) {
    const parts = high / low < 200 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) parts.forEach((part) => found.push(part * 10 ** power));
  } else {
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((size) => size >= raw);
    for (let count = Math.ceil(low / step); count * step <= high; count++) found.push(Number((count * step).toPrecision(6)));
  }
  return found.filter((value) => value >= low && value <= high);
}

// Losses from below the lowest to somewhat above the highest end of a line; of many lines, but for those that end far above.
function lossRange(shown) {
  const [low, middle] = [shown[0].mean, shown[Math.floor(shown.length / 2)].mean];
  const high = Math.max(...shown.map((row) => row.mean).filter((mean) => shown.length <= 8 || mean <= low + 2 * (middle - low)));
  const room = Math.max(high - low, 0.1 * low);
  return [low - 0.08 * room, high + 0.35 * room];
}

function draw(picture) {
  const { id, title, log, unit, x, points } = picture;
  const figure = find(id), svg = figure.querySelector("svg");
  const shown = alive.filter((row) => !hidden.has(row) && points(row).some((point) => x(row, point) > 0));
  svg.replaceChildren();
  picture.spots = [];
  if (!shown.length) return;

  const width = Math.max(240, figure.clientWidth), height = Math.round(Math.min(420, Math.max(290, width / 2)));
  const names = 12 + 7.5 * Math.max(...shown.map((row) => row.name.length)); // pixels
  const [left, right, top, bottom] = [40, width - (width < 480 ? 14 : Math.min(170, names)), 24, height - 40];
  const [low, high] = lossRange(shown);
  const seen = (row) => points(row).filter((point, place, all) => point[MEAN] < high || place === all.length - 1);
  const places = shown.flatMap((row) => seen(row).map((point) => x(row, point))).filter((at) => at > 0);
  const bend = log ? Math.log : Number;
  const margin = 0.03 * (bend(Math.max(...places)) - bend(Math.min(...places))) || (log ? 1 : 0.5);
  const [from, to] = [bend(Math.min(...places)) - margin, bend(Math.max(...places)) + margin];
  const across = (at) => left + ((bend(at) - from) / (to - from)) * (right - left);
  const down = (loss) => bottom - ((loss - low) / (high - low)) * (bottom - top);

  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const loss of ticks(low, high, false)) {
    add(svg, "line", { class: "grid", x1: left, x2: right, y1: down(loss), y2: down(loss) });
    add(svg, "text", { x: left - 6, y: down(loss) + 4, "text-anchor": "end" }, loss);
  }
  for (const at of ticks(...(log ? [Math.exp(from), Math.exp(to)] : [Math.max(0, from), to]), log)) {
    add(svg, "line", { class: "grid", x1: across(at), x2: across(at), y1: top, y2: bottom });
    add(svg, "text", { x: across(at), y: bottom + 16, "text-anchor": "middle" }, unit(at));
  }
  add(svg, "text", { x: 0, y: 12 }, "validation loss, nats a byte");
  add(svg, "text", { x: right, y: height - 6, "text-anchor": "end" }, title);

  const [wide, tall] = [right - left, bottom - top];
  const area = add(svg, "svg", { x: left, y: top, width: wide, height: tall, viewBox: `${left} ${top} ${wide} ${tall}` });
  const single = picture === pictures.at(-1);
  if (single) {
    const front = shown.filter((row) => row.front).map((row) => `${across(row.sent)} ${down(row.mean)}`);
    add(area, "path", { class: "front", d: front.length ? `M${front.join("L")}` : "" });
  }
  const lines = [...shown].sort((a, b) => main(a) - main(b)).map((row) => {
    const group = add(area, "g", { class: main(row) ? "row main" : "row", style: `--row: ${row.color}` });
    const spots = points(row).map((point) => ({ row, point, group, x: across(x(row, point)), y: down(point[MEAN]) }));
    return { row, group, spots: spots.filter((spot) => Number.isFinite(spot.x)) };
  });
  for (const line of lines) {
    (single ? drawSpot : drawLine)(line, down, top);
    picture.spots.push(...line.spots.filter((spot) => spot.y >= top));
  }
  nameLines(svg, lines.sort((a, b) => main(b.row) - main(a.row)), width, top, bottom);
}

function drawLine({ row, group, spots }, down) {
  const path = (list) => list.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  const edge = (place) => spots.map((spot) => [spot.x, down(spot.point[place])]);
  add(group, "path", { class: "band", d: `M${path([...edge(MOST), ...edge(LEAST).reverse()])}Z` });
  add(group, "path", { d: `M${path(edge(MEAN))}`, "stroke-dasharray": row.tag === "Muon-DDP" ? "7 4" : "none" });
  for (const spot of spots) spot.node = add(group, "circle", { cx: spot.x, cy: spot.y, r: 2.2 });
}

function drawSpot({ row, group, spots: [spot] }, down, top) {
  if (spot.y < top) { // above the picture
    spot.y = top + 8;
    spot.node = add(group, "path", { class: "open", d: `M${spot.x - 5} ${spot.y + 4}h10l-5 -9z` });
    return;
  }
  add(group, "line", { x1: spot.x, x2: spot.x, y1: down(spot.point[LEAST]), y2: down(spot.point[MOST]) });
  spot.node = add(group, "circle", { cx: spot.x, cy: spot.y, r: 5, class: row.front ? "" : "open" });
}

// Names the ends of lines, in the order given, at the first place about them that is free; or not at all.
function nameLines(svg, lines, width, top, bottom) {
  const about = [[8, 4, "start"], [8, -6, "start"], [8, 15, "start"], [-7, -6, "end"], [-7, 15, "end"]];
  const taken = [];
  for (const { row, spots } of lines) {
    const end = spots.at(-1);
    if (end.y < top || end.y > bottom) continue;
    const text = add(svg, "text", { class: "name", style: `--row: ${row.color}` }, row.name);
    const free = about.some(([right, below, anchor]) => {
      Object.entries({ x: end.x + right, y: end.y + below, "text-anchor": anchor }).forEach(([key, value]) => text.setAttribute(key, value));
      const box = text.getBBox();
      const meets = (other) => Math.abs(box.y - other.y) < 12 && box.x < other.x + other.width && other.x < box.x + box.width;
      if (box.x < 0 || box.x + box.width > width || taken.some(meets)) return false;
      return taken.push(box);
    });
    if (!free) text.remove();
  }
}

function hover(event, picture) {
  const figure = find(picture.id), box = figure.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const far = (spot) => Math.hypot(spot.x - x, spot.y - y);
  const near = picture.spots.reduce((one, other) => (far(other) < far(one) ? other : one), { x: Infinity, y: Infinity });
  leave(picture);
  if (far(near) > 40) return;
  near.group.classList.add("hot");
  near.node.classList.add("here");
  const { row, point } = near;
  const tip = Object.assign(document.createElement("output"), { className: "tip" });
  const range = point[LEAST] < point[MOST] ? ` (${point[LEAST].toFixed(3)} to ${point[MOST].toFixed(3)})` : "";
  tip.textContent = `${row.name}\nloss ${point[MEAN].toFixed(3)}${range} at step ${point[STEP]}\n${scaled(point[SENT], "B")} uploaded, ${time(secondsAt(row, point))}`;
  figure.append(tip);
  tip.style.left = `${Math.max(0, Math.min(near.x + 12, figure.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${near.y + 14}px`;
}

function leave(picture) {
  const figure = find(picture.id);
  figure.querySelector(".tip")?.remove();
  figure.querySelector(".hot")?.classList.remove("hot");
  figure.querySelector(".here")?.classList.remove("here");
}

// What the reader can move

function set(bits, latency, scale) {
  Object.assign(mine, { bits, latency, scale });
  find("bandwidth").value = Math.log10(bits);
  find("latency").value = Math.cbrt(latency * 1e3);
  find("computing").value = Math.log10(base.seconds * scale);
  update();
}

function listen() {
  find("bandwidth").oninput = (event) => set(Number((10 ** event.target.value).toPrecision(2)), mine.latency, mine.scale);
  find("latency").oninput = (event) => set(mine.bits, event.target.value ** 3 / 1e3, mine.scale);
  find("computing").oninput = (event) => set(mine.bits, mine.latency, 10 ** event.target.value / base.seconds);
  document.querySelectorAll(".preset").forEach((button) => (button.onclick = () => set(Number(button.value), mine.latency, mine.scale)));
  find("reference").append(...alive.map((row, place) => new Option(row.name, place, row === mine.reference, row === mine.reference)));
  find("reference").onchange = (event) => {
    mine.reference = alive[event.target.value];
    update();
  };
  find("mine").onreset = (event) => {
    event.preventDefault();
    set(link, 0, 1);
  };
  find("results").tHead.onclick = (event) => {
    const key = event.target.closest("button")?.dataset.key;
    if (key) Object.assign(order, { key, sign: key === order.key ? -order.sign : 1 });
    sort();
  };
  for (const picture of pictures) {
    const figure = find(picture.id);
    figure.onpointermove = figure.onpointerdown = (event) => hover(event, picture);
    figure.onpointerleave = () => leave(picture);
  }
  new ResizeObserver(() => pictures.forEach(draw)).observe(find("by-time"));
}

find("theme").onclick = () => {
  const style = document.documentElement.style;
  const dark = style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  style.colorScheme = dark === "dark" ? "light" : "dark";
};
rows.forEach((row, place) => (row.line = find("results").tBodies[0].rows[place]));
paint();
alive.forEach((row) => (row.chip = chip(row)));
if (alive.length) {
  if (rows.some(main)) {
    const all = Object.assign(document.createElement("button"), { textContent: "show all", onclick: () => show(() => true) });
    find("legend").append(all, Object.assign(document.createElement("button"), { textContent: "marked only", onclick: () => show(main) }));
  }
  find("legend").append(...alive.map((row) => row.chip));
  listen();
  set(link, 0, 1);
}
