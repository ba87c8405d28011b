// Windows as rows of blocks, so that batching is seen; and their means in words.
import { at, clock, draw, make, ms, number, say } from "./dom.js";

const ROWS = 16;
const MEAN_MS = 5000; // the tiles are means over so long
const SAID_MS = 30_000; // a screen reader hears of it so often, and not while it is paused
const WIDTH = 1000; // of a row's drawing, in its own units

/** Panel of the windows; `add` takes what an event brings, `tick` lets the tiles go stale. */
export function windowsPanel() {
  const rows = at("rows");
  const recent = []; // [arrived, window, weight]
  let shown = []; // windows, the newest last
  let scale = 0; // tokens that fill a row
  let paused = false;
  let said = -Infinity;

  at("pause").addEventListener("click", () => {
    paused = !paused;
    at("pause").setAttribute("aria-pressed", String(paused));
    say(at("pause"), paused ? "Paused" : "Pause");
  });

  function add({ windows, unseen }) {
    const now = performance.now();
    const weight = (windows.length + unseen) / windows.length; // the unseen are taken to be like those seen
    for (const window of windows) recent.push([now, window, weight]);
    if (!paused) show(windows.slice(-ROWS));
    tick();
  }

  function show(windows) {
    shown = [...shown, ...windows].slice(-ROWS);
    let fresh = windows;
    const fits = step(recent.reduce((most, [, window]) => Math.max(most, window.tokens), 1));
    if (fits !== scale) {
      scale = fits;
      fresh = shown;
      rows.replaceChildren(); // they are drawn to another scale
    }
    const { budget } = windows[windows.length - 1];
    say(at("windows-scale"), `A full row is ${number(scale)} tokens; a window may hold ${number(budget)}.`);
    rows.querySelector(".empty")?.remove();
    rows.prepend(...fresh.map((window) => row(window, scale)).reverse());
    while (rows.children.length > ROWS) rows.lastElementChild.remove();
  }

  function tick() {
    const now = performance.now();
    while (recent.length && now - recent[0][0] > MEAN_MS) recent.shift();
    let count = 0, requests = 0, tokens = 0, queue = 0, compute = 0;
    for (const [, window, weight] of recent) {
      count += weight;
      requests += weight * window.requests;
      tokens += weight * window.tokens;
      queue += weight * window.requests * window.queue_ms;
      compute += weight * window.compute_ms;
    }
    const mean = (sum, of) => (of ? sum / of : null);
    say(at("tile-requests"), number(mean(requests, count)));
    say(at("tile-tokens"), number(mean(tokens, count)));
    say(at("tile-windows"), number(count / (MEAN_MS / 1000)));
    say(at("tile-queue"), ms(mean(queue, requests)));
    say(at("tile-compute"), ms(mean(compute, count)));
    if (now - said > SAID_MS && count && !paused) {
      said = now;
      say(at("windows-said"), `${number(count / (MEAN_MS / 1000))} windows a second, with ${number(requests / count)} requests and ${number(tokens / count)} tokens each on average`);
    }
  }

  return { add, tick };
}

/** The least power of two, or one and a half times one, that is not below `tokens` nor 16. */
function step(tokens) {
  const power = 2 ** Math.ceil(Math.log2(Math.max(16, tokens)));
  return power > 16 && tokens <= power * 0.75 ? power * 0.75 : power;
}

function row(window, scale) {
  return make("tr", { class: window.failed ? "failed" : null },
    make("td", {}, number(window.requests)),
    make("td", {}, number(window.tokens)),
    make("td", {}, blocks(window, scale)),
    make("td", {}, ms(window.queue_ms)),
    make("td", {}, window.failed ? "failed" : ms(window.compute_ms)),
    make("td", { class: "time" }, clock(window.time)),
    make("td", { title: window.model }, window.model));
}

/** One block a request, neighbours in two shades; those beyond the ones that are told share a last block. */
function blocks(window, scale) {
  const told = window.blocks.reduce((a, b) => a + b, 0);
  const sizes = told < window.tokens ? [...window.blocks, window.tokens - told] : window.blocks;
  const shades = ["", ""];
  let x = 0;
  sizes.forEach((tokens, index) => {
    const width = (tokens / scale) * WIDTH;
    const gap = Math.min(2, width / 4);
    shades[index % 2] += `M${x.toFixed(2)} 0h${(width - gap).toFixed(2)}v20h-${(width - gap).toFixed(2)}z`;
    x += width;
  });
  return draw("svg", { class: "blocks", viewBox: `0 0 ${WIDTH} 20`, preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("path", { class: "even", d: shades[0] }), draw("path", { class: "odd", d: shades[1] }));
}
