"use strict";
// Everything that comes from a file, a class or a server is set as text, never as markup.

const byId = (id) => document.getElementById(id);
const state = { models: [], limits: null, file: null, url: null, sending: null };
// cividis at its ends and in the middle: rising brightness, the same order to every eye
const TINT = [[0, 34, 78], [124, 123, 120], [254, 232, 56]];

function make(name, { text, parent, ...properties } = {}) {
  const element = Object.assign(document.createElement(name), properties);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function say(text, bad = false) {
  const status = byId("status");
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Has it been stopped?");
  }
  let value = null;
  try {
    value = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (response.ok && value !== null) return value;
  const again = response.headers.get("Retry-After");
  const message = value?.error?.message ?? `The server answered ${response.status}.`;
  throw new Error(again ? `${message} (try again in ${again} s)` : message);
}

function post(path, query, signal) {
  const form = new FormData();
  form.append("image", state.file, state.file.name || "pasted image");
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return ask(`${path}?${new URLSearchParams(given)}`, { method: "POST", body: form, signal });
}

// ---- one model's part of the page

class Column {
  constructor(model) {
    this.model = model;
    this.found = null; // what /v1/attention answered last
    this.patch = null;
    this.crop = null;
    this.looking = null;
    const part = make("section", { className: "model", parent: byId("models") });
    this.heading = make("h2", { text: model.name, parent: part });
    part.setAttribute("aria-label", model.name);
    this.problem = make("p", { className: "bad", hidden: true, parent: part });
    this.results = make("div", { hidden: true, parent: part });
    this.top = make("ol", { className: "top", parent: this.results });
    this.time = make("p", { className: "soft time", parent: this.results });
    this.inside = make("div", { hidden: true, parent: this.results });
    this.addInside();
    const card = make("details", { parent: part });
    make("summary", { text: "Model card", parent: card });
    make("pre", { text: JSON.stringify({ parameters: model.parameters, ...model.card }, null, 2), parent: card });
  }

  addInside() {
    make("h3", { text: "Where it looks, on exactly what it saw", parent: this.inside });
    this.map = make("canvas", { className: "map", tabIndex: 0, parent: this.inside });
    this.map.setAttribute("role", "application");
    this.map.setAttribute("aria-roledescription", "map of patches");
    this.map.addEventListener("click", (event) => this.click(event));
    this.map.addEventListener("keydown", (event) => this.key(event));
    this.about = make("p", { className: "soft about", parent: this.inside });
    const controls = make("div", { className: "controls", parent: this.inside });
    this.view = this.choice(controls, "Show", [["rollout", "rollout, all layers"], ["attention", "one layer"]]);
    const layers = Array.from({ length: this.model.layers }, (_, i) => [String(i), `layer ${i}`]);
    this.layer = this.choice(controls, "Layer", layers);
    this.layer.value = String(this.model.layers - 1);
    const heads = Array.from({ length: this.model.heads }, (_, i) => [String(i), `head ${i}`]);
    this.head = this.choice(controls, "Head", [["", "mean of all"], ...heads]);
    this.opacity = this.labelled(controls, "Opacity", make("input", { type: "range", min: 0, max: 100, value: 60 }));
    this.opacity.addEventListener("input", () => this.draw());
    this.view.addEventListener("change", () => this.draw());
    for (const select of [this.layer, this.head]) {
      select.addEventListener("change", () => { this.view.value = "attention"; this.look(); });
    }
    this.clear = make("button", { type: "button", text: "No patch", disabled: true, parent: controls });
    this.clear.addEventListener("click", () => this.choose(null));
    this.alike = make("figure", { hidden: true, parent: this.inside });
    this.positions = make("canvas", { className: "positions", parent: this.alike });
    this.positions.setAttribute("role", "img");
    this.positionsAbout = make("figcaption", { parent: this.alike });
  }

  labelled(parent, text, control) {
    const label = make("label", { text, parent });
    control.id = `control-${document.querySelectorAll("label").length}`;
    label.htmlFor = control.id;
    parent.append(control);
    return control;
  }

  choice(parent, text, options) {
    const select = make("select");
    for (const [value, name] of options) make("option", { value, text: name, parent: select });
    return this.labelled(parent, text, select);
  }

  fail(error) {
    this.problem.textContent = error.message;
    this.problem.hidden = false;
    this.results.hidden = true;
  }

  // classes first; where it looks follows
  async show(signal) {
    this.problem.hidden = true;
    this.inside.hidden = true;
    this.results.hidden = true;
    this.patch = this.found = null;
    const answer = await post("/v1/predict", { model: this.model.name }, signal);
    const image = answer.images[0];
    if (image.problem) throw new Error(image.problem.message);
    this.top.replaceChildren(...image.top.map((one) => this.bar(one)));
    this.time.textContent = `${(1000 * answer.seconds).toFixed(0)} ms`;
    this.results.hidden = false;
    if (this.model.attention) await this.look(signal);
    return image.top[0];
  }

  bar({ class: name, probability }) {
    const item = make("li");
    make("span", { className: "class", text: name, parent: item });
    make("span", { className: "share", text: `${(100 * probability).toFixed(1)} %`, parent: item });
    const bar = make("div", { className: "bar", parent: item });
    bar.setAttribute("aria-hidden", "true");
    make("span", { parent: bar }).style.width = `${100 * probability}%`;
    return item;
  }

  // `signal` belongs to a new image; a click or a choice ends the look before it
  async look(signal) {
    this.looking?.abort();
    const mine = (this.looking = new AbortController());
    const query = { model: this.model.name, layer: this.layer.value, head: this.head.value || null };
    if (this.patch) [query.row, query.column] = this.patch;
    try {
      const both = signal ? AbortSignal.any([signal, mine.signal]) : mine.signal;
      const found = await post("/v1/attention", query, both);
      const crop = await loaded(found.crop);
      if (mine !== this.looking || both.aborted) return;
      this.found = found;
      this.crop = crop;
      this.inside.hidden = false;
      this.draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (signal) throw error;
      say(error.message, true);
    }
  }

  draw() {
    const { found, crop, map } = this;
    if (!found) return;
    const scale = Math.max(1, Math.ceil(448 / Math.max(crop.width, crop.height)));
    map.width = crop.width * scale;
    map.height = crop.height * scale;
    const context = map.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(crop, 0, 0, map.width, map.height);
    context.imageSmoothingEnabled = true;
    context.globalAlpha = this.opacity.value / 100;
    context.drawImage(tinted(found[this.view.value]), 0, 0, map.width, map.height);
    context.globalAlpha = 1;
    if (this.patch) outline(context, this.patch, found.grid);
    this.clear.disabled = !this.patch;
    const [rows, columns] = found.grid;
    const where = this.patch ? `the patch in row ${this.patch[0]}, column ${this.patch[1]}` : "what the classifier reads";
    const what = this.view.value === "rollout"
      ? "Attention rollout through all layers to what the classifier reads."
      : `Layer ${found.layer}, ${found.head === null ? "mean of all heads" : `head ${found.head}`}: what ${where} attends to.`;
    this.about.textContent = `${what} Yellow is most. Click a patch, or move with the arrow keys, to see what it attends to.`;
    map.setAttribute("aria-label", `${what} ${rows} rows and ${columns} columns of patches.`);
    this.drawPositions();
  }

  drawPositions() {
    const { found } = this;
    this.alike.hidden = !this.patch;
    this.positions.hidden = !found.positions;
    if (!this.patch) return;
    if (found.positions) {
      const [rows, columns] = found.grid;
      const scale = Math.max(1, Math.floor(224 / Math.max(rows, columns)));
      this.positions.width = columns * scale;
      this.positions.height = rows * scale;
      const context = this.positions.getContext("2d");
      context.imageSmoothingEnabled = false;
      context.drawImage(tinted(found.positions), 0, 0, this.positions.width, this.positions.height);
      outline(context, this.patch, found.grid);
      this.positions.setAttribute("aria-label", found.positions_about);
    }
    this.positionsAbout.textContent = `Positions and that of this patch: ${found.positions_about}`;
  }

  click(event) {
    if (!this.found) return;
    const box = this.map.getBoundingClientRect();
    const [rows, columns] = this.found.grid;
    const at = (place, length, count) => Math.min(count - 1, Math.max(0, Math.floor((place / length) * count)));
    this.choose([at(event.clientY - box.top, box.height, rows), at(event.clientX - box.left, box.width, columns)]);
  }

  key(event) {
    if (!this.found) return;
    const [rows, columns] = this.found.grid;
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0] }[event.key];
    if (event.key === "Escape" && this.patch) this.choose(null);
    if (!step) return;
    event.preventDefault();
    const [row, column] = this.patch ?? [Math.floor(rows / 2), Math.floor(columns / 2)];
    const moved = this.patch ? step : [0, 0];
    this.choose([Math.min(rows - 1, Math.max(0, row + moved[0])), Math.min(columns - 1, Math.max(0, column + moved[1]))]);
  }

  choose(patch) {
    this.patch = patch;
    if (patch) this.view.value = "attention";
    this.look();
  }
}

