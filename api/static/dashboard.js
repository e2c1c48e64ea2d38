// The dashboard: follows the server's pictures of its engine and draws them. What is drawn is what the
// engine reports; only tokens a second is worked out here, from two reports.

import { BlockMap } from "./block_map.js";
import { BlockTables } from "./block_tables.js";
import { drawCell, drawSharedMark } from "./cell.js";
import { readPalette, sizedContext } from "./palette.js";
import { Hues, KINDS, Pool, shortId } from "./pool.js";
import { authorization, errorText, events, storeKey } from "./server.js";
import { drawSparkline, drawSteps } from "./step_chart.js";

const RETRY_MS = 1000;
const RATE_SECONDS = 2; // over which tokens are counted
const RATES_KEPT = 120;
const QUEUE_SHOWN = 6;

const STATES = {
  running: ["live", "live"],
  restarting: ["stopped", "engine starts again"],
  stopped: ["stopped", "engine stopped"],
};

const $ = (id) => document.getElementById(id);
const hues = new Hues();
const map = new BlockMap($("map"), $("marks"), onBlock);
const tables = new BlockTables($("rows"), $("rest"), onHover, onPin);

let palette = readPalette();
let latest = null; // the last picture that came
let picture = null; // the last one with a view that was drawn
let pool = null; // of its view
let hovered = null; // key of the sequence under the pointer or the focus
let pinned = null; // key of the sequence that stays lit
let pointed = -1; // block under the pointer or the cursor
let paused = false;
let due = false; // the last picture is about to be drawn
let samples = []; // {time, tokens} of the last seconds
let rates = [];
let replica = null; // which of several engines is shown; null: the first
let following = new AbortController();

// --- following the server -------------------------------------------------------------------

async function follow() {
  for (;;) {
    if (document.hidden) await once(document, "visibilitychange");
    const controller = (following = new AbortController());
    const onHidden = () => document.hidden && controller.abort(); // nobody looks: nothing is computed
    document.addEventListener("visibilitychange", onHidden);
    try {
      await followOnce(controller.signal);
    } catch (error) {
      if (!controller.signal.aborted) setState("lost", "connection lost");
    } finally {
      document.removeEventListener("visibilitychange", onHidden);
    }
    if (!document.hidden && !controller.signal.aborted) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function followOnce(signal) {
  const query = replica ? `?${new URLSearchParams({ replica })}` : "";
  const response = await fetch(`dashboard/events${query}`, { headers: authorization(), signal });
  if (response.status === 404 && replica) {
    replica = null; // it is gone
    return;
  }
  if (response.status === 401) {
    await askForKey(await errorText(response));
    return;
  }
  if (!response.ok) throw new Error(await errorText(response));
  for await (const news of events(response.body)) {
    if (news.replica !== latest?.replica) samples = [];
    samples = news.view ? [...samples, sample(news.view)].slice(-100) : [];
    latest = news;
    showChoice(news);
    showSoon();
  }
  setState("lost", "connection lost");
}

const once = (target, type) => new Promise((resolve) => target.addEventListener(type, resolve, { once: true }));

async function askForKey(problem) {
  setState("lost", "no API key");
  $("refused").textContent = authorization().Authorization ? problem : "";
  $("ask").hidden = false;
  $("key").focus();
  await once($("ask"), "submit");
  storeKey($("key").value);
  $("ask").hidden = true;
}

// --- drawing a picture ----------------------------------------------------------------------

// At most once a frame, however fast pictures come.
function showSoon() {
  if (due || paused) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    show(latest);
  });
}

function show(news) {
  const view = news.view ?? picture?.view;
  setState(...STATES[news.status]);
  setText("model", news.model);
  if (!view) return;
  picture = { ...news, view };
  pool = new Pool(view, hues);
  if (!pool.sequences.some((sequence) => sequence.key === pinned)) pinned = null;
  showFigures(picture);
  showPoolSize(view);
  showSteps(view);
  showQueue(view);
  $("tables-empty").hidden = pool.sequences.length > 0;
  drawSequences();
}

function showChoice(news) {
  const names = news.replicas ?? [];
  $("choice").hidden = names.length === 0;
  const shown = [...$("replica").options].map((option) => option.value);
  if (names.join() !== shown.join()) $("replica").replaceChildren(...names.map((name) => new Option(name)));
  $("replica").value = news.replica;
  if (replica && !names.includes(replica)) {
    replica = null; // it is gone
    following.abort();
  }
}

function drawSequences() {
  if (!pool) return;
  const lit = litSequence();
  map.show(pool, palette, lit);
  tables.show(pool, palette, lit?.key ?? null, pinned);
  describeBlock();
}

