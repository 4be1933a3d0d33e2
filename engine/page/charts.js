// The live charts: read /metrics once a second, compare it with the samples of the last minute, and redraw.

/** Read /metrics every second while the tab is visible, never twice at a time, and draw the visible charts. */
async function startWatch() {
  const history = new History();
  let readAt = new Date();
  for (let mayAsk = true; ; await new Promise((resolve) => setTimeout(resolve, 1000))) {
    if (document.hidden) continue;
    try {
      history.add(parseMetrics(await (await ask("/metrics", {}, mayAsk)).text()));
      if (history.looks.length === 1) learnModels(); // the first sample, or that of a restarted server
      setState("good", history.now.get("vllm:num_requests_running")?.[0]?.labels.model_name ?? "connected");
      if (!byId("watch").hidden) {
        byId("tiles").replaceChildren(...liveTiles(history));
        byId("tiers").replaceChildren(...tierMeters(history.now));
      }
      mayAsk = true;
      readAt = new Date();
      document.body.classList.remove("stale");
    } catch (error) {
      if (error.message.includes("API key")) mayAsk = false; // until the user opens the dialog
      setState("bad", { TypeError: "not reachable", TimeoutError: "no response" }[error.name] ?? error.message);
      document.body.classList.add("stale");
      byId("gap").textContent = `No data since ${readAt.toLocaleTimeString()}.`;
    }
    byId("gap").hidden = !document.body.classList.contains("stale");
  }
}

function liveTiles(history) {
  const [first, last] = [history.looks[0], history.looks.at(-1)];
  const gauge = (label, name) => {
    const line = history.looks.map(({ series }) => total(series, name) ?? 0);
    return tile(label, [figure(total(history.now, name)), ""], line);
  };
  const speed = (label, name) => {
    const measure = (from, to) => growth(from, to, name) / (to.at - from.at);
    return tile(label, [figure(measure(history.looks.at(-4) ?? first, last)), "tok/s"], history.line(measure));
  };
  const ratio = (label, format, top, bottom) => {
    const measure = (from, to) => {
      const count = growth(from, to, bottom);
      return count > 0 ? growth(from, to, top) / count : undefined;
    };
    const recent = measure(first, last); // in the last minute
    const value = recent ?? measure(START, last);
    return tile(recent === value ? label : `${label}, since start`, format(value), history.line(measure));
  };
  const mean = (label, name) => ratio(label, duration, `${name}_sum`, `${name}_count`);
  const hits = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"];
  const drafts = ["vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"];
  return [
    gauge("Running", "vllm:num_requests_running"),
    gauge("Waiting", "vllm:num_requests_waiting"),
    speed("Generated", "vllm:generation_tokens_total"),
    speed("Prompts", "vllm:prompt_tokens_total"),
    ratio("Prefix hits", (share) => [percent(share), "%"], ...hits),
    ...(total(history.now, drafts[1]) ? [ratio("Right drafts", (share) => [percent(share), "%"], ...drafts)] : []),
    mean("Step", "penstock:step_seconds"),
    mean("In the queue", "vllm:request_queue_time_seconds"),
    mean("First token", "vllm:time_to_first_token_seconds"),
    mean("Between tokens", "vllm:inter_token_latency_seconds"),
    mean("Whole request", "vllm:e2e_request_latency_seconds"),
  ];
}

function tierMeters(series) {
  const blocks = byLabel(series, "penstock:kv_device_blocks", "state");
  const all = blocks.get("all") || 1;
  const [held, cached] = [blocks.get("held"), blocks.get("cached")];
  const mebibytes = series.get("vllm:cache_config_info")?.[0].labels.block_bytes / 2 ** 20;
  const blocksOf = (count) => {
    const size = count * mebibytes;
    return `${figure(count)} blocks · ${size < 1024 ? `${figure(size)} MiB` : `${figure(size / 1024, 1)} GiB`}`;
  };
  const words = `${figure(held)} held, ${figure(cached)} cached of ${blocksOf(all)}`;
  const rows = [meter("Device", held / all, words, cached / all)];
  const used = byLabel(series, "penstock:kv_tier_used_blocks", "tier");
  const slots = byLabel(series, "penstock:kv_tier_slots", "tier"); // of the disk
  const capacity = byLabel(series, "penstock:kv_tier_capacity_blocks", "tier");
  for (const [tier, count] of used) {
    const room = capacity.get(tier) ?? slots.get(tier);
    const full = room ? `${figure(count)} of ${blocksOf(room)}` : blocksOf(count);
    rows.push(meter(tier[0].toUpperCase() + tier.slice(1), room ? count / room : 0, full));
  }
  return rows;
}

