// The chat: one conversation, one answer at a time, streamed from /v1/chat/completions.

const MAX_TOKENS = 1024; // of an answer where the settings give no limit: small models may never end one

/** The text of an answer: what stands between fences is code, all else is prose. */
function showText(box, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  box.replaceChildren(
    ...parts.flatMap((part, i) => {
      if (i % 2) return [make("pre", "", make("code", "", part))];
      const prose = i > 0 ? part.replace(/^\n+/, "") : part;
      return prose === "" && i > 0 ? [] : [make("div", "prose", prose)];
    }),
  );
}

/** The payloads of a stream of server-sent events, wherever its chunks begin and end. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      if (piece.startsWith("data: ") && piece !== "data: [DONE]") yield JSON.parse(piece.slice(6));
    }
  }
}

/** What the settings say, as fields of a request; null where a field cannot be sent. */
function readSettings() {
  const fields = { model: byId("model").value || undefined };
  for (const input of document.querySelectorAll("[data-field]")) {
    if (!valid(input)) return null;
    if (input.value !== "") fields[input.dataset.field] = Number(input.value);
  }
  const form = byId("form").value;
  if (form === "json_object") fields.response_format = { type: form };
  if (form === "json_schema") {
    const schema = readSchema();
    if (schema === null) return null;
    fields.response_format = { type: form, json_schema: { name: "answer", schema, strict: true } };
  }
  return fields;
}

function readSchema() {
  const box = byId("schema");
  let schema = null;
  box.setCustomValidity("");
  try {
    schema = JSON.parse(box.value);
    if (typeof schema !== "object") throw new Error("a schema is an object");
  } catch (error) {
    box.setCustomValidity(`This is not a JSON schema: ${error.message}`);
  }
  return valid(box) ? schema : null;
}

function valid(input) {
  if (input.checkValidity()) return true;
  byId("settings").open = true;
  input.reportValidity();
  return false;
}

/** One answer as it arrives: its text, its counts, and when its first and last tokens came. */
class Answer {
  constructor(item) {
    this.item = item;
    this.text = this.thoughts = this.error = "";
    this.usage = this.finish = null;
    this.askedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.thinking = make("div", "thinking prose");
    this.thinking.hidden = true;
    this.box = make("div", "text");
    this.counts = make("span", "counts");
    this.foot = make("div", "foot", this.counts);
    item.append(this.thinking, this.box, this.foot);
    this.isDrawn = true;
    this.draw();
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    this.usage = event.usage ?? this.usage;
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content = "", reasoning_content: thoughts = "" } = choice.delta;
    if (content || thoughts) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.text += content;
      this.thoughts += thoughts;
      this.soon();
    }
  }

  /** Draw with the next frame: a stream can be quicker than the screen. */
  soon() {
    if (!this.isDrawn) return;
    this.isDrawn = false;
    requestAnimationFrame(() => {
      this.isDrawn = true;
      this.draw();
    });
  }

  draw() {
    const scroll = byId("scroll");
    const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    this.thinking.hidden = this.thoughts === "";
    this.thinking.textContent = this.thoughts;
    showText(this.box, this.text);
    this.counts.textContent = this.figures().join(" · ");
    if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  }

  figures() {
    const words = [];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const number = this.usage.completion_tokens ?? 0;
      words.push(`${figure(this.usage.prompt_tokens)} tokens in${cached ? `, ${figure(cached)} cached` : ""}`);
      words.push(`${figure(number)} out`);
      const seconds = (this.lastAt - this.firstAt) / 1000;
      if (number > 1 && seconds > 0) words.push(`${figure((number - 1) / seconds, 1)} tok/s`);
    }
    if (this.firstAt !== null) words.push(`first token ${brief((this.firstAt - this.askedAt) / 1000)}`);
    if (this.finish === "length") words.push("cut at its length");
    if (this.finish === "stopped") words.push("stopped");
    if (this.finish === "abort") words.push("ended by the server");
    return words;
  }

  close() {
    this.item.classList.remove("busy");
    this.draw();
    if (this.error) {
      const box = make("div", "error", this.error);
      box.setAttribute("role", "alert");
      this.foot.before(box);
    }
  }
}

