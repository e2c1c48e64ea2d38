// What both pages need of the server: the API key, its errors, its streams. No page of its own.

const KEY = "cuengine.key";

// Forgotten with the tab; the pages of one tab share it.
export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export const storeKey = (key) => sessionStorage.setItem(KEY, key.trim());

export function authorization() {
  const key = storedKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function errorText(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status} ${answer.statusText}.`;
  }
}

// The JSON of each `data:` line of a stream of server-sent events; comments are skipped.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    // An event may come in many pieces: they are joined once, at its end.
    const lines = value.split("\n");
    for (const line of lines.slice(0, -1)) {
      const whole = rest.join("") + line;
      rest = [];
      if (whole === "data: [DONE]") return;
      if (whole.startsWith("data: ")) yield JSON.parse(whole.slice(6));
    }
    rest.push(lines.at(-1));
  }
}
