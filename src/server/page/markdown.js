"use strict";
// Markdown of answers, as far as models write it: headings, lists, tables, quotes, code, emphasis, links. HTML stays
// text. `markdown` returns trees of plain values: a node is a string or [tag, attributes, ...nodes]. `elementOf` makes
// elements of them, of known tags and attributes alone, so a text cannot bring anything else into the page. All loops
// are bounded, since texts are not trusted: time is linear in their length.

const mostDepth = 12;       // of lists and quotes within each other
const mostOpenMarks = 32;   // of emphasis
const longestLabel = 400;   // characters of a link's text
const longestTarget = 2000; // and of its address
const mostParentheses = 16; // in an address

/// Returns the nodes of a text's blocks.
function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  return blocksOf(lines.map(line => line.replace(/^[ \t]+/, indent => indent.replace(/\t/g, "    "))), 0);
}

const indentOf = line => line.length - line.trimStart().length;
const isRule = line => /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/[ \t]/g, ""));
const fenceOf = line => /^ {0,3}(`{3,}|~{3,})([^`]*)$/.exec(line);
const headingOf = line => /^ {0,3}(#{1,6})(?:[ \t]|$)/.exec(line);
const itemOf = line => /^( {0,3})(?:([-*+])|(\d{1,9})([.)]))(?: |$)/.exec(line);
const isQuote = line => /^ {0,3}>/.test(line);
const beginsBlock = line =>
  isQuote(line) || headingOf(line) || fenceOf(line) || itemOf(line) || isRule(line);

function blocksOf(lines, depth) {
  const blocks = [];
  let paragraph = [];
  const endParagraph = () => {
    if (paragraph.length) blocks.push(["p", {}, ...inlinesOf(paragraph.join("\n"))]);
    paragraph = [];
  };
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const read = line.trim() === "" ? {next: i + 1} : blockAt(lines, i, depth);
    if (read) {
      endParagraph();
      if (read.block) blocks.push(read.block);
      i = read.next;
    } else {
      paragraph.push(line.trim());
      ++i;
    }
  }
  endParagraph();
  return blocks;
}

/// Returns the block that begins at a line and the next line, or null for a line of a paragraph.
function blockAt(lines, i, depth) {
  const line = lines[i], fence = fenceOf(line), heading = headingOf(line);
  if (fence) return codeAt(lines, i, fence[1]);
  if (heading) {
    // The page has headings of its own.
    const level = Math.min(6, heading[1].length + 2);
    let end = line.trimEnd().length, hashes = end;
    while (line[hashes - 1] === "#") --hashes;
    if (hashes >= heading[0].length && line[hashes - 1] === " ") end = hashes;
    return {block: ["h" + level, {}, ...inlinesOf(line.slice(heading[0].length, end).trim())], next: i + 1};
  }
  if (isRule(line)) return {block: ["hr", {}], next: i + 1};
  if (depth < mostDepth && isQuote(line)) return quoteAt(lines, i, depth);
  if (depth < mostDepth && itemOf(line)) return listAt(lines, i, depth);
  return tableAt(lines, i);
}

function codeAt(lines, i, fence) {
  const indent = indentOf(lines[i]), code = [];
  for (++i; i < lines.length; ++i) {
    const end = lines[i].trim();
    if (end.length >= fence.length && end === fence[0].repeat(end.length)) break;
    code.push(lines[i].slice(Math.min(indent, indentOf(lines[i]))));
  }
  return {block: ["pre", {}, ["code", {}, code.join("\n")]], next: i + 1};
}

function quoteAt(lines, i, depth) {
  const inner = [];
  for (; i < lines.length; ++i) {
    const isLazy = inner.length > 0 && lines[i].trim() !== "" && !beginsBlock(lines[i]) && inner.at(-1).trim() !== "";
    if (!isQuote(lines[i]) && !isLazy) break;
    inner.push(lines[i].replace(/^ {0,3}> ?/, ""));
  }
  return {block: ["blockquote", {}, ...blocksOf(inner, depth + 1)], next: i};
}

