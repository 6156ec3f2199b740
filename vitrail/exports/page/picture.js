// From a file to the pixels that the network sees. The steps and the rounding are those of `vitrail predict`.
// A picture is { pixels, height, width }: bytes of RGB, one row below the other.

const BAND = 1 << 22; // pixels that are read from the canvas at a time: some phones allow no large canvas

const linear = (x) => Math.max(1 - Math.abs(x), 0);
const cubic = (x, a = -0.5) => {
  x = Math.abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0;
};
const KERNELS = { bilinear: [linear, 1], bicubic: [cubic, 2] }; // with the pixels on each side

// return the picture of a file, upright and drawn on the background; the browser decodes, and applies the orientation
export async function decoded(file, { background }) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
  const { height, width } = bitmap;
  const pixels = new Uint8Array(height * width * 3);
  const rows = Math.min(Math.max(Math.floor(BAND / width), 1), height);
  const canvas = Object.assign(document.createElement("canvas"), { height: rows, width });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = `rgb(${background})`;
  for (let top = 0, to = 0; top < height; top += rows) {
    context.fillRect(0, 0, width, rows);
    context.drawImage(bitmap, 0, -top);
    const { data } = context.getImageData(0, 0, width, Math.min(rows, height - top));
    for (let from = 0; from < data.length; from += 4, to += 3) {
      pixels[to] = data[from];
      pixels[to + 1] = data[from + 1];
      pixels[to + 2] = data[from + 2];
    }
  }
  bitmap.close();
  return { pixels, height, width };
}

// return { shown, height, width, planes }: the picture that the network sees, and its input [3, height, width]
export function prepared(picture, how) {
  const shown = STEPS[how.resize](picture, how);
  const input = how.resize === "native" ? strip(shown, how) : shown;
  const { pixels, height, width } = input;
  const planes = new Uint8Array(pixels.length);
  const count = height * width;
  for (let i = 0; i < count; i++) for (let c = 0; c < 3; c++) planes[c * count + i] = pixels[3 * i + c];
  return { shown, height, width, planes };
}

const STEPS = {
  squash: (picture, how) => middle(resized(picture, ...how.size, how.interpolation), ...how.crop),
  cover(picture, how) {
    const longest = how.longest * Math.min(picture.height, picture.width); // of a longer picture, the middle
    const part = middle(picture, Math.min(picture.height, longest), Math.min(picture.width, longest));
    const scale = Math.max(how.size[0] / part.height, how.size[1] / part.width);
    const sides = [part.height, part.width].map((side, i) => Math.max(rounded(side * scale), how.size[i]));
    return middle(resized(part, ...sides, how.interpolation), ...how.crop);
  },
  pad(picture, how) {
    const scale = Math.min(how.size[0] / picture.height, how.size[1] / picture.width);
    const sides = [picture.height, picture.width].map((side) => Math.max(rounded(side * scale), 1));
    return filledUp(resized(picture, ...sides, how.interpolation), ...how.crop, how.fill);
  },
  native: (picture, how) =>
    resized(picture, ...grid(picture, how).map((count) => count * how.patch), how.interpolation),
};

// halves go to the even number, as in Python
function rounded(x) {
  return x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
}

function middle(picture, height, width) {
  if (picture.height === height && picture.width === width) return picture;
  const [top, left] = [Math.floor((picture.height - height) / 2), Math.floor((picture.width - width) / 2)];
  const pixels = new Uint8Array(height * width * 3);
  for (let row = 0; row < height; row++) {
    const from = 3 * ((top + row) * picture.width + left);
    pixels.set(picture.pixels.subarray(from, from + 3 * width), 3 * row * width);
  }
  return { pixels, height, width };
}

function filledUp(picture, height, width, fill) {
  if (picture.height === height && picture.width === width) return picture;
  const [top, left] = [Math.floor((height - picture.height) / 2), Math.floor((width - picture.width) / 2)];
  const pixels = Uint8Array.from({ length: height * width * 3 }, (_, i) => fill[i % 3]);
  for (let row = 0; row < picture.height; row++) {
    const from = 3 * row * picture.width;
    pixels.set(picture.pixels.subarray(from, from + 3 * picture.width), 3 * ((top + row) * width + left));
  }
  return { pixels, height, width };
}

// rows and columns of patches of a picture: the largest grid with its proportions
function grid({ height, width }, { patch, crop }) {
  const tokens = crop[0] / patch - 1; // of a strip: one patch more than an image may have
  const longest = Math.min(tokens, Math.floor(Math.sqrt(8 * tokens)));
  let [rows, columns] = [1, 1];
  for (;;) {
    const [taller, wider] = [rows * width, columns * height];
    const more = [rows + (taller <= wider), columns + (wider <= taller)];
    if (more[0] * more[1] > tokens || Math.max(...more) > longest) return [rows, columns];
    [rows, columns] = more;
  }
}

