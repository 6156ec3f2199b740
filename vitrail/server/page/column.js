// The part of the page that belongs to one model. Names and messages are set as text, never as markup.
import { post } from "./ask.js";
import { loaded, outline, overlay, paint, range, tinted } from "./draw.js";

const LONGEST = 3; // maximum aspect ratio: longer pictures would be a stripe
const EXAMPLES = 10; // maximum number of classes above an answer
const COVERING = 3; // maximum number of classes of pixels that are named in words
const NAMED = 200; // maximum number of classes in the model card

export class Column {
  // `moved(column, place)` is called when a patch is selected; `place` is in pixels of the picture, or null
  constructor(model, moved) {
    this.model = model;
    this.moved = moved;
    this.file = this.picture = this.found = this.patch = this.under = this.looking = this.place = null;
    this.part = document.getElementById("column").content.firstElementChild.cloneNode(true);
    this.part.setAttribute("aria-label", model.name);
    this.one("h2").textContent = model.name;
    this.one(".known").textContent = known(model);
    this.one(".kind").textContent = kind(model);
    this.results = this.one(".results");
    this.problem = this.one(".bad");
    this.map = this.one(".map");
    this.layer = this.one(".layer");
    this.head = this.one(".head");
    this.opacity = this.one(".opacity");
    for (const [name, value] of facts(model)) this.one(".card").append(element("dt", name), element("dd", value));
    if (model.attention) this.listen();
    else for (const part of this.all(".look, .controls, .alike")) part.remove();
  }

  one(selector) {
    return this.part.querySelector(selector);
  }

  all(selector) {
    return this.part.querySelectorAll(selector);
  }

  get view() {
    return this.one("input[type=radio]:checked").value;
  }

  set view(value) {
    this.one(`input[value=${value}]`).checked = true;
  }

  listen() {
    this.layer.max = this.layer.value = this.model.layers - 1;
    for (let head = 0; head < this.model.heads; head++) this.head.append(new Option(`head ${head}`, head));
    for (const radio of this.all("input[type=radio]")) {
      radio.name = `view of ${this.model.name}`;
      radio.addEventListener("change", () => this.draw());
    }
    for (const [control, event] of [[this.layer, "input"], [this.head, "change"]]) {
      control.addEventListener(event, () => { this.view = "attention"; this.look(); });
    }
    this.opacity.addEventListener("input", () => this.draw());
    this.one(".clear").addEventListener("click", () => this.choose(null));
    this.map.addEventListener("click", (event) => this.choose(this.patchAt(event)));
    this.map.addEventListener("pointermove", (event) => this.point(this.patchAt(event)));
    this.map.addEventListener("pointerleave", () => this.point(null));
    this.map.addEventListener("keydown", (event) => this.key(event));
    this.one("output").textContent = this.layer.value;
  }

  // show classes and attention; return the answer. `picture` is a promise of the result of `copied`
  async show(file, picture, signal) {
    Object.assign(this, { file, picture, patch: null, under: null, place: null });
    this.busy = true;
    try {
      const crop = !this.model.attention; // otherwise the crop comes with the attention
      const answer = await post("v1/predict", file, { model: this.model.name, crop }, signal);
      const image = answer.images[0];
      if (image.problem) throw new Error(image.problem.message);
      const labels = image.rejected ? [] : image.labels?.map((label) => label.class);
      const none = image.rejected ? [element("li", "none of these", "none")] : [];
      this.one(".top").replaceChildren(...none, ...bars(image, labels));
      this.one(".sure").textContent = labels || !image.top.length ? "" : meaning(image, this.model);
      if (image.mask) await this.drawMask(image.mask);
      this.one(".time").textContent = `answered in ${milliseconds(answer.seconds)}`;
      if (crop) this.drawCrop(await loaded(image.crop), "");
      else await this.look(signal);
      this.problem.hidden = true;
      this.results.hidden = false;
      this.busy = false;
      if (this.place) this.follow(this.place); // selected in another column while this one was waiting
      return image;
    } finally {
      if (!signal.aborted) this.busy = false; // otherwise another image is being processed
    }
  }