function listAt(lines, i, depth) {
  const first = itemOf(lines[i]), kind = first[2] || first[4], items = [];
  let isLoose = false;
  while (i < lines.length) {
    const item = itemOf(lines[i]);
    if (!item || (item[2] || item[4]) !== kind || isRule(lines[i])) break;
    const offset = item[0].length, inner = [lines[i].slice(offset)];
    for (++i; i < lines.length; ++i) {
      const line = lines[i], isBlank = line.trim() === "";
      const isInside = isBlank || indentOf(line) >= 2 || (inner.at(-1).trim() !== "" && !beginsBlock(line));
      if (!isInside) break;
      inner.push(line.slice(Math.min(offset, indentOf(line))));
    }
    let blanks = 0;
    while (inner.length > 1 && inner.at(-1).trim() === "") blanks += inner.pop() === undefined ? 0 : 1;
    const next = i < lines.length ? itemOf(lines[i]) : null;
    if (blanks > 0 && next && (next[2] || next[4]) === kind) isLoose = true;
    items.push(blocksOf(inner, depth + 1));
  }
  const shown = items.map(blocks => ["li", {}, ...blocks.flatMap(
    block => block[0] === "p" && !isLoose ? block.slice(2) : [block])]);
  return {block: [first[2] ? "ul" : "ol", first[3] ? {start: Number(first[3])} : {}, ...shown], next: i};
}

function cellsOf(line) {
  const cells = [];
  let cell = "", text = line.trim();
  if (text[0] === "|") text = text.slice(1);
  for (let i = 0; i < text.length; ++i) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      cell += text[++i];
    } else if (text[i] === "|") {
      cells.push(cell.trim());
      cell = "";
      if (i + 1 === text.length) return cells;
    } else {
      cell += text[i];
    }
  }
  cells.push(cell.trim());
  return cells;
}

function tableAt(lines, i) {
  if (!lines[i].includes("|") || i + 1 === lines.length || !/^[\s|:-]+$/.test(lines[i + 1])) return null;
  const head = cellsOf(lines[i]), marks = cellsOf(lines[i + 1]);
  if (head.length !== marks.length || !marks.every(mark => /^:?-+:?$/.test(mark))) return null;
  const sides = marks.map(mark => mark.at(-1) !== ":" ? "left" : mark[0] === ":" ? "center" : "right");
  const row = (tag, cells) => ["tr", {}, ...cells.slice(0, head.length).map(
    (cell, column) => [tag, {align: sides[column]}, ...inlinesOf(cell)])];
  const rows = [];
  for (i += 2; i < lines.length && lines[i].trim() !== "" && !beginsBlock(lines[i]); ++i) {
    rows.push(row("td", cellsOf(lines[i])));
  }
  return {block: ["table", {}, ["thead", {}, row("th", head)], ["tbody", {}, ...rows]], next: i};
}

/// Returns the address if a browser may follow it from here, otherwise null.
function safeAddress(text) {
  try {
    const url = new URL(text);
    return /^https?:$/.test(url.protocol) && !url.username && !url.password ? url.href : null;
  } catch {
    return null;
  }
}

