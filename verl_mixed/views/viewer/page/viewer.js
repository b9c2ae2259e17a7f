// The page: filters, list, keys. Its data come from the server, or from the file itself.

(() => {
  const PAGE_ROWS = 100;
  const MEMBERS = 32; // members of a group that are shown side by side, at most
  const at = (id) => document.getElementById(id);
  const form = at('filter');
  const list = at('list');
  const detail = at('detail');

  async function ask(path, query) {
    const response = await fetch(`${path}?${new URLSearchParams(query || {})}`);
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
  }

  const served = {
    run: () => ask('/api/run'),
    rows: (query) => ask('/api/trajectories', query),
    trajectory: (id) => ask(`/api/trajectories/${encodeURIComponent(id)}`),
  };

  /** The rows of each session; the rows of a session follow each other. */
  function sessionsOf(all) {
    const sessions = new Map();
    for (const row of all) {
      if (!sessions.has(row.session)) sessions.set(row.session, []);
      sessions.get(row.session).push(row);
    }
    return [...sessions.values()];
  }

  function inFile(data) {
    const known = new Map(); // id -> text and words, of the rows that were searched
    function textOf(row) {
      if (!known.has(row.id)) {
        const text = data.trajectories[row.id].segments.map((segment) => segment.text).join('\n');
        const bare = bareOf(text);
        known.set(row.id, { text: bare, words: wordsOf(bare) });
      }
      return known.get(row.id);
    }
    return {
      run: async () => data.run,
      rows: async (query) => {
        const fits = filterOf(query, textOf);
        const all = sessionsOf(data.rows.map((row) => ({ ...row, fits: fits(row) })));
        const chosen = all.filter((own) => own.some((row) => row.fits));
        return { total: chosen.length, rows: chosen.slice(query.offset, query.offset + query.limit).flat() };
      },
      trajectory: async (id) => {
        if (!data.trajectories[id]) throw new Error(`trajectory ${id} is not in this file`);
        return data.trajectories[id];
      },
    };
  }

  const block = at('data');
  const source = block ? inFile(JSON.parse(block.textContent)) : served;

  let rows = [];
  let total = 0;
  let offset = 0;
  let chosen = -1; // index in rows
  let current = null; // id of the trajectory that is shown or being loaded
  let grouped = false;
  const asked = { list: 0, detail: 0 }; // numbers of the newest requests; answers to older requests are ignored

  function complain(error) {
    detail.replaceChildren(make('p', { class: 'bad', role: 'alert' }, error.message));
  }

  // --- the list -----------------------------------------------------------------------------------

  const callsElement = (row) =>
    make('span', { class: row.errors ? 'bad' : '' }, row.errors ? `${row.calls} (${row.errors} ✗)` : String(row.calls));

  /** What can be chosen: a row of the list, by its line. */
  const optionOf = (row) => ({ id: `row-${row.id}`, role: 'option', 'aria-selected': 'false', title: `${row.row_id} ${row.key}` });

  /** The line of a session: its only row, or the sums of its rows. */
  function lineElement(row, before, attributes, rowCount) {
    const solved = row.outcomes.includes('solved');
    const element = make(
      'div',
      { class: `row ${solved ? 'solved' : ''} ${before && before[0].group === row.group ? '' : 'first'}`, ...attributes },
      make('span', {}, String(row.step)),
      make('span', {}, row.source),
      make('span', { class: row.outcomes.includes('lost') ? 'bad' : '' }, `${row.stop_reason}${rowCount}`),
      make('span', {}, `${solved ? '✓ ' : ''}${figure(row.reward, 2)}`),
      make('span', {}, figure(row.advantage, 2)),
      make('span', {}, String(row.length)),
      callsElement(row),
    );
    element.addEventListener('click', () => chooseRow(row.id));
    return element;
  }

  /** A row of a session of several, below the line of the session. */
  function partElement(row) {
    const element = make(
      'div',
      { class: `row part ${row.fits ? '' : 'unfit'}`, ...optionOf(row) },
      indent(make('span', {}, causeOf(row)), 1 + row.depth),
      make('span', {}, `${row.trained} trained`),
      make('span', {}, String(row.length)),
      callsElement(row),
    );
    element.addEventListener('click', () => chooseRow(row.id));
    return element;
  }

  function sessionElement(own, before) {
    const [first] = own;
    if (own.length === 1) return lineElement(first, before, optionOf(first), '');
    const sums = Object.fromEntries(['length', 'calls', 'errors'].map((name) => [name, sumOf(own, name)]));
    const line = lineElement({ ...first, ...sums }, before, { role: 'presentation' }, ` · ${own.length} rows`);
    return make('div', { role: 'group', 'aria-label': `session of ${own.length} rows` }, line, ...own.map(partElement));
  }

  function query() {
    const filled = [...new FormData(form)].filter(([, value]) => value.trim() !== '');
    return Object.fromEntries(filled);
  }

  /** Load a page of the list; false if a newer request was made meanwhile. `which` of its rows is
   *  shown: 'last'; null, none; else the first that fits the filter. */
  async function load(from, which) {
    const mine = ++asked.list;
    list.setAttribute('aria-busy', 'true');
    let failed = null;
    try {
      const answer = await source.rows({ ...query(), offset: from, limit: PAGE_ROWS });
      if (mine !== asked.list) return false;
      ({ rows, total } = answer);
      offset = from;
    } catch (error) {
      if (mine !== asked.list) return false;
      rows = [];
      total = 0;
      failed = error;
    }
    const sessions = sessionsOf(rows);
    list.replaceChildren(...sessions.map((own, number) => sessionElement(own, sessions[number - 1])));
    at('count').textContent = total === 1 ? '1 trajectory' : `${total} trajectories`;
    const last = offset + sessions.length;
    at('page').textContent = rows.length ? `${offset + 1} to ${last} of ${total}` : '';
    at('previous').disabled = offset === 0;
    at('next').disabled = last >= total;
    list.setAttribute('aria-busy', 'false');
    chosen = -1;
    if (rows.length && which !== null) {
      await choose(which === 'last' ? rows.length - 1 : rows.findIndex((row) => row.fits));
    } else if (!rows.length) {
      asked.detail++;
      if (failed) complain(failed);
      else detail.replaceChildren(make('p', {}, 'nothing fits the filter'));
    }
    return true;
  }

  function mark(number) {
    if (rows[chosen]) at(`row-${rows[chosen].id}`).setAttribute('aria-selected', 'false');
    chosen = number;
    const element = at(`row-${rows[number].id}`);
    element.setAttribute('aria-selected', 'true');
    list.setAttribute('aria-activedescendant', element.id);
    element.scrollIntoView({ block: 'nearest' });
  }

  async function choose(number) {
    mark(number);
    await open(rows[number].id);
  }

  /** Show a row by its id, and mark it in the list if it is there. */
  function chooseRow(id) {
    const number = rows.findIndex((row) => row.id === id);
    if (number >= 0) mark(number);
    return open(id);
  }

  function openAlone(id) {
    grouped = false;
    chooseRow(id);
  }

  // --- the trajectory -----------------------------------------------------------------------------

  async function open(id) {
    const mine = ++asked.detail;
    current = id;
    try {
      const shown = await source.trajectory(id);
      const element = grouped ? await groupOf(shown) : trajectoryElement(shown, openAlone);
      if (mine !== asked.detail) return;
      detail.replaceChildren(element);
      detail.scrollTop = 0;
      history.replaceState(null, '', `#${id}`);
    } catch (error) {
      if (mine === asked.detail) complain(error);
    }
  }

  async function groupOf(shown) {
    const answer = await source.rows({ group: shown.group, offset: 0, limit: MEMBERS });
    const indexOf = (row) => Number(row.key.split('_').pop());
    const lastOf = (own) => own.reduce((last, row) => (indexOf(row) > indexOf(last) ? row : last));
    const wanted = [answer.rows[0], ...sessionsOf(answer.rows).map(lastOf)];
    const [first, ...members] = await Promise.all(wanted.map((row) => source.trajectory(row.id)));
    return groupElement(first, members, answer.rows[0].group_size, openAlone);
  }

  function move(by) {
    const number = chosen + by;
    if (number >= 0 && number < rows.length) choose(number);
    else if (by > 0) turnPage(1, 0);
    else turnPage(-1, 'last');
  }

  async function moveGroup(by) {
    if (chosen < 0) return;
    const left = rows[chosen].group;
    let number = chosen;
    for (;;) {
      while (rows[number] && rows[number].group === left) number += by;
      if (rows[number]) break;
      if (!(await turnPage(by, null))) return;
      number = by > 0 ? 0 : rows.length - 1;
    }
    if (by < 0) {
      while (number > 0 && rows[number - 1].group === rows[number].group) number--;
    }
    await choose(number);
  }

  /** Load the page before or after this one; false if there is no such page. */
  async function turnPage(by, which) {
    const from = Math.max(0, offset + by * PAGE_ROWS);
    return from !== offset && from < total && load(from, which);
  }

  function toggleGroup() {
    grouped = !grouped;
    if (current !== null) open(current);
  }

  // --- keys and buttons ---------------------------------------------------------------------------

  const KEYS = {
    j: () => move(1),
    k: () => move(-1),
    n: () => moveGroup(1),
    p: () => moveGroup(-1),
    g: toggleGroup,
    '[': () => turnPage(-1, 0),
    ']': () => turnPage(1, 0),
    '/': () => form.elements.text.focus(),
    '?': () => at('help').showModal(),
  };

  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || at('help').open) return;
    const typing = event.target.matches('input, select, textarea');
    if (typing) {
      if (event.key === 'Escape') event.target.blur();
      return;
    }
    if (!Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });

  let typed = 0;
  form.addEventListener('submit', (event) => event.preventDefault());
  form.addEventListener('reset', () => setTimeout(() => load(0, 0)));
  form.addEventListener('input', () => {
    clearTimeout(typed);
    typed = setTimeout(() => load(0, 0), 150);
  });
  at('keys').addEventListener('click', () => at('help').showModal());
  at('previous').addEventListener('click', () => turnPage(-1, 0));
  at('next').addEventListener('click', () => turnPage(1, 0));

  async function begin() {
    const run = await source.run();
    document.title = plain(run.name);
    at('run').replaceChildren(appendText(document.createDocumentFragment(), run.name));
    for (const [name, values] of [
      ['source', Object.keys(run.sources)],
      ['outcome', run.outcomes],
    ]) {
      for (const value of values) form.elements[name].append(make('option', { value }, value));
    }
    const notes = at('notes');
    if (run.exported) notes.append(make('p', { class: 'note' }, `exported: ${run.exported}`));
    if (run.note) notes.append(make('p', { class: 'note' }, run.note));
    if (run.unreadable) {
      notes.append(
        make('p', { class: 'bad', role: 'alert' }, `cannot be read and left out (${run.unreadable}): ${run.unreadable_why.join('; ')}`),
      );
    }
    const linked = decodeURIComponent(location.hash.slice(1));
    await load(0, linked ? null : 0);
    if (linked) await chooseRow(linked);
  }

  begin().catch(complain).finally(() => document.body.setAttribute('data-ready', 'yes'));
})();
