"use strict";
// Requests to the server, and the events of its streams.

const keyName = "kvzap-key";
const storedKey = () => {
  try {
    return sessionStorage.getItem(keyName);
  } catch {
    return null;
  }
};

class WrongKey extends Error {}

/// Returns the response if its status is good. Throws an Error with the server's message, or the browser's AbortError.
async function ask(path, options) {
  const key = storedKey();
  let response;
  try {
    response = await fetch(path, {...options,
      headers: {"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})}});
  } catch (caught) {
    throw caught.name === "AbortError" ? caught : new Error("the server cannot be reached");
  }
  if (response.ok) return response;
  let message = "the server returned status " + response.status;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The reply is not from kvzap, but from a proxy.
  }
  // The user may have entered another key since.
  throw new (response.status === 401 && key === storedKey() ? WrongKey : Error)(message);
}

/// Yields the data of each event, whatever the chunks of the stream.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "";;) {
    const {value, done} = await reader.read().catch(caught => {
      throw caught.name === "AbortError" ? caught : new Error("the connection was lost");
    });
    if (done) throw new Error("the answer was cut off");
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let u = 0;
  for (; n >= 1000 && u < 4; ++u) n /= 1000;
  return (u ? n.toFixed(n < 10 ? 2 : 1) : n) + " " + units[u];
}
const percent = x => (100 * x).toFixed(1) + " %";

/// Says how much of the prompt has run. `progress`: the latest prompt_progress, or null; `seconds`: since the request.
function progressText(progress, seconds) {
  if (!progress) return `Waiting for the server, ${seconds.toFixed(0)} s`;
  const {total, cache, processed, time_ms: time} = progress;
  const count = n => n.toLocaleString("en");
  let text = `Reading: ${count(processed)} of ${count(total)} tokens`;
  if (cache > 0) text += ` (${count(cache)} were in the cache)`;
  text += `, ${seconds.toFixed(0)} s`;
  const left = processed > cache ? time * (total - processed) / (processed - cache) / 1000 : 0;
  return left >= 1 ? text + `, about ${left.toFixed(0)} s left` : text;
}

if (typeof module !== "undefined") module.exports = {events, bytes, percent, progressText};
