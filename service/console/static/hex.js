// The head of a body as hex with its meaning beside it, segment by segment.
import { make, number } from "./dom.js";
import { valuesOf } from "./wire.js";

const LINE = 16;
const LINES = { JSON: 32, FP32: 4, INT64: 4 };
const short = (value) => String(Number(value.toPrecision(4)));

/** A table of the segments of `body`. */
export function hexTable(body, segments, label) {
  const rows = segments.flatMap((segment) => [title(segment), ...lines(body, segment)]);
  const head = make("thead", {}, make("tr", {}, ...["Offset", "Bytes", "Meaning"].map((text) => make("th", { scope: "col" }, text))));
  const table = make("table", { class: "hex" }, make("caption", { class: "unseen" }, label), head, make("tbody", {}, ...rows));
  return make("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);
}

function title({ name, datatype, shape, start, length }) {
  const range = `bytes ${number(start)} to ${number(start + length - 1)}`;
  const text = datatype === "JSON"
    ? `${name}, ${range}: says which tensors follow, and in which order`
    : `${name}, ${range}: ${datatype} [${shape.join(", ")}], row by row, little-endian, ${datatype === "FP32" ? 4 : 8} bytes each`;
  return make("tr", {}, make("th", { colspan: "3", scope: "rowgroup" }, text));
}

function lines(body, segment) {
  const { datatype, start, length } = segment;
  const shown = Math.min(length, LINES[datatype] * LINE);
  const found = [];
  for (let at = 0; at < shown; at += LINE) {
    const bytes = body.subarray(start + at, start + Math.min(at + LINE, length));
    found.push(make("tr", {},
      make("td", {}, (start + at).toString(16).padStart(6, "0")),
      make("td", { class: "bytes" }, [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" ")),
      make("td", { class: "meaning" }, meaning(body, segment, at, bytes))));
  }
  if (shown < length) found.push(make("tr", {}, make("td", {}, "…"), make("td", { colspan: "2" }, `${number(length - shown)} more bytes`)));
  return found;
}

function meaning(body, segment, at, bytes) {
  if (segment.datatype === "JSON") return [...bytes].map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
  const size = segment.datatype === "FP32" ? 4 : 8;
  const first = at / size;
  const values = valuesOf(body, segment, first, LINE / size).map(short).join("  ");
  const width = segment.shape[1];
  return width ? `row ${Math.floor(first / width)}, column ${first % width}:  ${values}` : values;
}
