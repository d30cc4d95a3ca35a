// Tests of the scripts of the page of `kvzap serve` that need no browser. $KVZAP_PAGE is their folder.
"use strict";
const assert = require("node:assert/strict");
const path = require("node:path");
const {test} = require("node:test");
const load = name => require(path.join(process.env.KVZAP_PAGE, name));
const {markdown, safeAddress, elementOf} = load("markdown.js");
const {Conversations, mostCharacters, mostConversations} = load("history.js");
const {keptWords, keptLevel, keptRuns, keptSummary} = load("kept.js");
const {events, bytes, progressText} = load("stream.js");

const inline = text => markdown(text).flatMap(block => block.slice(2));
const textOf = node => typeof node === "string" ? node : node[0] === "br" ? "\n" : node.slice(2).map(textOf).join("");
const all = nodes => nodes.flatMap(node => typeof node === "string" ? [] : [node, ...all(node.slice(2))]);

test("blocks", () => {
  assert.deepEqual(markdown("# A #\n## B\ntext\n***\n"), [["h3", {}, "A"], ["h4", {}, "B"], ["p", {}, "text"], ["hr", {}]]);
  assert.deepEqual(markdown("#no\n####### no"), [["p", {}, "#no", ["br", {}], "####### no"]]);
  assert.deepEqual(markdown("```js\na *b*\n\n  <i>\n```\nc"),
    [["pre", {}, ["code", {}, "a *b*\n\n  <i>"]], ["p", {}, "c"]]);
  assert.deepEqual(markdown("~~~~\n```\n~~~"), [["pre", {}, ["code", {}, "```\n~~~"]]]);  // still being written
  assert.deepEqual(markdown("> a\nb\n>\n> > c"),
    [["blockquote", {}, ["p", {}, "a", ["br", {}], "b"], ["blockquote", {}, ["p", {}, "c"]]]]);
  assert.deepEqual(markdown("a\r\nb\rc"), [["p", {}, "a", ["br", {}], "b", ["br", {}], "c"]]);
});

test("lists", () => {
  assert.deepEqual(markdown("- a\n- b\n  - c\n  - d\n+ e"), [
    ["ul", {}, ["li", {}, "a"], ["li", {}, "b", ["ul", {}, ["li", {}, "c"], ["li", {}, "d"]]]], ["ul", {}, ["li", {}, "e"]]]);
  assert.deepEqual(markdown("3. a\n   more\n4. b"),
    [["ol", {start: 3}, ["li", {}, "a", ["br", {}], "more"], ["li", {}, "b"]]]);
  assert.deepEqual(markdown("1. a\n\n   ```\n   x\n   ```\n2. b"),
    [["ol", {start: 1}, ["li", {}, "a", ["pre", {}, ["code", {}, "x"]]], ["li", {}, "b"]]]);
  assert.deepEqual(markdown("- a\n\n- b\n\nc"), [["ul", {}, ["li", {}, ["p", {}, "a"]], ["li", {}, ["p", {}, "b"]]], ["p", {}, "c"]]);
  assert.deepEqual(markdown("1999 was\n-5 cold"), [["p", {}, "1999 was", ["br", {}], "-5 cold"]]);
});

test("tables", () => {
  const cell = (tag, align, ...nodes) => [tag, {align}, ...nodes];
  assert.deepEqual(markdown("| a | b\\|c |\n|---|:-:|\n| *1* | `x` | more |\n| 2\n\nend"), [
    ["table", {}, ["thead", {}, ["tr", {}, cell("th", "left", "a"), cell("th", "center", "b|c")]],
      ["tbody", {}, ["tr", {}, cell("td", "left", ["em", {}, "1"]), cell("td", "center", ["code", {}, "x"])],
        ["tr", {}, cell("td", "left", "2")]]], ["p", {}, "end"]]);
  assert.equal(markdown("a | b\n- | - | -")[0][0], "p");
});

test("emphasis and code", () => {
  assert.deepEqual(inline("**a *b* c** __d__ ~~e~~ ***f***"), [["strong", {}, "a ", ["em", {}, "b"], " c"], " ",
    ["strong", {}, "d"], " ", ["del", {}, "e"], " ", ["em", {}, ["strong", {}, "f"]]]);
  for (const text of ["snake_case_name", "2 * 3 * 4", "a ** b", "~5", "a****", "a *", "a*", "5*3=15 and __"]) {
    assert.deepEqual(inline(text), [text]);
  }
  assert.deepEqual(inline("*a **b*"), ["*a *", ["em", {}, "b"]]);
  assert.deepEqual(inline("`` a`*b* `` `"), [["code", {}, "a`*b*"], " `"]);
  assert.deepEqual(inline("\\*a\\* \\d"), ["*a* \\d"]);
  assert.deepEqual(inline("\\(a_1 * b_2\\) and $$x*y*z$$, $5 \\["),
    [["code", {class: "math"}, "a_1 * b_2"], " and ", ["code", {class: "math"}, "x*y*z"], ", $5 ["]);
});

