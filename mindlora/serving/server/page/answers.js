// One answer of a model: how it is asked for, what came of it, and how it is shown.
class Answer {
  constructor(model, cell) {
    this.model = model;
    this.text = this.thought = this.error = this.finish = "";
    this.calls = [];
    this.tokens = this.firstTokens = this.began = this.first = this.last = 0;
    this.usage = this.sends = null;
    this.results = [];
    this.stopping = new AbortController();
    const root = document.getElementById("answer").content.cloneNode(true).firstElementChild;
    this.root = root;
    this.parts = Object.fromEntries(
      ["thought", "text", "calls", "error", "figures"].map((name) => [name, root.querySelector(`.${name}`)]));
    root.querySelector("h3").textContent = model;
    root.setAttribute("aria-label", model);
    // Pieces are appended to these, since a long text that is written anew for each of them takes ever longer.
    this.shown = this.parts.text.appendChild(new Text());
    this.shownThought = this.parts.thought.querySelector("p").appendChild(new Text());
    cell.append(root);
  }

  // Its calls, if all of them came to their ends: the arguments of one that was cut off are not JSON.
  get wholeCalls() {
    return this.finish === "tool_calls" ? this.calls : [];
  }

  // Whether the conversation can go on after it.
  get counts() {
    return !this.error && (this.text !== "" || this.wholeCalls.length > 0);
  }

  stop() {
    this.stopping.abort();
  }

  // Asks for it, and shows it as it comes. Throws nothing: an error is part of the answer.
  async ask(body) {
    this.root.setAttribute("aria-busy", "true");
    this.began = performance.now();
    try {
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ ...body, model: this.model, stream: true, stream_options: { include_usage: true }, return_token_ids: true }),
        signal: this.stopping.signal,
      });
      this.notEnforced = response.headers.get("X-Not-Enforced");
      for await (const chunk of chunksOf(response)) this.add(chunk);
    } catch (error) {
      if (this.stopping.signal.aborted) this.finish = "stopped";
      else {
        this.error = error.message;
        this.status = error.status;
      }
    }
    this.end();
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    for (const { delta, finish_reason, token_ids } of chunk.choices) {
      if (token_ids?.length) this.count(token_ids.length);
      if (delta.reasoning_content) this.think(delta.reasoning_content);
      if (delta.content) {
        this.text += delta.content;
        // The line breaks that models begin with are not shown.
        this.shown.data ? this.shown.appendData(delta.content) : (this.shown.data = this.text.trimStart());
        this.parts.thought.firstElementChild.textContent = say.thought;
      }
      for (const part of delta.tool_calls ?? []) this.call(part);
      this.finish = finish_reason ?? this.finish;
    }
    this.showFigures();
  }

  count(tokens) {
    this.last = performance.now();
    if (!this.tokens) [this.first, this.firstTokens] = [this.last, tokens];
    this.tokens += tokens;
  }

  think(text) {
    this.thought += text;
    this.shownThought.appendData(text);
    this.parts.thought.hidden = false;
    this.parts.thought.firstElementChild.textContent = say.thinking;
  }

  // Takes the beginning of a call, which has its name, or more of its arguments.
  call({ index, id, function: called }) {
    if (id) {
      const root = document.getElementById("call").content.cloneNode(true).firstElementChild;
      writeTexts(root);
      root.querySelector(".name").textContent = called.name;
      this.parts.calls.append(root);
      this.calls[index] = { id, name: called.name, text: "", root };
    }
    this.calls[index].text += called.arguments ?? "";
    this.calls[index].root.querySelector("pre").textContent = this.calls[index].text;
  }

  end() {
    this.root.removeAttribute("aria-busy");
    this.parts.thought.firstElementChild.textContent = say.thought;
    if (this.error) {
      this.parts.error.textContent = this.error;
      this.parts.error.hidden = false;
    } else if (!this.text && !this.calls.length && this.finish !== "stopped") {
      this.shown.data = say.nothing;
      this.parts.text.classList.add("quiet");
    }
    this.showFigures();
  }

  showFigures() {
    const said = [];
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens) said.push(say.count(number(this.tokens)));
    if (seconds > 0) said.push(say.rate(number((this.tokens - this.firstTokens) / seconds, 1)));
    if (this.tokens) said.push(say.first(number((this.first - this.began) / 1000, 2)));
    if (this.usage) {
      const { prompt_tokens, prompt_tokens_details } = this.usage;
      said.push(say.cached(number(prompt_tokens_details.cached_tokens), number(prompt_tokens)));
    }
    if (["stopped", "length"].includes(this.finish)) said.push(say[this.finish]);
    if (this.notEnforced) said.push(say.not_enforced(this.notEnforced));
    this.parts.figures.textContent = said.join(" · ");
  }

  // Lets the reader write what the called tools gave, and calls goOn when that is to be sent.
  takeResults(goOn) {
    for (const call of this.calls) call.root.querySelector("label").hidden = false;
    this.sends = document.createElement("button");
    this.sends.type = "button";
    this.sends.textContent = say.give_results;
    this.sends.addEventListener("click", goOn);
    this.parts.calls.append(this.sends);
  }

  // Keeps the results as they are written.
  closeResults() {
    const fields = this.calls.map((call) => call.root.querySelector("textarea"));
    for (const field of fields) field.readOnly = true;
    this.results = fields.map((field) => field.value);
    this.sends.remove();
    this.sends = null;
  }

  // Returns the messages that tell a model of it.
  messages() {
    const message = { role: "assistant", content: this.text || null };
    if (this.thought) message.reasoning_content = this.thought;
    if (this.wholeCalls.length) {
      message.tool_calls = this.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.text } }));
    }
    const results = this.results.map((content, number) => (
      { role: "tool", tool_call_id: this.calls[number].id, content }));
    return [message, ...results];
  }
}
