// Requests to the server. Failures are Errors whose message can be shown.

export async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. It may have been stopped.");
  }
  let value = null;
  try {
    value = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  if (response.ok && value !== null) return value;
  const again = response.headers.get("Retry-After");
  const message = value?.error?.message ?? `The server failed with status ${response.status}.`;
  throw new Error(again ? `${message} (try again in ${again} s)` : message);
}

export function post(path, file, query, signal) {
  const form = new FormData();
  form.append("image", file, nameOf(file));
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return ask(`${path}?${new URLSearchParams(given)}`, { method: "POST", body: form, signal });
}

export function nameOf(file) {
  return file.name || "pasted image";
}
