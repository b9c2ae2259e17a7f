'use strict';
// A trajectory as HTML elements. All text of a model or a tool goes through `appendText`: it becomes
// text nodes, never markup, and characters that are invisible or change direction are made visible.

const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

function symbolOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return '\u2421';
  return 'U+' + code.toString(16).toUpperCase().padStart(4, '0');
}

/** Text with a symbol for every invisible character, for attributes. */
function plain(text) {
  return String(text).replace(UNSEEN, symbolOf);
}

/** Append text; newlines and tabs stay, other invisible characters are marked. */
function appendText(element, text) {
  const whole = String(text);
  let from = 0;
  for (const match of whole.matchAll(UNSEEN)) {
    if (match[0] === '\n' || match[0] === '\t') continue;
    if (match.index > from) element.append(whole.slice(from, match.index));
    const mark = document.createElement('span');
    mark.className = 'unseen';
    mark.textContent = symbolOf(match[0]);
    element.append(mark);
    from = match.index + match[0].length;
  }
  if (from < whole.length) element.append(whole.slice(from));
  return element;
}

/** An element; strings among the children become text, null is left out. */
function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) element.setAttribute(key, plain(value));
  }
  for (const child of children) {
    if (child === null || child === undefined) continue;
    if (child instanceof Node) element.append(child);
    else appendText(element, child);
  }
  return element;
}

function figure(value, places) {
  if (value === null || value === undefined) return '-';
  return typeof value === 'number' ? value.toFixed(places === undefined ? 3 : places) : String(value);
}

function count(number, thing) {
  return `${number} ${thing}${number === 1 ? '' : 's'}`;
}

function sumOf(rows, name) {
  return rows.reduce((sum, row) => sum + row[name], 0);
}

/** One token: its colour shows the author, the bar below shows whether it is trained. */
function tokenElement(shown, position, author) {
  const id = shown.response_ids[position];
  const text = shown.tokens === null ? String(id) : shown.tokens[position];
  const on = shown.response_mask[position] === 1;
  const logProb = shown.log_probs[position];
  const about = [`token ${position}`, `id ${id}`];
  const element = document.createElement('span');
  element.className = `token ${author} ${on ? 'on' : 'off'}`;
  if (text === '') {
    element.classList.add('part');
    element.textContent = '\u00b7';
    about.push('part of a character that a later token completes');
  } else {
    if (shown.tokens === null) element.classList.add('id');
    appendText(element, text.replaceAll('\n', '\u23ce\n'));
    about.push(JSON.stringify(text));
  }
  if (author === 'model') {
    const chance = typeof logProb === 'number' ? ` (p ${Math.exp(logProb).toPrecision(3)})` : '';
    about.push(`log-prob ${figure(logProb)}${chance}`);
  }
  about.push(on ? 'mask 1: trained' : 'mask 0: not trained');
  element.title = plain(about.join(', '));
  return element;
}

function tokensElement(shown, segment, most) {
  const box = make('div', { class: 'tokens', role: 'group', 'aria-label': `${segment.author} tokens` });
  const last = Math.min(segment.start + segment.length, shown.response_ids.length);
  const until = Math.min(last, segment.start + most);
  for (let position = segment.start; position < until; position++) {
    box.append(tokenElement(shown, position, segment.author));
  }
  if (until < last) box.append(make('em', {}, ` … ${last - until} more tokens`));
  return box;
}

/** Runs of equal values as bars; the width of a bar is the length of its run. */
function bars(values, classOf) {
  const row = make('div', { class: 'bars' });
  for (let from = 0; from < values.length; ) {
    let to = from + 1;
    while (to < values.length && values[to] === values[from]) to++;
    const bar = make('i', { class: classOf(values[from]) });
    bar.style.flexGrow = to - from;
    row.append(bar);
    from = to;
  }
  return row;
}

