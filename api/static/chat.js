// The chat page: keeps one conversation, streams answers from /v1/chat/completions and can stop them.
// Plain DOM, no library. Model text only ever becomes text nodes, never HTML.

import { tokenView } from "./logprobs.js";
import { authorization, errorText, events, storedKey, storeKey } from "./server.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const input = $("input");
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p",
  "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed",
];
const ALTERNATIVES = 5; // to each token, where log-probabilities are asked for
const SHORTEST_MS = 50; // over which tokens a second say anything
const FIGURES_MS = 250; // between two updates of what is counted while an answer comes
const SAVED = [...NUMBERS, "system", "stop"];

let conversation = []; // {role, content}, without the system message; a new list per chat
let running = null; // AbortController of the answer that is being written

// --- settings -------------------------------------------------------------------------------

function loadSettings() {
  for (const name of SAVED) $(name).value = localStorage.getItem(`cuengine.${name}`) ?? "";
  $("logprobs").checked = localStorage.getItem("cuengine.logprobs") === "true";
  $("key").value = storedKey();
  for (const name of SAVED) {
    $(name).addEventListener("change", () => localStorage.setItem(`cuengine.${name}`, $(name).value));
  }
  $("logprobs").addEventListener("change", () => {
    localStorage.setItem("cuengine.logprobs", $("logprobs").checked);
  });
  $("key").addEventListener("change", () => {
    storeKey($("key").value);
    loadModels();
  });
}

const headers = () => ({ "Content-Type": "application/json", ...authorization() });

function requestBody() {
  const body = {
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    messages: [...conversation],
  };
  if ($("model").value) body.model = $("model").value;
  const system = $("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const name of NUMBERS) {
    const value = $(name).valueAsNumber;
    if (Number.isFinite(value)) body[name] = value;
  }
  if ($("stop").value) body.stop = $("stop").value;
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return body;
}

async function loadModels() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) throw new Error(await errorText(answer));
    const { data } = await answer.json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    say("");
  } catch (error) {
    say(error.message, true);
  }
}

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

// --- the conversation on the page -----------------------------------------------------------

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function addMessage(role, content) {
  $("hint").hidden = true;
  const message = element("article", `message ${role}`);
  message.append(element("h2", "", role === "user" ? "You" : "Assistant"), element("div", "text", content));
  log.append(message);
  log.scrollTop = log.scrollHeight;
  return message;
}

// Text with ``` fences: what is between them becomes <pre>.
function setText(node, content) {
  const parts = content.split(/^```[^\n]*\n?/m);
  node.replaceChildren(
    ...parts.map((part, i) => (i % 2 ? element("pre", "", part.replace(/\n$/, "")) : document.createTextNode(part))),
  );
}

// Draws at most once a frame, however fast tokens come.
function painter(node) {
  let content = "";
  let due = false;
  return (text) => {
    content = text;
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      setText(node, content);
      if (atEnd) log.scrollTop = log.scrollHeight;
    });
  };
}

// --- one answer -----------------------------------------------------------------------------

async function answer() {
  const mine = conversation; // "New chat" may put another in its place meanwhile
  const message = addMessage("assistant", "");
  const text = message.querySelector(".text");
  const paint = painter(text);
  const counted = element("p", "figures");
  counted.setAttribute("aria-live", "off"); // it changes all the time
  message.append(counted);
  message.classList.add("waiting");
  const controller = new AbortController();
  setRunning(controller);
  const sent = performance.now();
  const tokens = []; // with their log-probabilities, where they were asked for
  let content = "";
  let first = 0;
  let last = 0;
  let updated = 0;
  let usage = null;
  let reason = null;
  let problem = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(requestBody()),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await errorText(response));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      tokens.push(...(choice.logprobs?.content ?? []));
      if (choice.delta.content) {
        last = performance.now();
        first ||= last;
        message.classList.replace("waiting", "writing");
        content += choice.delta.content;
        paint(content);
      }
      if (last - updated > FIGURES_MS) {
        updated = last;
        counted.textContent = figures({ sent, first, last, usage });
      }
    }
    if (reason === null) throw new Error("The connection ended before the answer did.");
  } catch (error) {
    if (controller.signal.aborted) reason = "stopped";
    else problem = error;
  } finally {
    if (running === controller) setRunning(null);
    message.classList.remove("waiting", "writing");
  }
  if (content) mine.push({ role: "assistant", content });
  else if (mine === conversation) giveBack();
  counted.textContent = figures({ sent, first, last, usage, reason });
  if (tokens.length) counted.append(...tokenView(text, tokens));
  if (problem) message.append(element("p", "error", problem.message));
  log.scrollTop = log.scrollHeight;
}

function figures({ sent, first, last, usage, reason = null }) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`);
    if (last - first >= SHORTEST_MS) {
      parts.push(`${((1000 * (usage.completion_tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
    }
  }
  if (first) parts.push(`first after ${((first - sent) / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("cut off at the token limit");
  if (reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

// A question that got no answer goes back to the box, to be sent again.
function giveBack() {
  const question = conversation.pop();
  if (question && !input.value) input.value = question.content;
  grow();
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stopping").hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null));
}

// --- what the person does -------------------------------------------------------------------

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

async function send() {
  const content = input.value.trim();
  if (!content || running) return;
  if (!$("settings").checkValidity()) {
    toggleSettings(true);
    $("settings").reportValidity();
    return;
  }
  input.value = "";
  grow();
  conversation.push({ role: "user", content });
  addMessage("user", content);
  await answer();
  input.focus({ preventScroll: true });
}

function toggleSettings(show) {
  $("settings").hidden = !show;
  $("toggle").setAttribute("aria-expanded", String(show));
}

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("toggle").addEventListener("click", () => toggleSettings($("settings").hidden));
$("stopping").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  setRunning(null);
  conversation = [];
  log.replaceChildren($("hint"));
  $("hint").hidden = false;
  input.focus();
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (running) running.abort();
    else toggleSettings(false);
  }
});

loadSettings();
loadModels();
