"use strict";

/*
 * The explorer of a page: carries the orders that the page has out with the reader's costs. It makes
 * no order of its own, and offers the sizes that the page has.
 */
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const { digits, keys, make, Picture } = pictures;
  const at = (id) => document.getElementById(id);
  const explorer = at("explorer");
  const picture = new Picture(at("drawing"));
  const COSTS = ["forward", "backward", "weight", "p2p"];

  /** What the reader can mend, in one sentence. */
  class Refused extends Error {}

  // --- controls ---------------------------------------------------------------------------------------

  const FIELDS = [
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
    if (!Number.isFinite(value) || value < 0 || (field.positive && value === 0)) {
      const least = field.positive ? "above 0" : "of 0 or more";
      throw new Refused(`${field.what}: give a number ${least}, such as 1.0`);
    }
    return value;
  }

  const setting = () => ({
    p: Number(at("p").value), m: Number(at("m").value),
    ...Object.fromEntries(FIELDS.map((field) => [field.id, read(field)])),
  });

  // --- sizes ------------------------------------------------------------------------------------------

  /** The microbatches of each number of ranks that the page has of a schedule. */
  function sizesOf(name) {
    const sizes = new Map();
    const own = data.orders.map(({ order }) => order).filter((order) => order.name === name)
      .sort((a, b) => a.p - b.p || a.m - b.m);
    for (const { p, m } of own) sizes.set(p, [...(sizes.get(p) ?? []), m]);
    return sizes;
  }

  /** Choices of a field; the one nearest to what it had is chosen. */
  function offer(id, values) {
    const before = Number(at(id).value || data.initial[id]);
    const nearest = values.reduce((a, b) => (Math.abs(b - before) < Math.abs(a - before) ? b : a));
    at(id).replaceChildren(...values.map((value) => make("option", { textContent: value })));
    at(id).value = nearest;
    return nearest;
  }

  function offerSizes(name) {
    const sizes = sizesOf(name);
    const p = offer("p", [...sizes.keys()]);
    offer("m", sizes.get(p));
    const listed = [...sizes].map(([ranks, ms], i) =>
      `${ranks}${i ? "" : " ranks"} with ${ms.join(", ")}${i ? "" : " microbatches"}`);
    at("offered").textContent = [`This page has ${name} on ${listed.join("; ")}.`, data.work.note].join(" ").trim();
  }

  // --- orders -----------------------------------------------------------------------------------------

  const decoded = new Map();

  /** The order of a schedule at the sizes of a setting; undefined where the page has none. */
  function find(name, now) {
    const found = data.orders.find(({ order }) =>
      order.name === name && order.p === now.p && order.m === now.m);
    if (found && !decoded.has(found)) decoded.set(found, pipelines.decode(found.order));
    return found && { ...found, decoded: decoded.get(found) };
  }

  function timelineOf({ decoded: order, costs }, now) {
    const times = Object.fromEntries(COSTS.map((name) => [name, now[name] / data.unit.scale]));
    times.update = data.work.update;
    if (costs === null) return pipelines.timeline(order, pipelines.equalCosts(order.place, times));
    const table = pipelines.costsOf(order.place, costs);
    const isAsBefore = COSTS.every((name) => now[name] === data.initial[name]);
    const before = Object.fromEntries(
      COSTS.map((name) => [name, data.initial[name] / data.unit.scale]));
    return pipelines.timeline(order,
      isAsBefore ? table : pipelines.scaledCosts(order.place, table, before, times));
  }

  // --- text -------------------------------------------------------------------------------------------

  /** With one digit, and a quarter to the even one as in Python: the page's tables say the same. */
  function percent(share) {
    const value = 100 * share;
    return `${(Math.abs((4 * value) % 4) === 1 ? value - 0.01 * Math.sign(value) : value).toFixed(1)}%`;
  }
  const signed = (share) => (share < 0 ? "" : "+") + percent(share);
  const baselineOf = ({ p, m }) => Math.min(p, m);
  const peakOf = ({ peaks }) => Math.max(...peaks);
  const timeOf = (time) => digits(time * data.unit.scale, 6);
  const isOver = (timeline, now) =>
    now.limit !== null && peakOf(timeline) > now.limit * now.p * (1 + 1e-9);

  function show(timeline, baseline, now) {
    const peak = peakOf(timeline);
    at("makespan").textContent = timeOf(timeline.makespan);
    at("bubble").textContent = percent(timeline.bubble);
    at("peak").textContent = digits(peak, 4);
    at("share").textContent = percent(peak / baselineOf(now));
    at("gain").textContent = baseline ? signed(baseline.makespan / timeline.makespan - 1) : "not known here";
  }

  function showCommand(name, now, found) {
    const { choices } = found;
    at("command").parentElement.hidden = choices === null;
    const words = [
      "megatron-zb show", name,
      `--pipeline-size ${now.p}`, data.work.flags || `--num-microbatches ${now.m}`,
      ...COSTS.map((cost) => `--${cost} ${now[cost]}`),
      ...(choices ? [choices] : []),
      ...(now.limit === null ? [] : [`--memory-limit ${now.limit}`]),
    ];
    at("command").textContent = words.join(" ");
  }

  /** Whether the package builds just this order for a setting. */
  function isPackages({ built }, now) {
    if (built === null) return now.limit === null;
    return [...COSTS, "limit"].every((name) => built[name] === now[name]);
  }

  const builtFor = ({ built }) => (built === null ? "any costs"
    : COSTS.map((name) => built[name]).join(", ")
      + (built.limit === null ? "" : `, limit ${built.limit}`));

  /** Where the order that is drawn comes from. */
  function kindOf(found, timeline, now) {
    const over = isOver(timeline, now)
      ? `It holds ${percent(peakOf(timeline) / now.p)} of 1F1B's memory, more than the limit. ` : "";
    if (!data.alike) {
      return `${over}This is the order of the page's table, carried out with its costs. `
        + (found.choices === null ? "" : "The command takes ranks that are all alike, so its figures differ:");
    }
    if (isPackages(found, now)) {
      return found.choices === null ? `${over}This is the order of the table that the page was made from.`
        : `${over}This is the order that the package builds for this setting. The command draws the same:`;
    }
    const what = found.built === null ? "This order is the same for all costs"
      : `This order was built for F, B, W and transfer of ${builtFor(found)}`;
    const more = found.built === null ? "it keeps no memory limit but its own."
      : "for others the package searches another, which may be faster.";
    return `${over}${what}; what it takes at your costs is computed exactly, and ${more} `
      + (found.choices === null ? "" : "The command asks the package:");
  }

  // --- all of them ------------------------------------------------------------------------------------

  function compare(now, baseline) {
    at("comparison").tBodies[0].replaceChildren(
      ...data.names.filter((name) => find(name, now)).map((name) => row(name, now, baseline)));
  }

  function row(name, now, baseline) {
    const tr = make("tr", { className: name === at("schedule").value ? "chosen" : "" });
    tr.dataset.schedule = name;
    const cell = (text) => Object.assign(tr.insertCell(), { textContent: text });
    const choose = make("button", { type: "button", textContent: name });
    choose.addEventListener("click", () => {
      at("schedule").value = name;
      redraw();
    });
    const first = cell("");
    first.className = "words";
    first.append(choose);
    const found = find(name, now);
    const timeline = timelineOf(found, now);
    const peak = peakOf(timeline);
    cell(timeOf(timeline.makespan));
    cell(baseline ? signed(baseline.makespan / timeline.makespan - 1) : "");
    cell(percent(timeline.bubble));
    cell(digits(peak, 4));
    cell(percent(peak / baselineOf(now)) + (isOver(timeline, now) ? ", over the limit" : ""));
    cell(data.alike ? builtFor(found) : "the page's costs");
    return tr;
  }

  // --- all together -----------------------------------------------------------------------------------

  /** What the reader can mend becomes {refused}; all else is thrown on. */
  function attempt(work) {
    try {
      return work();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      return { refused: error.message };
    }
  }

  function redraw() {
    const name = at("schedule").value;
    offerSizes(name);
    const now = attempt(setting);
    at("problem").hidden = true;
    at("results").hidden = now.refused !== undefined;
    if (now.refused) clear(now.refused);
    else draw(name, now);
    explorer.dataset.redrawn = String(Number(explorer.dataset.redrawn) + 1);
  }

  /** No figure of an earlier setting stays beside the sentence. */
  function clear(problem) {
    at("problem").hidden = false;
    at("problem").textContent = problem;
    explorer.querySelectorAll("output, #kind, #command, tbody, #drawn-keys")
      .forEach((element) => element.replaceChildren());
    picture.clear();
  }

  function draw(name, now) {
    const found = find(name, now), reference = find("1f1b", now);
    const baseline = reference && timelineOf(reference, now);
    const timeline = timelineOf(found, now);
    show(timeline, baseline, now);
    showCommand(name, now, found);
    compare(now, baseline);
    at("kind").textContent = kindOf(found, timeline, now);
    picture.show(timeline, {
      title: `${name}: ${now.p} ranks, ${now.m} microbatches`,
      unit: data.unit,
      baseline: baselineOf(now),
      limit: now.limit === null ? null : now.limit * now.p,
    });
    at("drawn-keys").replaceChildren(...keys(timeline));
  }

  /** A button beside everything that is to be pasted. */
  function addCopyButton(box) {
    const button = make("button", { type: "button", textContent: "copy" });
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
