import { ask, nameOf } from "./ask.js";
import { Column, answer } from "./column.js";
import { copied } from "./draw.js";

const byId = (id) => document.getElementById(id);
const state = { columns: [], limits: null, file: null, url: null, sending: null };

function say(text, bad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", bad);
}

async function take(file) {
  state.sending?.abort();
  const sending = (state.sending = new AbortController());
  state.file = file;
  const name = nameOf(file);
  if (state.url) URL.revokeObjectURL(state.url);
  state.url = URL.createObjectURL(file);
  byId("picture").hidden = false;
  byId("picture").src = state.url;
  byId("name").textContent = name;
  byId("choose").textContent = "Choose another";
  byId("drop").classList.add("taken");
  if (!state.limits) return; // the models are not loaded yet: `start` will take the file
  if (file.size > state.limits.body - 1024) {
    say(`${name} is larger than the ${(state.limits.body / 1e6).toFixed(0)} MB that this server accepts.`, true);
    for (const column of state.columns) column.fail("");
    return;
  }
  say(`Looking at ${name}…`);
  const picture = copied(state.url);
  const done = await Promise.allSettled(state.columns.map((column) => column.show(file, picture, sending.signal)));
  if (sending.signal.aborted) return; // another image replaced it
  tell(name, done);
}

// show the result of an image, or why there is none, in every column
function tell(name, done) {
  const failed = done.filter((one) => one.status === "rejected").map((one) => one.reason.message);
  const alike = failed.length === done.length && new Set(failed).size === 1; // show the same message only once
  done.forEach((one, i) => { if (one.status === "rejected") state.columns[i].fail(alike ? "" : one.reason.message); });
  const words = done.map((one, i) => {
    const found = one.status === "rejected" ? one.reason.message : answer(one.value);
    return done.length > 1 && !alike ? `${found} (${state.columns[i].model.name})` : found;
  });
  say(`${name}: ${alike ? failed[0] : words.join("; ")}`, failed.length > 0);
}

function listen() {
  const drop = byId("drop");
  byId("file").addEventListener("change", (event) => {
    const file = event.target.files[0];
    event.target.value = ""; // so that the same file can be chosen again
    if (file) take(file);
  });
  byId("picture").addEventListener("error", () => { byId("picture").hidden = true; }); // the browser cannot show it, such as TIFF
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const file = event.dataTransfer.files[0];
    if (file) take(file);
    else say("That was not a file. Drop an image file from your computer.", true);
  });
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (file) take(file);
    else say("The clipboard contains no image.", true);
  });
}

// select the same place in all columns: they show the same picture
function moved(chosen, place) {
  for (const column of state.columns) if (column !== chosen) column.follow(place);
}

async function start() {
  listen();
  try {
    const { models, limits } = await ask("v1/models");
    state.limits = limits;
    state.columns = models.map((model) => new Column(model, moved));
    byId("models").replaceChildren(...state.columns.map((column) => column.part));
    const most = `At most ${(limits.body / 1e6).toFixed(0)} MB and ${(limits.pixels / 1e6).toFixed(0)} megapixels.`;
    byId("limits").textContent = `${most} The image is sent only to the computer that serves this page.`;
    byId("program").querySelector("pre").textContent = `curl -F image=@photo.jpg ${new URL("v1/predict", location.href)}`;
    byId("program").hidden = false;
    say("Ready.");
    if (state.file) take(state.file); // a file that was chosen before the models were loaded
  } catch (error) {
    say(error.message, true);
  }
}

start();
