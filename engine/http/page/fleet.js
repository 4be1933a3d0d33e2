// The live view of a router: its replicas from /replicas, its counters from /metrics, once a second.

const FLEET_LATENCIES = [
  ["First byte", "penstock:router_first_byte_seconds"],
  ["Lag of the event loop", "penstock:router_loop_lag_seconds"],
];
const STATE_DOTS = { up: "good", trial: "good", starting: "", draining: "", removing: "" };

function startWatch() {
  let replicas = [];
  watch((history) => drawFleet(history, replicas), async (_history, mayAsk) => {
    replicas = (await bodyOf(await ask("/replicas", {}, mayAsk), "json")).replicas;
    const open = replicas.filter((replica) => replica.is_available).length;
    setState(open ? "good" : "bad", `${open} of ${replicas.length} replicas take requests`);
  });
}

function drawFleet(history, replicas) {
  byId("tiles").replaceChildren(...fleetTiles(history, replicas));
  byId("replicas").tBodies[0].replaceChildren(...replicas.map(replicaRow));
  drawLatencies(history, FLEET_LATENCIES);
  byId("counts").replaceChildren(...facts(fleetCounts(history.now)));
}

function fleetTiles(history, replicas) {
  const now = history.now;
  const share = (top) => [percent(history.ratio(top, "penstock:router_compared_prompt_tokens_total")), "%"];
  const predicted = "penstock:router_predicted_cached_tokens_total";
  const actual = "penstock:router_actual_cached_tokens_total";
  const ejections = "penstock:router_replica_ejections_total";
  const out = replicas.filter((replica) => replica.state === "ejected").length;
  return [
    tile("In flight", [figure(total(now, "penstock:router_under_way") ?? 0), ""], history.values("penstock:router_under_way")),
    tile("Placed", [figure(history.rate("penstock:router_decisions_total") ?? 0, 1), "/s"], history.rates("penstock:router_decisions_total")),
    tile("Overlap, predicted", share(predicted), history.rates(predicted)),
    tile("Overlap, measured", share(actual), history.rates(actual)),
    tile("Retries", [figure(total(now, "penstock:router_retries_total") ?? 0), ""], history.rates("penstock:router_retries_total")),
    tile("Ejections", [figure(total(now, ejections) ?? 0), out ? `${out} out now` : ""], history.rates(ejections)),
  ];
}

function replicaRow(replica) {
  const brain = replica.brain ?? {};
  const labels = [...byId("replicas").tHead.rows[0].cells].map((cell) => cell.textContent);
  const state = make("td", "", make("div", "", make("span", `dot ${STATE_DOTS[replica.state] ?? "bad"}`), replica.state));
  if (replica.state !== "up") state.lastChild.append(make("div", "why", replica.reason));
  const name = make("th", "", replica.url, make("div", "why", replica.models.join(", ")));
  name.scope = "row";
  const cells = [
    state,
    make("td", "", figure(replica.requests_under_way)),
    make("td", "", figure(brain.queued_tokens)),
    make("td", "", figure(brain.prefill_tokens_per_s)),
    make("td", "", cachedWords(brain.cached_blocks), make("div", "why", brain.knowledge === "events" ? "" : "guessed")),
    ...[replica.requests, replica.failures, replica.ejections].map((count) => make("td", "", figure(count))),
  ];
  cells.forEach((cell, i) => (cell.dataset.label = labels[i + 1]));
  return make("tr", "", name, ...cells);
}

/** Blocks by tier, the empty ones left out. */
function cachedWords(blocks = {}) {
  const filled = Object.entries(blocks).filter(([, count]) => count > 0);
  return filled.map(([tier, count]) => `${figure(count)} ${tier}`).join(", ") || "–";
}

function fleetCounts(series) {
  const answers = [...byLabel(series, "penstock:router_requests_total", "status")];
  const reasons = [...byLabel(series, "penstock:router_retries_total", "reason")];
  return [
    ...answers.map(([status, count]) => [`Answers with ${status}`, figure(count)]),
    ...reasons.map(([reason, count]) => [`Retried: ${reason}`, figure(count)]),
    ["Not retried, for want of budget", figure(total(series, "penstock:router_not_retried_total") ?? 0)],
    ["Streams that broke", figure(total(series, "penstock:router_broken_streams_total") ?? 0)],
    ["Clients that left", figure(total(series, "penstock:router_client_gone_total") ?? 0)],
    ["Replicas guessed at", figure(total(series, "penstock:router_approximate_replicas") ?? 0)],
    ["Memory of the router", bytes(total(series, "process_resident_memory_bytes"))],
  ];
}
