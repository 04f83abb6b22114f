"use strict";

/*
 * Orders of passes carried out in the browser: the same sums, in the same order, as
 * megatron_zb.schedules.simulator, so that times agree to the last bit. No order is made here: they
 * all come from the package (megatron_zb.drawing.html_drawing).
 *
 * A pass is {kind, stage, microbatch}; times are in the unit of the costs, memory in microbatches of
 * the first rank. paired[r] has the positions of the F of rank r that run as one with the pass behind.
 */
const pipelines = (() => {
  const F = 0, B = 1, W = 2, BW = 3;
  const FIRST = "A".charCodeAt(0);
  const range = (length) => Array.from({ length }, (_, i) => i);

  function placement(p, rankOf) {
    const stagesOf = range(p).map(() => []);
    rankOf.forEach((rank, stage) => stagesOf[rank].push(stage));
    const chunkOf = rankOf.map((rank, stage) => stagesOf[rank].indexOf(stage));
    return { p, rankOf, stagesOf, chunkOf, chunks: rankOf.length / p, stages: rankOf.length };
  }

  /** The placement and the passes of each rank, from what html_drawing.py has written. */
  function decode({ name, p, m, rank_of: rankOf, ranks, pairs }) {
    const place = placement(p, rankOf);
    return {
      name, p, m, place,
      ranks: ranks.map((text, rank) => passesOf(place, rank, text)),
      paired: ranks.map((_, rank) => new Set(pairs?.[rank])),
    };
  }

  /** F, input gradients and weight gradients of a stage each take the microbatches in turn. */
  function passesOf(place, rank, text) {
    const done = range(place.stages).map(() => [0, 0, 0]);
    return Array.from(text, (letter) => {
      const code = letter.charCodeAt(0) - FIRST;
      const kind = Math.floor(code / place.chunks);
      const stage = place.stagesOf[rank][code % place.chunks];
      const gradients = kind === BW ? [B, W] : [kind];
      const microbatch = done[stage][gradients[0]];
      gradients.forEach((gradient) => { done[stage][gradient] += 1; });
      return { kind, stage, microbatch };
    });
  }

  /** Equal stages, from times of one microbatch on one rank and of a transfer. */
  function equalCosts(place, { forward, backward, weight, p2p }) {
    const each = (value) => range(place.stages).map(() => value / place.chunks);
    const latency = (from, to) =>
      to < 0 || to >= place.stages || place.rankOf[from] === place.rankOf[to] ? 0 : p2p;
    return {
      forward: each(forward),
      backward: each(backward),
      weight: each(weight),
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
    return {
      forward: all(table.forward),
      backward: all(table.backward),
      weight: all(table.weight),
      activation: all(table.activation),
      heldForWeight: all(table.held_for_weight),
      forwardP2p: all(table.forward_p2p),
      backwardP2p: all(table.backward_p2p),
      whole: all(table.whole),
      forwardComm: table.forward_comm.length ? all(table.forward_comm) : range(place.stages).map(() => 0),
      backwardComm: table.backward_comm.length ? all(table.backward_comm) : range(place.stages).map(() => 0),
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
    return [costs.forward, costs.backward, costs.weight, fused];
  }

  /** What both compute, their all-to-all, or all of one of them, whichever takes longest. */
  function pairSeconds(costs, times, f, b) {
    const forward = times[f.kind][f.stage], backward = times[b.kind][b.stage];
    const allToAll = costs.forwardComm[f.stage] + costs.backwardComm[b.stage];
    const compute = forward + backward - allToAll;
    return Math.max(compute, allToAll, forward, backward) * (1 + costs.pairLoss);
  }

  const key = (place, kind, stage, microbatch) =>
    (microbatch * (place.stages + 2) + stage + 1) * 2 + (kind === F ? 0 : 1);

  /** Run every rank's passes as early as its order and inputs allow. */
  function simulate({ place, ranks, paired }, costs) {
    const times = durations(costs);
    const ready = new Map();
    const waiting = new Map();
    const clock = ranks.map(() => 0);
    const start = ranks.map(() => []);
    const end = ranks.map(() => []);
    const runnable = range(ranks.length);

    function inputOf({ kind, stage, microbatch }) {
      const first = kind === F ? 0 : place.stages - 1;
      return kind === W || stage === first ? null : key(place, kind, stage, microbatch);
    }

    function run(rank, { kind, stage, microbatch }, begin, finish) {
      clock[rank] = finish;
      start[rank].push(begin);
      end[rank].push(finish);
      if (kind === W) return;
      const latency = kind === F ? costs.forwardP2p[stage] : costs.backwardP2p[stage];
      const made = key(place, kind, kind === F ? stage + 1 : stage - 1, microbatch);
      ready.set(made, finish + latency);
      if (waiting.has(made)) {
        runnable.push(waiting.get(made));
        waiting.delete(made);
      }
    }

    while (runnable.length) {
      const rank = runnable.pop();
      while (start[rank].length < ranks[rank].length) {
        const at = start[rank].length;
        const passes = ranks[rank].slice(at, paired[rank].has(at) ? at + 2 : at + 1);
        const inputs = passes.map(inputOf).filter((input) => input !== null);
        const missing = inputs.find((input) => !ready.has(input));
        if (missing !== undefined) {
          waiting.set(missing, rank);
          break;
        }
        const begin = Math.max(clock[rank], ...inputs.map((input) => ready.get(input)));
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

  const kinds = ["F", "B", "W", "BW"];
  return { decode, equalCosts, costsOf, scaledCosts, timeline, kinds };
})();