/** The whole response in one strip: the authors above, the mask below. */
function stripElement(shown) {
  const authors = new Array(shown.response_ids.length).fill('nobody');
  for (const { author, start, length } of shown.segments) {
    authors.fill(author, start, Math.min(start + length, authors.length));
  }
  const { model, tool, mask_ones: trained, response } = shown.counts;
  return make(
    'div',
    {
      class: 'strip',
      role: 'img',
      'aria-label': `${count(model, 'model token')}, ${count(tool, 'tool token')}; ${trained} trained, ${response - trained} masked`,
    },
    bars(authors, (author) => author),
    bars(shown.response_mask, (bit) => (bit === 1 ? 'on' : 'off')),
  );
}

function countsElement(shown) {
  const { model, tool, response, mask_ones: ones, to_train: train } = shown.counts;
  const sum = model + tool === response;
  const masked = ones === train;
  return make(
    'p',
    { class: 'counts' },
    make('span', { class: sum ? 'good' : 'bad' }, `model ${model} + tool ${tool} ${sum ? '=' : '≠'} response ${response}`),
    '; ',
    make('span', { class: masked ? 'good' : 'bad' }, `mask ones ${ones} ${masked ? '=' : '≠'} trained tokens ${train}`),
  );
}

function problemsElement(shown) {
  if (!shown.problems.length) return null;
  return make('div', { class: 'problems', role: 'alert' }, ...shown.problems.map((each) => make('p', {}, each)));
}

function callElement(call) {
  const facts = [
    count(call.attempts, 'attempt'),
    `latency ${figure(call.latency_s)} s`,
    `limiter wait ${figure(call.limiter_wait_s)} s`,
    ...(call.server_wait_s ? [`waited ${figure(call.server_wait_s)} s for the server`] : []),
  ];
  return make(
    'div',
    { class: `call ${call.status === 'ok' ? '' : 'failed'}` },
    make('strong', {}, call.tool && call.tool !== call.action ? `${call.action} (${call.tool})` : call.action),
    ' ',
    make('span', { class: 'status' }, call.status),
    ` ${facts.join(', ')}`,
    make('pre', { 'aria-label': 'arguments' }, call.arguments),
    call.error === null || call.error === undefined ? null : make('pre', { class: 'bad', 'aria-label': 'error' }, call.error),
  );
}

/** Versions of the weights that sampled tokens, as text. */
function versionSpan(oldest, newest) {
  return oldest === newest ? oldest : `${oldest} to ${newest}`;
}

function segmentElement(shown, segment, most) {
  const facts = [count(segment.length, 'token')];
  if (segment.times) {
    facts.push(`generated in ${figure(segment.times.generate_s)} s`);
    if (segment.times.tools_s) facts.push(`tools ${figure(segment.times.tools_s)} s`);
    const [oldest, newest] = [segment.times.min_global_steps, segment.times.max_global_steps];
    if (newest > oldest) facts.push(`weights of steps ${versionSpan(oldest, newest)}`);
  }
  return make(
    'section',
    { class: `segment ${segment.author}` },
    make('h3', {}, `turn ${segment.turn} · ${segment.author}`, make('small', {}, ` ${facts.join(', ')}`)),
    tokensElement(shown, segment, most),
    shown.tokens === null ? make('pre', { class: 'text' }, segment.text) : null,
    ...(segment.calls || []).map(callElement),
  );
}

function factsElement(shown, names) {
  const list = make('dl', { class: 'facts' });
  for (const [name, value] of names) {
    if (value === null || value === undefined || value === '') continue;
    list.append(make('div', {}, make('dt', {}, name), make('dd', {}, String(value))));
  }
  return list;
}

function legendElement() {
  return make(
    'p',
    { class: 'legend' },
    make('span', { class: 'token model on' }, 'model, trained'),
    ' ',
    make('span', { class: 'token tool off' }, 'tool, masked'),
    ' the bar underneath is the loss mask; hover a token for its log-prob',
  );
}

/** Why a row of a session began, as text. */
function causeOf(row) {
  return row.cause || 'start';
}

/** Move an element to its depth in the tree; very deep trees do not leave the page. */
function indent(element, depth) {
  element.style.paddingLeft = `${0.3 + 1.1 * Math.min(depth, 8)}em`;
  return element;
}

