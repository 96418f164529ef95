"use strict";
// The live picture. Decides how /state is drawn; asks for it again and again, and keeps what lanes and slots were seen
// to do, since STATUS tells only what they do now. It must never show anything of a prompt.

const POLL_MS = 500;
const SPAN_MS = 60_000;
const ROW = 20;
const LEFT = 130;
const WIDTH = 1_000;
const KINDS = [
  ["queue", "queued"], ["prefill", "prefill"], ["transfer", "KV under way"], ["hold", "waits for a lane"],
  ["import", "import"], ["decode", "decode"], ["orphan", "orphan: nobody waits for it any more"],
];
const KIND_OF_STAGE = {
  tokenizing: "queue", queued: "queue", prefilling: "prefill", prefilled: "hold", importing: "import",
  local_prefilling: "prefill", decoding: "decode", flushing: "decode",
};
const KIND_OF_SLOT = { producing: "prefill", ready: "hold", importing: "import", orphaned: "orphan" };
const KIND_OF_LANE = { importing: "import", prefilling: "prefill", decoding: "decode", stopping: "orphan" };
const rows = new Map(); // name of a row: spans seen there, {kind, job, from, to}
let apiKey = "";
let scrolled = false; // on a narrow screen, to what happens now

const element = (id) => document.getElementById(id);

