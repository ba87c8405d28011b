// Models as cards. A card is built anew only when something but its counts has changed: what is open or focused stays.
import { at, make, number, say } from "./dom.js";

const cards = new Map();

/** Show these rows: the repository's index, with the details of what is served. */
export function showModels(rows) {
  const seen = new Set();
  for (const row of rows) {
    const id = `${row.name}/${row.version}`;
    seen.add(id);
    const { requests, tokens, ...fixed } = row.model ?? {};
    const print = JSON.stringify([row.state, row.reason, fixed]);
    let card = cards.get(id);
    if (card === undefined || card.print !== print) {
      const built = build(row);
      if (card === undefined) at("cards").append(built.element);
      else card.element.replaceWith(built.element);
      card = { ...built, print };
      cards.set(id, card);
    }
    if (row.model) say(card.counts, `${number(requests)} requests, ${number(tokens)} tokens`);
  }
  for (const [id, card] of cards) {
    if (!seen.has(id)) {
      card.element.remove();
      cards.delete(id);
    }
  }
}

// An unmeasured file's figures are of a stand-in that ran in its place.
function againstTorch({ relative_error, sqnr_db, certificate }) {
  const figures = `relative error ${relative_error.toExponential(1)}, SQNR ${number(sqnr_db)} dB`;
  return certificate.kind === "unmeasured" ? `${figures}, of a stand-in on the CPU` : figures;
}

function build({ name, version, state, reason, model }) {
  const counts = make("dd");
  const badge = make("span", { class: state === "READY" ? "state" : "state bad" }, state.toLowerCase());
  const element = make("li", {}, make("h3", {}, `${name}, version ${version} `, badge));
  if (reason) element.append(make("p", { class: "note" }, reason));
  if (!model) return { element, counts };
  const facts = [
    ["Precision", `${model.precision}, ${model.provider}`],
    ["Kind", model.kind === "sequence" ? "sequences: tokens attend to one another" : "position-wise: tokens are independent"],
    ["Shapes", shapes(model)],
    ["Parameters", number(model.parameters)],
    ["Memory", `${number(model.memory_bytes / 2 ** 20)} MiB`],
    ["Window", model.packed ? `up to ${number(model.window_tokens)} tokens` : "one request: not packed"],
    ["Against torch", againstTorch(model)],
  ];
  const list = make("dl", { class: "facts" });
  for (const [term, text] of facts) list.append(make("dt", {}, term), make("dd", {}, text));
  list.append(make("dt", {}, "Answered"), counts);
  element.append(list, certificate(model.certificate));
  return { element, counts };
}

function shapes(model) {
  const inputs = [`tokens [n, ${model.d_in}]`];
  if (model.kind === "sequence") inputs.push("seq_lens [s]");
  if (model.d_memory) inputs.push(`memory [m, ${model.d_memory}]`, "memory_seq_lens [s]");
  return `${inputs.join(", ")} → out [n, ${model.d_out}]`;
}

const MEANS = {
  exact: "an answer's bits do not depend on who shares its window",
  tolerance: "who shares a window changes an answer by rounding alone",
  dependent: "who shares a window changes an answer",
  unmeasured: "nobody has measured whether who shares a window changes an answer: each request runs alone",
};

function certificate({ kind, max_drift, rows, checks, session, machine }) {
  const options = Object.entries(session).map(([name, value]) => `${name} ${value}`).join(", ");
  const measured = `Measured on ${number(rows)} rows, largest change ${max_drift}`;
  return make("details", {},
    make("summary", {}, "Certificate: ", make("b", { class: kind }, kind)),
    make("p", { class: "note" }, kind === "unmeasured" ? `${MEANS[kind]}.` : `${MEANS[kind]}. ${measured}.`),
    make("ul", { class: "checks" }, ...Object.entries(checks).map(([name, held]) => make("li", {}, `${name}: ${held ? "bit for bit" : "differs"}`))),
    ...(kind === "unmeasured" ? [] : [make("p", { class: "note" }, `${machine}; ${options}`)]));
}