test("links lead to http and https alone", () => {
  assert.deepEqual(inline("[a *b*](https://x.org/p_(q) \"t\")"), [["a", {href: "https://x.org/p_(q)"}, "a ", ["em", {}, "b"]]]);
  assert.deepEqual(inline("see http://x.org/a_b_c). <https://y.org>"), ["see ", ["a", {href: "http://x.org/a_b_c"}, "http://x.org/a_b_c"],
    "). ", ["a", {href: "https://y.org/"}, "https://y.org"]]);
  assert.deepEqual(inline("![p](https://x.org/p.png)"), [["a", {href: "https://x.org/p.png"}, "p"]]);
  assert.deepEqual(all(inline("[[x](https://a.org)](https://b.org) [http://c.org](http://d.org)")).filter(node => node[0] === "a").length, 2);
  for (const address of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", " javascript:alert(1)", "data:text/html,x",
    "vbscript:x", "file:///etc/passwd", "//x.org", "/v1/models", "x", "", "https://", "blob:https://x.org/1",
    "https://good.org@evil.org/", "\u0001javascript:alert(1)", "&#106;avascript:alert(1)"]) {
    assert.equal(safeAddress(address), null, address);
    for (const text of [`[a](${address})`, `[a](<${address}>)`, `![a](${address})`, `<${address}>`]) {
      const nodes = inline(text);
      for (const one of all(nodes)) assert.ok(one[0] !== "a" || /^https?:/.test(one[1].href), text);
    }
  }
});

test("HTML stays text", () => {
  for (const text of ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</div></body>", "&lt;b&gt; &amp;",
    "<!-- x -->", "<svg/onload=alert(1)>", "<a href='javascript:x'>y</a>"]) {
    assert.equal(inline(text).map(textOf).join(""), text);
    assert.deepEqual(all(inline(text)), []);
  }
  // Elements have known tags, and the attributes that elementOf sets.
  globalThis.document = {createTextNode: text => text, createElement: tag => ({tag, nodes: [], attributes: {},
    append(node) { this.nodes.push(node); }, setAttribute(name, value) { this.attributes[name] = value; }})};
  const made = elementOf(["script", {href: "https://x.org", onclick: "x", innerHTML: "<b>", class: "unseen", align: "left", start: 1},
    ["a", {href: "javascript:x"}, "y"], ["iframe", {src: "https://x.org", srcdoc: "x"}]]);
  const plain = tag => ({tag, attributes: {}});
  const seen = ({append, setAttribute, nodes, ...rest}) => rest;
  assert.deepEqual(seen(made), plain("span"));
  assert.deepEqual(made.nodes.map(seen), [plain("a"), plain("span")]);
  const link = elementOf(["a", {href: "https://x.org"}, "y"]);
  assert.deepEqual([link.rel, link.target], ["noopener noreferrer nofollow", "_blank"]);
});

test("any text renders, in linear time, with its characters", () => {
  const many = {stars: "*a ", open: "[", links: "[a](", titles: "[a](\"", quotes: ">", lists: "- ", cells: "|", ticks: "`a``b",
    addresses: "http://", scores: "__a", both: "*_~~", math: "\\(", dollars: "$$a", angle: "<http://", pictures: "![", fences: "```\n",
    spaces: "# a  ", rows: "|a\n|-\n", numbers: "1. ", blank: "\n", closed: "*a*"};
  for (const [name, part] of Object.entries(many)) {
    const text = part.repeat(2e5 / part.length), start = process.cpuUsage().user;
    markdown(text);
    assert.ok(process.cpuUsage().user - start < 10e6, name);
  }
  let seed = 7;
  const draw = count => (seed = seed * 48271 % 2147483647) % count;
  const parts = ["*", "**", "_", "~~", "`", "```", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "|-|-|", "[", "](", ")", "http://x.org", "<", ">", "\\", "$$",
    "a", " ", "  ", "é", "中", "😀", "!", "\t", "\\(", "\\)", "~", "---", "<b>", "\u0000", "\ud800"];
  for (let round = 0; round < 3000; ++round) {
    const text = Array.from({length: draw(40)}, () => parts[draw(parts.length)]).join("");
    const nodes = markdown(text);
    for (const [, attributes] of all(nodes)) {
      assert.ok(Object.keys(attributes).every(name => ["href", "start", "align", "class"].includes(name)), text);
    }
    const letters = nodes.map(textOf).join("").replace(/[^aé中😀]/gu, "").length;
    assert.ok(letters <= text.replace(/[^aé中😀]/gu, "").length, text);
  }
});

class Storage {
  constructor(room = 1e9) {
    this.room = room;
    this.map = new Map();
  }
  getItem(key) {
    return this.map.get(key) ?? null;
  }
  removeItem(key) {
    this.map.delete(key);
  }
  setItem(key, value) {
    const others = [...this.map].reduce((sum, [name, text]) => sum + (name === key ? 0 : text.length), 0);
    if (others + value.length > this.room) throw new Error("QuotaExceededError");
    this.map.set(key, value);
  }
}
const talk = (id, text) => ({id, system: "s", messages: [{role: "user", text, document: "d"}, {role: "assistant", text: "a"}]});

