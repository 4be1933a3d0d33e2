// The live view of one server: /metrics once a second, drawn anew each time.

const LATENCIES = [
  ["First token", "vllm:time_to_first_token_seconds"],
  ["Between tokens", "vllm:inter_token_latency_seconds"],
  ["Whole request", "vllm:e2e_request_latency_seconds"],
  ["In the queue", "vllm:request_queue_time_seconds"],
];

function startWatch() {
  watch(drawLive, (history) => setState("good", watchedName(history.now)));
}

const watchedName = (series) => series.get("vllm:num_requests_running")?.[0]?.labels.model_name ?? "connected";

function drawLive(history) {
  const now = history.now;
  byId("tiles").replaceChildren(...liveTiles(history));
  byId("tiers").replaceChildren(...tierMeters(now));
  drawLatencies(history, LATENCIES);
  drawExperts(now);
  byId("counts").replaceChildren(...facts(liveCounts(now)));
}

function liveTiles(history) {
  const gauge = (label, name) => tile(label, [figure(total(history.now, name)), ""], history.values(name));
  const speed = (label, name) => tile(label, [figure(history.rate(name)), "tok/s"], history.rates(name));
  const steps = ["penstock:step_seconds_sum", "penstock:step_seconds_count"];
  const [seconds, counts] = steps.map((name) => history.rates(name));
  const hits = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"];
  return [
    gauge("Running", "vllm:num_requests_running"),
    gauge("Waiting", "vllm:num_requests_waiting"),
    speed("Generated", "vllm:generation_tokens_total"),
    speed("Prompts", "vllm:prompt_tokens_total"),
    tile("Prefix hits", [percent(history.ratio(...hits)), "%"], history.rates(hits[0])),
    tile("Step", duration(history.ratio(...steps)), counts.map((rate, i) => (rate > 0 ? seconds[i] / rate : 0))),
  ];
}

function tierMeters(series) {
  const blocks = byLabel(series, "penstock:kv_device_blocks", "state");
  const all = blocks.get("all") || 1;
  const [held, cached] = [blocks.get("held"), blocks.get("cached")];
  const words = `${figure(held)} held, ${figure(cached)} cached of ${figure(all)}`;
  const rows = [meter("Device", held / all, words, cached / all)];
  const used = byLabel(series, "penstock:kv_tier_used_blocks", "tier");
  const capacity = byLabel(series, "penstock:kv_tier_capacity_blocks", "tier");
  for (const [tier, count] of used) {
    const room = capacity.get(tier);
    const full = room ? `${figure(count)} of ${figure(room)}` : `${figure(count)} blocks`;
    rows.push(meter(tier[0].toUpperCase() + tier.slice(1), room ? count / room : 0, full));
  }
  return rows;
}

function drawExperts(series) {
  const balance = total(series, "penstock:expert_balance");
  byId("experts").hidden = balance === undefined;
  if (balance === undefined) return;
  const ranks = byLabel(series, "penstock:expert_rank_load", "rank");
  byId("ranks").replaceChildren(
    ...[...ranks].map(([rank, share]) =>
      meter(`Rank ${rank}`, share / Math.max(...ranks.values()), `${percent(share)} % of the tokens`),
    ),
  );
  const experts = byLabel(series, "penstock:expert_load", "expert");
  const highest = Math.max(...experts.values(), 1e-9);
  byId("expert-load").replaceChildren(
    ...[...experts].map(([expert, share]) => {
      const cell = make("i");
      cell.style.opacity = 0.08 + (0.92 * share) / highest;
      cell.title = `Expert ${expert}: ${figure(100 * share, 2)} % of the tokens`;
      return cell;
    }),
  );
  byId("expert-facts").replaceChildren(
    ...facts([
      ["Balance of the ranks", `${percent(balance)} %`],
      ["Plans carried out", figure(total(series, "penstock:expert_rebalances_total"))],
      ["Experts moved", figure(total(series, "penstock:expert_moved_total"))],
      ["Steps waited for moves", brief(total(series, "penstock:expert_stall_seconds_total"))],
    ]),
  );
}

function liveCounts(series) {
  const statuses = [...byLabel(series, "penstock:http_requests_total", "status")];
  const bad = statuses.filter(([status]) => status >= "4").reduce((sum, [, count]) => sum + count, 0);
  const ends = [...byLabel(series, "vllm:request_success_total", "finished_reason")];
  const endings = { stop: "Ended by the model", length: "Cut at their length", abort: "Aborted", error: "Failed" };
  return [
    ["Tokens generated", figure(total(series, "vllm:generation_tokens_total"))],
    ["Prompt tokens", figure(total(series, "vllm:prompt_tokens_total"))],
    ["Steps", figure(total(series, "penstock:step_seconds_count"))],
    ...ends.map(([reason, count]) => [endings[reason] ?? reason, figure(count)]),
    ["Preemptions", figure(total(series, "vllm:num_preemptions_total"))],
    ["Answers with an error", figure(bad)],
    ["Memory of the API", bytes(total(series, "process_resident_memory_bytes"))],
  ];
}
