"use strict";
// The page: messages on the screen, answers in progress, settings, and the server's memory.

const $ = id => document.getElementById(id);
const make = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const store = new Conversations((() => {
  try {
    return window.localStorage;
  } catch {
    return null;  // forbidden by the user
  }
})());
const newConversation = () => ({id: Math.random().toString(36).slice(2), system: $("system").value, messages: []});
let conversation = {id: "", system: "", messages: []};
let running = null;  // the AbortController of the answer in progress
let amounts = [];    // of the server's policy
const keptOf = new WeakMap();  // by message; not saved, because it is as long as the prompt

const titleOf = of => (of.messages[0]?.text.trim() || "Untitled").slice(0, 80);
function save(of) {
  if (of.isGone) return;
  if (of.messages.length && !store.save(of, titleOf(of))) announce("This conversation is too long to be kept");
  showList();
}
const announce = text => $("announcement").textContent = text;

// Messages on the screen.

/// Keeps the end visible, unless the user has scrolled back.
function write(change) {
  const all = $("messages"), isAtEnd = all.scrollHeight - all.scrollTop - all.clientHeight < 40;
  change(all);
  if (isAtEnd) all.scrollTop = all.scrollHeight;
}
const viewOf = message => [...$("messages").children].find(view => view.message === message);
const button = (text, className, action) =>
  make("button", {type: "button", textContent: text, className, onclick: action});

function add(message) {
  const isUser = message.role === "user";
  const view = make("article", {className: "message " + message.role, message});
  view.setAttribute("aria-label", isUser ? "You" : "Answer");
  const actions = make("div", {className: "actions"});
  if (isUser) {
    view.append(make("div", {className: "text", textContent: message.text}));
    if (message.document) view.append(documentView(message.document));
    actions.append(button("Edit", "", () => edit(message)));
  } else {
    actions.append(button("Regenerate", "last", () => regenerate(message)),
      button("Continue", "last continue", () => proceed(message)));
    if (navigator.clipboard) actions.append(button("Copy", "", () => navigator.clipboard.writeText(message.text)));
  }
  view.append(actions);
  write(all => all.append(view));
  if (!isUser) fill(view);
  return view;
}
function documentView(text) {
  const view = make("details", {className: "document"},
    make("summary", {textContent: `Document of ${text.length} characters`}));
  view.addEventListener("toggle", () => view.children.length > 1 || view.append(make("pre", {textContent: text})));
  return view;
}

const endings = {
  length: "Cut off: the answer has reached the maximum of new tokens, or the context is full.",
  stopped: "Stopped before its end.", error: "Incomplete: an error ended the answer."};

/// Shows the present state of an answer.
function fill(view) {
  const {message} = view, actions = view.lastChild;
  const part = (name, wanted, makePart) => {
    let found = view.querySelector(`:scope > .${name}`);
    if (!wanted) found?.remove();
    else if (!found) actions.before(found = makePart());
    return wanted ? found : null;
  };
  const thoughts = part("thoughts", message.thoughts, () =>
    make("details", {className: "thoughts", open: !message.text}, make("summary", {textContent: "Thoughts"}), make("div")));
  if (thoughts) {
    grow(thoughts.lastChild, message.thoughts);
    if (message.text && !view.hasClosedThoughts) thoughts.open = !(view.hasClosedThoughts = true);
  }
  const renders = $("markdown").checked;
  const text = part("text", message.text, () => make("div", {className: renders ? "text" : "text plain"}));
  if (text && renders) showMarkdown(text, message.text);
  else if (text) grow(text, message.text);
  const cut = part("cut", endings[message.end], () => make("p", {className: "cut"}));
  if (cut) cut.textContent = endings[message.end];
  const note = part("note", message.note, () => make("p", {className: "note"}));
  if (note) note.textContent = message.note;
  const kept = keptOf.get(message);
  if (view.kept !== kept) part("kept", false);
  part("kept", kept, () => keptView(view.kept = kept));
  actions.hidden = running && message === conversation.messages.at(-1);
  actions.querySelector(".continue").hidden = !message.text || !endings[message.end];
}
function grow(element, text) {
  if (text.startsWith(element.textContent)) element.append(text.slice(element.textContent.length));
  else element.textContent = text;
}

