// The last minutes as three charts (uPlot, a script of its own), each with a legend that says its latest values.
import { at, clock, draw, make, ms, number, say } from "./dom.js";

const HEIGHT = 190;
const TABLE_ROWS = 30;
const rate = (value) => `${number(value)}/s`;

// Neighbouring lines differ in their dashes too: colour alone tells not everyone.
const CHARTS = {
  throughput: [
    { label: "tokens", of: (s) => s.tokens, say: rate, colour: "--one", dash: [] },
    { label: "requests (right)", of: (s) => s.requests, say: rate, colour: "--queue", dash: [6, 3], scale: "right" },
  ],
  latency: [
    { label: "whole, mean", of: (s) => s.latency_ms, say: ms, colour: "--one", dash: [] },
    { label: "queue, mean", of: (s) => s.queue_ms, say: ms, colour: "--queue", dash: [6, 3] },
    { label: "queue, 99 %", of: (s) => s.queue_p99_ms, say: ms, colour: "--queue", dash: [2, 3] },
    { label: "compute, mean", of: (s) => s.compute_ms, say: ms, colour: "--third", dash: [10, 3, 2, 3] },
  ],
  rejections: [
    { label: "rejected", of: (s) => total(s.rejections) / s.seconds, say: rate, colour: "--bad", dash: [] },
    { label: "late, failed or left", of: (s) => s.failed / s.seconds, say: rate, colour: "--third", dash: [6, 3] },
  ],
};

const total = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

/** Panel of the samples: `set` takes all there are, `add` one more; at most `limit` are kept. */
export function minutesPanel() {
  let samples = [];
  let limit = 300;
  const charts = Object.entries(CHARTS).map(([name, series]) => chart(at(`chart-${name}`), series));

  function show() {
    for (const one of charts) one.show(samples);
    const reasons = {};
    for (const sample of samples) for (const [reason, n] of Object.entries(sample.rejections)) reasons[reason] = (reasons[reason] ?? 0) + n;
    const list = Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([reason, n]) => `${reason} ${number(n)}`);
    say(at("reasons"), list.length ? `Rejected, by reason: ${list.join(", ")}` : "");
    if (at("samples").open) table();
  }

  function table() {
    at("sample-rows").replaceChildren(...samples.slice(-TABLE_ROWS).reverse().map((s) => make("tr", {},
      ...[clock(s.time), number(s.tokens), number(s.requests), number(s.latency_ms), number(s.queue_ms), number(s.compute_ms), number(total(s.rejections))].map((text) => make("td", {}, text)))));
  }

  at("samples").addEventListener("toggle", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((one) => one.rebuild(samples)));
  return {
    limit: (n) => { limit = n; },
    set: (all) => { samples = all; show(); },
    add: (one) => { samples.push(one); if (samples.length > limit) samples.shift(); show(); },
  };
}

function chart(figure, series) {
  const holder = make("div", { class: "plot" });
  const values = series.map(() => make("b", {}, "–"));
  const legend = make("ul", { class: "legend" }, ...series.map((one, i) => make("li", {}, swatch(one), `${one.label}: `, values[i])));
  figure.append(legend, holder);
  let plot = null;

  function build(samples) {
    plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, size: 58, font: "12px system-ui" };
    const right = series.some((one) => one.scale);
    plot = new globalThis.uPlot({
      width: Math.max(200, holder.clientWidth), height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false } },
      scales: { x: { time: true }, y: { range: upwards }, ...(right ? { right: { range: upwards } } : {}) },
      axes: [{ ...axis, size: 34, values: times, space: 76 }, { ...axis, values: (_, ticks) => ticks.map(number) },
        ...(right ? [{ ...axis, scale: "right", side: 1, grid: { show: false }, values: (_, ticks) => ticks.map(number) }] : [])],
      series: [{}, ...series.map((one) => ({ label: one.label, scale: one.scale ?? "y", stroke: colour(one.colour), width: 2, dash: one.dash, spanGaps: false, points: { show: false } }))],
    }, data(samples, series), holder);
    plot.root.setAttribute("aria-hidden", "true"); // the legend and the table say the same in words
  }

  function show(samples) {
    if (plot === null) build(samples);
    else plot.setData(data(samples, series));
    const last = samples[samples.length - 1];
    series.forEach((one, i) => say(values[i], last ? one.say(one.of(last)) : "–"));
  }

  new ResizeObserver(() => plot?.setSize({ width: Math.max(200, holder.clientWidth), height: HEIGHT })).observe(holder);
  return { show, rebuild: build };
}

const data = (samples, series) => [samples.map((s) => s.time), ...series.map((one) => samples.map(one.of))];
// Seconds where the minutes alone would repeat.
const times = (_, ticks) => ticks.map((t) => clock(t).slice(0, ticks.length > 1 && ticks[1] - ticks[0] < 60 ? 8 : 5));
const upwards = (_, __, most) => [0, most > 0 ? most * 1.1 : 1];

function swatch(one) {
  const line = draw("line", { x1: 0, y1: 5, x2: 26, y2: 5, "stroke-width": 3, "stroke-dasharray": one.dash.join(" ") || null });
  line.style.stroke = `var(${one.colour})`;
  return draw("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, line);
}
