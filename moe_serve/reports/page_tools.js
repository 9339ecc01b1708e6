"use strict";
// Helpers of the page: elements, numbers, tables and bars. Text is set as text, never as HTML.

const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const fixed = (value, digits) => (value === null ? "–" : value.toFixed(digits));
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value, digits = 1) =>
  value === null ? "–" : `${(100 * value).toFixed(digits)}%`;
const mebibytes = (value) => (value === null ? "–" : whole(value / 2 ** 20));
const milliseconds = (value) =>
  value === null ? "–" : value.toFixed(value >= 100 ? 0 : value >= 1 ? 1 : 3);
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(name, attributes = {}, ...children) {
  const isShape = ["svg", "rect", "line", "path", "text", "title", "g"].includes(name);
  const made = isShape
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// `rows`: lists of cells, as text.
function table(names, rows) {
  const line = (kind, cells) => make("tr", {}, ...cells.map((cell) => make(kind, {}, cell)));
  return make("table", {}, make("thead", {}, line("th", names)),
    make("tbody", {}, ...rows.map((row) => line("td", row))));
}

function show(sectionId) {
  byId(sectionId).hidden = false;
}

function fillSelect(select, options, onChange) {
  select.append(...options.map(([value, text]) => make("option", { value }, text)));
  select.addEventListener("change", () => onChange(select.value));
}

// A step for ticks: 1, 2 or 5 times a power of ten, at least `least`, so that there are at most
// `most`.
function tickStep(length, most, least = 1) {
  let step = least;
  for (let i = 0; length / step > most; i += 1) step *= [2, 2.5, 2][i % 3];
  return step;
}

// Upright bars from 0. options: into, label, top (least end of the axis), mean (a dashed line),
// high (indices that are marked, by colour and a triangle), tip (index -> text), format (value ->
// text), axis (name of what is counted below).
function bars(values, options) {
  const width = Math.max(280, (options.into.clientWidth || 1000));
  const [left, right, above, height, below] = [52, 84, 16, 170, 40];
  const tick = tickStep(options.top, 6, 0.01);
  const numTicks = Math.ceil(options.top / tick - 1e-9);
  const top = numTicks * tick;
  const each = Math.min(120, (width - left - right) / values.length);
  const y = (value) => above + height * (1 - value / top);
  const svg = make("svg", { class: "chart", role: "img", "aria-label": options.label,
    viewBox: `0 0 ${width} ${above + height + below}` });
  for (let i = 0; i <= numTicks; i += 1) {
    const value = i * tick;
    svg.append(
      make("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      make("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, options.format(value)));
  }
  const gap = each > 4 ? Math.min(each * 0.25, 8) : 0.5;
  values.forEach((value, index) => {
    const isHigh = options.high.includes(index);
    const x = left + index * each + gap / 2;
    const bar = make("rect", { class: isHigh ? "bar high" : "bar", x, y: y(value),
      width: Math.max(each - gap, 0.5), height: above + height - y(value) });
    // The whole column answers to the pointer, however low its bar.
    const column = make("rect", { x: left + index * each, y: above, width: each, height,
      fill: "transparent" }, make("title", {}, options.tip(index)));
    svg.append(bar, column);
    if (isHigh) {
      const middle = left + (index + 0.5) * each;
      svg.append(make("path", { class: "high",
        d: `M${middle - 5} ${y(value) - 9}h10l-5 7z` }));
    }
  });
  const step = tickStep(values.length, (width - left - right) / 34);
  for (let index = 0; index < values.length; index += step) {
    svg.append(make("text", { x: left + (index + 0.5) * each, y: above + height + 16,
      "text-anchor": "middle" }, index));
  }
  svg.append(make("text", { x: left + (each * values.length) / 2, y: above + height + 34,
    "text-anchor": "middle" }, options.axis));
  const at = y(options.mean);
  svg.append(
    make("line", { class: "mean", x1: left, x2: width - right, y1: at, y2: at }),
    make("text", { x: width - right + 6, y: at + 4 }, `mean ${options.format(options.mean)}`));
  options.into.replaceChildren(svg);
}