function keptView(kept) {
  const view = make("details", {className: "kept"}, make("summary", {textContent: "Words that stayed"}));
  view.addEventListener("toggle", () => {
    if (view.children.length > 1) return;
    const words = keptWords(kept), shade = level => level * 100 / keptLevels + " %";
    const legend = make("div", {className: "legend"}, "Share of a word's rows that stayed:",
      ...[0, 1, 3, 5, 7, 10].map(level => make("span", {className: "k" + level, textContent: shade(level)})));
    const text = make("pre", {tabIndex: 0}, ...keptRuns(words).map(({text: run, level}) =>
      make("span", {className: "k" + level, title: "about " + shade(level), textContent: run})));
    text.setAttribute("aria-label", "Prompt, shaded by what stayed");
    text.setAttribute("role", "region");
    view.append(make("p", {className: "note", textContent: keptSummary(kept, words)}), legend, text);
  });
  return view;
}

function showError(text) {
  const view = make("div", {className: "message error", textContent: text});
  view.setAttribute("role", "alert");
  write(all => all.append(view));
}

function show(of) {
  conversation = of;
  const all = $("messages");
  all.setAttribute("aria-live", "off");  // a screen reader would read all of it
  all.replaceChildren();
  for (const message of of.messages) add(message);
  all.scrollTop = all.scrollHeight;
  setTimeout(() => all.setAttribute("aria-live", "polite"));
  $("system").value = of.system;
  $("document").disabled = $("file").disabled = of.messages.length > 0;
  showList();
}

// Answers.

const numberOf = input => Number.isNaN(Number(input.value)) ? input.value.trim() : Number(input.value);

function bodyOf(of) {
  const messages = of.messages.map(({role, text, document}) => ({role, content: document ?
    [{type: "text", text: document}, {type: "text", text: "\n\n" + text}] : text}));
  if (of.system.trim()) messages.unshift({role: "system", content: of.system});
  const body = {messages, stream: true, stream_options: {include_usage: true}, return_progress: true};
  for (const input of document.querySelectorAll("[data-field]")) {
    if (input.value !== "") body[input.dataset.field] = Number(input.value);
  }
  if ($("thinking").value) body.chat_template_kwargs = {enable_thinking: $("thinking").value === "on"};
  const wish = {};
  for (const input of document.querySelectorAll("[data-amount]")) {
    if (input.value !== "" && amounts.includes(input.dataset.amount)) wish[input.dataset.amount] = numberOf(input);
  }
  if ($("return-kept").checked && !$("pruning").hidden) wish.return_kept = true;
  if (Object.keys(wish).length) body.kvzap = wish;
  return JSON.stringify(body);
}

function noteOf({usage, kvzap}) {
  const evicted = $("pruning").hidden && kvzap.evict_ratio === 0 ? `keys and values: ${bytes(kvzap.kv_bytes)}` :
    `${percent(kvzap.evict_ratio)} evicted: ${bytes(kvzap.kv_bytes)} of ${bytes(kvzap.full_kv_bytes)}`;
  $("last-evicted").textContent = percent(kvzap.evict_ratio);
  $("last-bytes").textContent = bytes(kvzap.kv_bytes);
  $("last-full").textContent = bytes(kvzap.full_kv_bytes);
  return `${usage.prompt_tokens} prompt tokens (${usage.prompt_tokens_details.cached_tokens} cached), ` +
    `${usage.completion_tokens} new tokens; ${evicted}`;
}

