"use strict";
// Which words of a prompt stayed in the cache, from a reply's "kept": {texts, rows, full}.

const keptLevels = 10;

/// Joins tokens to words {text, share}: the mean share of their rows that stayed. A token without a text is part of a
/// character, which the next one ends. Scripts without spaces keep their tokens.
function keptWords({texts, rows, full}) {
  const inWord = /^[\p{L}\p{M}\p{N}_'’]$/u, isAlone = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]/u;
  const words = [];
  let sum = 0, count = 0;
  texts.forEach((text, i) => {
    sum += rows[i] / full;
    ++count;
    if (text === "") return;
    const last = words.at(-1), before = last ? [...last.text.slice(-2)].at(-1) : "", after = [...text.slice(0, 2)][0];
    if (last && inWord.test(before) && inWord.test(after) && !isAlone.test(before + after)) {
      last.text += text;
      last.sum += sum;
      last.count += count;
    } else {
      words.push({text, sum, count});
    }
    sum = count = 0;
  });
  return words.map(of => ({text: of.text, share: of.sum / of.count}));
}

/// The shade of a share: 0 only if no row stayed.
const keptLevel = share => share <= 0 ? 0 : Math.min(keptLevels, Math.max(1, Math.round(keptLevels * share)));

/// Joins neighbours of one shade: {text, level}.
function keptRuns(words) {
  const runs = [];
  for (const {text, share} of words) {
    const level = keptLevel(share);
    if (runs.at(-1)?.level === level) runs.at(-1).text += text;
    else runs.push({text, level});
  }
  return runs;
}

/// The same in a sentence, for readers who do not see shades.
function keptSummary({rows, full}, words) {
  const count = test => words.filter(({text, share}) => /[\p{L}\p{N}]/u.test(text) && test(share)).length;
  const mean = rows.reduce((sum, one) => sum + one, 0) / (full * Math.max(1, rows.length));
  return `Each token of the prompt had ${full} rows, one for each layer and KV head; ${(100 * mean).toFixed(1)} % of them ` +
    `stayed. Of ${count(() => true)} words, ${count(share => share >= 1)} kept all rows, ` +
    `${count(share => share >= 0.5 && share < 1)} at least half, ${count(share => share > 0 && share < 0.5)} fewer, ` +
    `${count(share => share <= 0)} none.`;
}

if (typeof module !== "undefined") module.exports = {keptWords, keptLevel, keptRuns, keptSummary};