  // results of the previous image are pale and cannot be used
  set busy(value) {
    this.part.setAttribute("aria-busy", value);
    this.results.inert = value;
  }

  get busy() {
    return this.results.inert;
  }

  fail(message) {
    this.problem.textContent = message;
    this.problem.hidden = !message;
    this.results.hidden = true;
  }

  // request the attention, replacing an earlier request; `signal` comes with a new image
  async look(signal = null) {
    this.looking?.abort();
    const mine = (this.looking = new AbortController());
    signal?.addEventListener("abort", () => mine.abort());
    this.one("output").textContent = this.layer.value;
    const [row, column] = this.patch ?? [null, null];
    const query = { model: this.model.name, layer: this.layer.value, head: this.head.value, row, column };
    try {
      const found = await post("v1/attention", this.file, query, mine.signal);
      const [crop, copy] = await Promise.all([loaded(found.crop), this.picture]);
      if (mine.signal.aborted) return;
      Object.assign(this, { found, crop, copy });
      this.draw();
    } catch (error) {
      if (signal) throw error;
      if (error.name !== "AbortError") this.one(".about").textContent = error.message;
    }
  }

  // return the picture if the browser decodes it to the same size as the server, else the crop that the network saw
  base() {
    const { found, crop, copy } = this;
    const [height, width] = found.picture;
    const same = copy?.width === width && copy?.height === height;
    if (same && Math.max(width / height, height / width) < LONGEST) return { image: copy.canvas, seen: found.seen, width };
    return { image: crop, seen: whole(crop), width: crop.width };
  }

  draw() {
    const { found, map, patch, under } = this;
    const { image, seen, width } = this.base();
    const context = paint(map, image);
    const scale = map.width / width;
    this.box = Object.fromEntries(Object.entries(seen).map(([name, length]) => [name, length * scale]));
    const values = found[this.view];
    overlay(context, values, this.box, this.opacity.value / 100);
    if (under) outline(context, under, found.grid, this.box, 0.5);
    if (patch && this.view === "attention") outline(context, patch, found.grid, this.box);
    const [least, most] = range(values);
    this.one(".least").textContent = percent(least);
    this.one(".most").textContent = percent(most);
    this.one(".here").textContent = under ? `this patch: ${percent(values[under[0]][under[1]])}` : "";
    this.tell();
    this.drawTiles();
  }

  tell() {
    const { found } = this;
    const who = found.patch ? `the patch in row ${found.patch[0]}, column ${found.patch[1]}` : "the classifier’s input";
    const head = found.head === null ? "mean of all heads" : `head ${found.head}`;
    const rollout = this.view === "rollout";
    const what = rollout
      ? "Rollout: the share of each patch in the classifier’s input, through all layers."
      : `Layer ${found.layer}, ${head}: attention of ${who} to each patch.`;
    const text = `Yellow patches have the largest share, blue ones the smallest. ${what} It shows what was looked at, not why. Click a patch to see what it attends to. Arrow keys move the selection.`;
    this.one(".controls").classList.toggle("rollout", rollout);
    if (this.one(".about").textContent !== text) this.one(".about").textContent = text; // so that screen readers read it once
    this.map.setAttribute("aria-label", `${what} ${found.grid[0]} rows and ${found.grid[1]} columns of patches.`);
    this.one(".clear").hidden = !this.patch;
  }

  drawTiles() {
    const { found, crop } = this;
    const seen = this.drawCrop(crop, ` in ${found.grid[0]} × ${found.grid[1]} patches`);
    if (found.patch) outline(seen, found.patch, found.grid, whole(seen.canvas), 2);
    this.one(".alike").hidden = !found.patch;
    if (!found.patch) return;
    const alike = this.one(".positions");
    alike.hidden = !found.positions;
    alike.nextElementSibling.textContent = found.positions_about;
    if (!found.positions) return;
    const [least, most] = range(found.positions).map((value) => value.toFixed(2));
    const context = paint(alike, tinted(found.positions));
    outline(context, found.patch, found.grid, whole(alike), 2);
    alike.setAttribute("aria-label", found.positions_about);
    alike.nextElementSibling.textContent = `How near the network places each patch to the selected one, yellow for the nearest: ${found.positions_about}, from ${least} to ${most}`;
  }

