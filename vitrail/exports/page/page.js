// The page: files in, answers out. Names of files and classes are set as text, never as markup.
import { decoded, prepared } from "./picture.js";

const TOP = 5; // number of classes that are shown
const byId = (id) => document.getElementById(id);
let latest = 0; // number of the files chosen last, which replace earlier ones

function say(text, bad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", bad);
}

function element(name, text = "", className = "") {
  return Object.assign(document.createElement(name), { textContent: text, className });
}

// return a file of the folder, or of the runtime with its integrity
async function fetched(path, integrity) {
  let response;
  try {
    response = await fetch(path, integrity ? { integrity } : { cache: "no-cache" });
  } catch (error) {
    throw new Error(`${path} cannot be loaded: there is no connection, or the file is not the expected one.`);
  }
  if (!response.ok) throw new Error(`${path} cannot be loaded: the server answers with status ${response.status}.`);
  return response;
}

// return the function from planes [3, height, width] to the outputs of the program
async function started(about) {
  const { at, script, wasm } = about.program.runtime;
  const code = await (await fetched(at + script.file, script.integrity)).blob();
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const ort = await import(url);
  URL.revokeObjectURL(url);
  ort.env.wasm.wasmBinary = await (await fetched(at + wasm.file, wasm.integrity)).arrayBuffer();
  ort.env.wasm.numThreads = 1; // more need headers that most web servers do not send
  const program = new Uint8Array(await (await fetched(about.program.file)).arrayBuffer());
  const session = await ort.InferenceSession.create(program, { executionProviders: ["wasm"] });
  return async ({ planes, height, width }) => {
    const images = new ort.Tensor("uint8", planes, [1, 3, height, width]);
    return (await session.run({ [about.input.name]: images }))[about.output.name].data;
  };
}

// return rows of { name, value, share, named } as `vitrail predict` has them: the best classes, or every number
function answers(outputs, { card, output, class_names }) {
  const values = Array.from(outputs);
  const names = values.map((_, i) => class_names[i] ?? String(i));
  const raw = output.name === "logits";
  if (card.scale) {
    const { mean, deviation } = card.scale;
    return values.map((value, i) => ({ name: names[i], value: raw ? value * deviation[i] + mean[i] : value }));
  }
  const shares = raw ? ACTIVATIONS[output.function](values.map((value) => value / output.temperature)) : values;
  const limits = card.thresholds ?? [];
  const rows = shares.map((share, i) => ({ name: names[i], value: share, share, named: share >= limits[i] }));
  rows.sort((a, b) => b.share - a.share);
  return rows.filter((row, i) => i < TOP || row.named);
}

const ACTIVATIONS = {
  softmax(values) {
    const largest = values.reduce((a, b) => Math.max(a, b));
    const powers = values.map((value) => Math.exp(value - largest));
    const total = powers.reduce((a, b) => a + b);
    return powers.map((power) => power / total);
  },
  sigmoid: (values) => values.map((value) => 1 / (1 + Math.exp(-value))),
};

function row({ name, value, share, named }) {
  const line = element("li");
  const text = share === undefined ? String(Number(value.toPrecision(7))) : `${(100 * share).toFixed(1)} %`;
  const shown = element("span", text, "value");
  shown.title = String(value);
  line.append(element("span", named ? `✓ ${name}` : name, named ? "class named" : "class"), shown);
  if (share !== undefined) line.append(Object.assign(element("meter"), { value: share }));
  return line;
}

function drawn({ pixels, height, width }) {
  const canvas = Object.assign(element("canvas"), { height, width });
  const image = new ImageData(width, height);
  image.data.fill(255);
  for (let i = 0; i < pixels.length; i++) image.data[i + Math.floor(i / 3)] = pixels[i];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

async function answered(file, about, run) {
  let picture;
  try {
    picture = await decoded(file, about.preprocess.picture);
  } catch (error) {
    throw new Error("this browser cannot read it. It may be damaged, too large, or no image.");
  }
  const input = prepared(picture, about.preprocess);
  const rows = answers(await run(input), about);
  const canvas = drawn(input.shown);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${file.name} as the network sees it`);
  const figure = element("figure");
  figure.append(canvas, element("figcaption", file.name, "soft"));
  const list = element("ol");
  list.append(...rows.map(row));
  const article = element("article");
  article.append(figure, list);
  return article;
}

async function take(files, about, run) {
  const mine = ++latest;
  byId("results").replaceChildren();
  let failed = 0;
  for (const [i, file] of files.entries()) {
    say(`Image ${i + 1} of ${files.length}: ${file.name}`);
    await new Promise((resolve) => setTimeout(resolve)); // so that the browser can show it
    const found = await answered(file, about, run).catch((error) => {
      failed += 1;
      const article = element("article");
      article.append(element("p", `${file.name}: ${error.message}`, "bad"));
      return article;
    });
    if (mine !== latest) return; // other files were chosen
    byId("results").append(found);
  }
  const all = files.length === 1 ? "1 image" : `${files.length} images`;
  say(failed ? `${all}, of which ${failed} failed.` : `${all} classified.`, failed > 0);
}

function listen(about, run) {
  const input = byId("files");
  input.disabled = false;
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = ""; // so that the same file can be chosen again
    if (files.length) take(files, about, run);
  });
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); byId("drop").classList.add("over"); });
  }
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("drop").classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    byId("drop").classList.remove("over");
    const files = [...event.dataTransfer.files];
    if (files.length) take(files, about, run);
    else say("That was not a file. Drop image files from your computer.", true);
  });
}

async function start() {
  say("Loading the network…");
  try {
    const about = await (await fetched("card.json")).json();
    const run = await started(about);
    listen(about, run);
    const { name, version } = about.program.runtime;
    const marked = about.card.thresholds?.length ? "✓ marks the classes that are predicted. " : "";
    byId("about").textContent = `${marked}Computed by ${name} ${version}.`;
    say("Ready.");
  } catch (error) {
    say(error.message, true);
  }
}

start();
