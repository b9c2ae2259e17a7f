'use strict';
// Filters of trajectories, for the page without a server. The rules are those of filters.py. The
// server searches words with SQLite; here each text is searched as the list of its words.

const STEPS = /^ *([0-9]{1,15}) *(?:- *([0-9]{1,15}) *)?$/;
const NUMBER = /^ *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)? *$/i;

function stepsOf(text) {
  if (!text) return null;
  const match = STEPS.exec(text);
  const [first, last] = match ? [Number(match[1]), Number(match[2] || match[1])] : [1, 0];
  if (first > last) throw new Error(`cannot filter by step='${text}': want one step, 3, or a range, 3-7`);
  return [first, last];
}

function numberOf(text) {
  if (!text) return null;
  if (!NUMBER.test(text) || !Number.isFinite(Number(text))) {
    throw new Error(`cannot filter by reward='${text}': want a number, 0.5`);
  }
  return Number(text);
}

function rewardsOf(low, high) {
  const [least, most] = [numberOf(low), numberOf(high)];
  if (least !== null && most !== null && least > most) {
    throw new Error(`cannot filter by reward from ${low} to ${high}: want the lower one first`);
  }
  return [least, most];
}

/** Text in the form that is searched: small letters, no accents, NFKD. */
function bareOf(text) {
  return text.normalize('NFKD').replace(/[\u0300-\u036f]/g, '').toLowerCase().replaceAll('\u03c2', '\u03c3');
}

/** The words of a bare text, each with a blank before and after. */
function wordsOf(bare) {
  return ` ${(bare.match(/[\p{L}\p{N}\p{Co}]+/gu) || []).join(' ')} `;
}

/** A function that says whether a text has all words; the last may be the beginning of a word. */
function search(text) {
  const parts = bareOf(text).match(/[^ \t\n\r\f\v]+/g) || [];
  const worded = parts.filter((part) => /[\p{L}\p{N}]/u.test(part));
  const phrases = worded.map(wordsOf);
  if (phrases.length) phrases.push(phrases.pop().trimEnd());
  const signs = parts.filter((part) => !worded.includes(part));
  return (row) => phrases.every((phrase) => row.words.includes(phrase)) && signs.every((sign) => row.text.includes(sign));
}

/** A function that says whether a query chooses a row; `textOf(row)` gives {text, words} of a row. */
function filterOf(query, textOf) {
  const steps = stepsOf(query.step);
  const [least, most] = rewardsOf(query.reward_min, query.reward_max);
  const holds = search(query.text || '');
  return (row) =>
    (!query.source || row.source === query.source) &&
    (!query.group || row.group === query.group) &&
    (!query.outcome || row.outcomes.includes(query.outcome)) &&
    (!steps || (row.step >= steps[0] && row.step <= steps[1])) &&
    (least === null || (row.reward !== null && row.reward >= least)) &&
    (most === null || (row.reward !== null && row.reward <= most)) &&
    (!query.text || holds(textOf(row)));
}
