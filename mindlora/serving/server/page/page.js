// The conversation, its settings, and what the server holds.
const at = (name) => document.getElementById(name);
const [left, right] = document.querySelectorAll("select.model");
const narrow = matchMedia("(max-width: 900px)");
// Turns of the conversation: {prompt, answers: [of the left model, of the right one]}, each a list that has more than
// one answer where tools were called.
let turns = [];
let running = [];

writeTexts(document);
document.documentElement.lang = LANGUAGE === "zh" ? "zh-CN" : "en";

// Models: one, or two side by side.

function compares() {
  return !right.parentElement.hidden;
}

function compare(two) {
  right.parentElement.hidden = !two;
  document.body.classList.toggle("two", two);
  at("compare").textContent = two ? "×" : say.compare;
  at("compare").title = two ? say.one : "";
  at("compare").setAttribute("aria-label", two ? say.one : say.compare);
  at("hint").hidden = !two || turns.length > 0;
}

function fill(select, names, preferred) {
  const shown = [...select.options].map((option) => option.value);
  // A list that is open would close.
  if (shown.join("\n") === names.join("\n")) return;
  const chosen = names.includes(select.value) ? select.value : preferred;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

async function readModels() {
  const names = (await (await request("v1/models")).json()).data.map((model) => model.id);
  const first = !left.value;
  fill(left, names, names[0]);
  fill(right, names, names[1] ?? names[0]);
  if (first) compare(names.length > 1);
}

// Settings.

function openPanel(open) {
  at("panel").hidden = !open;
  at("fold").setAttribute("aria-expanded", String(open));
}

// Returns the fields of a request, or null where one of them is wrong, which the browser then shows.
function settings() {
  const form = at("settings");
  const fields = {};
  for (const element of form.elements) {
    if (element.type === "number" && element.value !== "") fields[element.name] = Number(element.value);
  }
  if (form.reasoning_effort.value) fields.reasoning_effort = form.reasoning_effort.value;
  const stop = form.stop.value.split("\n").filter((line) => line);
  if (stop.length) fields.stop = stop;
  form.tools.setCustomValidity("");
  if (form.tools.value.trim()) {
    try {
      fields.tools = JSON.parse(form.tools.value);
    } catch (error) {
      form.tools.setCustomValidity(say.not_tools(error.message));
    }
  }
  if (form.checkValidity()) return fields;
  openPanel(true);
  form.querySelector(":invalid:not(details)").closest("details")?.setAttribute("open", "");
  form.reportValidity();
  return null;
}

// The conversation.

// Returns the conversation that one of the models has had. What it did not answer was not part of it.
function messagesOf(side) {
  const system = at("settings").system.value;
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const answers = turn.answers[side].filter((answer) => answer.counts);
    const asks = turn === turns.at(-1);
    if (answers.length || asks) messages.push({ role: "user", content: turn.prompt });
    for (const answer of answers) messages.push(...answer.messages());
  }
  return messages;
}

// Begins an answer in the last turn.
async function answer(side, fields, follow) {
  const turn = turns.at(-1);
  const messages = messagesOf(side);
  const begun = new Answer([left, right][side].value, turn.cells[side]);
  turn.answers[side].push(begun);
  running.push(begun);
  showRunning();
  follow();
  const following = setInterval(follow, 100);
  await begun.ask({ ...fields, messages });
  clearInterval(following);
  running = running.filter((other) => other !== begun);
  showRunning();
  if (begun.status === 401) askKey(begun.error);
  if (begun.wholeCalls.length) {
    begun.takeResults(() => {
      const now = settings();
      if (!now) return;
      begun.closeResults();
      answer(side, now, follower());
    });
  }
  follow();
}

// Returns a function that keeps the end of the conversation in sight, until the reader scrolls up.
function follower() {
  const talk = at("talk");
  let seen = 0;
  let follows = true;
  return () => {
    const end = talk.scrollHeight - talk.clientHeight;
    if (talk.scrollTop < seen - 4) follows = false;
    else if (talk.scrollTop > end - 20) follows = true;
    if (follows) talk.scrollTop = end;
    seen = talk.scrollTop;
  };
}

function send() {
  const prompt = at("prompt").value;
  if (!prompt.trim() || running.length || !left.value) return;
  const fields = settings();
  if (!fields) return;
  for (const open of (turns.at(-1)?.answers ?? []).flat()) if (open.sends) open.closeResults();
  const root = at("turn").content.cloneNode(true).firstElementChild;
  root.querySelector(".prompt").textContent = prompt;
  const cells = [left, ...(compares() ? [right] : [])].map(() => document.createElement("div"));
  cells[1]?.classList.add("right");
  root.querySelector(".answers").append(...cells);
  at("turns").append(root);
  turns.push({ prompt, cells, answers: [[], []] });
  at("hint").hidden = true;
  at("prompt").value = "";
  grow();
  const follow = follower();
  cells.forEach((_, side) => answer(side, fields, follow));
}

