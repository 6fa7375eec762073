// The live page of a service: reads /state.json once a second and shows it. It does nothing else.
//
// All texts of the document are of strangers: they are shown by textContent alone.
'use strict';
{
  const POLL = 1000; // milliseconds between two looks
  const PATIENCE = 5000; // milliseconds for one answer
  const SPANS = [60, 120, 300]; // seconds that the charts show: the first that has all samples
  const WIDTH = 300; // of a chart, in its own units
  const GAP = 5; // seconds without an answer after which a line is not drawn through
  const SMOOTH = 3; // seconds over which the rates in numbers are taken
  const SHOWN = 20; // rows of a table until more are asked for
  const LONG = 160; // characters of one text
  // Seconds: the buckets of the calls of a handler; those of aqueduct.admin.report.
  const BOUNDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0, 1800.0];
  const SVG = 'http://www.w3.org/2000/svg';

  const byId = id => document.getElementById(id);
  const element = (name, ...classes) => {
    const made = document.createElement(name);
    made.classList.add(...classes);
    return made;
  };
  const drawn = (name, given) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
    return made;
  };
  const say = (where, text) => {
    if (where.textContent !== text) where.textContent = text; // what is selected stays so
  };

  // Texts

  // Controls, and characters that turn the order of others round, are shown as their numbers.
  const clean = text => {
    const all = [...String(text)];
    const kept = all.slice(0, LONG).map(each => /[\p{C}\p{Zl}\p{Zp}]/u.test(each)
      ? `\\u{${each.codePointAt(0).toString(16)}}` : each).join('');
    return all.length > LONG ? `${kept}…` : kept;
  };
  const grouped = new Intl.NumberFormat('en');
  const count = number => grouped.format(Math.round(number));
  const short = number => {
    if (number === 0) return '0';
    if (number < 10) return number.toFixed(number < 0.095 ? 2 : 1);
    if (number < 1e6) return count(number);
    return number < 1e9 ? `${(number / 1e6).toFixed(1)} million` : `${(number / 1e9).toFixed(1)} billion`;
  };
  const bytes = number => {
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
    let place = 0;
    for (; number >= 1023.5 && place < units.length - 1; place += 1) number /= 1024;
    return `${place && number < 99.95 ? number.toFixed(1) : Math.round(number)} ${units[place]}`;
  };
  const duration = seconds => {
    if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
    if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
    if (seconds < 100) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 100) return `${minutes} min`;
    const hours = Math.round(seconds / 3600);
    return hours < 48 ? `${hours} h` : `${Math.round(seconds / 86400)} days`;
  };
  const clock = milliseconds => new Date(milliseconds).toLocaleTimeString('en-GB');
  const many = (number, one, several) => `${count(number)} ${number === 1 ? one : several || `${one}s`}`;

  // Tables

  class Table {
    constructor(id, columns) {
      this.columns = columns;
      this.all = false;
      this.last = null;
      const region = element('div', 'scroll');
      region.setAttribute('role', 'region');
      region.setAttribute('aria-labelledby', `${id}-title`);
      region.tabIndex = 0;
      const table = element('table');
      this.caption = table.createCaption();
      const head = table.createTHead().insertRow();
      for (const { head: title, text } of columns) {
        const cell = element('th', ...(text ? ['text'] : []));
        cell.scope = 'col';
        cell.textContent = title;
        head.append(cell);
      }
      this.body = table.createTBody();
      region.append(table);
      this.more = element('button');
      this.more.type = 'button';
      this.more.addEventListener('click', () => {
        this.all = !this.all;
        this.fill(...this.last);
      });
      byId(id).append(region, this.more);
    }

    // `told` says in words what is shown: (number shown) => text.
    fill(rows, told) {
      this.last = [rows, told];
      const shown = this.all ? rows : rows.slice(0, SHOWN);
      say(this.caption, told(shown.length));
      while (this.body.rows.length > shown.length) this.body.deleteRow(-1);
      shown.forEach((row, number) => {
        let line = this.body.rows[number];
        if (!line) {
          line = this.body.insertRow();
          this.columns.forEach(({ text }, place) => {
            const cell = element(place ? 'td' : 'th', ...(text ? ['text'] : []));
            if (!place) cell.scope = 'row';
            line.append(cell);
          });
        }
        this.columns.forEach(({ value, mark, text }, place) => {
          const cell = line.cells[place];
          const said = value(row);
          say(cell, said);
          if (text) cell.title = said;
          const found = mark ? mark(row) : '';
          cell.classList.toggle('failed', found === 'failed');
          cell.classList.toggle('waits', found === 'waits');
        });
      });
      this.more.hidden = rows.length <= SHOWN;
      say(this.more, this.all ? `Show the first ${SHOWN} alone` : `Show all ${count(rows.length)} that are listed`);
      this.more.setAttribute('aria-expanded', this.all);
    }
  }

  const inOut = [
    { head: 'Rows in', value: row => count(row.rows_in) },
    { head: 'Rows out', value: row => count(row.rows_out) },
    { head: 'Received', value: row => bytes(row.bytes_in) },
    { head: 'Sent', value: row => bytes(row.bytes_out) },
  ];
  const failures = errors => Object.entries(errors).filter(([status]) => status !== 'cancelled')
    .reduce((sum, [, number]) => sum + number, 0);
  const statuses = errors => Object.entries(errors).sort(([, one], [, other]) => other - one)
    .map(([status, number]) => `${clean(status)} ${count(number)}`).join(', ') || 'none';
  const within = ({ buckets }) => {
    const all = buckets.reduce((sum, each) => sum + each, 0);
    if (!all) return '–';
    let sum = 0;
    const place = buckets.findIndex(each => (sum += each) >= 0.95 * all);
    return place < BOUNDS.length ? `≤ ${duration(BOUNDS[place])}` : `> ${duration(BOUNDS.at(-1))}`;
  };
  const mean = ({ seconds, buckets }) => {
    const all = buckets.reduce((sum, each) => sum + each, 0);
    return all ? duration(seconds / all) : '–';
  };
  const known = value => value === null ? '–' : clean(value);
  const where = row => [row.host, row.executor].filter(Boolean).map(clean).join(' · ') || '–';
  const TURN = 'waits for its turn';
  const doing = row => {
    if (!row.open_calls) return `no call for ${duration(row.idle ?? 0)}`;
    if (row.waiting_turn >= row.open_calls) return TURN;
    if (row.waiting_client >= row.open_calls) return 'waits for the client';
    return 'at work';
  };
  const callDoing = row => row.state === 'waiting' ? TURN : 'runs';
  const worker = { head: 'Worker', value: row => row.worker === null ? '–' : count(row.worker) };
  const failed = {
    head: 'Failed', value: row => count(row.failed), mark: row => row.failed ? 'failed' : '',
  };

  const handlers = new Table('handlers', [
    { head: 'Handler', text: true, value: row => clean(row.name) },
    { head: 'Kind', text: true, value: row => clean(row.kind) || 'no handler' },
    { head: 'In flight', value: row => count(row.open) },
    { head: 'In queue', value: row => count(row.waiting), mark: row => row.waiting ? 'waits' : '' },
    { head: 'Calls', value: row => count(row.calls) },
    { head: 'Calls/s', value: row => short(row.rate) },
    ...inOut,
    { head: 'Mean time', value: mean },
    { head: '95 % within', value: within },
    {
      head: 'Errors', text: true, value: row => statuses(row.errors),
      mark: row => failures(row.errors) ? 'failed' : '',
    },
  ]);
  const executors = new Table('executors', [
    { head: 'Executor', text: true, value: where },
    { head: 'Application', text: true, value: row => clean(row.name || row.application) || '–' },
    { head: 'Calls in flight', value: row => count(row.open_calls) },
    { head: 'In queue', value: row => count(row.waiting_turn), mark: row => row.waiting_turn ? 'waits' : '' },
    { head: 'Calls', value: row => count(row.calls) },
    failed,
    ...inOut,
    { head: 'Doing', text: true, value: doing },
  ]);
  const tasks = new Table('tasks', [
    { head: 'Task', text: true, value: row => known(row.task) },
    { head: 'Stage', value: row => known(row.stage) },
    { head: 'Partition', value: row => known(row.partition) },
    { head: 'Executor', text: true, value: where },
    { head: 'Handler', text: true, value: row => clean(row.handler) },
    { head: 'Doing', text: true, value: doing, mark: row => doing(row) === TURN ? 'waits' : '' },
    { head: 'Calls', value: row => count(row.calls) },
    failed,
    ...inOut,
  ]);
  const calls = new Table('calls', [
    { head: 'Call', value: row => count(row.number) },
    { head: 'Handler', text: true, value: row => clean(row.handler) || 'no handler of that name' },
    { head: 'Client', text: true, value: row => clean(row.peer) },
    { head: 'Doing', text: true, value: callDoing, mark: row => row.state === 'waiting' ? 'waits' : '' },
    { head: 'For', value: row => duration(row.seconds) },
    ...inOut,
    worker,
  ]);
  const connections = new Table('connections', [
    { head: 'Client', text: true, value: row => clean(row.peer) },
    { head: 'Carrier', text: true, value: row => clean(row.carrier) },
    { head: 'Age', value: row => duration(Math.max(0, row.age)) },
    { head: 'Calls in flight', value: row => count(row.calls) },
    { head: 'Queued to send', value: row => bytes(row.queued_bytes) },
    { head: 'Round trip', value: row => row.rtt === null ? '–' : duration(row.rtt) },
    { head: 'Resumes', value: row => count(row.resumes) },
    worker,
  ]);
  const workers = new Table('workers', [
    { head: 'Worker', value: row => count(row.number) },
    { head: 'Process', value: row => row.pid === null ? 'none' : String(row.pid) },
    { head: 'Phase', text: true, value: row => clean(row.phase) },
    {
      head: 'Ready', text: true, mark: row => row.ready ? '' : 'waits',
      value: row => row.ready ? 'yes' : `no: ${row.reasons.map(clean).join('; ')}`,
    },
    { head: 'Died', value: row => count(row.deaths), mark: row => row.deaths ? 'failed' : '' },
    { head: 'Numbers of', value: row => row.age === null ? '–' : `${duration(row.age)} ago` },
  ]);

  // Tiles

  const tiles = new Map();
  const tile = (id, title, value, note, share) => {
    let made = tiles.get(id);
    if (!made) {
      const box = element('div');
      const head = element('dt');
      const first = element('dd', 'value');
      const second = element('dd', 'note');
      first.id = id;
      head.textContent = title;
      box.append(head, first, second);
      made = { first, second };
      if (share !== undefined) {
        made.meter = element('meter');
        made.meter.setAttribute('aria-label', `${title}: share of the limit`);
        Object.assign(made.meter, { max: 1, high: 0.9, low: 0.7, optimum: 0 });
        const last = element('dd');
        last.append(made.meter);
        box.append(last);
      }
      tiles.set(id, made);
      byId('tiles').append(box);
    }
    say(made.first, value);
    say(made.second, note);
    if (share !== undefined) made.meter.value = share;
  };

  // Charts

  class Chart {
    constructor(title, unit, whole, series) {
      Object.assign(this, { title, unit, whole, series });
      const figure = element('figure');
      const caption = element('figcaption');
      caption.textContent = title;
      const legend = element('ul', 'legend');
      this.values = series.map(([name], place) => {
        const item = element('li');
        const key = drawn('svg', { viewBox: '0 0 26 10', 'aria-hidden': 'true' });
        key.append(drawn('path', { class: `line ${place ? 'second' : 'first'}`, d: 'M0 5H26' }));
        const value = element('span');
        item.append(key, value);
        legend.append(item);
        return value;
      });
      const plot = element('div', 'plot');
      this.svg = drawn('svg', { viewBox: `0 0 ${WIDTH} 100`, preserveAspectRatio: 'none', role: 'img' });
      for (const y of [3, 50, 97]) this.svg.append(drawn('path', { class: 'grid', d: `M0 ${y}H${WIDTH}` }));
      this.area = drawn('path', { class: 'area', d: '' });
      this.lines = series.map((_, place) => drawn('path', { class: `line ${place ? 'second' : 'first'}`, d: '' }));
      this.svg.append(this.area, ...this.lines);
      this.top = element('span', 'top');
      plot.append(this.svg, this.top);
      const times = element('div', 'times');
      this.from = element('span');
      const now = element('span');
      now.textContent = 'now';
      times.append(this.from, now);
      figure.append(caption, legend, plot, times);
      byId('charts').append(figure);
    }

    draw(samples, now, latest) {
      const points = this.series.map(([, key]) => samples.map(each => [each.at, each[key]]));
      const most = Math.max(0, ...points.flat().map(([, value]) => value ?? 0));
      const scale = this.above(most);
      const age = samples.length ? now - samples[0].at : 0;
      const span = SPANS.find(each => each >= age) ?? SPANS.at(-1);
      points.forEach((line, place) => {
        const pieces = [[]];
        line.forEach(([at, value], number) => {
          const apart = number && at - line[number - 1][0] > GAP;
          if (value === null || apart) pieces.push([]);
          if (value !== null) pieces.at(-1).push([WIDTH * (1 - (now - at) / span), 97 - 94 * value / scale]);
        });
        const paths = pieces.filter(piece => piece.length > 1).map(piece => [
          piece.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join('L'), piece[0][0], piece.at(-1)[0]]);
        this.lines[place].setAttribute('d', paths.map(([path]) => `M${path}`).join(''));
        if (!place) {
          this.area.setAttribute('d', paths.map(([path, from, to]) =>
            `M${path}L${to.toFixed(1)} 97L${from.toFixed(1)} 97Z`).join(''));
        }
      });
      say(this.top, this.unit(scale));
      say(this.from, `${many(span / 60, 'minute')} ago`);
      const said = this.series.map(([name, key]) => `${name} ${this.unit(latest[key] ?? 0)}`);
      said.forEach((text, place) => say(this.values[place], text));
      this.svg.setAttribute('aria-label', `${this.title}: now ${said.join(', ')}; at most ${this.unit(most)} in `
        + `the last ${many(span / 60, 'minute')}`);
    }

    // The end of the scale: a round number that is not below `most`.
    above(most) {
      if (most <= 1) return this.whole ? 4 : 1;
      const base = this.unit === bytesPerSecond ? 1024 : 10;
      const step = base ** Math.floor(Math.log(most) / Math.log(base));
      const factors = base === 10 ? [1, 2, 4, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
      return Math.max(this.whole ? 4 : 1, step * factors.find(each => each * step >= most * 0.9999));
    }
  }
  const bytesPerSecond = number => `${bytes(number)}/s`;
  const perSecond = number => `${short(number)}/s`;
  const charts = [
    new Chart('Bytes', bytesPerSecond, false, [['received', 'bytesIn'], ['sent', 'bytesOut']]),
    new Chart('Rows', perSecond, false, [['in', 'rowsIn'], ['out', 'rowsOut']]),
    new Chart('Calls in flight', count, true, [['all', 'open'], ['in a queue', 'waiting']]),
    new Chart('Calls', perSecond, false, [['begun', 'begun'], ['ended with an error', 'failed']]),
  ];

  // One look after the other

  const COUNTED = {
    bytesIn: row => row.bytes_in, bytesOut: row => row.bytes_out, rowsIn: row => row.rows_in,
    rowsOut: row => row.rows_out, begun: row => row.calls, failed: row => failures(row.errors),
  };
  let looks = []; // {at, sums, byHandler}: as counted
  let samples = []; // {at, ...}: by second, for the charts
  let started = null; // of the service
  let restarted = 0; // when that was noticed, by performance.now()
  let silent = null; // since when it does not answer, by Date.now(); null: it does
  let answered = false;

  const rates = (newer, older) => {
    const seconds = newer.at - older.at;
    return Object.fromEntries(Object.keys(COUNTED).map(key =>
      [key, seconds > 0 ? Math.max(0, newer.sums[key] - older.sums[key]) / seconds : 0]));
  };

  const show = state => {
    const { service, calls: called, connections: connected, memory, spark } = state;
    const now = performance.now() / 1000;
    if (started !== null && Math.abs(service.started - started) > 0.5) {
      looks = [];
      samples.push({ at: now, ...Object.fromEntries(Object.keys(COUNTED).map(key => [key, null])), open: null, waiting: null });
      restarted = performance.now();
    }
    started = service.started;
    const rows = Object.entries(state.handlers).map(([name, row]) => ({ name, ...row }));
    const sums = Object.fromEntries(Object.entries(COUNTED).map(([key, of]) =>
      [key, rows.reduce((sum, row) => sum + of(row), 0)]));
    const look = { at: now, sums, byHandler: Object.fromEntries(rows.map(row => [row.name, row.calls])) };
    const last = looks.at(-1);
    if (last) samples.push({ at: now, ...rates(look, last), open: called.open, waiting: called.waiting });
    looks.push(look);
    looks = looks.filter(each => each.at > now - SMOOTH - 1 || each === look);
    samples = samples.filter(each => each.at > now - SPANS.at(-1));
    const oldest = looks[0];
    const rate = rates(look, oldest);
    for (const row of rows) {
      const before = oldest.byHandler[row.name] ?? row.calls;
      row.rate = now > oldest.at ? Math.max(0, row.calls - before) / (now - oldest.at) : 0;
    }
    rows.sort((one, other) => other.open - one.open || other.calls - one.calls || (one.name < other.name ? -1 : 1));

    document.title = `${clean(service.name)} · Aqueduct`;
    say(byId('name'), clean(service.name));
    const phase = byId('phase');
    say(phase, service.ready ? `${service.phase}, ready` : `${service.phase}, not ready`);
    phase.className = `badge ${!service.live ? 'bad' : service.ready ? 'good' : 'warn'}`;
    const late = service.loop_lag >= 0.0995 ? `, event loop late by ${duration(service.loop_lag)}` : '';
    say(byId('about'), `aqueduct-arrow ${clean(service.version)}, up for ${duration(service.uptime)}`
      + `${state.workers.length ? `, ${many(state.workers.length, 'worker')}` : ''}${late}`
      + `${service.ready ? '' : `. Not ready: ${service.reasons.map(clean).join('; ')}`}`);
    say(byId('addresses'), service.addresses.map(clean).join('  '));

    tile('open-connections', 'Connections', count(connected.open),
      `of ${count(connected.limit)}; ${count(connected.total)} since the start`);
    tile('open-calls', 'Calls in flight', count(called.open), `of ${count(called.limit)}`);
    tile('waiting-calls', 'Calls in a queue', count(called.waiting), 'wait for their turn');
    tile('received', 'Received', bytesPerSecond(rate.bytesIn), `${short(rate.rowsIn)} rows/s`);
    tile('sent', 'Sent', bytesPerSecond(rate.bytesOut), `${short(rate.rowsOut)} rows/s`);
    const cancelled = rows.reduce((sum, row) => sum + (row.errors.cancelled ?? 0), 0);
    tile('errors', 'Calls with an error', count(sums.failed), `of ${count(sums.begun)}; ${count(cancelled)} cancelled`);
    for (const [name, title] of [['received', 'Memory: received'], ['sending', 'Memory: to be sent']]) {
      const account = memory[name];
      if (account) {
        tile(`memory-${name}`, title, bytes(account.bytes), account.limit ? `of ${bytes(account.limit)}` : '',
          account.limit ? account.bytes / account.limit : 0);
      }
    }
    for (const chart of charts) chart.draw(samples, now, { ...rate, open: called.open, waiting: called.waiting });

    const own = rows.filter(row => row.calls || !row.name.startsWith('aqueduct.'));
    handlers.fill(own, shown => `${many(own.length, 'handler')}${shown < own.length ? `, ${shown} shown` : ''}. Those with `
      + 'calls in flight stand first; all counts are since the start.');
    byId('executors-part').hidden = !spark?.executor_count;
    byId('tasks-part').hidden = !spark?.task_count;
    if (spark) {
      const placed = [...spark.executors].sort((one, other) => where(one) < where(other) ? -1 : 1);
      executors.fill(placed, shown =>
        `${count(shown)} of ${many(spark.executor_count, 'executor')} whose tasks have called.`);
      tasks.fill(spark.tasks, shown => `${count(shown)} of ${many(spark.task_count, 'task')} that the service remembers`
        + `${spark.forgotten ? `; ${count(spark.forgotten)} older ones are forgotten` : ''}. Those at work stand first.`);
    }
    calls.fill(called.listed, shown => called.open
      ? `${count(shown)} of ${count(called.open)}, the oldest first.` : 'There are none.');
    const age = service.started + service.uptime;
    connections.fill(connected.listed.map(row => ({ ...row, age: age - row.since })), shown => connected.open
      ? `${count(shown)} of ${count(connected.open)}, the newest first.` : 'There are none.');
    byId('workers-part').hidden = !state.workers.length;
    workers.fill(state.workers, () => `${many(state.workers.length, 'process', 'processes')} share the addresses.`);
  };

  const trouble = (text, mild) => {
    const place = byId('trouble');
    place.hidden = !text;
    place.className = mild ? 'warn' : '';
    say(place, text);
  };

  const look = async () => {
    const asked = Date.now();
    try {
      const response = await fetch('/state.json', { cache: 'no-store', signal: AbortSignal.timeout(PATIENCE) });
      if (!response.ok) throw new Error(`it answers with the status ${response.status}`);
      show(await response.json());
      silent = null;
      answered = true;
      document.body.classList.remove('stale');
      trouble(restarted && performance.now() - restarted < 60_000
        ? 'The service was started again while this page was open: its counts began anew.' : '', true);
    } catch (error) {
      silent ??= asked;
      document.body.classList.toggle('stale', answered);
      const why = error.name === 'TimeoutError' ? `no answer within ${duration(PATIENCE / 1000)}`
        : error.name === 'TypeError' ? 'no connection' : clean(error.message);
      say(byId('phase'), 'no answer');
      byId('phase').className = 'badge bad';
      trouble(`The service has not answered since ${clock(silent)} (${why}). This page goes on trying.`
        + `${answered ? ' The numbers below are the last ones.' : ''}`, false);
    }
    document.documentElement.dataset.looks = Number(document.documentElement.dataset.looks ?? 0) + 1;
    setTimeout(look, Math.max(POLL / 4, POLL - (Date.now() - asked)));
  };
  look();
}
