// Figures as people read them, and the few shapes that the views are made of.

function figure(value, digits = 0) {
  if (value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

const percent = (share) => (share === undefined ? "–" : figure(100 * share, share > 0 && share < 0.1 ? 1 : 0));

/** Seconds as [figure, unit]. */
function duration(seconds) {
  if (seconds === undefined) return ["–", ""];
  if (seconds === 0) return ["0", ""];
  if (seconds < 1) return [figure(1000 * seconds, seconds < 0.01 ? 1 : 0), "ms"];
  return [figure(seconds, seconds < 10 ? 2 : 0), "s"];
}

const brief = (seconds) => duration(seconds).join(" ").trim();

function bytes(value) {
  const power = value >= 2 ** 30 ? 3 : 2;
  return `${figure(value / 1024 ** power, power === 3 ? 1 : 0)} ${["MiB", "GiB"][power - 2]}`;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A tile: a label, a figure with its unit, and a line of the last minute. */
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

/** A bar with what it stands for; `behind` is a second share that shows through. */
function meter(label, share, value, behind = 0) {
  return make("div", "meter", make("span", "", label), bar(share, behind), make("span", "value", value));
}

function bar(share, behind = 0) {
  const box = make("div", "bar");
  for (const [name, part] of [["behind", behind], ["", share]]) {
    const fill = make("i", name);
    fill.style.width = `${100 * Math.min(Math.max(part, 0), 1)}%`;
    box.append(fill);
  }
  return box;
}

const FEWEST_BUCKETS = 9; // fewer would be slabs

/** A histogram around the buckets that have something, with three quantiles. */
function chart(label, buckets) {
  const count = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  const filled = buckets.map((bucket, i) => (bucket.count > 0 ? i : -1)).filter((i) => i >= 0);
  const first = Math.max(Math.min((filled[0] ?? 0) - 2, buckets.length - FEWEST_BUCKETS), 0);
  const shown = buckets.slice(first, Math.max((filled.at(-1) ?? 0) + 2, first + FEWEST_BUCKETS));
  const highest = Math.max(...shown.map((bucket) => bucket.count), 1);
  const svg = draw("svg", { viewBox: `0 0 ${Math.max(shown.length, 1)} 100`, preserveAspectRatio: "none", role: "img" });
  shown.forEach((bucket, i) => {
    const height = bucket.count ? Math.max((96 * bucket.count) / highest, 2) : 0;
    const words = `${figure(bucket.count)} up to ${bucket.upTo === Infinity ? "any time" : brief(bucket.upTo)}`;
    const attributes = { x: i + 0.06, y: 100 - height, width: 0.88, height };
    svg.append(draw("rect", attributes, draw("title", {}, words)));
  });
  const from = first > 0 ? buckets[first - 1].upTo : 0;
  const to = shown.at(-1)?.upTo;
  const ends = count > 0 ? [brief(from), to === Infinity ? "longer" : brief(to)] : ["nothing yet", ""];
  const quantiles = [0.5, 0.95, 0.99].map((share) => {
    const [sign, value] = quantile(buckets, share);
    return make("span", "", make("span", "soft", `p${100 * share} `), make("b", "", sign + brief(value)));
  });
  svg.setAttribute("aria-label", `${label}: ${figure(count)} observations`);
  return make(
    "div",
    "chart",
    make("div", "label", label, make("span", "soft", figure(count))),
    svg,
    make("div", "ends", ...ends.map((end) => make("span", "", end))),
    make("div", "quantiles", ...quantiles),
  );
}

function drawLatencies(history, names) {
  const isWhole = byId("window").value === "start";
  byId("latency").replaceChildren(...names.map(([label, name]) => chart(label, history.histogram(name, isWhole))));
}

/** [term, value] pairs as a list of facts. */
function facts(pairs) {
  return pairs.map(([term, value]) => make("div", "", make("dt", "", term), make("dd", "", value)));
}