/// Shows the progress of a prompt in an answer's view until `end`.
function reading(view) {
  const bar = make("progress", {max: 1}), text = make("div"), start = performance.now();
  bar.setAttribute("aria-label", "Prompt read");
  const element = make("div", {className: "reading"}, bar, text);
  let latest = null, quarter = 0;
  const draw = () => text.textContent = progressText(latest, (performance.now() - start) / 1000);
  const timer = setInterval(draw, 500);
  write(() => view.lastChild.before(element));
  draw();
  return {
    update(progress) {
      latest = progress;
      bar.value = progress.processed / Math.max(1, progress.total);
      if (Math.floor(4 * bar.value) > quarter) announce(`${25 * (quarter = Math.floor(4 * bar.value))} % of the prompt read`);
      draw();
    },
    end() {
      clearInterval(timer);
      element.remove();
    }
  };
}

/// Lets the model answer a conversation whose last message is `answer`. Returns whether anything has come.
async function run(of, answer) {
  const before = answer.text, view = viewOf(answer) || add(answer), abort = running = new AbortController();
  answer.end = answer.note = "";
  setBusy(true);
  fill(view);
  const prompt = reading(view);
  let error = "", shown = null;
  const draw = () => {
    if (shown !== answer.text + answer.thoughts) write(() => fill(view));
    shown = answer.text + answer.thoughts;
  };
  // Tokens may come faster than the browser draws; long answers take longer.
  let timer = 0;
  const drawLater = () => {
    const start = performance.now();
    draw();
    timer = setTimeout(drawLater, Math.max(60, 5 * (performance.now() - start)));
  };
  drawLater();
  try {
    const request = {...of, messages: before ? of.messages : of.messages.slice(0, -1)};
    const response = await ask("v1/chat/completions", {method: "POST", body: bodyOf(request), signal: abort.signal});
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress) prompt.update(event.prompt_progress);
      for (const choice of event.choices) {
        answer.thoughts += choice.delta.reasoning_content || "";
        answer.text += choice.delta.content || "";
        if (choice.delta.reasoning_content || choice.delta.content) prompt.end();
        if (choice.finish_reason) answer.end = choice.finish_reason;
        if (choice.kvzap?.kept) keptOf.set(answer, choice.kvzap.kept);
      }
      if (event.usage) answer.note = noteOf(event);
    }
  } catch (caught) {
    if (caught instanceof WrongKey) askForKey();
    if (caught.name !== "AbortError") error = caught.message;
    answer.end = error ? "error" : "stopped";
  }
  clearTimeout(timer);
  prompt.end();
  if (running === abort) running = null;
  const hasCome = Boolean(answer.text || answer.thoughts);
  if (!hasCome) of.messages.pop();
  if (hasCome) save(of);
  if (of === conversation) {
    setBusy(false);
    if (hasCome) write(() => fill(view));
    else view.remove();
    if (error) showError(error);
    announce(error ? "" : endings[answer.end] || "The answer is complete");
  }
  look();
  return hasCome;
}

function setBusy(isBusy) {
  if (isBusy) $("messages").setAttribute("aria-busy", "true");
  else $("messages").removeAttribute("aria-busy");
  $("send").disabled = isBusy;
  if (!isBusy && document.activeElement === $("stop")) $("message").focus();
  $("stop").disabled = !isBusy;
  for (const one of $("messages").querySelectorAll(".actions button")) one.disabled = isBusy;
}
const newAnswer = of => of.messages[of.messages.push({role: "assistant", text: "", thoughts: "", end: "", note: ""}) - 1];

async function send() {
  const text = $("message").value, of = conversation;
  if (running || !text.trim()) return;
  const asked = {role: "user", text}, about = of.messages.length ? "" : $("document").value;
  if (about) asked.document = about;
  of.system = $("system").value;
  of.messages.push(asked);
  add(asked);
  $("messages").scrollTop = $("messages").scrollHeight;
  $("message").value = "";
  $("document").disabled = $("file").disabled = true;
  if (await run(of, newAnswer(of))) return;
  // The user may send it again.
  of.messages.pop();
  if (of !== conversation) return;
  viewOf(asked).remove();
  if (!$("message").value) $("message").value = text;
  $("document").disabled = $("file").disabled = of.messages.length > 0;
}

