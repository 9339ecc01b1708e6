"use strict";
// The map of layers and experts. Colours run from dark blue to yellow, in order of lightness, so
// that any colour vision and a grey print tell them apart ("cividis" of Nuñez, Anderton and
// Renslow, 2018, at nine points). The hottest experts also have a diamond, those never chosen a
// cross.

const COLOURS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "d2c060",
  "fee838"].map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
// Loads over the mean from here on look alike.
const TOP = 8;

class LoadMap {
  // `onPick(layer)` hears of a cell that was clicked or entered.
  constructor(canvas, report, onPick) {
    this.canvas = canvas;
    this.load = report.load;
    this.means = report.load.map((row) => sum(row) / row.length);
    // Of a small model, not a mark on each third cell.
    this.hot = report.hot.slice(0, Math.ceil((this.load.length * report.num_experts) / 16));
    this.numExperts = report.num_experts;
    // One layer that sends all to few experts must not darken all others.
    this.hottest = report.experts.hottest.max;
    this.top = Math.max(4, Math.min(TOP, Math.ceil(this.hottest)));
    this.at = null;
    this.onPick = onPick;
    canvas.addEventListener("mousemove", (event) => {
      this.move(this.cellAt(event));
      this.tip(event);
    });
    canvas.addEventListener("mouseleave", (event) => {
      this.move(null);
      this.tip(event);
    });
    canvas.addEventListener("click", (event) => this.pick(this.cellAt(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.setAttribute("aria-label", `Map of ${this.load.length} layers and ${this.numExperts} ` +
      "experts. Arrow keys move from cell to cell; the values follow below, and in the table.");
  }

  xMean(layer, expert) {
    return this.means[layer] ? this.load[layer][expert] / this.means[layer] : 0;
  }

  // Square roots spread the many experts below the mean.
  colour(xMean) {
    const at = Math.sqrt(Math.min(xMean / this.top, 1)) * (COLOURS.length - 1);
    const low = Math.min(Math.floor(at), COLOURS.length - 2);
    const mix = COLOURS[low].map((value, i) =>
      Math.round(value + (COLOURS[low + 1][i] - value) * (at - low)));
    return `rgb(${mix.join(",")})`;
  }

  draw() {
    const layers = this.load.length;
    this.left = 46;
    this.above = 8;
    const room = this.canvas.parentElement.clientWidth - this.left - 10;
    this.width = Math.max(4, Math.min(34, Math.floor((room / this.numExperts) * 4) / 4));
    this.height = Math.round(Math.max(9, Math.min(26, this.width * 1.15, 900 / layers)));
    const size = [this.left + this.width * this.numExperts + 10,
      this.above + this.height * layers + 44];
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(size[0] * scale);
    this.canvas.height = Math.round(size[1] * scale);
    this.canvas.style.width = `${size[0]}px`;
    this.canvas.style.height = `${size[1]}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.pen = pen;
    this.cells();
    this.axes();
    this.hot.forEach(({ layer, expert }) => this.diamond(layer, expert));
    if (this.at) this.cursor();
  }

  cells() {
    const [gap, gapBelow] = [this.width >= 8 ? 1 : 0, this.height >= 12 ? 1 : 0];
    const scale = window.devicePixelRatio || 1;
    this.load.forEach((row, layer) => row.forEach((load, expert) => {
      const [x, y] = this.corner(layer, expert);
      // On whole pixels: a blurred edge would be a colour of its own.
      const [left, right] = [x, x + this.width].map((edge) => Math.round(edge * scale) / scale);
      this.pen.fillStyle = this.colour(this.xMean(layer, expert));
      this.pen.fillRect(left, y, right - left - gap, this.height - gapBelow);
      if (load === 0 && this.means[layer]) this.cross(x, y);
    }));
  }

  corner(layer, expert) {
    return [this.left + expert * this.width, this.above + layer * this.height];
  }

  axes() {
    const pen = this.pen;
    pen.fillStyle = theme("--text");
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const layerStep = tickStep(this.load.length, (this.load.length * this.height) / 15);
    for (let layer = 0; layer < this.load.length; layer += layerStep) {
      pen.fillText(layer, this.left - 6, this.corner(layer, 0)[1] + this.height / 2);
    }
    pen.textAlign = "center";
    const bottom = this.above + this.load.length * this.height;
    const expertStep = tickStep(this.numExperts, (this.numExperts * this.width) / 32);
    for (let expert = 0; expert < this.numExperts; expert += expertStep) {
      pen.fillText(expert, this.corner(0, expert)[0] + this.width / 2, bottom + 11);
    }
    // In the middle of what is seen without scrolling.
    const seen = Math.min(this.numExperts * this.width,
      this.canvas.parentElement.clientWidth - this.left);
    pen.fillText("expert", this.left + seen / 2, bottom + 30);
    pen.save();
    pen.translate(9, this.above + (this.load.length * this.height) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText("layer", 0, 0);
    pen.restore();
  }

  cross(x, y) {
    const [w, h] = [Math.min(this.width, 9), Math.min(this.height, 9)];
    const [cx, cy] = [x + this.width / 2, y + this.height / 2];
    this.pen.strokeStyle = "#ffffff";
    this.pen.lineWidth = 1;
    this.pen.beginPath();
    this.pen.moveTo(cx - w / 3, cy - h / 3);
    this.pen.lineTo(cx + w / 3, cy + h / 3);
    this.pen.moveTo(cx - w / 3, cy + h / 3);
    this.pen.lineTo(cx + w / 3, cy - h / 3);
    this.pen.stroke();
  }

  diamond(layer, expert) {
    const [x, y] = this.corner(layer, expert);
    const [cx, cy] = [x + this.width / 2, y + this.height / 2];
    const size = Math.max(4, Math.min(6, this.width / 3));
    const pen = this.pen;
    pen.beginPath();
    pen.moveTo(cx, cy - size);
    pen.lineTo(cx + size, cy);
    pen.lineTo(cx, cy + size);
    pen.lineTo(cx - size, cy);
    pen.closePath();
    pen.fillStyle = "#ffffff";
    pen.fill();
    pen.lineWidth = 1.5;
    pen.strokeStyle = "#000000";
    pen.stroke();
  }

  cursor() {
    const [x, y] = this.corner(...this.at);
    const pen = this.pen;
    for (const [colour, grow] of [["#000000", 2], ["#ffffff", 1]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = 1.5;
      pen.strokeRect(x - grow, y - grow, this.width + 2 * grow - 1, this.height + 2 * grow - 1);
    }
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top - this.above) / this.height);
    const expert = Math.floor((event.clientX - box.left - this.left) / this.width);
    const isInside = layer >= 0 && layer < this.load.length && expert >= 0 &&
      expert < this.numExperts;
    return isInside ? [layer, expert] : null;
  }

  move(cell) {
    if (String(cell) === String(this.at)) return;
    this.at = cell;
    this.draw();
    byId("cell").textContent = cell ? this.text(...cell) : "";
  }

  tip(event) {
    const tip = byId("tip");
    tip.hidden = !this.at;
    tip.textContent = byId("cell").textContent;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${event.clientY + 18}px`;
  }

  pick(cell) {
    if (cell) this.onPick(cell[0]);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1],
      ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" && this.at) this.pick(this.at);
    if (!step) return;
    event.preventDefault();
    const [layer, expert] = this.at || [-step[0], -step[1]].map((s) => Math.min(s, 0));
    const clamp = (value, size) => Math.max(0, Math.min(size - 1, value));
    this.move([clamp(layer + step[0], this.load.length), clamp(expert + step[1], this.numExperts)]);
    this.scrollTo(...this.at);
  }

  // Of a map that is wider than its place, the part that is seen follows the keys.
  scrollTo(layer, expert) {
    const place = this.canvas.parentElement;
    const x = this.corner(layer, expert)[0];
    const least = x + this.width + 4 - place.clientWidth;
    place.scrollLeft = Math.max(least, Math.min(place.scrollLeft, x - this.left));
  }

  text(layer, expert) {
    const load = this.load[layer][expert];
    const total = sum(this.load[layer]);
    return `Layer ${layer}, expert ${expert}: chosen ${whole(load)} times, ` +
      `${fixed(this.xMean(layer, expert), 2)} x the mean, ` +
      `${percent(total ? load / total : 0, 2)} of the layer`;
  }

  drawLegend(into) {
    const at = (mark) => Math.sqrt(mark / this.top);
    const marks = [0];
    for (const mark of [0.25, 0.5, 1, 2, 4]) {
      const isClear = at(mark) - at(marks[marks.length - 1]) > 0.15 && at(mark) < 0.86;
      if (isClear) marks.push(mark);
    }
    const stops = COLOURS.map((rgb) => `rgb(${rgb.join(",")})`).join(",");
    const scale = make("div", { class: "scale", role: "img",
      "aria-label": `Colours run from 0 to ${this.top} x the mean` });
    const strip = make("i");
    strip.style.background = `linear-gradient(90deg,${stops})`;
    scale.append(strip, ...[...marks, this.top].map((mark) => {
      const isOpen = mark === this.top && this.hottest > this.top;
      const label = make("span", {}, isOpen ? `${mark}x or more` : `${mark}x`);
      label.style.left = `${100 * at(mark)}%`;
      return label;
    }));
    const key = (path, fill, stroke, text) => make("span", { class: "key" },
      make("svg", { width: 16, height: 16, "aria-hidden": "true" },
        make("rect", { width: 16, height: 16, fill: fill ? "none" : "#00224e" }),
        make("path", { d: path, fill: fill || "none", stroke, "stroke-width": 1.5 })), text);
    into.replaceChildren(scale,
      key("M8 3l5 5l-5 5l-5 -5z", "#ffffff", "#000000", `the ${this.hot.length} hottest`));
    if (this.load.some((row, layer) => this.means[layer] && row.includes(0))) {
      into.append(key("M5 5l6 6M5 11l6 -6", "", "#ffffff", "never chosen"));
    }
  }
}