test("conversations are kept, bounded and deleted", () => {
  const storage = new Storage(), store = new Conversations(storage);
  assert.deepEqual(store.list(), []);
  assert.ok(store.save(talk("a", "1"), "first", 1));
  assert.ok(store.save(talk("b", "2"), "second", 2));
  assert.ok(store.save(talk("a", "3"), "third", 3));
  assert.deepEqual(store.list().map(({id, title}) => [id, title]), [["a", "third"], ["b", "second"]]);
  assert.deepEqual(store.load("a"), talk("a", "3"));
  store.remove("a");
  assert.equal(store.load("a"), null);
  assert.equal(store.list().length, 1);
  for (let i = 0; i < 2 * mostConversations; ++i) store.save(talk("c" + i, "x"), "x", 10 + i);
  assert.equal(store.list().length, mostConversations);
  assert.equal(storage.map.size, mostConversations + 1);
  for (let i = 0; i < 9; ++i) assert.ok(store.save(talk("d" + i, "x".repeat(mostCharacters / 4)), "x", 1000 + i));
  assert.ok([...storage.map.values()].reduce((sum, text) => sum + text.length, 0) < 1.1 * mostCharacters);
  assert.ok(!store.save(talk("e", "x".repeat(mostCharacters)), "x"));
  assert.equal(store.list()[0].id, "d8");
  store.clear();
  assert.deepEqual(store.list(), []);
  assert.deepEqual([...storage.map.keys()], ["kvzap-conversations"]);
});

test("a browser may grant less, nothing, or have something else", () => {
  const small = new Conversations(new Storage(3000));
  for (let i = 0; i < 9; ++i) assert.ok(small.save(talk("a" + i, "x".repeat(900)), "x", i));
  assert.deepEqual(small.list().map(one => one.id), ["a8", "a7"]);
  assert.ok(!small.save(talk("b", "x".repeat(5000)), "x"));
  const none = new Conversations(null);
  assert.ok(!none.save(talk("a", "x"), "x"));
  assert.deepEqual([none.list(), none.load("a")], [[], null]);
  none.clear();
  const storage = new Storage(), store = new Conversations(storage);
  for (const text of ["", "{", "[]", "null", "5", "{\"messages\": 5}", "{\"messages\": [5]}", "{\"messages\": [{\"role\": \"system\", \"text\": \"x\"}]}",
    "{\"messages\": [{\"role\": \"user\", \"text\": 5}]}", "{\"messages\": [{\"role\": \"user\", \"text\": \"\", \"note\": {}}]}"]) {
    storage.setItem("kvzap-conversation-a", text);
    storage.setItem("kvzap-conversations", text);
    assert.equal(store.load("a"), null, text);
    assert.deepEqual(store.list(), [], text);
  }
});

test("words that stayed", () => {
  const kept = {texts: ["The", " ma", "gic", " ", "", "é", "-", "12", "3", " 中", "文"], rows: [0, 4, 2, 0, 2, 4, 4, 4, 0, 1, 4], full: 4};
  assert.deepEqual(keptWords(kept).map(({text, share}) => [text, share]),
    [["The", 0], [" magic", 0.75], [" ", 0], ["é", 0.75], ["-", 1], ["123", 0.5], [" 中", 0.25], ["文", 1]]);
  assert.deepEqual([0, 0.01, 0.5, 0.97, 1].map(keptLevel), [0, 1, 5, 10, 10]);
  assert.deepEqual(keptRuns([{text: "a", share: 0.5}, {text: "b", share: 0.52}, {text: "c", share: 0}]), [{text: "ab", level: 5}, {text: "c", level: 0}]);
  assert.match(keptSummary(kept, keptWords(kept)), / had 4 rows.* 56\.8 % .* Of 6 words, 1 kept all rows, 3 at least half, 1 fewer, 1 none\.$/);
  assert.deepEqual(keptWords({texts: [], rows: [], full: 4}), []);
});

test("progress in words", () => {
  assert.equal(progressText(null, 2.2), "Waiting for the server, 2 s");
  assert.equal(progressText({total: 9000, cache: 0, processed: 0, time_ms: 0}, 1), "Reading: 0 of 9,000 tokens, 1 s");
  assert.equal(progressText({total: 9000, cache: 1000, processed: 3000, time_ms: 4000}, 5),
    "Reading: 3,000 of 9,000 tokens (1,000 were in the cache), 5 s, about 12 s left");
  assert.equal(bytes(999), "999 B");
  assert.equal(bytes(1234567), "1.23 MB");
});

test("events of a stream, however it is cut", async () => {
  const text = "data: {\"a\":\"é😀\"}\r\n\r\n: in progress\n\ndata:{\"a\":2}\n\ndata: [DONE]\n\n", data = new TextEncoder().encode(text);
  for (const cut of [1, 2, 3, 7, data.length]) {
    let at = 0;
    const body = new ReadableStream({pull(to) {
      if (at < data.length) to.enqueue(data.slice(at, at += cut));
      else to.close();
    }});
    const found = [];
    for await (const event of events(body)) found.push(event.a);
    assert.deepEqual(found, ["é😀", 2]);
  }
});