// What is pointed at comes before what was chosen.
function litSequence() {
  const key = hovered ?? (pointed < 0 ? pinned : null);
  return pool.sequences.find((sequence) => sequence.key === key) ?? null;
}

function showFigures({ view, ttft, tpot }) {
  const { stats } = view;
  setNumber("running", stats.num_running, "", plural(pool.sequences.length, "block table"));
  const { preempted = 0, swapped = 0, held = 0 } = view.queued;
  const waiting = [[preempted, "preempted"], [swapped, "swapped"], [held, "held"]];
  const parts = waiting.filter(([count]) => count).map(([count, name]) => `${count} ${name}`);
  setNumber("waiting", stats.num_waiting, "", parts.join(", "));
  showLatency("ttft", ttft);
  showLatency("tpot", tpot);
  const { prefix_hits: hits, prefix_queries: queries } = stats;
  setNumber("hits", queries ? percent(hits / queries) : "–", queries ? "%" : "", queries ? `${group(hits)} of ${group(queries)}` : "");
  setNumber("preemptions", group(stats.num_preemptions), "", view.num_host_blocks ? `${group(stats.num_swaps)} swapped` : "");
  $("speculation").hidden = !view.speculative;
  const { num_draft_tokens: guessed, num_accepted_tokens: right } = stats;
  setNumber("acceptance", guessed ? percent(right / guessed) : "–", guessed ? "%" : "", `${group(right)} of ${group(guessed)}`);
}

function showLatency(id, latency) {
  if (!latency) return;
  const [value, unit] = seconds(latency.median);
  setNumber(id, value, unit, `95 %: ${seconds(latency.p95).join(" ")}`);
}

function showPoolSize(view) {
  const counts = pool.counts();
  for (const kind of KINDS) setText(`count-${kind}`, group(counts[kind]));
  const used = (counts.held + counts.shared) / pool.numBlocks;
  const host = view.num_host_blocks ? ` · ${group(view.num_host_blocks - view.num_free_host_blocks)} of ${group(view.num_host_blocks)} in host memory` : "";
  setText("pool-size", `${group(pool.numBlocks)} blocks of ${view.block_size} tokens · ${percent(used)} % in use${host}`);
  const words = KINDS.map((kind) => `${counts[kind]} ${kind}`).join(", ");
  $("map").setAttribute("aria-label", `Map of the block pool: ${words}`);
}

function showSteps(view) {
  drawSteps($("steps"), palette, view.steps);
  $("guessed-key").hidden = !view.speculative;
  const last = view.steps.at(-1);
  if (!last) return;
  const [step, , prefill, decode, guessed] = last;
  const parts = [`step ${group(step)}: ${prefill} prompt, ${decode} decoded`];
  if (view.speculative) parts.push(`${guessed} guessed`);
  setText("steps-last", `${parts.join(", ")} · at most ${view.token_budget}`);
}

function showQueue(view) {
  const shown = view.queue.slice(0, QUEUE_SHOWN);
  $("queue").replaceChildren(...shown.map(queueItem));
  $("queue-empty").hidden = shown.length > 0;
  const left = view.stats.num_waiting - shown.length;
  setText("queue-more", left > 0 ? `and ${group(left)} more` : "");
}

function queueItem(queued) {
  const item = document.createElement("li");
  item.dataset.state = queued.state;
  const sample = queued.index ? ` · ${queued.index}` : "";
  const name = span("name", shortId(queued.request_id) + sample);
  item.append(name, span("", plural(queued.num_tokens, "token")), span("why", queued.state));
  return item;
}

function showRate() {
  const now = samples.at(-1);
  const idle = !now || performance.now() - now.received > 1000 * RATE_SECONDS;
  const from = samples.findLast((s) => s.time <= now?.time - RATE_SECONDS) ?? samples[0];
  const rate = idle || from === now ? 0 : (now.tokens - from.tokens) / (now.time - from.time);
  rates = [...rates, rate].slice(-RATES_KEPT);
  if (paused) return;
  setText("rate", rate >= 100 || rate === 0 ? group(Math.round(rate)) : rate.toFixed(1));
  drawSparkline($("rates"), palette, rates);
}

const sample = (view) => ({
  time: view.time,
  tokens: view.stats.generation_tokens,
  received: performance.now(),
});

// --- what is pointed at ---------------------------------------------------------------------

