// One answer of the model: read from its stream into a turn and rendered, while it streams or from storage.

const PAUSE = 4; // after rendering, wait this many times its duration, so that the page stays responsive
const MISSES = {
  new_tokens: "no earlier prompt goes on like this",
  evicted: "the rest was cached and made room for other prompts",
  no_checkpoint: "there is no state of the model to go on from; the next prompt with this beginning finds one",
  tier_slow: "reading the rest from memory or disk would take longer than computing it",
  tier_timeout: "reading the rest from memory or disk took too long",
  other_adapter: "the same beginning was cached for another adapter",
  weights_changed: "the same beginning was cached before the weights changed",
  cache_disabled: "this request, or the server, does not use the cache",
};
const ENDS = { length: "cut at its length", stopped: "stopped", abort: "ended by the server", left: "left unfinished" };

/** Yield the payloads of a stream of server-sent events, independent of its chunk boundaries. */
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

/** Create a collapsible part of an answer. */
function fold(title, className = "prose") {
  return make("details", "", make("summary", "", title), make("div", className));
}

class Answer {
  constructor(turn, item) {
    this.turn = Object.assign(turn, { thoughts: turn.thoughts ?? "", calls: turn.calls ?? [] });
    this.item = item;
    this.usage = this.finish = null;
    this.askedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.thinking = fold("Reasoning");
    this.box = make("div", "text");
    this.markdown = new Markdown(this.box);
    this.calls = make("div");
    this.counts = make("span", "counts");
    this.foot = make("div", "foot", this.counts);
    item.append(this.thinking, this.box, this.calls, this.foot);
    this.draw();
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    this.usage = event.usage ?? this.usage;
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: thoughts, tool_calls: calls = [] } = choice.delta;
    if (!content && !thoughts && calls.length === 0) return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.turn.content += content ?? "";
    this.turn.thoughts += thoughts ?? "";
    for (const call of calls) this.takeCall(call);
    this.soon();
  }

  takeCall({ index, id, function: part }) {
    const call = (this.turn.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.name ?? "";
    call.function.arguments += part.arguments ?? "";
  }

  /** Render with the next frame, or later if rendering is slow: a stream can be faster than the screen. */
  soon() {
    if (!this.isDrawn) return;
    this.isDrawn = false;
    setTimeout(() => requestAnimationFrame(() => this.draw()), this.pause);
  }

  draw() {
    const start = performance.now();
    const { content, thoughts, calls, figures } = this.turn;
    const scroll = byId("scroll");
    const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
    this.isDrawn = true;
    this.thinking.hidden = thoughts === "";
    showPlain(this.thinking.lastChild, thoughts);
    this.markdown.show(content);
    calls.forEach(({ function: call }, i) => {
      if (!this.calls.children[i]) this.calls.append(fold("", "prose mono"));
      const [summary, box] = this.calls.children[i].children;
      summary.textContent = `Call of ${call.name}`;
      showPlain(box, call.arguments);
    });
    this.counts.textContent = (figures ?? this.figures()).join(" · ");
    if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
    this.pause = PAUSE * (performance.now() - start);
  }

  figures() {
    const words = [];
    if (this.usage) {
      const { cached_tokens: cached = 0, penstock: [miss] = [] } = this.usage.prompt_tokens_details ?? {};
      const why = MISSES[miss?.reason];
      if (why) this.counts.title = `Why no more of the prompt was cached: ${why}.`;
      const number = this.usage.completion_tokens ?? 0;
      words.push(`${figure(this.usage.prompt_tokens)} tokens in${cached ? `, ${figure(cached)} of them cached` : ""}`);
      words.push(`${figure(number)} out`);
      const seconds = (this.lastAt - this.firstAt) / 1000;
      if (number > 1 && seconds > 0) words.push(`${figure((number - 1) / seconds, 1)} tok/s`);
    }
    if (this.firstAt !== null) words.push(`first token ${brief((this.firstAt - this.askedAt) / 1000)}`);
    if (this.finish in ENDS) words.push(ENDS[this.finish]);
    return words;
  }

  /** Show the end of a streamed or stored answer: its error, and its buttons. */
  close(again) {
    const { content, error } = this.turn;
    this.item.classList.remove("busy");
    this.item.removeAttribute("aria-busy");
    this.draw();
    if (error) {
      const box = make("div", "error", error);
      box.setAttribute("role", "alert");
      this.foot.before(box);
    }
    const retry = button(error ? "Try again" : "Regenerate", again);
    retry.dataset.does = "again";
    this.foot.append(retry);
    if (content !== "") this.foot.append(copyButton(() => content));
  }
}