/// Answers the messages `earlier` anew; if nothing comes, the conversation is as before.
async function again(of, earlier) {
  const before = of.messages;
  of.messages = earlier;
  of.system = $("system").value;
  show(of);
  if (await run(of, newAnswer(of))) return;
  of.messages = before;
  if (of !== conversation) return;
  const errors = [...$("messages").querySelectorAll(".error")];
  show(of);
  $("messages").append(...errors);
}
const regenerate = answer => running ||
  again(conversation, conversation.messages.slice(0, conversation.messages.indexOf(answer)));
const proceed = answer => running || run(conversation, answer);

function edit(message) {
  if (running) return;
  const of = conversation, place = of.messages.indexOf(message), view = viewOf(message);
  const [text] = view.querySelectorAll(".text"), actions = view.lastChild;
  const area = make("textarea", {value: message.text, rows: Math.min(12, 2 + message.text.split("\n").length)});
  area.setAttribute("aria-label", "Message");
  const close = () => {
    form.replaceWith(text);
    actions.hidden = false;
    actions.firstChild.focus();
  };
  const finish = () => {
    if (running || !area.value.trim()) return;
    $("message").focus();
    again(of, [...of.messages.slice(0, place), {...message, text: area.value}]);
  };
  const form = make("div", {}, area, make("div", {className: "row"}, button("Send edited message", "", finish),
    button("Cancel", "", close)));
  form.addEventListener("keydown", event => {
    if (event.key === "Escape") close();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== area) return;
    event.preventDefault();
    finish();
  });
  text.replaceWith(form);
  actions.hidden = true;
  area.focus();
}

function leave() {
  running?.abort();
  running = null;
  setBusy(false);
  announce("");
}

// The list of conversations.

function showList() {
  const entries = store.list();
  $("conversations").replaceChildren(...entries.map(({id, title, time}) => {
    const open = button(title, "", () => {
      uncover();
      if (id === conversation.id) return;
      const found = store.load(id);
      if (!found) return store.remove(id), showList();
      leave();
      show(found);
    });
    open.title = new Date(time).toLocaleString();
    if (id === conversation.id) open.setAttribute("aria-current", "true");
    const drop = button("×", "", () => {
      if (!confirm(`Delete "${title}"?`)) return;
      if (id === conversation.id) {
        conversation.isGone = true;
        begin();
      }
      store.remove(id);
      showList();
    });
    drop.setAttribute("aria-label", "Delete " + title);
    return make("li", {}, open, drop);
  }));
  $("clear").disabled = entries.length === 0;
}
function begin() {
  uncover();
  leave();
  show(newConversation());
  $("message").focus();
}
$("new").addEventListener("click", begin);
$("clear").addEventListener("click", () => {
  if (!confirm("Delete all conversations of this browser?")) return;
  store.clear();
  conversation.isGone = true;
  begin();
});
window.addEventListener("storage", showList);

// Panels beside the conversation; on narrow screens they cover it.

const narrow = matchMedia("(max-width: 900px)");
function setPanel(id, isOpen) {
  for (const panel of ["history", "memory"]) {
    if (panel === id) $(panel).hidden = !isOpen;
    else if (isOpen && narrow.matches) $(panel).hidden = true;
    $(panel + "-toggle").setAttribute("aria-expanded", String(!$(panel).hidden));
  }
  document.querySelector("main").hidden = narrow.matches && !($("history").hidden && $("memory").hidden);
  if (id === "memory" && isOpen) look();
}
const uncover = () => narrow.matches && (setPanel("history", false), setPanel("memory", false));
for (const panel of ["history", "memory"]) {
  $(panel + "-toggle").addEventListener("click", () => setPanel(panel, $(panel).hidden));
}
function layOut() {
  setPanel("history", matchMedia("(min-width: 1250px)").matches);
  setPanel("memory", !narrow.matches);
}
narrow.addEventListener("change", layOut);