  // draw the class of each pixel over the picture, or alone if the browser cannot read the picture
  async drawMask(address) {
    const [mask, copy] = await Promise.all([loaded(address), this.picture]);
    const context = paint(this.one(".mask"), copy?.canvas ?? mask);
    context.globalAlpha = copy ? 0.6 : 1;
    context.imageSmoothingEnabled = false;
    context.drawImage(mask, 0, 0, context.canvas.width, context.canvas.height);
    this.one(".masked").hidden = false;
  }

  drawCrop(crop, patches) {
    const tile = this.one(".crop");
    const size = `${crop.width} × ${crop.height} px`;
    tile.setAttribute("aria-label", `What the network saw, ${size}`);
    tile.nextElementSibling.textContent = `What the network saw: ${size}${patches}`;
    return paint(tile, crop);
  }

  patchAt(event) {
    const shown = this.map.getBoundingClientRect();
    const scale = this.map.width / shown.width;
    const [rows, columns] = this.found.grid;
    const row = Math.floor((((event.clientY - shown.top) * scale - this.box.top) / this.box.height) * rows);
    const column = Math.floor((((event.clientX - shown.left) * scale - this.box.left) / this.box.width) * columns);
    return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
  }

  point(patch) {
    if (String(patch) === String(this.under)) return;
    this.under = patch;
    this.draw();
  }

  key(event) {
    if (event.key === "Escape" && this.patch) this.choose(null);
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const sides = this.found.grid;
    const to = (side) => Math.min(sides[side] - 1, Math.max(0, this.patch[side] + step[side]));
    this.choose(this.patch ? [to(0), to(1)] : sides.map((side) => Math.floor(side / 2)));
  }

  // select a patch by hand; the other columns follow
  choose(patch) {
    const { seen, grid } = this.found;
    const at = (side, start, length) => start + ((patch[side] + 0.5) / grid[side]) * length;
    this.hold(patch);
    this.moved(this, patch && [at(0, seen.top, seen.height), at(1, seen.left, seen.width)]);
  }

  // select the patch at `place`, in pixels of the picture; if an image is being processed, afterwards
  follow(place) {
    this.place = place;
    if (this.busy || !this.found || this.results.hidden) return;
    const { seen, grid } = this.found;
    const row = place && Math.floor(((place[0] - seen.top) / seen.height) * grid[0]);
    const column = place && Math.floor(((place[1] - seen.left) / seen.width) * grid[1]);
    const inside = place && row >= 0 && row < grid[0] && column >= 0 && column < grid[1];
    this.hold(inside ? [row, column] : null);
  }

  hold(patch) {
    this.patch = patch;
    if (patch) this.view = "attention";
    this.look();
  }
}

function whole({ width, height }) {
  return { left: 0, top: 0, width, height };
}

function element(name, text, className = "") {
  return Object.assign(document.createElement(name), { textContent: text, className });
}

// the answer for an image in words: its best class, or all of its labels, or none of the classes; or the classes that
// cover most of it; or numbers; or each of several answers
export function answer({ top, labels, rejected, numbers, answers, mask }) {
  const words = ({ class: name, probability }) => `${name} (${percent(probability)})`;
  if (answers) return Object.entries(answers).map(([name, one]) => (one.numbers ? answer(one) : `${name}: ${answer(one)}`)).join("; ");
  if (numbers) return Object.entries(numbers).map(([name, value]) => `${name} ${written(value)}`).join(", ");
  if (mask) return top.slice(0, COVERING).filter((one) => one.probability > 0).map(words).join(", ");
  if (rejected) return `none of these; most likely ${words(top[0])}`;
  if (!labels && top[0].probability < 0.5) return `not sure; most likely ${words(top[0])}`;
  if (!labels) return `most likely ${words(top[0])}`;
  if (!labels.length) return `no label; most likely ${words(top[0])}`;
  return `labels ${labels.map((one) => words(one)).join("; ")}`;
}

