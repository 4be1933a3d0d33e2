// Reads the Prometheus text format and says what has changed between two looks. Knows no names of ours.

/** The text → Map of sample name → [{labels, value}]. */
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

/** The sum of a name's samples; undefined where there are none. */
function total(series, name) {
  return series.get(name)?.reduce((sum, { value }) => sum + value, 0);
}

/** A name's samples by the value of one label. */
function byLabel(series, name, label) {
  const found = new Map();
  for (const { labels, value } of series.get(name) ?? []) {
    found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
  }
  return found;
}

/** The last minute of looks, a second apart while the tab is visible. */
class History {
  constructor() {
    this.looks = []; // {at, series}, oldest first
  }

  add(series) {
    const last = this.looks.at(-1);
    const started = "process_start_time_seconds";
    // A server that was started again counts from nothing.
    if (last && total(last.series, started) !== total(series, started)) this.looks = [];
    this.looks.push({ at: performance.now() / 1000, series });
    while (this.looks.at(-1).at - this.looks[0].at > 60 && this.looks.length > 2) this.looks.shift();
  }

  get now() {
    return this.looks.at(-1).series;
  }

  /** How much a counter grew per second over the last looks; undefined with one look alone. */
  rate(name) {
    return between(this.looks.at(-4) ?? this.looks[0], this.looks.at(-1), name);
  }

  /** The same between all neighbouring looks, for a line. */
  rates(name) {
    return this.looks.slice(1).map((look, i) => between(this.looks[i], look, name) ?? 0);
  }

  /** How much `top` grew for each that `bottom` grew: in the last minute, else since the start; undefined for none. */
  ratio(top, bottom) {
    const grown = (name) => (total(this.now, name) ?? 0) - (total(this.looks[0].series, name) ?? 0);
    if (grown(bottom) > 0) return grown(top) / grown(bottom);
    return total(this.now, bottom) ? total(this.now, top) / total(this.now, bottom) : undefined;
  }

  values(name) {
    return this.looks.map(({ series }) => total(series, name) ?? 0);
  }

  /** A histogram as [{upTo, count}], not cumulated: of the last minute, or of all time. */
  histogram(name, isWhole) {
    const read = (series) => byLabel(series, `${name}_bucket`, "le");
    const now = read(this.now);
    const before = isWhole ? new Map() : read(this.looks[0].series);
    let seen = 0;
    return [...now].map(([le, value]) => {
      const cumulated = value - (before.get(le) ?? 0);
      const count = cumulated - seen;
      seen = cumulated;
      return { upTo: le === "+Inf" ? Infinity : Number(le), count };
    });
  }
}

function between(first, last, name) {
  const seconds = last.at - first.at;
  const now = total(last.series, name);
  if (seconds <= 0 || now === undefined) return undefined;
  return (now - (total(first.series, name) ?? 0)) / seconds;
}

/**
 * A quantile as [sign, value]: evenly spread within its bucket, as Prometheus estimates it. The first and the last
 * bucket say no more than their bound.
 */
function quantile(buckets, share) {
  let left = share * buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  if (left === 0) return ["", undefined];
  let from = null;
  for (const { upTo, count } of buckets) {
    if (left <= count) {
      if (from === null) return ["< ", upTo];
      return upTo === Infinity ? ["> ", from] : ["", from + ((upTo - from) * left) / count];
    }
    left -= count;
    from = upTo;
  }
  return ["> ", from];
}
