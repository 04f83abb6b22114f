"use strict";

/*
 * Draws a timeline as drawing.py does, and lets the reader look closer: a window on its time that
 * the wheel, the keyboard, the buttons and the mouse move, and what each pass is under the pointer.
 */
const pictures = (() => {
  const constants = JSON.parse(document.getElementById("constants").textContent);
  const { sizes } = constants;
  const LETTERS = pipelines.kinds;
  const MOST_ZOOM = 4000;

  const short = (value) => String(Number(value.toFixed(2)));
  const digits = (value, count) => String(Number(value.toPrecision(count)));
  const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
  const make = (tag, properties = {}) => Object.assign(document.createElement(tag), properties);

  /** The shades of each kind: of the chunks of a rank, or of the trainings that share the ranks. */
  class Shades {
    constructor({ place, owners }) {
      this.place = place;
      this.owners = owners;
      this.count = owners?.labels.length ?? place.chunks;
      this.firsts = owners?.spans.map(([first]) => first);
    }

    /** The step that a microbatch belongs to, where trainings share the ranks. */
    spanOf(microbatch) { return this.owners?.spans[lastBefore(this.firsts, microbatch)]; }

    /** What a pass works on, in words: an update is of a whole step. */
    wordsOf({ kind, microbatch }) {
      const [first, , words] = this.spanOf(microbatch) ?? [0, null, null];
      const parts = LETTERS[kind] === "U" ? [words] : [words, `microbatch ${microbatch - first}`];
      return parts.filter((part) => part !== null).join(", ");
    }

    of({ stage, microbatch }) { return this.spanOf(microbatch)?.[1] ?? this.place.chunkOf[stage]; }

    label(shade) {
      return this.owners?.labels[shade] ?? (this.count === 1 ? "" : `, chunk ${shade}`);
    }

    /** The colour of a bar, and that of text on it. */
    colours(letter, shade) {
      if (this.owners) return this.owners.colours[letter][shade];
      const rowOf = (rows) => rows[Math.min(this.count, rows.length) - 1][shade % rows.length];
      return [rowOf(constants.shades[letter]), rowOf(constants.texts[letter])];
    }
  }

  /** Whether a pass is left out: an update that takes no time. */
  const isUnseen = ({ kind }, start, end) => LETTERS[kind] === "U" && start === end;

  function ticks(from, to, about) {
    const rough = (to - from) / Math.max(about, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough * (1 - 1e-9));
    const first = Math.ceil(from / step - 1e-9), last = Math.floor(to / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  }

  /** The last of rising numbers that is not above a value; -1 where all are. */
  function lastBefore(values, value) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= value) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  class Picture {
    /** In the place of what is in `box`. */
    constructor(box) {
      this.frame = make("div", { className: "scroll view", tabIndex: 0 });
      this.frame.setAttribute("role", "group");
      this.frame.setAttribute("aria-label",
        "picture: plus and minus zoom, arrows move, 0 shows all of it");
      this.frame.innerHTML = '<svg class="schedule" role="img"></svg>';
      this.svg = this.frame.firstChild;
      this.tip = make("div", { className: "tip", hidden: true });
      this.shown = make("span", { className: "shown" });
      box.replaceChildren(this.buttons(), this.frame, this.tip);
      this.box = box;
      this.drag = null;
      this.peers = [this];
      this.listen();
    }

    buttons() {
      const bar = make("div", { className: "buttons" });
      const add = (text, title, act) => {
        const button = make("button", { type: "button", textContent: text, title });
        button.setAttribute("aria-label", title);
        button.addEventListener("click", act);
        bar.append(button);
      };
      add("+", "zoom in", () => this.zoom(0.5));
      add("−", "zoom out", () => this.zoom(2));
      add("◀", "earlier", () => this.move(-0.25));
      add("▶", "later", () => this.move(0.25));
      add("all", "show all of it", () => this.all());
      bar.append(this.shown, make("span", { className: "hint",
        textContent: "wheel, after a click or with Ctrl: zoom; drag, or Shift and wheel: move; keys + − ← → 0" }));
      return bar;
    }

    listen() {
      const { frame } = this;
      frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
      frame.addEventListener("keydown", (event) => this.press(event));
      frame.addEventListener("pointerdown", (event) => {
        if (event.button === 0 && event.pointerType === "mouse") this.drag = { x: event.clientX, from: this.from };
      });
      frame.addEventListener("pointermove", (event) => this.point(event));
      addEventListener("pointerup", () => { this.drag = null; });
      frame.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      frame.addEventListener("scroll", () => this.peers.forEach((peer) => {
        peer.frame.scrollLeft = frame.scrollLeft;
      }));
      new ResizeObserver(() => { if (this.timeline) this.draw(); }).observe(frame);
    }

    /** Draw a timeline; `unit` is {words, symbol, scale}, `limit` microbatches or null, `extent` the room. */
    show(timeline, { title, unit, baseline, limit = null, extent = null }) {
      Object.assign(this, { timeline, unit, baseline, limit, shades: new Shades(timeline) });
      this.room = extent?.seconds ?? timeline.makespan;
      this.most = extent?.held ?? Math.max(baseline, limit ?? 0, ...timeline.peaks);
      this.svg.setAttribute("aria-label", title);
      this.all();
    }

    clear() {
      this.timeline = null;
      this.svg.replaceChildren();
      this.shown.textContent = "";
    }

    // --- the window ---------------------------------------------------------------------------------

    all() { this.look(this.timeline.first, this.room); }

    /** Make the window so many times as long; what is at `share` of it stays there. */
    zoom(factor, share = 0.5) {
      const span = clamp(this.span * factor, this.room / MOST_ZOOM, this.room);
      this.look(this.from + (this.span - span) * share, span);
    }

    move(share) { this.look(this.from + share * this.span, this.span); }

    look(from, span) {
      const after = clamp(from - this.timeline.first, 0, this.room - span);
      this.peers.forEach((peer) => peer.see(after, span));
    }

    /** Show so much time, from so long after the first start. */
    see(after, span) {
      this.span = span;
      this.from = this.timeline.first + after;
      this.draw();
    }

    wheel(event) {
      const isAsked = event.ctrlKey || event.metaKey || event.shiftKey
        || document.activeElement === this.frame;
      if (!isAsked) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.move(Math.sign(event.deltaX || event.deltaY) * 0.1);
      } else {
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, clamp((this.timeOf(event) - this.from) / this.span, 0, 1));
      }
    }

    press(event) {
      const acts = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
        "0": () => this.all(),
        ArrowLeft: () => this.move(-0.1), ArrowRight: () => this.move(0.1),
        Home: () => this.look(-Infinity, this.span), End: () => this.look(Infinity, this.span),
      };
      const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : acts[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    }

    // --- under the pointer --------------------------------------------------------------------------

    timeOf(event) {
      const left = this.svg.getBoundingClientRect().left + sizes.labels;
      return this.from + (event.clientX - left) / this.perSecond;
    }

    point(event) {
      if (this.drag !== null) {
        this.tip.hidden = true;
        this.look(this.drag.from - (event.clientX - this.drag.x) / this.perSecond, this.span);
        return;
      }
      const time = this.timeOf(event);
      const y = event.clientY - this.svg.getBoundingClientRect().top;
      const { first, makespan } = this.timeline;
      const isInside = time >= this.from && time <= Math.min(this.from + this.span, first + makespan);
      const words = isInside ? this.wordsAt(time, y) : null;
      this.tip.hidden = words === null;
      if (words === null) return;
      this.tip.textContent = words;
      const box = this.box.getBoundingClientRect();
      const x = event.clientX - box.left + 14;
      this.tip.style.left = `${clamp(x, 0, Math.max(0, box.width - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${event.clientY - box.top + 18}px`;
    }

    wordsAt(time, y) {
      const { p } = this.timeline;
      const row = Math.floor(y / sizes.row);
      if (row < p) return this.passAt(row, time, y % sizes.row > sizes.row / 2);
      const rank = Math.floor((y - this.top) / sizes.memory);
      return y >= this.top && rank < p ? this.heldAt(rank, time) : null;
    }

    /** A time with its unit, counted from the first start. */
    time(value) { return this.length(value - this.timeline.first); }

    length(value) { return `${digits(value * this.unit.scale, 6)} ${this.unit.symbol}`.trim(); }

    /** Of a job, Megatron's pipeline rank; a V is on its ranks in mirror image. */
    number(rank) {
      const { p, place } = this.timeline;
      return constants.ofJob && place.rankOf.at(-1) !== p - 1 ? p - 1 - rank : rank;
    }

    passAt(rank, time, isLower) {
      const { place, ranks, paired, start, end } = this.timeline;
      let at = lastBefore(start[rank], time);
      if (!isLower && paired[rank].has(at - 1)) at -= 1;
      if (at < 0 || time > end[rank][at]) {
        const from = at < 0 ? this.timeline.first : end[rank][at];
        const to = start[rank][at + 1] ?? this.timeline.first + this.timeline.makespan;
        return `rank ${this.number(rank)}, idle\n${this.time(from)} to ${this.time(to)}: ${this.length(to - from)}`;
      }
      const pass = ranks[rank][at];
      const { kind, stage } = pass;
      const letter = LETTERS[kind];
      const chunk = place.chunks === 1 ? "" : ` (chunk ${place.chunkOf[stage]})`;
      const [from, to] = [start[rank][at], end[rank][at]];
      const pair = [paired[rank].has(at) && at + 1, paired[rank].has(at - 1) && at - 1]
        .filter((other) => other !== false).map((other) => ranks[rank][other])
        .map((q) => ` with ${LETTERS[q.kind]} of stage ${q.stage}, ${this.shades.wordsOf(q)}`);
      return `${letter}, ${constants.kinds[letter]}${pair.join("")}\nrank ${this.number(rank)}, stage ${stage}${chunk}, `
        + `${this.shades.wordsOf(pass)}\n${this.time(from)} to ${this.time(to)}: ${this.length(to - from)}`;
    }

    heldAt(rank, time) {
      const { times, held } = this.timeline.lines[rank];
      const now = held[lastBefore(times, time)] ?? 0;
      return `rank ${this.number(rank)} holds ${digits(now, 4)} microbatches at ${this.time(time)}\n`
        + `at most ${digits(this.timeline.peaks[rank], 4)}`;
    }

    // --- drawing ------------------------------------------------------------------------------------

    draw() {
      const { p } = this.timeline;
      const width = Math.max(this.frame.clientWidth, sizes.least);
      this.inner = width - sizes.labels - sizes.right;
      this.perSecond = this.inner / this.span;
      this.top = p * sizes.row + sizes.gap;
      this.bottom = this.top + p * sizes.memory;
      const height = this.bottom + sizes.axis;
      this.svg.setAttribute("width", width);
      this.svg.setAttribute("height", height);
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      // Nothing but numbers and the words of this file and of the palette goes in here.
      this.svg.innerHTML = this.names() + this.bars() + this.axis() + this.memory();
      this.shown.textContent = `${this.time(this.from)} to ${this.time(this.from + this.span)}`;
    }

    /** Pixels of a time, kept within the window. */
    x(time) {
      return sizes.labels + clamp((time - this.from) * this.perSecond, 0, this.inner);
    }

    y(rank, held) {
      return this.top + (rank + 1) * sizes.memory - 1 - (held / this.most) * sizes.most;
    }

    names() {
      const { p, first, makespan } = this.timeline;
      const left = this.x(first), width = this.x(first + makespan) - left;
      const rows = Array.from({ length: p }, (_, rank) =>
        `<text class="name" x="${sizes.labels - 8}" y="${rank * sizes.row + sizes.row / 2}">`
        + `rank ${this.number(rank)}</text>`);
      return `<rect class="ground" x="${left}" y="0" width="${width}" `
        + `height="${p * sizes.row}"/>${rows.join("")}`;
    }

    /** One path for all bars of a colour, and numbers where there is room. */
    bars() {
      const { shades } = this;
      const { ranks, paired, start, end } = this.timeline;
      const groups = LETTERS.flatMap((letter) => Array.from({ length: shades.count },
        (_, shade) => ({ letter, shade, path: [], numbers: [] })));
      const until = this.from + this.span;
      ranks.forEach((passes, rank) => {
        let first = Math.max(lastBefore(start[rank], this.from), 0);
        if (paired[rank].has(first - 1)) first -= 1;
        for (let i = first; i < passes.length && start[rank][i] < until; i += 1) {
          if (end[rank][i] <= this.from || isUnseen(passes[i], start[rank][i], end[rank][i])) continue;
          const { kind, microbatch } = passes[i];
          const group = groups[kind * shades.count + shades.of(passes[i])];
          const lower = paired[rank].has(i - 1);
          const half = lower || paired[rank].has(i) ? Number(lower) : null;
          this.bar(group, rank, start[rank][i], end[rank][i], microbatch, half);
        }
      });
      // Gaps between bars of a pixel or two would hide the bars.
      const thin = this.shortest(start, end) * this.perSecond < 6 ? " thin" : "";
      return groups.filter(({ path }) => path.length).map(({ letter, shade, path, numbers }) => {
        const [fill, ink] = shades.colours(letter, shade);
        return `<path class="bars${thin}" data-kind="${letter}" data-chunk="${shade}" `
          + `fill="${fill}" d="${path.join("")}"/>`
          + `<g class="numbers" fill="${ink}">${numbers.join("")}</g>`;
      }).join("");
    }

    /** What nine passes of ten take at least. */
    shortest(start, end) {
      if (this.usual?.timeline !== this.timeline) {
        const spans = start.flatMap((times, rank) => times.map((time, i) => end[rank][i] - time))
          .filter((span) => span > 0).sort((a, b) => a - b);
        this.usual = { timeline: this.timeline, span: spans[Math.floor(spans.length / 10)] ?? 0 };
      }
      return this.usual.span;
    }

    /** The two of a pair share its height: F, `half` 0, is above. */
    bar(group, rank, start, end, microbatch, half) {
      const x = this.x(start), width = this.x(end) - x;
      const height = half === null ? sizes.bar : sizes.bar / 2;
      const y = rank * sizes.row + (sizes.row - sizes.bar) / 2 + (half ?? 0) * height;
      group.path.push(`M${short(x)},${y}h${short(width)}v${height}h-${short(width)}z`);
      if (width < String(microbatch).length * sizes.digit + 1) return;
      group.numbers.push(
        `<text x="${short(x + width / 2)}" y="${y + height / 2}">${microbatch}</text>`);
    }

    axis() {
      const y = this.bottom;
      const { first } = this.timeline;
      const { scale, words } = this.unit;
      const [from, to] = [this.from - first, this.from - first + this.span].map((t) => t * scale);
      const times = ticks(from, to, this.inner / 90).map((time) => {
        const x = short(this.x(first + time / scale));
        return `<path class="axis" d="M${x},${y}v4"/>`
          + `<text class="tick" x="${x}" y="${y + 15}">${digits(time, 6)}</text>`;
      });
      return `<path class="axis" d="M${sizes.labels},${y}h${this.inner}"/>${times.join("")}`
        + `<text class="tick" x="${sizes.labels + this.inner / 2}" y="${y + 31}">${words}</text>`;
    }

    memory() {
      const worst = this.timeline.peaks.indexOf(Math.max(...this.timeline.peaks));
      const limit = this.limit === null ? "" : `; dotted: the limit, ${digits(this.limit, 4)}`;
      const caption = `<text class="caption" x="${sizes.labels}" y="${this.top - 9}">activation memory `
        + `held, in microbatches of a rank; dashed: 1F1B's peak, ${this.baseline}${limit}</text>`;
      return caption + this.timeline.lines.map((line, rank) => this.row(line, rank, rank === worst)).join("");
    }

    row(line, rank, isWorst) {
      const middle = this.top + rank * sizes.memory + sizes.memory / 2;
      const worst = isWorst ? " worst" : "";
      const level = (name, held) => (held === null ? ""
        : `<path class="${name}" d="M${sizes.labels},${short(this.y(rank, held))}h${this.inner}"/>`);
      return `<text class="name${worst}" x="${sizes.labels - 8}" y="${middle}">rank ${this.number(rank)}</text>`
        + `<path class="held" data-rank="${rank}" fill="${constants.memory}" `
        + `d="M${sizes.labels},${short(this.y(rank, 0))}${this.steps(line, rank)}"/>`
        + level("reference", this.baseline) + level("limit", this.limit)
        + `<text class="peak${worst}" x="${sizes.labels + this.inner + 6}" y="${middle}">`
        + `${digits(this.timeline.peaks[rank], 4)}${isWorst ? " most" : ""}</text>`;
    }

    /** The steps within the window, down to nothing at its end. */
    steps({ times, held }, rank) {
      const until = this.from + this.span;
      let path = "";
      const first = Math.max(lastBefore(times, this.from), 0);
      for (let i = first; i < times.length && times[i] < until; i += 1) {
        path += `H${short(this.x(times[i]))}V${short(this.y(rank, held[i]))}`;
      }
      return `${path}H${short(this.x(until))}V${short(this.y(rank, 0))}`;
    }
  }

  /** A list of the kinds that occur, with their colours. */
  function keys(timeline) {
    const { ranks, start, end } = timeline;
    const shades = new Shades(timeline);
    const found = new Set();
    ranks.forEach((passes, rank) => passes.forEach((pass, i) => {
      if (isUnseen(pass, start[rank][i], end[rank][i])) return;
      found.add(pass.kind * shades.count + shades.of(pass));
    }));
    const items = [...found].sort((a, b) => a - b).map((code) => {
      const letter = LETTERS[Math.floor(code / shades.count)], shade = code % shades.count;
      return key(`fill="${shades.colours(letter, shade)[0]}"`, constants.kinds[letter] + shades.label(shade));
    });
    return [...items, key('class="ground"', "idle")];
  }

  function key(fill, words) {
    const li = make("li");
    li.innerHTML = '<svg class="key" width="18" height="11" aria-hidden="true">'
      + `<rect width="18" height="11" ${fill}/></svg>`;
    li.append(words);
    return li;
  }

  /** The timeline of a picture's data. */
  function timelineOf({ order, costs, times }) {
    const decoded = pipelines.decode(order);
    const table = pipelines.costsOf(decoded.place, costs);
    return times === null ? pipelines.timeline(decoded, table)
      : pipelines.timeline(decoded, table, { start: times[0], end: times[1] });
  }

  const ofSection = new Map();
  for (const box of document.querySelectorAll(".picture[data-picture]")) {
    const data = JSON.parse(box.querySelector("script").textContent);
    const timeline = timelineOf(data);
    const picture = new Picture(box.querySelector(".still"));
    picture.show(timeline, { ...data, baseline: Math.min(timeline.p, timeline.m) });
    if (data.extent === null) continue;
    const section = box.closest("section");
    picture.peers = [...(ofSection.get(section) ?? []), picture];
    picture.peers.forEach((peer) => { peer.peers = picture.peers; });
    ofSection.set(section, picture.peers);
  }

  return { Picture, keys, make, digits };
})();