// what the shares beside the classes are
function meaning({ mask }, { class_names: names }) {
  if (mask) return "The share of the picture that each class covers.";
  return `How sure it is. It always chooses one of its ${counted(names.length, "class", "classes")}, also for an image that shows none of them.`;
}

// what is predicted as items of a list: classes, or numbers, or each of several answers below its name
function bars({ top, numbers, answers }, labels) {
  if (answers) return Object.entries(answers).flatMap(([name, one]) => [
    ...(one.numbers ? [] : [element("li", name, "named")]), ...bars(one, one.labels?.map((label) => label.class)),
  ]);
  return numbers ? Object.entries(numbers).map(number) : top.map((one) => bar(one, labels));
}

function number([name, value]) {
  const item = element("li", "");
  item.append(element("span", name, "class"), element("span", written(value), "share"));
  return item;
}

// a class with its probability; those that are not predicted are pale, of several labels or if none is sure enough
function bar({ class: name, probability, colour }, labels) {
  const item = element("li", "", labels && !labels.includes(name) ? "unlikely" : "");
  const length = element("div", "", "bar");
  length.setAttribute("aria-hidden", "true");
  length.append(element("span"));
  length.firstChild.style.width = `${100 * probability}%`;
  if (colour) length.firstChild.style.background = colour; // that of the class in the mask
  item.append(element("span", name, "class"), element("span", percent(probability), "share"), length);
  return item;
}

// what the model can answer, before it has seen an image
function known({ class_names: names, card }) {
  if (card.answers) return `Gives ${counted(card.answers.length, "answer")}: ${card.answers.map((one) => one.name).join(", ")}`;
  const more = names.length - EXAMPLES;
  if (!names.length) return "";
  return `${card.scale ? "Predicts" : "Knows"} ${card.scale ? counted(names.length, "number") : counted(names.length, "class", "classes")}: ${names.slice(0, EXAMPLES).join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}

function kind(model) {
  const [height, width] = model.image_size;
  const what = model.attention ? `ViT with ${counted(model.layers, "layer")}, ${counted(model.heads, "head")}` : "ResNet without attention";
  const parts = [what, `${short(model.parameters)} parameters`, `${width} × ${height} px`];
  return parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · "); // lines break only between the parts
}

// the model card as names and values, the architecture last, without empty values
function* facts({ parameters, class_names, card }) {
  yield ["parameters", parameters.toLocaleString("en")];
  const more = class_names.length - NAMED;
  yield ["classes", class_names.slice(0, NAMED).join(", ") + (more > 0 ? ` and ${more} more` : "")];
  const { config, ...others } = card;
  for (const [name, value] of Object.entries({ ...others, config })) {
    const nested = value !== null && typeof value === "object" && !Array.isArray(value);
    for (const [part, one] of nested ? Object.entries(value) : [["", value]]) {
      if (one !== null && one !== "" && one.length !== 0) yield [part ? `${name} · ${part}` : name, written(one)];
    }
  }
}

function written(value) {
  if (Array.isArray(value)) return value.map(written).join(", ");
  if (value !== null && typeof value === "object") return Object.entries(value).filter(([, one]) => one !== null && one.length !== 0).map(([name, one]) => `${name} ${written(one)}`).join(" ");
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "under 0.01 %";
  return `${value.toFixed(value < 1 && value > 0 ? 2 : 1)} %`;
}

function milliseconds(seconds) {
  return seconds < 0.1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(2)} s`;
}

function counted(number, name, names = `${name}s`) {
  return `${number} ${number === 1 ? name : names}`;
}

function short(number) {
  return number < 1e6 ? `${(number / 1e3).toFixed(0)} k` : `${(number / 1e6).toFixed(1)} M`;
}