function startChat() {
  const messages = []; // as they are sent, without the system prompt
  let underWay = null; // the AbortController of the answer that is being written

  function addItem(role, ...children) {
    byId("empty").hidden = true;
    const item = make("li", role, make("div", "who", role === "user" ? "You" : byId("model").value), ...children);
    byId("talk").append(item);
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
    return item;
  }

  function setBusy(isBusy) {
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("new").disabled = isBusy;
  }

  function offerAgain(answer) {
    const again = make("button", "quiet", answer.error ? "Try again" : "Regenerate");
    const copy = make("button", "quiet", "Copy");
    again.type = copy.type = "button";
    again.addEventListener("click", regenerate);
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(answer.text);
      copy.textContent = "Copied";
    });
    again.dataset.does = "again";
    copy.hidden = answer.text === "" || !navigator.clipboard; // which only a secure origin has
    for (const old of document.querySelectorAll("[data-does=again]")) old.remove();
    answer.foot.append(again, copy);
  }

  async function write(fields) {
    const system = byId("system").value.trim();
    const body = {
      ...fields,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const answer = new Answer(addItem("assistant"));
    answer.item.classList.add("busy");
    underWay = new AbortController();
    setBusy(true);
    byId("said").textContent = "Answering";
    try {
      const response = await ask("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: underWay.signal,
      });
      if (!response.ok) throw new Error(await complaint(response));
      for await (const event of events(response.body)) {
        answer.take(event);
        // Ended here and not by asking for a length, which is refused where the context has no room for it.
        if (fields.max_tokens === undefined && answer.usage?.completion_tokens >= MAX_TOKENS) {
          answer.finish ??= "length";
          underWay.abort();
        }
      }
      if (answer.finish === null) throw new Error("The answer broke off.");
    } catch (error) {
      if (error.name === "AbortError") answer.finish ??= "stopped";
      else answer.error = error instanceof TypeError ? `The connection broke: ${error.message}` : error.message;
    }
    underWay = null;
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    answer.close();
    offerAgain(answer);
    setBusy(false);
    byId("said").textContent = answer.error || `Answer complete: ${answer.figures().join(", ")}`;
  }

  function regenerate() {
    const fields = readSettings();
    if (underWay || fields === null) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    byId("talk").lastElementChild.remove();
    byId("say").focus();
    write(fields);
  }

  function send() {
    const text = byId("say").value.trim();
    if (underWay || text === "") return;
    const fields = readSettings();
    if (fields === null) return;
    byId("say").value = "";
    messages.push({ role: "user", content: text });
    addItem("user", make("div", "prose", text));
    write(fields);
  }

  byId("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => {
    underWay?.abort();
    byId("say").focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key").open) underWay?.abort();
  });
  byId("new").addEventListener("click", () => {
    messages.length = 0;
    byId("talk").replaceChildren();
    byId("empty").hidden = false;
    byId("say").focus();
  });
  byId("form").addEventListener("change", () => {
    byId("schema-field").hidden = byId("form").value !== "json_schema";
  });
  const properties = { name: { type: "string" }, year: { type: "integer" } };
  const schema = { type: "object", properties, required: ["name", "year"], additionalProperties: false };
  byId("schema").value = JSON.stringify(schema, null, 2);
  byId("settings").open = matchMedia("(min-width: 781px)").matches;
}

/** The served names, for the list of models. The watch says what is wrong where there is no answer. */
async function learnModels() {
  try {
    const { data } = await bodyOf(await ask("/v1/models"), "json");
    const chosen = byId("model").value;
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  } catch {
    byId("model").replaceChildren(); // a request without a model still has an answer
  }
}