// the patches of a picture one below the other, after one that holds the bits of both numbers of the grid
function strip(picture, { patch, crop }) {
  const [rows, columns] = [picture.height / patch, picture.width / patch];
  const pixels = new Uint8Array(crop[0] * crop[1] * 3);
  for (let bit = 0; bit < 8; bit++) {
    pixels[3 * bit] = 255 * ((rows >> bit) & 1);
    pixels[3 * (8 + bit)] = 255 * ((columns >> bit) & 1);
  }
  let to = 3 * patch * patch;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      for (let y = 0; y < patch; y++, to += 3 * patch) {
        const from = 3 * ((row * patch + y) * picture.width + column * patch);
        pixels.set(picture.pixels.subarray(from, from + 3 * patch), to);
      }
    }
  }
  return { pixels, height: crop[0], width: crop[1] };
}

// Antialiased, the width first, with weights of 16 bits and a rounding to bytes after each direction: torch's kernel for
// uint8, whose values these are. The canvas and ONNX's Resize interpolate differently.
export function resized(picture, height, width, interpolation) {
  const wide = picture.height * width > 2 ** 25 && picture.height > height; // the height first, or rows get too wide
  const first = wide ? alongColumns(picture, height, interpolation) : picture;
  return alongColumns(alongRows(first, width, interpolation), height, interpolation);
}

function alongRows(picture, width, interpolation) {
  if (picture.width === width) return picture;
  const { starts, counts, weights, taps, bits } = weighted(picture.width, width, interpolation);
  const { pixels, height } = picture;
  const out = new Uint8Array(height * width * 3);
  const half = 1 << (bits - 1);
  for (let row = 0, to = 0; row < height; row++) {
    for (let x = 0; x < width; x++, to += 3) {
      let [red, green, blue] = [half, half, half];
      let from = 3 * (row * picture.width + starts[x]);
      for (let k = x * taps, end = k + counts[x]; k < end; k++, from += 3) {
        red += weights[k] * pixels[from];
        green += weights[k] * pixels[from + 1];
        blue += weights[k] * pixels[from + 2];
      }
      out[to] = byte(red >> bits);
      out[to + 1] = byte(green >> bits);
      out[to + 2] = byte(blue >> bits);
    }
  }
  return { pixels: out, height, width };
}

function alongColumns(picture, height, interpolation) {
  if (picture.height === height) return picture;
  const { starts, counts, weights, taps, bits } = weighted(picture.height, height, interpolation);
  const { pixels, width } = picture;
  const stride = 3 * width;
  const out = new Uint8Array(height * stride);
  const sums = new Int32Array(stride);
  for (let y = 0; y < height; y++) {
    sums.fill(1 << (bits - 1));
    for (let k = 0; k < counts[y]; k++) {
      const [weight, from] = [weights[y * taps + k], (starts[y] + k) * stride];
      for (let i = 0; i < stride; i++) sums[i] += weight * pixels[from + i];
    }
    for (let i = 0; i < stride; i++) out[y * stride + i] = byte(sums[i] >> bits);
  }
  return { pixels: out, height, width };
}

function byte(value) {
  return value < 0 ? 0 : value > 255 ? 255 : value;
}

// for each new pixel the first old one, how many there are, and their weights times 2 ** bits as whole numbers
function weighted(from, to, interpolation) {
  const [kernel, reach] = KERNELS[interpolation];
  const scale = from / to;
  const stretch = Math.max(scale, 1);
  const support = reach * stretch;
  const taps = 2 * Math.ceil(support) + 1;
  const [starts, counts, exact] = [new Int32Array(to), new Int32Array(to), new Float64Array(to * taps)];
  let most = -Infinity;
  for (let i = 0; i < to; i++) {
    const centre = scale * (i + 0.5);
    starts[i] = Math.max(Math.trunc(centre - support + 0.5), 0);
    counts[i] = Math.min(Math.min(Math.trunc(centre + support + 0.5), from) - starts[i], taps);
    let total = 0;
    for (let j = 0; j < counts[i]; j++) {
      exact[i * taps + j] = kernel((j + starts[i] - centre + 0.5) * (1 / stretch));
      total += exact[i * taps + j];
    }
    for (let j = 0; j < counts[i]; j++) most = Math.max(most, (exact[i * taps + j] /= total));
  }
  let bits = 0;
  while (bits < 22 && Math.trunc(0.5 + most * 2 ** (bits + 1)) < 2 ** 15) bits++;
  const weights = Int32Array.from(exact, (weight) => Math.trunc(weight * 2 ** bits + (weight < 0 ? -0.5 : 0.5)));
  return { starts, counts, weights, taps, bits };
}
