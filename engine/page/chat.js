// The chat: the open conversation, one answer at a time, streamed from /v1/chat/completions.

const MAX_TOKENS = 1024; // limit of an answer if the settings have none: small models may never stop
const OPEN = "penstock-open"; // the key of this tab's conversation in session storage

/** Return the turns as messages of a request, without an answer that never started. */
function messagesOf(turns) {
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, calls = [], callId } of turns) {
    if (role === "user") messages.push({ role, content });
    else if (role === "tool") messages.push({ role, content, tool_call_id: callId });
    else if (calls.length) messages.push({ role, content: content || null, tool_calls: calls });
    else if (content) messages.push({ role, content });
  }
  return messages;
}

/** Return the tool calls of the last answer that have no result yet. */
function openCalls(turns) {
  const calls = turns.findLast((turn) => turn.role === "assistant")?.calls ?? [];
  return turns.at(-1)?.role === "user" ? [] : calls.filter(({ id }) => !turns.some((turn) => turn.callId === id));
}

class Chat {
  constructor() {
    this.talk = newTalk();
    this.inFlight = null; // the AbortController of the streaming answer
    this.answer = null; // the streaming answer
  }

  /** Show a conversation from its beginning. */
  open(talk) {
    this.talk = talk;
    this.show();
    if (byId("past").matches(":popover-open")) byId("past").hidePopover();
    byId("say").focus();
  }

  show() {
    byId("talk").replaceChildren();
    byId("empty").hidden = this.talk.turns.length > 0;
    this.talk.turns.forEach((turn) => this.add(turn));
    this.list();
  }

  list() {
    session.setItem(OPEN, this.talk.id);
    showTalks(this.talk.id, (id) => this.open(readTalk(id) ?? newTalk()), (id) => this.drop([id]));
    const [call] = openCalls(this.talk.turns);
    byId("say").placeholder = byId("say").ariaLabel = call ? `Result of ${call.function.name}` : "Message";
  }

  /** Append a turn to the view. */
  add(turn) {
    const names = { user: "You", tool: `Result of ${turn.name}`, assistant: turn.model };
    const item = make("li", turn.role, make("div", "who", names[turn.role] ?? turn.role));
    byId("empty").hidden = true;
    byId("talk").append(item);
    byId("scroll").scrollTop = byId("scroll").scrollHeight;
    if (turn.role === "assistant") {
      const answer = new Answer(turn, item);
      if (turn.figures) answer.close(() => this.regenerate());
      return answer;
    }
    item.append(make("div", "prose", turn.content));
  }

  setBusy(isBusy) {
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    byId("new").disabled = byId("past").inert = isBusy;
  }

  send() {
    const text = byId("say").value.trim();
    const fields = this.inFlight || text === "" ? null : readSettings();
    if (fields === null) return;
    const { turns } = this.talk;
    const [call] = openCalls(turns);
    byId("say").value = "";
    const result = call && { role: "tool", name: call.function.name, callId: call.id, content: text };
    turns.push(result ?? { role: "user", content: text });
    this.add(turns.at(-1));
    if (openCalls(turns).length) this.keep(); // every call needs a result before the model continues
    else this.write(fields);
  }

  regenerate() {
    const fields = this.inFlight ? null : readSettings();
    if (fields === null) return;
    this.talk.turns.pop();
    byId("talk").lastElementChild.remove();
    byId("say").focus();
    this.write(fields);
  }

  keep() {
    keepTalk(this.talk);
    this.list();
  }

  async write(fields) {
    const body = {
      ...fields,
      messages: messagesOf(this.talk.turns),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      explain_cache: true,
    };
    const turn = { role: "assistant", model: byId("model").value, content: "", thoughts: "", calls: [] };
    this.talk.turns.push(turn);
    const answer = (this.answer = this.add(turn));
    answer.item.classList.add("busy");
    answer.item.setAttribute("aria-busy", "true");
    const control = (this.inFlight = new AbortController());
    this.setBusy(true);
    byId("said").textContent = "Answering";
    try {
      const response = await ask("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal: control.signal,
      });
      for await (const event of events(response.body)) {
        answer.take(event);
        // Stopped here, because the server refuses a requested length that does not fit into the context.
        if (fields.max_tokens === undefined && answer.usage?.completion_tokens >= MAX_TOKENS) {
          answer.finish ??= "length";
          control.abort();
        }
      }
      if (answer.finish === null) throw new Error("The answer broke off.");
    } catch (error) {
      if (error.name === "AbortError") answer.finish ??= "stopped";
      else turn.error = error instanceof TypeError ? `The connection broke: ${error.message}` : error.message;
    }
    control.abort(); // closes the connection of an answer that could not be read to its end
    this.inFlight = this.answer = null;
    turn.figures = answer.figures();
    answer.close(() => this.regenerate());
    this.setBusy(false);
    this.keep();
    const said = `${turn.content.slice(0, 1000)} Answer complete: ${turn.figures.join(", ")}`;
    byId("said").textContent = turn.error || said;
  }

  drop(ids) {
    const what = ids.length === 1 ? `“${titleOf(readTalk(ids[0]))}”` : `all ${ids.length} conversations`;
    if (!confirm(`Delete ${what}?`)) return;
    ids.forEach(dropTalk);
    if (ids.includes(this.talk.id)) this.open(newTalk());
    else this.list();
  }
}

function startChat() {
  const chat = new Chat();
  byId("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send();
  });
  byId("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    chat.send();
  });
  byId("stop").addEventListener("click", () => {
    chat.inFlight?.abort();
    byId("say").focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) chat.inFlight?.abort();
  });
  byId("new").addEventListener("click", () => chat.open(newTalk()));
  byId("past-clear").addEventListener("click", () => chat.drop(readTalks().map(({ id }) => id)));
  addEventListener("pagehide", () => {
    if (chat.answer === null) return;
    chat.answer.finish = "left";
    chat.answer.turn.figures = chat.answer.figures();
    chat.keep();
  });
  chat.talk = readTalk(session.getItem(OPEN)) ?? chat.talk;
  chat.show();
}
