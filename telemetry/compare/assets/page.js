// Draws the curves and timelines of the page from the JSON beside it, as SVG. No library, no network.
const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { axis: "step", smooth: false, hidden: new Set(), zoom: null, hover: null };
for (const chart of DATA.charts) chart.log = chart.logarithmic;
const SVG = document.getElementById("seed").namespaceURI;
const color = (run) => `var(--run${run % 8})`;
const dash = (run) => ["", "7 4", "2 3", "8 3 2 3"][Math.floor(run / 8) % 4];  // of more runs than colors
const swatch = (run, parent) => element("span", { class: `swatch${run < 8 ? "" : ` dash${Math.floor(run / 8) % 4}`}`, style: `color:${color(run)}` }, parent);

function node(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}
function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

// ---- curves
function visible(chart) {
  return chart.series.filter((one) => !state.hidden.has(one.run));
}
function smoothed(values) {
  let mean = null;
  return values.map((value) => (value === null ? null : (mean = mean === null ? value : 0.9 * mean + 0.1 * value)));
}
function xs(series) { return series.x[state.axis]; }

function extent(chart, all) {
  const inside = (x) => x !== null && (!state.zoom || (x >= state.zoom[0] && x <= state.zoom[1]));
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const other of DATA.charts) for (const series of visible(other)) for (const x of xs(series)) if (x !== null) { left = Math.min(left, x); right = Math.max(right, x); }
  const y = [];
  for (const series of all) xs(series).forEach((x, place) => { const value = series.y[place]; if (inside(x) && value !== null && (!chart.log || value > 0)) y.push(value); });
  if (chart.limit && (!chart.log || chart.limit > 0)) y.push(chart.limit);
  for (const value of y) { low = Math.min(low, value); high = Math.max(high, value); }
  if (state.zoom) [left, right] = state.zoom;
  if (low > high) return null;
  if (chart.log) { const room = Math.max(0.06 * Math.log10(high / low), 0.02); return { left, right, low: low / 10 ** room, high: high * 10 ** room }; }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return { left, right, low: low >= 0 && low < 0.25 * (high - low) ? Math.min(low, 0) : low - room, high: high + room };
}

