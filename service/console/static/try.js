// The form that asks a model, through the same route as any client, and shows the answer, its timing and the bytes.
import { at, draw, make, ms, number, say } from "./dom.js";
import { hexTable } from "./hex.js";
import { keyed } from "./stream.js";
import { decode, encode, floats, integers, lengthsOf, normal, numbersOf, timingOf, valuesOf } from "./wire.js";

const OUT_ROWS = 4;
const OUT_COLUMNS = 8;
const MOST_VALUES = 1 << 24; // 64 MiB: more is no try
let served = new Map();

/** Offer these models; the choice stays if it is still there. */
export function offerModels(rows) {
  const fresh = new Map(rows.filter((row) => row.model).map((row) => [`${row.name}/${row.version}`, row]));
  if ([...fresh.keys()].join() !== [...served.keys()].join()) {
    const chosen = at("try-model").value;
    at("try-model").replaceChildren(...[...fresh].map(([id, row]) => make("option", { value: id }, `${row.name}, version ${row.version} (${row.model.precision})`)));
    if (fresh.has(chosen)) at("try-model").value = chosen;
  }
  served = fresh;
  adapt();
}

function adapt() {
  const model = served.get(at("try-model").value)?.model;
  if (!model) return;
  const sequences = model.kind === "sequence";
  say(at("try-lens-label"), sequences ? "Tokens of each sequence" : "Tokens");
  say(at("try-lens-hint"), sequences ? "Whole numbers between commas, one a sequence" : `Rows of ${model.d_in} columns`);
  at("try-memory-row").hidden = !model.d_memory;
  at("try-values-row").hidden = source() !== "pasted";
  say(at("try-values-hint"), `JSON, or numbers between spaces, commas or lines; ${model.d_in} a token`);
}

const source = () => document.querySelector("input[name=source]:checked").value;

/** Tensors of one request, from the form. Throws with what is wrong. */
function tensors(model) {
  const lens = lengthsOf(at("try-lens").value, "Tokens");
  const rows = lens.reduce((a, b) => a + b, 0);
  if (rows * model.d_in > MOST_VALUES) throw new Error(`Tokens: ${number(rows)} rows are too many to try from a page`);
  const values = source() === "random" ? normal(rows * model.d_in) : numbersOf(at("try-values").value);
  if (values.length !== rows * model.d_in) throw new Error(`Pasted: ${number(values.length)} numbers, expected ${number(rows)} x ${model.d_in} = ${number(rows * model.d_in)}`);
  const found = [floats("tokens", [rows, model.d_in], values)];
  if (model.kind === "sequence") found.push(integers("seq_lens", lens));
  if (model.d_memory) {
    const memory = lengthsOf(at("try-memory").value, "Memory rows");
    if (memory.length !== lens.length) throw new Error(`Memory rows: ${memory.length} numbers for ${lens.length} sequences`);
    const all = memory.reduce((a, b) => a + b, 0);
    found.push(floats("memory", [all, model.d_memory], normal(all * model.d_memory)), integers("memory_seq_lens", memory));
  }
  return found;
}

async function send(row, request) {
  const began = performance.now();
  const response = await fetch(`v2/models/${encodeURIComponent(row.name)}/versions/${row.version}/infer`, {
    method: "POST", body: request.body, cache: "no-store",
    headers: { ...keyed(), "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(request.jsonLength) },
  });
  const body = new Uint8Array(await response.arrayBuffer());
  const took = performance.now() - began;
  if (!response.ok) throw new Error(`${response.status}: ${JSON.parse(new TextDecoder().decode(body)).error}`);
  return { body, took, jsonLength: Number(response.headers.get("inference-header-content-length")), timing: timingOf(response.headers.get("server-timing") ?? "") };
}

async function submit(submission) {
  submission.preventDefault();
  say(at("try-fault"), "");
  say(at("try-said"), "");
  const row = served.get(at("try-model").value);
  try {
    if (!row) throw new Error("Model: none is served");
    const [count] = lengthsOf(at("try-count").value, "Requests at once");
    if (count > 64) throw new Error("Requests at once: 64 at most");
    const requests = Array.from({ length: count }, () => encode(tensors(row.model)));
    at("try-send").disabled = true;
    const answers = await Promise.all(requests.map((request) => send(row, request)));
    show(row, requests[0], answers);
  } catch (error) {
    at("try-result").hidden = true;
    say(at("try-fault"), error.message);
  } finally {
    at("try-send").disabled = false;
  }
}

function show(row, request, answers) {
  const [first] = answers;
  const { head, segments } = decode(first.body, first.jsonLength);
  const out = segments[1];
  const { queue, compute, window } = first.timing;
  const rest = Math.max(0, first.took - queue - compute);
  const others = answers.length > 1
    ? `${answers.length} requests answered; their windows held ${spread(answers.map((one) => one.timing.window))} tokens, and they took ${spread(answers.map((one) => one.took))} ms. The first: `
    : "";
  say(at("try-said"), `${others}${out.shape[0]} tokens answered in ${ms(first.took)}, in a window of ${number(window)} tokens, by ${head.model_name} version ${head.model_version}.`);
  const parts = [["queue", queue, "queue"], ["compute", compute, "compute"], ["rest", rest, "HTTP, network and browser"]];
  let x = 0;
  at("try-bar").replaceChildren(...parts.map(([kind, value]) => {
    const width = (value / first.took) * 1000;
    x += width;
    return draw("rect", { class: `fill-${kind}`, x: x - width, y: 0, width, height: 24 });
  }));
  at("try-bar").setAttribute("aria-label", parts.map(([, value, text]) => `${text} ${ms(value)}`).join(", "));
  at("try-legend").replaceChildren(...parts.map(([kind, value, text]) => make("li", {}, draw("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, draw("rect", { class: `fill-${kind}`, width: 26, height: 10 })), `${text}: ${ms(value)}`)));
  outTable(first.body, out);
  const path = `/v2/models/${row.name}/versions/${row.version}/infer`;
  at("try-sent").replaceChildren(
    make("p", { class: "wirehead" }, `POST ${path}\nInference-Header-Content-Length: ${request.jsonLength}`),
    hexTable(request.body, request.segments, "Bytes that were sent"));
  at("try-got").replaceChildren(
    make("p", { class: "wirehead" }, `200\nInference-Header-Content-Length: ${first.jsonLength}`),
    hexTable(first.body, segments, "Bytes that came back"));
  at("try-result").hidden = false;
}

const spread = (values) => {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return least === most ? number(least) : `${number(least)} to ${number(most)}`;
};

function outTable(body, segment) {
  const [rows, columns] = segment.shape;
  const shown = Math.min(columns, OUT_COLUMNS);
  const head = make("tr", {}, make("th", { scope: "col" }, "Token"), ...Array.from({ length: shown }, (_, i) => make("th", { scope: "col" }, String(i))));
  const lines = Array.from({ length: Math.min(rows, OUT_ROWS) }, (_, row) => make("tr", {},
    make("th", { scope: "row" }, String(row)),
    ...valuesOf(body, segment, row * columns, shown).map((value) => make("td", {}, value.toPrecision(4)))));
  at("try-out").replaceChildren(make("caption", { class: "note" }, `out, FP32 [${rows}, ${columns}], its first rows and columns`), make("thead", {}, head), make("tbody", {}, ...lines));
}

/** Make the form live. */
export function startForm() {
  at("try-form").addEventListener("submit", submit);
  at("try-form").addEventListener("change", adapt);
}
