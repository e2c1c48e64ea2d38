// An answer token by token: how likely each was, and what it could have been. Made when asked for.

const IMPOSSIBLE = -9999; // what JSON has for minus infinity here
const natural = (logprob) => (logprob <= IMPOSSIBLE ? "\u2212\u221e" : logprob.toFixed(2).replace("-", "\u2212"));
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

// White space is shown by signs, so that a token of nothing else can be seen.
const shown = (token) => token.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replace(/^ | $/g, "\u00b7");

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

// A button that puts the tokens in the place of `text`, and back.
export function tokenView(text, tokens) {
  const button = element("button", "toggle", "Log-probabilities");
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  let view = null;
  button.addEventListener("click", () => {
    view ??= makeView(text, tokens);
    const show = view.hidden;
    view.hidden = !show;
    text.hidden = show;
    button.setAttribute("aria-expanded", String(show));
  });
  return [button];
}

function makeView(text, tokens) {
  const view = element("div", "tokens");
  const list = element("div", "list");
  const details = element("div", "alternatives");
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Tokens of the answer");
  details.setAttribute("aria-live", "polite");
  const options = tokens.map((token, i) => option(token, i === 0));
  const choose = (at) => {
    options.forEach((node, i) => {
      node.setAttribute("aria-selected", String(i === at));
      node.tabIndex = i === at ? 0 : -1;
    });
    details.replaceChildren(...alternatives(tokens[at]));
  };
  options.forEach((node, i) => {
    node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && choose(i));
    node.addEventListener("click", () => node.focus());
    node.addEventListener("focus", () => choose(i));
  });
  list.addEventListener("keydown", (event) => {
    const at = options.indexOf(document.activeElement);
    const moves = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: options.length - 1 };
    const to = moves[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    options[to]?.focus();
  });
  list.append(...options);
  view.append(list, details);
  view.hidden = true;
  text.after(view);
  choose(0);
  return view;
}

function option({ token, logprob }, first) {
  const node = element("span", "token", token);
  node.setAttribute("role", "option");
  node.setAttribute("aria-label", `${shown(token)}, ${percent(logprob)}`);
  node.tabIndex = first ? 0 : -1;
  node.style.setProperty("--doubt", `${Math.round(100 * (1 - Math.exp(logprob)))}%`);
  return node;
}

// The token that was drawn, and the most likely ones in its place, as rows with bars.
function alternatives({ token, logprob, top_logprobs: top }) {
  const others = top.some((other) => other.token === token) ? top : [...top, { token, logprob }];
  return others.map((other) => {
    const row = element("p", other.token === token ? "drawn" : "");
    const bar = element("span", "bar");
    bar.style.setProperty("--part", `${100 * Math.exp(other.logprob)}%`);
    row.append(
      element("code", "", shown(other.token)), bar,
      element("span", "number", percent(other.logprob)),
      element("span", "number", natural(other.logprob)),
    );
    return row;
  });
}