// Input and settings.

$("form").addEventListener("submit", event => {
  event.preventDefault();
  send();
});
// A field that is wrong may be folded away.
$("form").addEventListener("invalid", event => {
  for (let fold = event.target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
}, true);
$("message").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", event => event.key === "Escape" && !event.isComposing && running?.abort());
$("file").addEventListener("change", async () => {
  try {
    if ($("file").files.length) $("document").value = await $("file").files[0].text();
  } catch (caught) {
    showError(caught.message);
  }
});
$("system").addEventListener("change", () => conversation.system = $("system").value);
$("markdown").addEventListener("change", () => running || show(conversation));

const settings = () => [...document.querySelectorAll("[data-field], [data-amount], #thinking, #markdown, #return-kept")];
const settingOf = input => input.dataset.field || input.dataset.amount || input.id;
function loadSettings() {
  const found = store.read("kvzap-settings") || {};
  for (const input of settings()) {
    const value = found[settingOf(input)];
    if (input.type === "checkbox" && typeof value === "boolean") input.checked = value;
    else if (typeof value === "string") input.value = value;
  }
}
function saveSettings() {
  try {
    store.storage?.setItem("kvzap-settings", JSON.stringify(Object.fromEntries(settings().map(input =>
      [settingOf(input), input.type === "checkbox" ? input.checked : input.value]))));
  } catch {
    // They last until the page is closed.
  }
}
$("form").addEventListener("change", event => settings().includes(event.target) && saveSettings());
$("reset").addEventListener("click", () => {
  for (const input of settings()) {
    if (input.type === "checkbox") input.checked = input.defaultChecked;
    else input.value = input.defaultValue || "";
  }
  saveSettings();
});

function askForKey() {
  sessionStorage.removeItem(keyName);
  $("key-row").hidden = false;
}
$("key").addEventListener("change", () => {
  sessionStorage.setItem(keyName, $("key").value);
  $("key-row").hidden = true;
  $("key").value = "";
  look();
});

// The server's memory.

let isLooking = false;
async function look() {
  if (isLooking) return;
  isLooking = true;
  try {
    const now = await (await ask("kvzap/status", {signal: AbortSignal.timeout(10000)})).json();
    $("model").textContent = now.model;
    // Without a policy of the server there is nothing to set.
    amounts = now.amounts || [];
    $("pruning").hidden = !now.policy;
    $("policy").textContent = now.policy || "";
    for (const input of document.querySelectorAll("[data-amount]")) {
      input.parentElement.hidden = !amounts.includes(input.dataset.amount);
    }
    // Allocated memory may be free.
    const used = now.kv_memory === null ? now.kv_allocated : now.kv_memory - now.kv_free;
    $("taken").textContent = bytes(used);
    $("allocated").textContent = bytes(now.kv_allocated);
    $("free").textContent = bytes(now.kv_free);
    $("meter").value = used / Math.max(1, used + now.kv_free);
    $("keep").textContent = percent(now.keep_ratio);
    $("counts").textContent = now.running + ", " + now.waiting;
    $("prefixes").textContent = now.prefixes;
    $("sequences").replaceChildren(...now.sequences.map(of => {
      const row = make("tr", {});
      for (const text of [of.choice ? of.request + "." + of.choice : of.request, of.phase, of.tokens, of.new_tokens,
        percent(of.evict_ratio), bytes(of.kv_bytes), bytes(of.full_kv_bytes)]) {
        row.insertCell().textContent = text;
      }
      return row;
    }));
    $("status-error").textContent = "";
  } catch (caught) {
    if (caught instanceof WrongKey) askForKey();
    $("status-error").textContent = caught.message;
  }
  isLooking = false;
}
setInterval(() => document.hidden || !$("key-row").hidden || $("memory").hidden || look(), 1000);
loadSettings();
layOut();
show(newConversation());
look();
$("message").focus();