/** The session of a row as a tree of buttons that open its rows; nothing for a session of one row. */
function treeElement(shown, open) {
  if (!shown.tree.length) return null;
  const buttons = shown.tree.map((row) => {
    const button = make(
      'button',
      { type: 'button', title: row.key, 'aria-current': row.id === shown.id ? 'true' : null },
      make('strong', {}, causeOf(row)),
      ` ${row.id}: ${count(row.length, 'token')}, ${row.trained} trained`,
    );
    button.addEventListener('click', () => open(row.id));
    return indent(button, row.depth);
  });
  return make('section', { class: 'tree', 'aria-label': 'rows of the session' }, make('h3', {}, `session of ${count(buttons.length, 'row')}`), ...buttons);
}

/** One trajectory or one row of it, from its prompt to its end. */
function trajectoryElement(shown, open) {
  const parts = Object.entries(shown.reward_parts || {}).map(([name, value]) => `${name} ${figure(value)}`);
  const box = make(
    'div',
    { class: 'trajectory' },
    make('h2', {}, `${shown.source} · step ${shown.step} · ${shown.id}`),
    problemsElement(shown),
    treeElement(shown, open),
    factsElement(shown, [
      ['reward', figure(shown.reward)],
      ['advantage', figure(shown.advantage)],
      ['solved', shown.masked === 'lost' ? 'lost' : shown.acc >= 1 ? 'yes' : 'no'],
      ['ended', shown.stop_reason],
      ['not trained', shown.masked],
      ['weights', shown.weight_versions && `of step ${versionSpan(...shown.weight_versions)}`],
      ['answer', shown.answer],
      ['reward parts', parts.join(', ')],
      ['row', shown.row_id],
      ['draw', shown.draw],
      ['key', shown.key],
      ['fault', shown.fault && `${shown.fault_tool}: ${shown.fault}`],
      ['state masking', shown.state_masking ? null : 'off: tool tokens are in the loss'],
    ]),
    countsElement(shown),
    stripElement(shown),
    legendElement(),
    make('details', {}, make('summary', {}, `prompt, ${count(shown.prompt_length, 'token')}`), make('pre', {}, shown.prompt === null ? 'no tokenizer' : shown.prompt)),
    shown.loop_error ? make('pre', { class: 'bad' }, shown.loop_error) : null,
  );
  for (const segment of shown.segments) box.append(segmentElement(shown, segment, Infinity));
  return box;
}

const OF_A_MEMBER = 600; // tokens of a segment that the group view shows

/** All members of a group side by side; `first` has the prompt, a member of several rows its last row. */
function groupElement(first, members, total, open) {
  const box = make('div', { class: 'group' });
  for (const shown of members) {
    const button = make('button', { type: 'button' }, `open ${shown.id}`);
    button.addEventListener('click', () => open(shown.id));
    const card = make(
      'section',
      { class: 'member', 'aria-label': `member ${shown.id}` },
      factsElement(shown, [
        ['reward', figure(shown.reward)],
        ['advantage', figure(shown.advantage)],
        ['tokens', shown.tree.length ? sumOf(shown.tree, 'length') : shown.counts.response],
        ['ended', shown.stop_reason],
        ['answer', shown.answer],
      ]),
      treeElement(shown, open),
      countsElement(shown),
      problemsElement(shown),
      stripElement(shown),
      button,
    );
    for (const segment of shown.segments) card.append(segmentElement(shown, segment, OF_A_MEMBER));
    box.append(card);
  }
  return make(
    'div',
    {},
    make('h2', {}, `group · ${first.source} · step ${first.step} · ${members.length} of ${count(total, 'member')}`),
    factsElement(first, [['row', first.row_id], ['draw', first.draw], ['group', first.group]]),
    legendElement(),
    make('details', {}, make('summary', {}, `prompt, ${count(first.prompt_length, 'token')}`), make('pre', {}, first.prompt === null ? 'no tokenizer' : first.prompt)),
    box,
  );
}
