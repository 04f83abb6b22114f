"use strict";

/* The explorer of a page: reads its controls, asks simulator.js, and draws as drawing.py does. */
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const { sizes, colours } = data;
  const LETTERS = pipelines.kinds;
  const MOST_COMPARED = 8000;
  const at = (id) => document.getElementById(id);
  const explorer = at("explorer");

  // --- controls ---------------------------------------------------------------------------------------

  const FIELDS = [
    { id: "p", what: "ranks, p", whole: true, least: 2, most: 128 },
    { id: "m", what: "microbatches, m", whole: true, least: 1, most: 1024 },
    { id: "forward", what: "forward, F", positive: true },
    { id: "backward", what: "input gradient, B", positive: true },
    { id: "weight", what: "weight gradient, W" },
    { id: "p2p", what: "transfer, p2p" },
    { id: "limit", what: "memory limit", positive: true, optional: true },
  ];

  function read(field) {
    const input = at(field.id);
    const text = input.value.trim();
    if (text === "" && field.optional && !input.validity.badInput) return null;
    const value = text === "" ? NaN : Number(text);
    if (field.whole && !(Number.isInteger(value) && value >= field.least && value <= field.most)) {
      throw new pipelines.Refused(
        `${field.what}: give a whole number from ${field.least} to ${field.most}`);
    }
    if (!Number.isFinite(value) || value < 0 || (field.positive && value === 0)) {
      const least = field.positive ? "above 0" : "of 0 or more";
      throw new pipelines.Refused(`${field.what}: give a number ${least}, such as 1.0`);
    }
    return value;
  }

  const setting = () => Object.fromEntries(FIELDS.map((field) => [field.id, read(field)]));

  // --- text -------------------------------------------------------------------------------------------

  const digits = (value, count) => String(Number(value.toPrecision(count)));
  const percent = (share, places = 1) => `${(100 * share).toFixed(places)}%`;
  const signed = (share) => (share < 0 ? "" : "+") + percent(share);
  const stockOf = ({ p, m }) => Math.min(p, m);

  function show(timeline, stock, now) {
    const peak = Math.max(...timeline.peaks);
    at("makespan").textContent = digits(timeline.makespan, 6);
    at("bubble").textContent = percent(timeline.bubble);
    at("peak").textContent = digits(peak, 4);
    at("share").textContent = percent(peak / stockOf(now));
    at("gain").textContent = signed(stock.makespan / timeline.makespan - 1);
  }

  function showCommand(name, now) {
    const limit = now.limit ?? (name === "greedy-v" ? 1 : null);
    const words = [
      "megatron-zb show", data.commands[name],
      `--pipeline-size ${now.p} --num-microbatches ${now.m}`,
      `--forward ${now.forward} --backward ${now.backward} --weight ${now.weight} --p2p ${now.p2p}`,
      ...(limit === null ? [] : [`--memory-limit ${limit}`]),
    ];
    at("command").textContent = words.join(" ");
    at("kind").textContent = kindOf(name, now);
  }

  /** How what is drawn compares with what the package runs; `found` is what it found for the page. */
  function kindOf(name, now) {
    if (data.exact.includes(name)) {
      return "This is the order that the package runs. It draws the same, in the terminal or as a file:";
    }
    const { found } = data;
    const isFound = found !== null && data.commands[name] === found.name
      && FIELDS.every(({ id }) => now[id] === data.initial[id]);
    const result = isFound ? `: at this setting it found ${digits(found.makespan, 6)}` : "";
    return `This is a quick order. The package's own search does better${result}. Run it with:`;
  }

  // --- drawing ----------------------------------------------------------------------------------------

  const short = (value) => String(Number(value.toFixed(2)));

  function scaleOf(timeline, now) {
    const spans = timeline.ranks.flatMap((passes, rank) =>
      passes.map((_, i) => timeline.end[rank][i] - timeline.start[rank][i])
        .filter((span) => span > 0)).sort((a, b) => a - b);
    const wanted = (timeline.makespan / spans[Math.floor(spans.length / 10)]) * sizes.shortest;
    const inner = Math.round(Math.min(Math.max(wanted, sizes.least), sizes.most));
    const top = timeline.place.p * sizes.row + sizes.gap;
    const bottom = top + sizes.memory;
    const levels = [stockOf(now), ...timeline.peaks, (now.limit ?? 0) * now.p];
    const most = Math.max(...levels);
    return {
      inner, top, bottom, most,
      first: Math.min(...timeline.start.map((times) => times[0])),
      perSecond: inner / timeline.makespan,
      x(time) { return sizes.labels + (time - this.first) * this.perSecond; },
      y(held) { return bottom - (held / most) * (sizes.memory - 8); },
    };
  }

  function draw(timeline, now, title) {
    const scale = scaleOf(timeline, now);
    const width = sizes.labels + scale.inner + sizes.right;
    const height = scale.bottom + sizes.axis;
    const svg = at("drawing");
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", title);
    // Nothing but numbers and the words of this file and of the palette goes in here.
    svg.innerHTML = names(timeline, scale) + bars(timeline, scale) + axis(timeline, scale)
      + memory(timeline, scale, now);
  }

  function names(timeline, scale) {
    const ground = `<rect class="ground" x="${sizes.labels}" y="0" width="${scale.inner}" `
      + `height="${timeline.place.p * sizes.row}"/>`;
    const words = timeline.ranks.map((_, rank) =>
      `<text class="name" x="${sizes.labels - 8}" y="${rank * sizes.row + sizes.row / 2}">`
      + `rank ${rank}</text>`);
    return ground + words.join("");
  }

  /** One path for all bars of a colour, and numbers where there is room. */
  function bars(timeline, scale) {
    const groups = new Map();
    timeline.ranks.forEach((passes, rank) => passes.forEach((pass, i) => {
      const chunk = timeline.place.chunkOf[pass.stage];
      const name = `${pass.kind} ${chunk}`;
      if (!groups.has(name)) groups.set(name, { kind: pass.kind, chunk, path: [], numbers: [] });
      const x = scale.x(timeline.start[rank][i]);
      const width = (timeline.end[rank][i] - timeline.start[rank][i]) * scale.perSecond;
      bar(groups.get(name), rank, x, width, pass.microbatch);
    }));
    return [...groups.values()].map(({ kind, chunk, path, numbers }) => {
      const letter = LETTERS[kind];
      return `<path class="bars" data-kind="${letter}" data-chunk="${chunk}" `
        + `fill="${colours.bars[letter][chunk]}" d="${path.join("")}"/>`
        + `<g class="numbers" fill="${colours.numbers[letter][chunk]}">${numbers.join("")}</g>`;
    }).join("");
  }

  function bar(group, rank, x, width, microbatch) {
    const y = rank * sizes.row + (sizes.row - sizes.bar) / 2;
    group.path.push(`M${short(x)},${y}h${short(width)}v${sizes.bar}h-${short(width)}z`);
    if (width < String(microbatch).length * sizes.digit + 1) return;
    group.numbers.push(
      `<text x="${short(x + width / 2)}" y="${y + sizes.bar / 2}">${microbatch}</text>`);
  }

  function ticks(most, about) {
    const rough = most / Math.max(about, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough * (1 - 1e-9));
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
  }

  function axis(timeline, scale) {
    const y = scale.bottom;
    const times = ticks(timeline.makespan, scale.inner / 90).map((time) => {
      const x = short(scale.x(scale.first + time));
      return `<path class="axis" d="M${x},${y}v4"/>`
        + `<text class="tick" x="${x}" y="${y + 15}">${digits(time, 6)}</text>`;
    });
    const levels = ticks(scale.most, 4).map((held) =>
      `<text class="name" x="${sizes.labels - 8}" y="${short(scale.y(held))}">`
      + `${digits(held, 4)}</text>`);
    return `<path class="axis" d="M${sizes.labels},${scale.top}V${y}h${scale.inner}"/>`
      + times.join("") + levels.join("")
      + `<text class="tick" x="${sizes.labels + scale.inner / 2}" y="${y + 29}">time</text>`
      + `<text class="caption" x="${sizes.labels}" y="${scale.top - 8}">`
      + "activation memory held, in microbatches of a rank</text>";
  }

  function memory(timeline, scale, now) {
    const worst = worstOf(timeline);
    const lines = timeline.lines.map((line, rank) => memoryLine(timeline, line, rank, scale));
    const [onTop] = lines.splice(worst, 1);
    const limit = now.limit === null ? "" : level(
      "limit", now.limit * now.p, colours.worst, "memory limit", scale, sizes.labels + 110);
    const stock = level("reference", stockOf(now), colours.reference,
      `1F1B's peak: ${stockOf(now)}`, scale, sizes.labels + 4);
    return lines.join("") + onTop + stock + limit;
  }

  function level(name, held, colour, words, scale, x) {
    const y = scale.y(held);
    return `<path class="${name}" stroke="${colour}" d="M${sizes.labels},${short(y)}h${scale.inner}"/>`
      + `<text class="level" x="${x}" y="${short(y + 12)}">${words}</text>`;
  }

  const worstOf = ({ peaks }) => peaks.indexOf(Math.max(...peaks));

  function lineColour(timeline, rank) {
    if (rank === worstOf(timeline)) return colours.worst;
    const channels = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    const [dark, light] = colours.ranks.map(channels);
    const share = rank / Math.max(timeline.place.p - 1, 1);
    const mixed = dark.map((a, i) => Math.round(a + (light[i] - a) * share));
    return `rgb(${mixed.join(",")})`;
  }

  function memoryLine(timeline, line, rank, scale) {
    const steps = line.times.map((time, i) =>
      `H${short(scale.x(time))}V${short(scale.y(line.held[i]))}`);
    const name = rank === worstOf(timeline) ? "line worst" : "line";
    return `<path class="${name}" data-rank="${rank}" stroke="${lineColour(timeline, rank)}" `
      + `d="M${sizes.labels},${short(scale.y(0))}${steps.join("")}"/>`;
  }

  // --- legends ----------------------------------------------------------------------------------------

  function keys(timeline) {
    const found = new Set();
    timeline.ranks.forEach((passes) => passes.forEach(({ kind, stage }) =>
      found.add(kind * 2 + timeline.place.chunkOf[stage])));
    return [...found].sort((a, b) => a - b).map((code) => {
      const [letter, chunk] = [LETTERS[code >> 1], code & 1];
      const words = colours.kinds[letter];
      return item(`<rect width="18" height="11" fill="${colours.bars[letter][chunk]}"/>`,
        timeline.place.chunks === 1 ? words : `${words}, chunk ${chunk}`);
    });
  }

  function peaks(timeline, now) {
    const title = document.createElement("li");
    title.className = "title";
    title.textContent = `most held, in microbatches (1F1B: ${stockOf(now)})`;
    const items = timeline.peaks.map((peak, rank) => {
      const isWorst = rank === worstOf(timeline);
      const line = `<path d="M0,6h18" stroke="${lineColour(timeline, rank)}" `
        + `stroke-width="${isWorst ? 3.5 : 2}"/>`;
      return item(line, `rank ${rank}: ${digits(peak, 4)}`, isWorst ? "worst" : "");
    });
    return [title, ...items];
  }

  function item(shape, words, name = "") {
    const li = document.createElement("li");
    li.className = name;
    li.innerHTML = `<svg class="key" width="18" height="11" aria-hidden="true">${shape}</svg>`;
    li.append(words);
    return li;
  }

  // --- all of them ------------------------------------------------------------------------------------

  function compare(now, stock) {
    const tooMany = 6 * now.p * now.m > MOST_COMPARED;
    at("too-many").hidden = !tooMany;
    at("comparison").hidden = tooMany;
    if (tooMany) return;
    const rows = data.order.map((name) => row(name, now, stock));
    at("comparison").tBodies[0].replaceChildren(...rows);
  }

  function row(name, now, stock) {
    const tr = document.createElement("tr");
    tr.className = name === at("schedule").value ? "chosen" : "";
    tr.dataset.schedule = name;
    const cell = (text) => Object.assign(tr.insertCell(), { textContent: text });
    const choose = Object.assign(document.createElement("button"), { textContent: data.labels[name] });
    choose.addEventListener("click", () => {
      at("schedule").value = name;
      redraw();
    });
    const first = cell("");
    first.className = "words";
    first.append(choose);
    const timeline = attempt(() => pipelines.build(name, now));
    if (timeline.refused) {
      Object.assign(cell(timeline.refused), { colSpan: 5, className: "words" });
      return tr;
    }
    const peak = Math.max(...timeline.peaks);
    cell(digits(timeline.makespan, 6));
    cell(signed(stock.makespan / timeline.makespan - 1));
    cell(percent(timeline.bubble));
    cell(digits(peak, 4));
    cell(percent(peak / stockOf(now)));
    return tr;
  }

  // --- all together -----------------------------------------------------------------------------------

  /** What the reader can mend becomes {refused}; all else is thrown on. */
  function attempt(work) {
    try {
      return work();
    } catch (error) {
      if (!(error instanceof pipelines.Refused)) throw error;
      return { refused: error.message };
    }
  }

  function redraw() {
    const name = at("schedule").value;
    const now = attempt(setting);
    const timeline = now.refused ? now : attempt(() => pipelines.build(name, now));
    const stock = now.refused ? now : attempt(() => pipelines.build("1f1b", { ...now, limit: null }));
    const problem = timeline.refused ?? stock.refused;
    at("problem").hidden = problem === undefined;
    at("problem").textContent = problem ?? "";
    for (const id of ["readings", "drawn"]) at(id).classList.toggle("stale", problem !== undefined);
    if (!now.refused) showCommand(name, now);
    if (problem === undefined) {
      show(timeline, stock, now);
      draw(timeline, now, `${data.labels[name]}: ${now.p} ranks, ${now.m} microbatches`);
      at("drawn-keys").replaceChildren(...keys(timeline));
      at("drawn-peaks").replaceChildren(...peaks(timeline, now));
    }
    if (!now.refused && !stock.refused) compare(now, stock);
    explorer.dataset.redrawn = String(Number(explorer.dataset.redrawn) + 1);
  }

  /** A button beside everything that is to be pasted. */
  function addCopyButton(box) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "copy" });
    button.addEventListener("click", () => {
      const text = box.querySelector("pre");
      getSelection().selectAllChildren(text);
      navigator.clipboard?.writeText(text.textContent).then(() => {
        button.textContent = "copied";
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      }, () => {});
    });
    box.append(button);
  }

  let waiting = 0;
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("controls").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 80);
  });
  document.querySelectorAll(".command").forEach(addCopyButton);
  redraw();
})();