/// Finds the ends of runs of characters without searching any part of the text twice.
class Closers {
  constructor(text) {
    this.text = text;
    this.known = new Map();
  }
  /// Place of `mark` at `from` or later, or -1.
  find(mark, from) {
    const known = this.known.get(mark);
    if (known !== undefined && (known < 0 || known >= from)) return known;
    const place = this.text.indexOf(mark, from);
    this.known.set(mark, place);
    return place;
  }
  /// Place of a run of exactly `count` backticks after `from`, or -1.
  ticks(count, from) {
    if (!this.runs) {
      this.runs = new Map();
      for (const {0: run, index} of this.text.matchAll(/`+/g)) {
        const of = this.runs.get(run.length) || {places: [], next: 0};
        of.places.push(index);
        this.runs.set(run.length, of);
      }
    }
    const of = this.runs.get(count);
    while (of && of.next < of.places.length && of.places[of.next] < from) ++of.next;
    return of && of.next < of.places.length ? of.places[of.next] : -1;
  }
}

/// Returns the link whose text begins at `i` with a bracket: {label, target, next}, or null.
function linkAt(text, i) {
  let depth = 0, end = i;
  for (const last = Math.min(text.length, i + longestLabel); end < last; ++end) {
    if (text[end] === "\\") ++end;
    else if (text[end] === "[") ++depth;
    else if (text[end] === "]" && --depth === 0) break;
  }
  if (text[end] !== "]" || depth !== 0 || text[end + 1] !== "(") return null;
  const last = Math.min(text.length, end + longestTarget);
  let at = end + 2;
  const skipSpaces = () => {
    while (at < last && /\s/.test(text[at])) ++at;
  };
  skipSpaces();
  const isBracketed = text[at] === "<", begin = isBracketed ? ++at : at;
  for (let open = 0, all = 0; at < last; ++at) {
    if (isBracketed ? text[at] === ">" : /\s/.test(text[at])) break;
    if (isBracketed) continue;
    if (text[at] === "(" && (++open, ++all > mostParentheses)) return null;
    if (text[at] === ")" && --open < 0) break;
  }
  const target = text.slice(begin, at);
  if (isBracketed) ++at;
  skipSpaces();
  if (text[at] === "\"" || text[at] === "'") {
    const quote = text[at++];
    while (at < last && text[at] !== quote) ++at;
    ++at;
    skipSpaces();
  }
  return text[at] === ")" && at < last ? {label: text.slice(i + 1, end), target, next: at + 1} : null;
}

/// Returns a bare address at `i` without the punctuation behind it, or "".
function addressAt(text, i) {
  const bare = /https?:\/\/[^\s<>"`*|]+/y;
  bare.lastIndex = i;
  const found = bare.exec(text);
  if (!found || /\w/.test(text[i - 1] || "")) return "";
  let end = found[0].length;
  let open = 0;
  for (const letter of found[0]) open += letter === "(" ? 1 : letter === ")" ? -1 : 0;
  for (; end > 0; --end) {
    const letter = found[0][end - 1];
    if (letter === ")" && open < 0) ++open;
    else if (!/[.,;:!?'_~\]}]/.test(letter)) break;
  }
  return found[0].slice(0, end);
}

/// Emphasis in progress: nodes by the marks that may begin it.
class Emphasis {
  constructor() {
    this.nodes = [];
    this.open = [];
  }
  top() {
    return this.open.length ? this.open.at(-1).nodes : this.nodes;
  }
  add(node) {
    const nodes = this.top();
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else if (node !== "") nodes.push(node);
  }
  /// Turns the open marks from `place` on to text.
  giveUp(place) {
    for (const {mark, count, nodes} of this.open.splice(place)) {
      this.add(mark.repeat(count));
      for (const node of nodes) this.add(node);
    }
  }
  mark(mark, count, before, after) {
    const isSpace = letter => /\s/.test(letter), isSign = letter => /[\p{P}\p{S}]/u.test(letter);
    const isLeft = !isSpace(after) && (!isSign(after) || isSpace(before) || isSign(before));
    const isRight = !isSpace(before) && (!isSign(before) || isSpace(after) || isSign(after));
    const isWord = mark === "_";  // within words it is a letter
    const opens = isLeft && (!isWord || !isRight || isSign(before));
    const closes = isRight && (!isWord || !isLeft || isSign(after));
    const fits = mark === "~" ? count === 2 : count <= 3;
    while (fits && closes && count > 0) {
      const place = this.open.findLastIndex(one => one.mark === mark);
      if (place < 0) break;
      this.giveUp(place + 1);
      const one = this.open.at(-1), used = Math.min(2, count, one.count);
      const node = [mark === "~" ? "del" : used === 2 ? "strong" : "em", {}, ...one.nodes];
      count -= used;
      one.count -= used;
      one.nodes = [];
      if (one.count === 0) this.open.pop();
      this.add(node);
    }
    if (count === 0) return;
    if (!fits || !opens) return this.add(mark.repeat(count));
    this.open.push({mark, count, nodes: []});
    if (this.open.length <= mostOpenMarks) return;
    const [oldest] = this.open.splice(0, 1), rest = this.open;
    this.open = [];
    this.add(oldest.mark.repeat(oldest.count));
    for (const node of oldest.nodes) this.add(node);
    this.open = rest;
  }
  end() {
    this.giveUp(0);
    return this.nodes;
  }
}

/// Returns the nodes of a paragraph's text. `isLabel`: the text is that of a link.
function inlinesOf(text, isLabel = false) {
  const out = new Emphasis(), closers = new Closers(text);
  const link = (address, nodes) => ["a", {href: address}, ...nodes];
  // Each returns the place behind what it has added, or 0.
  const verbatim = (begin, close, end) => {
    if (close < 0) return 0;
    out.add(["code", {class: "math"}, text.slice(begin, close).trim()]);
    return end;
  };
  const readers = {
    "\n": i => (out.add(["br", {}]), i + 1),
    "\\": i => {
      const next = text[i + 1] || "";
      if (next === "(" || next === "[") {
        const close = closers.find(next === "(" ? "\\)" : "\\]", i + 2);
        if (close >= 0) return verbatim(i + 2, close, close + 2);
      }
      if (!/[!-/:-@[-`{-~]/.test(next)) return 0;
      out.add(next);
      return i + 2;
    },
    "$": i => {
      if (text[i + 1] !== "$") return 0;
      const close = closers.find("$$", i + 2);
      return verbatim(i + 2, close, close + 2);
    },
    "`": i => {
      let count = 1;
      while (text[i + count] === "`") ++count;
      const close = closers.ticks(count, i + count);
      if (close < 0) return out.add("`".repeat(count)), i + count;
      const code = text.slice(i + count, close).replace(/\n/g, " ");
      const isPadded = code.trim() !== "" && code[0] === " " && code.at(-1) === " ";
      out.add(["code", {}, isPadded ? code.slice(1, -1) : code]);
      return close + count;
    },
    "<": i => {
      const bracketed = /<(https?:\/\/[^\s<>]*)>/y;
      bracketed.lastIndex = i;
      const found = isLabel ? null : bracketed.exec(text), address = found && safeAddress(found[1]);
      if (!address) return 0;
      out.add(link(address, [found[1]]));
      return bracketed.lastIndex;
    },
    // Pictures would come from elsewhere: they become links.
    "!": i => text[i + 1] === "[" ? readers["["](i + 1) : 0,
    "[": i => {
      const found = isLabel ? null : linkAt(text, i), address = found && safeAddress(found.target);
      if (!address) return 0;
      out.add(link(address, inlinesOf(found.label || found.target, true)));
      return found.next;
    },
    "h": i => {
      const found = isLabel ? "" : addressAt(text, i), address = found && safeAddress(found);
      if (!address) return 0;
      out.add(link(address, [found]));
      return i + found.length;
    },
  };
  const emphasis = i => {
    let count = 1;
    while (text[i + count] === text[i]) ++count;
    out.mark(text[i], count, text[i - 1] || " ", text[i + count] || " ");
    return i + count;
  };
  for (const mark of "*_~") readers[mark] = emphasis;
  const plain = /[^\n\\$`<![h*_~]+/y;
  for (let i = 0; i < text.length;) {
    plain.lastIndex = i;
    const found = plain.exec(text);
    if (found) {
      out.add(found[0]);
      i += found[0].length;
      continue;
    }
    const next = readers[text[i]](i);
    if (!next) out.add(text[i]);
    i = next || i + 1;
  }
  return out.end();
}

const knownTags = new Set(("p br hr h3 h4 h5 h6 pre code blockquote ul ol li table thead tbody tr th td strong em del a")
  .split(" "));

/// Returns the element of a node. Whatever the node is, it has no attribute but those set here.
function elementOf(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const [tag, attributes, ...nodes] = node, made = document.createElement(knownTags.has(tag) ? tag : "span");
  const address = tag === "a" ? safeAddress(attributes.href) : null;
  if (address) Object.assign(made, {href: address, rel: "noopener noreferrer nofollow", target: "_blank", title: address});
  if (tag === "ol" && attributes.start !== 1) made.start = attributes.start;
  if (attributes.align === "right" || attributes.align === "center") made.className = attributes.align;
  if (attributes.class === "math") made.className = "math";
  for (const inner of nodes) made.append(elementOf(inner));
  if (tag !== "table" && tag !== "pre") return made;
  // Wide ones scroll by themselves, with the keyboard, too.
  const frame = document.createElement("div");
  Object.assign(frame, {className: tag === "pre" ? "frame code" : "frame", tabIndex: 0});
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", tag === "pre" ? "Code" : "Table");
  frame.append(made);
  return frame;
}

/// Shows a text that grows: replaces the blocks alone that have changed since the last call.
function showMarkdown(where, text) {
  const shown = where.shownBlocks || [], blocks = markdown(text), keys = blocks.map(block => JSON.stringify(block));
  keys.forEach((key, i) => {
    if (key === shown[i]) return;
    const made = elementOf(blocks[i]);
    if (i < where.childNodes.length) where.replaceChild(made, where.childNodes[i]);
    else where.append(made);
  });
  while (where.childNodes.length > keys.length) where.lastChild.remove();
  where.shownBlocks = keys;
}

if (typeof module !== "undefined") module.exports = {markdown, safeAddress, elementOf};
