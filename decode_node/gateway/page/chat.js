"use strict";
// The chat box. Decides nothing: it uses POST /v1/chat/completions as any other client does, and shows what comes as
// text, never as markup.

const turns = [];
let going = null; // of the answer under way

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  element("turns").append(item);
  return item;
}

function busy(state) {
  element("send").disabled = state;
  element("stop").disabled = !state;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function model() {
  const answer = await fetch("/v1/models", { headers: headers() });
  return (await answer.json()).data[0].id;
}

async function ask(item) {
  going = new AbortController();
  const body = { model: await model(), messages: turns, stream: true };
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: going.signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    item.textContent += event.choices[0]?.delta?.content ?? "";
  }
}

element("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = element("prompt").value.trim();
  if (!text || going) return;
  element("prompt").value = "";
  turns.push({ role: "user", content: text });
  show("user", text);
  const item = show("assistant", "");
  busy(true);
  try {
    await ask(item);
  } catch (error) {
    if (error.name !== "AbortError") show("problem", error.message);
  }
  going = null;
  busy(false);
  if (item.textContent) turns.push({ role: "assistant", content: item.textContent });
  else {
    item.remove();
    turns.pop();
  }
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    element("chat").requestSubmit();
  }
});
element("stop").addEventListener("click", () => going?.abort());
element("clear").addEventListener("click", () => {
  going?.abort();
  turns.length = 0;
  element("turns").replaceChildren();
});
