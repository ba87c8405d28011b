// The binary form of the protocol: a JSON part, then raw little-endian tensors. Pure: values in, bytes and their meaning out.

const SIZES = { FP32: 4, INT64: 8 };

/** A tensor: name, datatype, shape, and its bytes. */
export const floats = (name, shape, values) => ({ name, datatype: "FP32", shape, bytes: littleEndian(values, 4, (view, i, v) => view.setFloat32(i, v, true)) });
export const integers = (name, values) => ({ name, datatype: "INT64", shape: [values.length], bytes: littleEndian(values, 8, (view, i, v) => view.setBigInt64(i, BigInt(v), true)) });

function littleEndian(values, size, set) {
  const view = new DataView(new ArrayBuffer(values.length * size));
  for (let i = 0; i < values.length; i++) set(view, i * size, values[i]);
  return new Uint8Array(view.buffer);
}

/** The body of an infer request, the length of its JSON part, and its segments. */
export function encode(tensors) {
  const inputs = tensors.map(({ name, datatype, shape, bytes }) => ({ name, datatype, shape, parameters: { binary_data_size: bytes.length } }));
  const json = new TextEncoder().encode(JSON.stringify({ inputs, parameters: { binary_data_output: true } }));
  const body = new Uint8Array(json.length + tensors.reduce((sum, one) => sum + one.bytes.length, 0));
  body.set(json);
  let end = json.length;
  for (const { bytes } of tensors) {
    body.set(bytes, end);
    end += bytes.length;
  }
  return { body, jsonLength: json.length, segments: segments(json.length, tensors.map((one) => ({ ...one, size: one.bytes.length }))) };
}

/** What an answer's bytes are. */
export function decode(body, jsonLength) {
  const head = JSON.parse(new TextDecoder().decode(body.subarray(0, jsonLength)));
  const tensors = head.outputs.map((one) => ({ ...one, size: one.parameters.binary_data_size }));
  return { head, segments: segments(jsonLength, tensors) };
}

function segments(jsonLength, tensors) {
  const found = [{ name: "JSON part", datatype: "JSON", start: 0, length: jsonLength }];
  let start = jsonLength;
  for (const { name, datatype, shape, size } of tensors) {
    found.push({ name, datatype, shape, start, length: size });
    start += size;
  }
  return found;
}

/** The values of a tensor's segment from its `first` one on, `count` of them at most. */
export function valuesOf(body, { datatype, start, length }, first, count) {
  const size = SIZES[datatype];
  const view = new DataView(body.buffer, body.byteOffset + start, length);
  const last = Math.min(first + count, length / size);
  const found = [];
  for (let i = first; i < last; i++) found.push(datatype === "FP32" ? view.getFloat32(i * size, true) : Number(view.getBigInt64(i * size, true)));
  return found;
}

/** The numbers of a text: JSON, or numbers between spaces, commas, semicolons or lines. Throws with what is wrong. */
export function numbersOf(text) {
  const words = text.trim().replace(/[[\],;]/g, " ").split(/\s+/).filter(Boolean);
  return words.map((word, i) => {
    const value = Number(word);
    if (!Number.isFinite(value)) throw new Error(`number ${i + 1} is ${JSON.stringify(word.slice(0, 20))}, which is none`);
    return value;
  });
}

/** Whole numbers >= `least` between commas. Throws, naming the field. */
export function lengthsOf(text, field, least = 1) {
  const words = text.split(/[\s,]+/).filter(Boolean);
  const found = words.map(Number);
  if (!found.length || found.some((n) => !Number.isInteger(n) || n < least)) throw new Error(`${field}: expected whole numbers from ${least} between commas`);
  return found;
}

/** `count` values of a standard normal distribution (Box-Muller). */
export function normal(count) {
  const found = new Float32Array(count);
  for (let i = 0; i < count; i++) found[i] = Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return found;
}

/** Server-Timing -> milliseconds in the queue and of compute, and the tokens of the window. */
export function timingOf(header) {
  const find = (pattern) => Number(pattern.exec(header)?.[1] ?? NaN);
  return { queue: find(/queue;dur=([\d.]+)/), compute: find(/compute;dur=([\d.]+)/), window: find(/window;desc="(\d+)"/) };
}