// ---- drawing

function loaded(address) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new Error("The picture of what the network saw cannot be shown."));
    image.src = address;
  });
}

// rows of numbers as a canvas of one pixel each, from least (blue) to most (yellow)
function tinted(values) {
  const flat = values.flat();
  const least = Math.min(...flat);
  const span = Math.max(...flat) - least || 1;
  const canvas = make("canvas", { width: values[0].length, height: values.length });
  const pixels = new ImageData(canvas.width, canvas.height);
  flat.forEach((value, i) => {
    const at = (2 * (value - least)) / span;
    const low = Math.min(1, Math.floor(at));
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = TINT[low][c] + (at - low) * (TINT[low + 1][c] - TINT[low][c]);
    pixels.data[4 * i + 3] = 255;
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

function outline(context, [row, column], [rows, columns]) {
  const { width, height } = context.canvas;
  const box = [(column * width) / columns, (row * height) / rows, width / columns, height / rows];
  for (const [colour, line] of [["#000", 4], ["#fff", 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(...box);
  }
}

// ---- the image

async function take(file) {
  if (!file) return;
  state.sending?.abort();
  const sending = (state.sending = new AbortController());
  state.file = file;
  const name = file.name || "pasted image";
  if (state.url) URL.revokeObjectURL(state.url);
  state.url = URL.createObjectURL(file);
  byId("picture").hidden = false;
  byId("picture").src = state.url;
  byId("name").textContent = name;
  byId("sent").hidden = false;
  if (state.limits && file.size > state.limits.body - 1024) {
    say(`${name} is larger than the ${(state.limits.body / 1e6).toFixed(0)} MB this server takes.`, true);
    for (const column of state.models) column.results.hidden = true;
    return;
  }
  say(`Looking at ${name}…`);
  const done = await Promise.allSettled(state.models.map((column) => column.show(sending.signal)));
  if (sending.signal.aborted) return; // another image took its place
  done.forEach((one, i) => { if (one.status === "rejected") state.models[i].fail(one.reason); });
  const failed = done.find((one) => one.status === "rejected");
  const best = done.find((one) => one.status === "fulfilled")?.value;
  if (failed) say(`${name}: ${failed.reason.message}`, true);
  else say(`${name}: ${best.class}, ${(100 * best.probability).toFixed(1)} %`);
}

function listen() {
  const drop = byId("drop");
  byId("file").addEventListener("change", (event) => {
    take(event.target.files[0]);
    event.target.value = ""; // so that the same file can be chosen again
  });
  byId("picture").addEventListener("error", () => { byId("picture").hidden = true; }); // TIFF and the like
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const file = event.dataTransfer.files[0];
    if (file) take(file);
    else say("That was not a file: drop an image from your computer.", true);
  });
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (file) take(file);
  });
}

async function start() {
  listen();
  try {
    const { models, limits } = await ask("/v1/models");
    state.limits = limits;
    state.models = models.map((model) => new Column(model));
    byId("limits").textContent = `Up to ${(limits.body / 1e6).toFixed(0)} MB and ${(limits.pixels / 1e6).toFixed(0)} megapixels. It stays on the computer that serves this page.`;
    say("Ready.");
    if (state.file) take(state.file); // one that came before the models
  } catch (error) {
    say(error.message, true);
  }
}

start();
