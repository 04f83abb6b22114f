"use strict";

/*
 * Orders of passes carried out in the browser: the same sums, in the same order, as
 * megatron_zb.schedules.simulator, so that times agree to the last bit. No order is made here: they
 * all come from the package (megatron_zb.drawing.html_drawing).
 *
 * A pass is {kind, stage, microbatch}; times are in the unit of the costs, memory in microbatches of
 * the first rank. paired[r] has the positions of the F of rank r that run as one with the pass behind.
 * inputs[r] has, for each pass of rank r, those that it waits for: numbers that count rank by rank.
 */
const pipelines = (() => {
  const F = 0, B = 1, W = 2, BW = 3;
  const kinds = ["F", "B", "W", "BW", "U"];
  const FIRST = "A".charCodeAt(0);
  const range = (length) => Array.from({ length }, (_, i) => i);

  function placement(p, rankOf) {
    const stagesOf = range(p).map(() => []);
    rankOf.forEach((rank, stage) => stagesOf[rank].push(stage));
    const chunkOf = rankOf.map((rank, stage) => stagesOf[rank].indexOf(stage));
    return { p, rankOf, stagesOf, chunkOf, chunks: rankOf.length / p, stages: rankOf.length };
  }

  /** The placement and the passes of each rank, from what html_drawing.py has written. */
  function decode({ name, p, m, rank_of: rankOf, ranks, pairs, turns = {}, inputs, owners }) {
    const place = placement(p, rankOf);
    const passes = ranks.map((text, rank) => passesOf(place, rank, text, turns));
    return {
      name, p, m, place, owners,
      ranks: passes,
      inputs: inputs ?? chain(place, passes),
      paired: ranks.map((_, rank) => new Set(pairs?.[rank])),
    };
  }

  const gradientsOf = (kind) => (kind === BW ? [B, W] : [kind]);

  /** Each kind of pass of a stage takes the microbatches in turn, or those of its list. */
  function passesOf(place, rank, text, turns) {
    const take = (kind, stage, count) => {
      const lists = turns[kinds[kind]];
      return lists === undefined ? count : lists[lists.length === 1 ? 0 : stage][count];
    };
    const done = range(place.stages).map(() => kinds.map(() => 0));
    return Array.from(text, (letter) => {
      const code = letter.charCodeAt(0) - FIRST;
      const kind = Math.floor(code / place.chunks);
      const stage = place.stagesOf[rank][code % place.chunks];
      const gradients = gradientsOf(kind);
      const microbatch = take(gradients[0], stage, done[stage][gradients[0]]);
      gradients.forEach((gradient) => { done[stage][gradient] += 1; });
      return { kind, stage, microbatch };
    });
  }

  /** F waits for the stage before, and B for the one behind. */
  function chain(place, ranks) {
    const key = (kind, stage, microbatch) =>
      (microbatch * place.stages + stage) * kinds.length + kind;
    const number = new Map();
    let count = 0;
    ranks.forEach((passes) => passes.forEach(({ kind, stage, microbatch }) => {
      gradientsOf(kind).forEach((role) => number.set(key(role, stage, microbatch), count));
      count += 1;
    }));
    const inputsOf = ({ kind, stage, microbatch }) => {
      if (kind === F) return stage === 0 ? [] : [number.get(key(F, stage - 1, microbatch))];
      const isLast = stage === place.stages - 1;
      return (kind === B || kind === BW) && !isLast ? [number.get(key(B, stage + 1, microbatch))] : [];
    };
    return ranks.map((passes) => passes.map(inputsOf));
  }

  /** Equal stages, from times of one microbatch or update on one rank and of a transfer. */
  function equalCosts(place, { forward, backward, weight, p2p, update = 0 }) {
    const each = (value) => range(place.stages).map(() => value / place.chunks);
    const latency = (from, to) =>
      to < 0 || to >= place.stages || place.rankOf[from] === place.rankOf[to] ? 0 : p2p;
    return {
      forward: each(forward),
      backward: each(backward),
      weight: each(weight),
      update: each(update),
      activation: each(1),
      heldForWeight: each(1),
      forwardP2p: range(place.stages).map((s) => latency(s, s + 1)),
      backwardP2p: range(place.stages).map((s) => latency(s, s - 1)),
      whole: [],
      forwardComm: each(0),
      backwardComm: each(0),
      pairLoss: 0,
    };
  }

  /** Costs as drawing.py has written them: one entry stands for equal stages. */
  function costsOf(place, table) {
    const all = (values) => (values.length === 1 ? range(place.stages).map(() => values[0]) : values);
    const orNothing = (values) => all(values.length ? values : [0]);
    return {
      forward: all(table.forward),
      backward: all(table.backward),
      weight: all(table.weight),
      update: orNothing(table.update),
      activation: all(table.activation),
      heldForWeight: all(table.held_for_weight),
      forwardP2p: all(table.forward_p2p),
      backwardP2p: all(table.backward_p2p),
      whole: all(table.whole),
      forwardComm: orNothing(table.forward_comm),
      backwardComm: orNothing(table.backward_comm),
      pairLoss: table.pair_loss[0],
    };
  }

  /** The costs of a table for other mean times: each stage and link keeps its share of them. */
  function scaledCosts(place, costs, before, now) {
    const equal = equalCosts(place, now);
    const scaled = (name, time) =>
      (before[time] > 0 ? costs[name].map((v) => v * (now[time] / before[time])) : equal[name]);
    const both = (now.backward + now.weight) / (before.backward + before.weight);
    return {
      ...costs,
      forward: scaled("forward", "forward"),
      backward: scaled("backward", "backward"),
      weight: scaled("weight", "weight"),
      forwardP2p: scaled("forwardP2p", "p2p"),
      backwardP2p: scaled("backwardP2p", "p2p"),
      whole: costs.whole.map((v) => v * both),
      forwardComm: scaled("forwardComm", "forward"),
      backwardComm: scaled("backwardComm", "backward"),
    };
  }

  function durations(costs) {
    const fused = costs.whole.length ? costs.whole
      : costs.backward.map((time, stage) => time + costs.weight[stage]);
    return [costs.forward, costs.backward, costs.weight, fused, costs.update];
  }

  /** What both compute, their all-to-all, or all of one of them, whichever takes longest. */
  function pairSeconds(costs, times, f, b) {
    const forward = times[f.kind][f.stage], backward = times[b.kind][b.stage];
    const allToAll = costs.forwardComm[f.stage] + costs.backwardComm[b.stage];
    const compute = forward + backward - allToAll;
    return Math.max(compute, allToAll, forward, backward) * (1 + costs.pairLoss);
  }

  /** Run every rank's passes as early as its order and inputs allow. */
  function simulate({ ranks, inputs, paired }, costs) {
    const times = durations(costs);
    const latencies = { [F]: costs.forwardP2p, [B]: costs.backwardP2p, [BW]: costs.backwardP2p };
    const ready = [];
    const waiting = new Map();
    let count = 0;
    const firsts = ranks.map((passes) => (count += passes.length) - passes.length);
    const clock = ranks.map(() => 0);
    const start = ranks.map(() => []);
    const end = ranks.map(() => []);
    const runnable = range(ranks.length);

    function run(rank, { kind, stage }, begin, finish) {
      const made = firsts[rank] + start[rank].length;
      clock[rank] = finish;
      start[rank].push(begin);
      end[rank].push(finish);
      ready[made] = finish + (latencies[kind]?.[stage] ?? 0);
      runnable.push(...(waiting.get(made) ?? []));
      waiting.delete(made);
    }

    while (runnable.length) {
      const rank = runnable.pop();
      while (start[rank].length < ranks[rank].length) {
        const at = start[rank].length;
        const passes = ranks[rank].slice(at, paired[rank].has(at) ? at + 2 : at + 1);
        const needed = passes.flatMap((_, i) => inputs[rank][at + i]);
        const missing = needed.find((input) => ready[input] === undefined);
        if (missing !== undefined) {
          waiting.set(missing, [...(waiting.get(missing) ?? []), rank]);
          break;
        }
        const begin = Math.max(clock[rank], ...needed.map((input) => ready[input]));
        const [{ kind, stage }] = passes;
        const finish = begin + (passes.length === 2
          ? pairSeconds(costs, times, ...passes) : times[kind][stage]);
        for (const pass of passes) run(rank, pass, begin, finish);
      }
    }
    return { start, end };
  }

  /** What a timeline comes to; `start` and `end` run beside the passes of each rank. */
  function timeline(order, costs, { start, end } = simulate(order, costs)) {
    const { place, ranks, paired } = order;
    const times = durations(costs);
    const first = Math.min(...start.filter((t) => t.length).map((t) => t[0]));
    const makespan = Math.max(...end.filter((t) => t.length).map((t) => t[t.length - 1])) - first;
    let busy = 0;
    ranks.forEach((passes, rank) => passes.forEach((pass, i) => {
      if (paired[rank].has(i)) busy += pairSeconds(costs, times, pass, passes[i + 1]);
      else if (!paired[rank].has(i - 1)) busy += times[pass.kind][pass.stage];
    }));
    const unit = costs.activation.slice(0, place.chunks).reduce((a, b) => a + b, 0) || 1;
    const lines = ranks.map((passes, rank) => memoryLine(passes, start[rank], end[rank], costs, unit));
    return {
      ...order, start, end, first, makespan, lines,
      bubble: 1 - busy / (ranks.length * makespan),
      peaks: lines.map((line) => line.held.reduce((a, b) => Math.max(a, b), 0)),
    };
  }

  /** Steps of what a rank holds: held[i] from times[i] on. */
  function memoryLine(passes, start, end, costs, unit) {
    const times = [], held = [];
    let now = 0;
    function step(time) {
      if (held.length && held[held.length - 1] === now / unit) return;
      times.push(time);
      held.push(now / unit);
    }
    passes.forEach(({ kind, stage }, i) => {
      const activation = costs.activation[stage], kept = costs.heldForWeight[stage];
      if (kind === F) now += activation;
      step(start[i]);
      if (kind === B) now -= activation - kept;
      if (kind === W) now -= kept;
      if (kind === BW) now -= activation;
      if (i + 1 === passes.length || start[i + 1] > end[i]) step(end[i]);
    });
    return { times, held };
  }

  return { decode, equalCosts, costsOf, scaledCosts, timeline, kinds };
})();