function stop() {
  for (const begun of running) begun.stop();
  at("prompt").focus();
}

function showRunning() {
  const focused = [at("send"), at("stop")].includes(document.activeElement);
  at("send").hidden = running.length > 0;
  at("stop").hidden = running.length === 0;
  at("said").textContent = running.length ? "" : say.complete;
  if (focused) (running.length ? at("stop") : at("prompt")).focus();
}

function startAnew() {
  for (const begun of running) begun.stop();
  turns = [];
  at("turns").replaceChildren();
  at("hint").hidden = !compares();
  at("prompt").focus();
}

// The field of the prompt is as high as its text.
function grow() {
  const field = at("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

// The server.

// Whether the reader was asked for a key and gave none.
let declined = false;

function askKey(message) {
  at("key").hidden = false;
  at("key-said").textContent = message;
  if (!at("ask-key").open) at("ask-key").showModal();
}

function showState(kind, message) {
  if (at("state").textContent !== message) at("state").textContent = message;
  at("state").className = kind;
}

function bytes(count) {
  const power = count ? Math.min(3, Math.floor(Math.log2(count) / 10)) : 0;
  return `${number(count / 1024 ** power, power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

let before = null;

function showMetrics(metrics) {
  const value = (name) => metrics[`mindlora_${name}`]?.[""] ?? 0;
  const now = { time: performance.now(), tokens: value("generated_tokens_total") };
  const speed = before ? (1000 * (now.tokens - before.tokens)) / (now.time - before.time) : 0;
  before = now;
  const blocks = value("cache_blocks");
  const prompts = value("prompt_tokens_total");
  const rows = {
    running: number(value("requests_running")),
    waiting: number(value("requests_waiting")),
    speed: number(Math.max(speed, 0), 1),
    slots: say.of(number(value("adapter_slots_leased")), number(value("adapter_slots"))),
    held: number(value("adapter_slots_used")),
    registered: number(value("adapters_registered")),
    memory: say.in_memory(number(value("adapters_in_memory")), bytes(value("adapter_memory_bytes"))),
    blocks: say.of(number(blocks - value("cache_blocks_free")), number(blocks)),
    reused: `${number(prompts ? (100 * value("prompt_tokens_cached_total")) / prompts : 0)} %`,
  };
  at("figures").replaceChildren(...Object.entries(rows).flatMap(([name, text]) => [cell("dt", say[name]), cell("dd", text)]));
  const requests = Object.entries(metrics.mindlora_adapter_requests_total ?? {}).sort((one, other) => other[1] - one[1]);
  const tokens = metrics.mindlora_adapter_generated_tokens_total;
  at("adapters").hidden = requests.length === 0;
  at("adapters").tBodies[0].replaceChildren(...requests.map(([labels, count]) => {
    const row = document.createElement("tr");
    const name = JSON.parse(labels.replace(/^adapter=/, ""));
    row.append(cell("td", name), cell("td", number(count), "number"), cell("td", number(tokens[labels]), "number"));
    return row;
  }));
}

function cell(kind, text, name = "") {
  const element = document.createElement(kind);
  element.textContent = text;
  element.className = name;
  return element;
}

// Looks at the server once: whether it is ready, and what it holds.
async function look() {
  try {
    await request("ready");
    const metrics = readMetrics(await (await request("metrics")).text());
    if (!at("panel").hidden) showMetrics(metrics);
    if (!left.value) await readModels();
    showState("good", say.ready);
  } catch (error) {
    showError(error);
  }
}

function showError(error) {
  showState([401, 503].includes(error.status) ? "waits" : "bad", error.message);
  if (error.status === 401 && !declined) askKey(error.message);
}

async function watch() {
  for (;;) {
    if (!document.hidden && !at("ask-key").open) await look();
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// The server finds new adapters when somebody asks which there are, and has a line in its log for each time.
for (const element of [left, right, window]) element.addEventListener("focus", () => readModels().catch(showError));
at("compare").addEventListener("click", () => compare(!compares()));
at("fresh").addEventListener("click", startAnew);
at("fold").addEventListener("click", () => openPanel(at("panel").hidden));
at("key").addEventListener("click", () => askKey(""));
at("stop").addEventListener("click", stop);
at("prompt").addEventListener("input", grow);
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings").tools.addEventListener("input", (event) => event.target.setCustomValidity(""));
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => {
  // While an input method composes Chinese, Enter is for it.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("ask-key").open) return;
  if (running.length) stop();
  else if (narrow.matches) openPanel(false);
});
at("cancel").addEventListener("click", () => at("ask-key").close());
at("ask-key").addEventListener("close", () => {
  const key = at("key-text").value.trim();
  at("key-text").value = "";
  declined = at("ask-key").returnValue !== "use" || !key;
  at("ask-key").returnValue = "";
  if (declined) return;
  sessionStorage.setItem(KEY, key);
  look();
});

openPanel(!narrow.matches);
compare(false);
showState("waits", say.connecting);
watch();