function headers() {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function titled(made, text) {
  made.append(shape("title", {}, text));
  return made;
}

function see(row, kind, job, now) {
  const spans = rows.get(row) ?? rows.set(row, []).get(row);
  const last = spans.at(-1);
  if (last && last.kind === kind && last.job === job && now - last.to < 3 * POLL_MS) last.to = now;
  else if (kind) spans.push({ kind, job, from: now - POLL_MS / 2, to: now });
  while (spans.length && spans[0].to < now - SPAN_MS) spans.shift();
}

function shortName(worker) {
  const name = worker.replace(/^\w+:\/\//, "").split("/").at(-1);
  return name.length > 20 ? `…${name.slice(-19)}` : name;
}

function observe(state) {
  const now = state.now_ms;
  const present = new Set();
  for (const worker of state.decode.workers) {
    const slots = [...worker.slots, ...worker.survivors];
    for (const slot of slots.length ? slots : [{ slot: 0, state: "free", job: null }]) {
      const several = slots.length > 1 ? ` ${slot.slot}` : "";
      const row = `${shortName(worker.worker)}${several}`;
      present.add(row);
      see(row, KIND_OF_SLOT[slot.state], slot.job, now);
    }
  }
  for (const lane of state.decode.lanes) {
    const row = `lane ${lane.lane}`;
    present.add(row);
    see(row, KIND_OF_LANE[lane.state], lane.job, now);
  }
  for (const [row, spans] of rows) if (!present.has(row) && !spans.length) rows.delete(row);
}

function axis(svg, height, now) {
  for (let back = 0; back <= SPAN_MS; back += 10_000) {
    const x = LEFT + (WIDTH - LEFT) * (1 - back / SPAN_MS);
    svg.append(shape("line", { x1: x, x2: x, y1: 0, y2: height - 16 }));
    svg.append(shape("text", { x: Math.max(LEFT, x - 28), y: height - 4, class: "faint" }, back ? `-${back / 1_000} s` : "now"));
  }
}

function bar(svg, kind, from, to, y, now, words) {
  const scale = (WIDTH - LEFT) / SPAN_MS;
  const start = Math.max(LEFT, WIDTH - (now - from) * scale);
  const end = Math.max(start, WIDTH - (now - to) * scale);
  svg.append(titled(shape("rect", { x: start, y, width: Math.max(1.5, end - start), height: ROW - 6, class: kind }), words));
}

function drawTimeline(now) {
  const svg = element("timeline");
  const height = rows.size * ROW + 22;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.replaceChildren();
  axis(svg, height, now);
  let y = 4;
  for (const [row, spans] of rows) {
    svg.append(shape("text", { x: 2, y: y + 11 }, row));
    for (const span of spans) bar(svg, span.kind, span.from, span.to, y, now, `${row}: ${span.kind}, job ${span.job ?? "gone"}`);
    y += ROW;
  }
}

function drawJobs(state) {
  const svg = element("jobs");
  const now = state.now_ms;
  const recent = state.ended.filter((job) => job.timings && job.ended_ms > now - SPAN_MS).slice(-12);
  const running = state.running.slice(0, 12);
  const height = Math.max(1, recent.length + running.length) * ROW + 22;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.replaceChildren();
  axis(svg, height, now);
  let y = 4;
  for (const job of recent) {
    svg.append(shape("text", { x: 2, y: y + 11 }, `${job.path}, ${job.timings.total_ms} ms`));
    let at = job.arrived_ms;
    for (const [stage, length] of Object.entries(job.timings.stages_ms)) {
      bar(svg, KIND_OF_STAGE[stage] ?? "queue", at, at + length, y, now, `${stage} ${length} ms`);
      at += length;
    }
    const landing = job.timings.transfer_exposed_us / 1_000;
    if (landing >= 1) {
      const here = job.arrived_ms + (job.timings.stages_ms.tokenizing ?? 0) + (job.timings.stages_ms.queued ?? 0)
        + (job.timings.stages_ms.prefilling ?? 0);
      bar(svg, "transfer", here - landing, here, y, now, `KV not hidden behind compute: ${Math.round(landing)} ms`);
    }
    y += ROW;
  }
  for (const job of running) {
    svg.append(shape("text", { x: 2, y: y + 11 }, "running"));
    const first = job.first_token_ms ?? now;
    bar(svg, "queue", job.arrived_ms, first, y, now, "before its first token");
    if (job.first_token_ms) bar(svg, "decode", first, now, y, now, "tokens come");
    y += ROW;
  }
  if (y === 4) svg.append(shape("text", { x: 2, y: 15, class: "faint" }, "no job in the last minute"));
}

function drawHistogram(id, values) {
  const svg = element(id);
  svg.setAttribute("viewBox", "0 0 430 125");
  svg.replaceChildren();
  if (!values.length) {
    svg.append(shape("text", { x: 10, y: 20, class: "faint" }, "nothing yet"));
    return;
  }
  const bins = new Array(16).fill(0); // each twice as long as the one before, from 1 ms on
  for (const value of values) bins[Math.min(15, Math.max(0, Math.floor(Math.log2(Math.max(1, value)))))] += 1;
  const most = Math.max(...bins);
  bins.forEach((count, number) => {
    const height = (80 * count) / most;
    const range = `${2 ** number} to ${2 ** (number + 1)} ms: ${count}`;
    svg.append(titled(shape("rect", { x: 8 + number * 24, y: 103 - height, width: 20, height, class: "decode" }), range));
    if (number % 3 === 0) svg.append(shape("text", { x: 8 + number * 24, y: 118, class: "faint" }, `${2 ** number} ms`));
  });
  const sorted = [...values].sort((one, other) => one - other);
  const at = (share) => Math.round(sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]);
  const caption = { x: 422, y: 14, "text-anchor": "end", class: "faint" };
  svg.append(shape("text", caption, `p50 ${at(0.5)} ms, p95 ${at(0.95)} ms, ${values.length} jobs`));
}

function drawNumbers(state) {
  const decode = state.decode;
  const busy = decode.lanes.filter((lane) => lane.state !== "free").length;
  const waiting = (decode.jobs.queued ?? 0) + (decode.jobs.tokenizing ?? 0);
  const numbers = {
    "tokens / s": state.tokens_per_s.toFixed(1),
    "jobs under way": Object.values(decode.jobs).reduce((sum, count) => sum + count, 0),
    waiting,
    "lanes busy": `${busy} of ${decode.lanes.length}`,
    "prefetch depth": decode.prefetch_depth_asked === "auto" ? `${decode.prefetch_depth} (auto)` : decode.prefetch_depth,
    prefetches: decode.counters.prefetches,
    "finished / failed": `${decode.counters.jobs_finished} / ${decode.counters.jobs_failed}`,
    orphans: decode.workers.reduce((sum, worker) => sum + worker.orphans, 0),
  };
  element("numbers").replaceChildren(...Object.entries(numbers).map(([name, value]) => {
    const box = document.createElement("div");
    const term = document.createElement("dt");
    const told = document.createElement("dd");
    term.textContent = name;
    told.textContent = value;
    box.append(term, told);
    return box;
  }));
}

function drawWorkers(state) {
  element("workers").replaceChildren(...state.decode.workers.map((worker) => {
    const row = document.createElement("tr");
    const down = worker.refusal || (worker.session ? "not usable now" : "no session: is it running?");
    const slots = [...worker.slots, ...worker.survivors].map((slot) => `${slot.state} ${Math.round(slot.age_ms / 1_000)} s`);
    for (const text of [worker.worker, worker.usable ? `usable, KV over ${worker.kv_plane}` : down, slots.join(", ") || "none",
      worker.orphans, worker.counters.prefills_sent]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  }));
}

function judge(text, good, trouble) {
  const badge = element("health");
  badge.textContent = text;
  badge.className = `badge ${good ? "good" : "bad"}`;
  element("trouble").hidden = !trouble;
  element("trouble").textContent = trouble;
}

function draw(state) {
  if (!state.decode) {
    judge("decode node not reached", false, state.problem);
    return;
  }
  const lost = state.decode.workers.filter((worker) => !worker.usable).map((worker) => worker.worker);
  const trouble = lost.length ? `not usable: ${lost.join(", ")}` : "";
  judge(state.decode.ready ? "ready" : "not ready", state.decode.ready, trouble);
  element("model").textContent = `${state.decode.model}, up to ${state.decode.max_tokens} tokens`;
  observe(state);
  drawNumbers(state);
  drawTimeline(state.now_ms);
  drawJobs(state);
  const timed = state.ended.filter((job) => job.timings);
  drawHistogram("ttft", timed.map((job) => job.timings.first_token_ms).filter((value) => value !== null));
  drawHistogram("gap", timed.map((job) => job.timings.lane_gap_us).filter((value) => value !== null).map((value) => value / 1_000));
  drawWorkers(state);
  if (!scrolled) for (const id of ["timeline", "jobs"]) element(id).parentElement.scrollLeft = WIDTH;
  scrolled = true;
}

async function poll() {
  try {
    const answer = await fetch("/state", { headers: headers() });
    element("access").hidden = answer.status !== 401;
    if (answer.status === 401) judge("needs an API key", false, "");
    else draw(await answer.json());
  } catch (error) {
    judge("gateway not reached", false, String(error));
  }
  setTimeout(poll, POLL_MS);
}

element("access").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = element("key").value;
});
element("legend").replaceChildren(...KINDS.map(([kind, words]) => {
  const item = document.createElement("li");
  const colour = document.createElement("i");
  colour.className = kind;
  item.append(colour, words);
  return item;
}));
poll();