function draw(chart) {
  const svg = chart.svg, width = svg.clientWidth || 420, height = chart.height;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  svg.replaceChildren();
  const all = visible(chart), box = extent(chart, all);
  const margin = { left: 56, right: 12, top: 12, bottom: 24 };
  const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
  chart.scale = null;
  if (!box) return void node("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "nothing to draw");
  const share = (value) => chart.log ? Math.log(value / box.low) / Math.log(box.high / box.low) : (value - box.low) / (box.high - box.low);
  const X = (value) => margin.left + (inner.width * (value - box.left)) / (box.right - box.left || 1);
  const Y = (value) => margin.top + inner.height * (1 - share(value));
  chart.scale = { X, Y, box, margin, inner };
  for (const value of chart.log ? logTicks(box.low, box.high) : ticks(box.low, box.high, height > 240 ? 6 : 4)) {
    node("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: Y(value), y2: Y(value) }, svg);
    node("text", { x: margin.left - 7, y: Y(value) + 4, "text-anchor": "end" }, svg, short(value));
  }
  for (const value of ticks(box.left, box.right, width / 110))
    node("text", { x: X(value), y: height - 7, "text-anchor": X(value) > width - 30 ? "end" : "middle" }, svg, short(value));
  node("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom }, svg);
  const clip = node("clipPath", { id: `clip-${chart.key}` }, svg);
  node("rect", { x: margin.left, y: 0, width: inner.width, height: height - margin.bottom }, clip);
  const plot = node("g", { "clip-path": `url(#clip-${chart.key})` }, svg);
  if (chart.limit) {
    node("line", { class: "limit", x1: margin.left, x2: width - margin.right, y1: Y(chart.limit), y2: Y(chart.limit) }, plot);
    node("text", { x: width - margin.right - 4, y: Y(chart.limit) - 5, "text-anchor": "end", class: "over" }, svg, `allowed ${short(chart.limit)}`);
  }
  for (const series of all) {
    const smooth = state.smooth && chart.smooth && series.y.length > 60;
    if (smooth) curve(plot, series, series.y, chart, "curve raw");
    curve(plot, series, smooth ? smoothed(series.y) : series.y, chart, "curve");
  }
  const told = new Map();  // labels at one place, below each other
  for (const mark of chart.marked ? DATA.marks : []) {
    if (state.hidden.has(mark.run) || mark.x[state.axis] === null) continue;
    const at = X(mark.x[state.axis]);
    if (at < margin.left || at > width - margin.right) continue;
    node("line", { class: "mark", x1: at, x2: at, y1: margin.top, y2: height - margin.bottom }, svg);
    const late = at > width - 120, row = told.get(mark.x[state.axis]) || 0;
    told.set(mark.x[state.axis], row + 1);
    if (row > 3) continue;
    node("text", { class: "marked over", x: at + (late ? -5 : 5), y: margin.top + 8 + 13 * row, "text-anchor": late ? "end" : "start" }, svg, row < 3 ? mark.label : "and others");
  }
  chart.cross = node("g", {}, svg);
}
function curve(parent, series, values, chart, kind) {
  const { X, Y } = chart.scale;
  let path = "", pen = "M";
  const dots = [];
  xs(series).forEach((x, place) => {
    const value = values[place];
    if (x === null || value === null || (chart.log && value <= 0)) { pen = "M"; return; }
    path += `${pen}${X(x).toFixed(1)},${Y(value).toFixed(1)}`;
    pen = "L";
    dots.push([X(x), Y(value)]);
  });
  node("path", { class: kind, d: path, style: `stroke:${color(series.run)};stroke-dasharray:${dash(series.run) || "none"}` }, parent);
  if (dots.length <= 40 && kind === "curve") for (const [cx, cy] of dots) node("circle", { cx, cy, r: 2.6, style: `fill:${color(series.run)}` }, parent);
}

// ---- crosshair, tooltip, zoom
const tip = element("div", { id: "tip" }, document.body);
function showTip(event, build) {
  tip.replaceChildren();
  build(tip);
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, event.clientX + 16 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
}
function hideTip() { tip.style.display = "none"; cross(null); }

function nearest(series, x) {
  let best = -1, least = Infinity;
  xs(series).forEach((value, place) => { if (value !== null && Math.abs(value - x) < least) { least = Math.abs(value - x); best = place; } });
  const seen = xs(series).filter((value) => value !== null);  // a run that has ended says nothing of what comes after
  const gap = (seen[seen.length - 1] - seen[0]) / Math.max(1, seen.length - 1);
  return best >= 0 && least <= Math.max(gap, 1e-9 * Math.abs(x)) ? best : -1;
}
function cross(x) {
  for (const chart of DATA.charts) {
    if (!chart.cross || !chart.scale) continue;
    chart.cross.replaceChildren();
    if (x === null) continue;
    const { X, Y, margin, inner } = chart.scale, at = X(x);
    if (at < margin.left - 1 || at > margin.left + inner.width + 1) continue;
    node("line", { class: "cross", x1: at, x2: at, y1: margin.top, y2: margin.top + inner.height }, chart.cross);
    for (const series of visible(chart)) {
      const place = nearest(series, x), value = place < 0 ? null : series.y[place];
      if (value === null || (chart.log && value <= 0)) continue;
      node("circle", { cx: X(xs(series)[place]), cy: Y(value), r: 3.6, style: `fill:${color(series.run)};stroke:var(--card);stroke-width:1.5` }, chart.cross);
    }
  }
}
function follow(chart) {
  const at = (event) => {
    const { box, margin, inner } = chart.scale, place = event.clientX - chart.svg.getBoundingClientRect().left;
    return box.left + ((box.right - box.left) * Math.min(Math.max(place - margin.left, 0), inner.width)) / inner.width;
  };
  let from = null;
  chart.svg.addEventListener("pointerdown", (event) => { if (chart.scale && event.button === 0) from = at(event); });
  chart.svg.addEventListener("pointermove", (event) => {
    if (!chart.scale) return;
    const x = at(event);
    cross(x);
    if (from !== null) {
      const { X, margin, inner } = chart.scale, [left, right] = [X(Math.min(from, x)), X(Math.max(from, x))];
      node("rect", { class: "selected", x: left, width: right - left, y: margin.top, height: inner.height }, chart.cross);
    }
    showTip(event, (box) => {
      element("div", { class: "at" }, box, `${DATA.axes[state.axis]} ${state.axis === "step" ? Math.round(x) : short(x)}`);
      for (const series of visible(chart)) {
        const place = nearest(series, x);
        if (place < 0) continue;
        const row = element("div", { class: "one" }, box);
        swatch(series.run, row);
        const where = state.axis === "step" ? "" : ` (step ${series.x.step[place]})`;
        element("span", {}, row, DATA.runs[series.run] + where);
        const value = series.y[place];
        element("b", {}, row, value === null ? "not finite" : `${short(value)}${chart.unit.startsWith("%") ? " %" : ""}`);
      }
    });
  });
  const end = (event) => {
    if (from === null || !chart.scale) return;
    const to = at(event), { box } = chart.scale;
    if (Math.abs(to - from) > 0.02 * (box.right - box.left)) { state.zoom = [Math.min(from, to), Math.max(from, to)]; render(); }
    from = null;
  };
  chart.svg.addEventListener("pointerup", end);
  chart.svg.addEventListener("pointerleave", () => { from = null; hideTip(); });
  chart.svg.addEventListener("dblclick", () => { state.zoom = null; render(); });
}

// ---- timelines
const KINDS = [
  [/^(bad step|rank lost|checkpoint failed|alert raised)/, "bad", "M0,-6L6,5L-6,5Z", "trouble"],
  [/^(rollback|resume|stopped|skipped)/, "warn", "M0,-6L6,0L0,6L-6,0Z", "went back, resumed or stopped"],
  [/^(start|end|alert cleared)/, "soft", "M-5,-5H5V5H-5Z", "start, end, cleared"],
  [/./, "faint", "M-2.5,0A2.5,2.5 0 1 0 2.5,0A2.5,2.5 0 1 0 -2.5,0", "checkpoint, evaluation"],
];
function timelines() {
  const svg = document.getElementById("lanes");
  if (!svg) return;
  const lanes = DATA.events.map((events, run) => ({ events, run })).filter((one) => !state.hidden.has(one.run) && one.events.length);
  const width = svg.clientWidth || 900, row = 34, height = 26 + row * lanes.length;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  svg.replaceChildren();
  const places = lanes.flatMap((lane) => lane.events.map((event) => event.x[state.axis])).filter((x) => x !== null);
  const low = state.zoom ? state.zoom[0] : Math.min(...places), high = state.zoom ? state.zoom[1] : Math.max(...places);
  const X = (x) => 14 + ((width - 28) * (x - low)) / (high - low || 1);
  lanes.forEach((lane, place) => {
    const y = row * place + 22;
    node("line", { class: "lane", x1: 14, x2: width - 14, y1: y, y2: y }, svg);
    node("text", { x: 14, y: y - 11, style: `fill:${color(lane.run)};font-weight:600` }, svg, DATA.runs[lane.run]);
    const order = (event) => KINDS.length - KINDS.findIndex(([pattern]) => pattern.test(event.event));
    for (const event of [...lane.events].sort((one, other) => order(one) - order(other))) {
      const x = event.x[state.axis];
      if (x === null || x < low || x > high) continue;
      const [, tone, shape] = KINDS.find(([pattern]) => pattern.test(event.event));
      const made = node("path", { class: "event", d: shape, transform: `translate(${X(x)},${y})`, style: `fill:var(--${tone});stroke:var(--card)` }, svg);
      made.addEventListener("pointermove", (moved) => showTip(moved, (box) => element("div", {}, box, event.line)));
      made.addEventListener("pointerleave", hideTip);
    }
  });
  for (const value of ticks(low, high, width / 120)) node("text", { x: X(value), y: height - 4, "text-anchor": "middle" }, svg, short(value));
  const key = document.getElementById("kinds");
  if (key.childElementCount) return;
  for (const [, tone, shape, word] of KINDS) {
    const one = element("span", {}, key), drawn = node("svg", { viewBox: "-8 -8 16 16" }, one);
    node("path", { d: shape, style: `fill:var(--${tone})` }, drawn);
    one.append(word);
  }
}

// ---- the page
function render() {
  for (const chart of DATA.charts) draw(chart);
  timelines();
  document.getElementById("reset").style.display = state.zoom ? "" : "none";
}
function pressed(button, value) { button.setAttribute("aria-pressed", value ? "true" : "false"); }

function build() {
  const legend = document.querySelector(".legend");
  DATA.runs.forEach((name, run) => {
    const button = element("button", { "aria-pressed": "true", title: "show or hide" }, legend);
    swatch(run, button);
    element("span", {}, button, name);
    button.addEventListener("click", () => {
      state.hidden.has(run) ? state.hidden.delete(run) : state.hidden.add(run);
      pressed(button, !state.hidden.has(run));
      render();
    });
  });
  const axes = document.getElementById("axes");
  for (const axis of Object.keys(DATA.axes)) {
    if (!DATA.charts.some((chart) => chart.series.some((one) => one.x[axis].some((x) => x !== null)))) continue;
    const button = element("button", { "aria-pressed": String(axis === state.axis) }, axes, axis === "flops" ? "FLOPs" : axis);
    button.addEventListener("click", () => {
      state.axis = axis;
      hideTip();
      state.zoom = null;
      for (const other of axes.querySelectorAll("button")) pressed(other, other === button);
      render();
    });
  }
  const holder = document.getElementById("charts");
  for (const chart of DATA.charts) {
    const card = element("div", { class: `card chart${chart.wide ? " wide" : ""}` }, holder), top = element("div", { class: "top" }, card);
    element("span", { class: "title" }, top, chart.title);
    element("span", { class: "unit" }, top, chart.unit);
    const button = element("button", { "aria-pressed": String(chart.log), class: "toggle" }, top, "log");
    button.addEventListener("click", () => { chart.log = !chart.log; pressed(button, chart.log); draw(chart); });
    chart.height = chart.wide ? 300 : 190;
    chart.svg = node("svg", { role: "img", "aria-label": chart.title }, card);
    follow(chart);
  }
  const smooth = document.getElementById("smooth"), theme = document.getElementById("theme"), root = document.documentElement;
  smooth.addEventListener("click", () => { state.smooth = !state.smooth; pressed(smooth, state.smooth); render(); });
  document.getElementById("reset").addEventListener("click", () => { state.zoom = null; render(); });
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  theme.addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
  addEventListener("resize", render);
  let before = null;  // paper is light, narrow, and opens nothing
  addEventListener("beforeprint", () => {
    before = { theme: root.dataset.theme, closed: [...document.querySelectorAll("details:not([open])")] };
    root.dataset.theme = "light";
    for (const one of before.closed) one.open = true;
    render();
  });
  addEventListener("afterprint", () => { root.dataset.theme = before.theme; for (const one of before.closed) one.open = false; render(); });
  render();
}
build();
