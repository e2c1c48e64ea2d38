// The chat page: keeps one conversation, streams answers from /v1/chat/completions and can stop them.
// Plain DOM, no library. Model text only ever becomes text nodes, never HTML.

"use strict";

const $ = (id) => document.getElementById(id);
const log = $("log");
const input = $("input");
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const SAVED = [...NUMBERS, "system", "stop"];

let conversation = []; // {role, content}, without the system message; a new list per chat
let running = null; // AbortController of the answer that is being written

// --- settings -------------------------------------------------------------------------------

function loadSettings() {
  for (const name of SAVED) $(name).value = localStorage.getItem(`cuengine.${name}`) ?? "";
  $("key").value = sessionStorage.getItem("cuengine.key") ?? "";
  for (const name of SAVED) {
    $(name).addEventListener("change", () => localStorage.setItem(`cuengine.${name}`, $(name).value));
  }
  $("key").addEventListener("change", () => {
    sessionStorage.setItem("cuengine.key", $("key").value); // forgotten with the tab
    loadModels();
  });
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function requestBody() {
  const body = { stream: true, stream_options: { include_usage: true }, messages: [...conversation] };
  if ($("model").value) body.model = $("model").value;
  const system = $("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const name of NUMBERS) {
    const value = $(name).valueAsNumber;
    if (Number.isFinite(value)) body[name] = value;
  }
  if ($("stop").value) body.stop = $("stop").value;
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

async function errorText(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status} ${answer.statusText}.`;
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

// The JSON of each `data:` line of a stream of server-sent events; comments are skipped.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function answer() {
  const mine = conversation; // "New chat" may put another in its place meanwhile
  const message = addMessage("assistant", "");
  const paint = painter(message.querySelector(".text"));
  message.classList.add("waiting");
  const controller = new AbortController();
  setRunning(controller);
  const sent = performance.now();
  let content = "";
  let first = 0;
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
      if (choice.delta.content) {
        first ||= performance.now();
        message.classList.replace("waiting", "writing");
        content += choice.delta.content;
        paint(content);
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
  message.append(element("p", "figures", figures({ sent, first, usage, reason })));
  if (problem) message.append(element("p", "error", problem.message));
  log.scrollTop = log.scrollHeight;
}

function figures({ sent, first, usage, reason }) {
  const parts = [];
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`);
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
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
