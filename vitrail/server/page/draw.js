// Pictures, and maps of patches over them.

const LONGER = 1000; // pixels of the longer side of a canvas
const LEAST = [0, 34, 78]; // the colour map cividis at its ends and middle: readable with every kind of colour vision
const MIDDLE = [124, 123, 120];
const MOST = [254, 232, 56];

// load the image at an address; rejects if the browser cannot read it
export function loaded(address) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(image);
    image.onerror = () => reject(new Error("This browser cannot show the picture."));
    image.src = address;
  });
}

// draw an image on a canvas of limited size, over white as the network sees it; null if the browser cannot read it
export async function copied(address) {
  const image = await loaded(address).catch(() => null);
  if (!image?.naturalWidth) return null;
  const [width, height] = [image.naturalWidth, image.naturalHeight];
  const scale = Math.min(1, LONGER / Math.max(width, height));
  const canvas = sized(document.createElement("canvas"), Math.ceil(width * scale), Math.ceil(height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return { canvas, width, height };
}

// fill `canvas` with an image; the pixels of a small image stay visible
export function paint(canvas, image) {
  const scale = LONGER / Math.max(image.width, image.height);
  sized(canvas, Math.max(1, Math.round(image.width * scale)), Math.max(1, Math.round(image.height * scale)));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = scale < 4;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return context;
}

// draw a map over `box` of a painted image, which loses its colours with growing opacity; the rest is faded
export function overlay(context, values, box, opacity) {
  const { width, height } = context.canvas;
  context.save();
  context.fillStyle = "#808080";
  context.globalAlpha = 0.7;
  const around = new Path2D();
  around.rect(0, 0, width, height);
  around.rect(box.left, box.top, box.width, box.height);
  context.fill(around, "evenodd");
  context.globalAlpha = opacity;
  context.globalCompositeOperation = "saturation";
  context.fillRect(box.left, box.top, box.width, box.height);
  context.globalAlpha = 1;
  context.globalCompositeOperation = "source-over";
  context.imageSmoothingEnabled = true;
  context.drawImage(tinted(values, opacity), box.left, box.top, box.width, box.height);
  context.restore();
}

// turn rows of numbers into a canvas with one pixel per number, from lowest (blue, more transparent) to highest (yellow)
export function tinted(values, opacity = 1) {
  const flat = values.flat();
  const [least, most] = range(values);
  const canvas = sized(document.createElement("canvas"), values[0].length, values.length);
  const pixels = new ImageData(canvas.width, canvas.height);
  flat.forEach((value, i) => {
    const at = most > least ? (value - least) / (most - least) : 0;
    const [from, to, part] = at < 0.5 ? [LEAST, MIDDLE, 2 * at] : [MIDDLE, MOST, 2 * at - 1];
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = from[c] + part * (to[c] - from[c]);
    pixels.data[4 * i + 3] = 255 * opacity ** (2 - at);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

export function range(values) {
  const flat = values.flat();
  return [Math.min(...flat), Math.max(...flat)];
}

// outline a patch of a grid over `box` in black and white, which is visible on every background
export function outline(context, [row, column], [rows, columns], box, width = 1) {
  const [high, wide] = [box.height / rows, box.width / columns];
  const edge = [box.left + column * wide, box.top + row * high, wide, high];
  for (const [colour, line] of [["#000", 7 * width], ["#fff", 3 * width]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(...edge);
  }
}

function sized(canvas, width, height) {
  canvas.width = width;
  canvas.height = height;
  return canvas;
}