function onBlock(block, pin) {
  pointed = block;
  const holders = block < 0 ? [] : pool.holders(block);
  hovered = holders.length ? pool.sequences[holders[0]].key : null;
  if (pin) {
    // Again on the same block: its next holder, and after the last one none.
    const keys = holders.map((index) => pool.sequences[index].key);
    pinned = keys[keys.indexOf(pinned) + 1] ?? null;
    hovered = pinned ?? hovered;
  }
  drawSequences();
  // Read aloud once; what is seen goes on changing.
  setText("said", block < 0 ? "" : $("pointed").textContent);
}

function onHover(key) {
  hovered = key;
  drawSequences();
}

function onPin(key) {
  pinned = pinned === key ? null : key;
  drawSequences();
}

function describeBlock() {
  const nodes = pointed >= 0 ? blockText(pointed) : [sequenceText()];
  const text = nodes.map((node) => node.textContent ?? node).join("");
  if ($("pointed").textContent !== text) $("pointed").replaceChildren(...nodes);
}

function sequenceText() {
  const lit = litSequence();
  if (!lit) return "Point at a block to see whose it is, or at a row below to see where its blocks are.";
  const shared = lit.table.filter((block) => pool.refCounts[block] > 1).length;
  return `${shortId(lit.request_id)}, sample ${lit.index}: ${plural(lit.num_slots, "token")} in ${plural(lit.table.length, "block")}, ${shared} of them shared. The map numbers them in order.`;
}

function blockText(block) {
  const kind = KINDS[pool.kind(block)];
  const owners = pool.refCounts[block];
  const words = {
    free: "free",
    cached: "held by nobody; the prefix cache can find it",
    held: "held by",
    shared: `shared, reference count ${owners === 255 ? "255 or more" : owners}:`,
  };
  const bold = document.createElement("b");
  bold.textContent = `Block ${block}`;
  const nodes = [bold, ` · ${words[kind]}`];
  const holders = pool.holders(block);
  for (const index of holders.slice(0, 8)) nodes.push(...holderText(pool.sequences[index], block));
  if (holders.length > 8) nodes.push(` and ${holders.length - 8} more`);
  if (owners && !holders.length) nodes.push(" a sequence that is not known");
  if (owners && pool.isCached(block)) nodes.push(" · the prefix cache can find it");
  return nodes;
}

function holderText(sequence, block) {
  const chip = span("chip", "");
  chip.style.setProperty("background", palette.hues[sequence.hue]);
  const first = sequence.table.indexOf(block) * pool.blockSize;
  const last = Math.min(first + pool.blockSize, sequence.num_slots) - 1;
  return [chip, `${shortId(sequence.request_id)}${sequence.index ? ` · ${sequence.index}` : ""} (tokens ${first}–${last})`];
}

// --- the rest of the page -------------------------------------------------------------------

function setState(state, text) {
  $("state").dataset.state = state;
  setText("state", text);
}

function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function setNumber(id, value, unit, more) {
  const text = `${value}${unit}`;
  if ($(id).textContent !== text) {
    $(id).replaceChildren(String(value), ...(unit ? [smallText(unit)] : []));
  }
  setText(`${id}-more`, more);
}

function smallText(text) {
  const node = document.createElement("small");
  node.textContent = text;
  return node;
}

function span(className, text) {
  const node = document.createElement("span");
  node.className = className;
  node.textContent = text;
  return node;
}

const group = (number) => number.toLocaleString("en");
const percent = (part) => (100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0);
const plural = (count, noun) => `${group(count)} ${noun}${count === 1 ? "" : "s"}`;
const seconds = (value) => (value < 1 ? [(1000 * value).toFixed(value < 0.01 ? 1 : 0), "ms"] : [value.toFixed(2), "s"]);

function drawLegend() {
  const sample = {
    kind: (block) => block,
    hues: (block) => (block === 3 ? [0, 1] : [0]),
    filled: new Map(),
  };
  document.querySelectorAll("#legend li").forEach((item) => {
    const kind = KINDS.indexOf(item.dataset.kind);
    const context = sizedContext(item.querySelector("canvas"), 13, 13);
    drawCell(context, palette, sample, kind, 0, 0, 13, 13);
    drawSharedMark(context, palette, sample, kind, 0, 0, 13, 13);
  });
}

function redrawAll() {
  palette = readPalette();
  drawLegend();
  if (!picture) return;
  map.resize();
  showSteps(picture.view);
  drawSequences();
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (latest) showSoon();
});
$("replica").addEventListener("change", () => {
  replica = $("replica").value;
  following.abort();
});
$("ask").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && pinned !== null) onPin(pinned);
});
window.addEventListener("resize", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

drawLegend();
setInterval(showRate, 500);
follow();