// The Prometheus text format, and differences between two samples of it.

/** Parse the text into a Map of sample name → [{labels, value}]. */
function parseMetrics(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (found === null) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
    }
    const value = found[3] === "+Inf" ? Infinity : Number(found[3]);
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({ labels, value });
  }
  return series;
}

/** Return the sum of a name's samples; undefined if there are none. */
function total(series, name) {
  return series.get(name)?.reduce((sum, { value }) => sum + value, 0);
}

/** Return a name's samples by the value of one label. */
function byLabel(series, name, label) {
  const found = new Map();
  for (const { labels, value } of series.get(name) ?? []) {
    found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
  }
  return found;
}

/** The samples of the last minute, a second apart while the tab is visible. */
class History {
  constructor() {
    this.looks = []; // {at, series}, oldest first
  }

  add(series) {
    const last = this.looks.at(-1);
    const started = "process_start_time_seconds";
    // The counters of a restarted server start at zero.
    if (last && total(last.series, started) !== total(series, started)) this.looks = [];
    this.looks.push({ at: performance.now() / 1000, series });
    while (this.looks.at(-1).at - this.looks[0].at > 60 && this.looks.length > 2) this.looks.shift();
  }

  get now() {
    return this.looks.at(-1).series;
  }

  /** Return a measure of two samples for all adjacent ones, for a line chart; 0 where there is none. */
  line(measure) {
    return this.looks.slice(1).map((look, i) => measure(this.looks[i], look) || 0);
  }
}

const START = { series: new Map() }; // before the first count

/** Return the growth of a counter between two samples; NaN if the later one does not have it. */
function growth(from, to, name) {
  return total(to.series, name) - (total(from.series, name) ?? 0);
}

// Number formats and chart elements.

function figure(value, digits = 0) {
  if (value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

const percent = (share) => (share === undefined ? "–" : figure(100 * share, share > 0 && share < 0.1 ? 1 : 0));

/** Format seconds as [figure, unit]. */
function duration(seconds) {
  if (seconds === undefined) return ["–", ""];
  if (seconds === 0) return ["0", ""];
  if (seconds < 1) return [figure(1000 * seconds, seconds < 0.01 ? 1 : 0), "ms"];
  return [figure(seconds, seconds < 10 ? 2 : 0), "s"];
}

const brief = (seconds) => duration(seconds).join(" ").trim();

function draw(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Create a tile: a label, a figure with its unit, and a line chart of the last minute. */
function tile(label, [value, unit], line) {
  const shown = make("div", "figure", value);
  if (unit) shown.append(make("span", "unit", unit));
  return make("div", "tile", make("div", "label", label), shown, spark(line));
}

function spark(values) {
  const svg = draw("svg", { viewBox: "0 0 60 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length < 2) return svg;
  const top = Math.max(...values, 1e-9);
  const points = values.map((value, i) => {
    const x = 60 - values.length + 1 + i;
    return `${Math.max(x, 0)} ${(29 - (27 * value) / top).toFixed(2)}`;
  });
  const start = points[0].split(" ")[0];
  svg.append(
    draw("path", { class: "under", d: `M${start} 30 L${points.join(" L")} L60 30 Z` }),
    draw("path", { class: "spark", d: `M${points.join(" L")}` }),
  );
  return svg;
}

/** Create a labelled bar; `behind` is a second share shown behind the first. */
function meter(label, share, value, behind = 0) {
  const box = make("div", "bar");
  for (const [name, part] of [["behind", behind], ["", share]]) {
    const fill = make("i", name);
    fill.style.width = `${100 * Math.min(Math.max(part, 0), 1)}%`;
    box.append(fill);
  }
  return make("div", "meter", make("span", "", label), box, make("span", "value", value));
}
