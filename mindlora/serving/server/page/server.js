// What the page asks the server, and how it reads the answers.
const KEY = "mindlora-key";

// What a request got in place of an answer, in the server's own words; status 0 where nothing came.
class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Returns the answer to a request that the server took.
async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(say.unreachable(error.message), 0);
  }
  if (!response.ok) throw new ServerError(await problemOf(response), response.status);
  return response;
}

async function problemOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text}`.trim();
  }
}

// Yields the chunks of a streamed answer as they come.
async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError(say.broken, 0);
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 200);
      yield chunk;
    }
  }
}

// Returns {name: {labels: value}} of what /metrics says; labels are "" or such as adapter="sql".
function readMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const [, name, labels = "", value] = line.match(/^(\w+)(?:\{(.*)\})? (\S+)/) ?? [];
    if (name) (found[name] ??= {})[labels] = Number(value);
  }
  return found;
}
