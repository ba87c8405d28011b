// Elements from text, never from markup: what a model is called cannot become part of the page's structure.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id. */
export const at = (id) => document.getElementById(id);

/** A new HTML element with attributes and children (elements or text). */
export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set the text of an element, only if it is another: live regions speak on every change. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");

/** A count with thousands parted, or three figures where it is small and broken. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100 || Number.isInteger(value)) return whole.format(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

/** Milliseconds, three figures. */
export const ms = (value) => (value === null || value === undefined ? "–" : `${number(value)} ms`);

/** Unix seconds as local time of day. */
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
