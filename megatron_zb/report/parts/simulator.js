"use strict";

/*
 * Pipeline schedules in the browser: the same sums, in the same order, as megatron_zb.schedules, so
 * that times agree to the last bit. A pass is {kind, stage, microbatch}; times are in the unit of the
 * setting's costs, memory in microbatches of a whole rank.
 *
 * A setting is {p, m, forward, backward, weight, p2p, limit}: ranks, microbatches, the times of one
 * microbatch on one rank and of a transfer, and the most memory as a share of 1F1B's peak or null.
 */
const pipelines = (() => {
  const F = 0, B = 1, W = 2, BW = 3;
  const EAGERNESS = [1.0, 0.75, 0.5, 0.25, 0.0];
  const MOST_PASSES = 60000;
  const INTERVAL = 6;

  /** What the reader can mend, in one sentence. */
  class Refused extends Error {}

  // --- placements and costs -----------------------------------------------------------------------

  function placement(p, rankOf) {
    const stagesOf = Array.from({ length: p }, () => []);
    rankOf.forEach((rank, stage) => stagesOf[rank].push(stage));
    const chunkOf = rankOf.map((rank, stage) => stagesOf[rank].indexOf(stage));
    return { p, rankOf, stagesOf, chunkOf, chunks: rankOf.length / p, stages: rankOf.length };
  }

  const range = (length) => Array.from({ length }, (_, i) => i);

  /** Stage s on rank s mod p. */
  function looped(p, chunks) {
    return placement(p, range(p * chunks).map((stage) => stage % p));
  }

  /** Stages i and 2p-1-i on rank i. */
  function vShape(p) {
    return placement(p, [...range(p), ...range(p).reverse()]);
  }

  /** Costs of a stage on this placement; all stages cost the same. */
  function costsOn(place, setting) {
    const share = place.chunks;
    const times = [setting.forward / share, setting.backward / share, setting.weight / share];
    const hop = (from, to) =>
      to < 0 || to >= place.stages || place.rankOf[from] === place.rankOf[to] ? 0 : setting.p2p;
    return {
      times: [...times, times[B] + times[W]],
      activation: 1 / share,
      forwardHop: range(place.stages).map((s) => hop(s, s + 1)),
      backwardHop: range(place.stages).map((s) => hop(s, s - 1)),
    };
  }

  // --- simulation -----------------------------------------------------------------------------------

  const isInput = (kind) => kind !== W;
  const key = (place, kind, stage, microbatch) =>
    (microbatch * (place.stages + 2) + stage + 1) * 2 + (kind === F ? 0 : 1);

  /** Run every rank's passes as early as its order and inputs allow; null if they wait in a circle. */
  function simulate(place, ranks, costs) {
    const ready = new Map();
    const clock = ranks.map(() => 0);
    const start = ranks.map(() => []);
    const end = ranks.map(() => []);
    const next = ranks.map(() => 0);
    const waiting = new Map();
    const runnable = range(ranks.length);

    function inputOf({ kind, stage, microbatch }) {
      const first = kind === F ? stage === 0 : stage === place.stages - 1;
      return isInput(kind) && !first ? key(place, kind, stage, microbatch) : null;
    }

    function run(rank, pass) {
      const input = inputOf(pass);
      const begin = Math.max(clock[rank], input === null ? 0 : ready.get(input));
      const finish = begin + costs.times[pass.kind];
      clock[rank] = finish;
      start[rank].push(begin);
      end[rank].push(finish);
      if (!isInput(pass.kind)) return;
      const { kind, stage, microbatch } = pass;
      const hop = kind === F ? costs.forwardHop[stage] : costs.backwardHop[stage];
      const made = key(place, kind, kind === F ? stage + 1 : stage - 1, microbatch);
      ready.set(made, finish + hop);
      if (waiting.has(made)) {
        runnable.push(waiting.get(made));
        waiting.delete(made);
      }
    }

    while (runnable.length) {
      const rank = runnable.pop();
      while (next[rank] < ranks[rank].length) {
        const pass = ranks[rank][next[rank]];
        const input = inputOf(pass);
        if (input !== null && !ready.has(input)) {
          waiting.set(input, rank);
          break;
        }
        run(rank, pass);
        next[rank] += 1;
      }
    }
    if (next.some((done, rank) => done < ranks[rank].length)) return null;
    return summary(place, ranks, costs, start, end);
  }

  function summary(place, ranks, costs, start, end) {
    const first = Math.min(...start.map((times) => times[0]));
    const makespan = Math.max(...end.map((times) => times[times.length - 1])) - first;
    let busy = 0;
    for (const passes of ranks) for (const pass of passes) busy += costs.times[pass.kind];
    const lines = ranks.map((passes, rank) =>
      memoryLine(passes, start[rank], end[rank], place.chunks));
    return {
      place, ranks, start, end, makespan, lines,
      bubble: 1 - busy / (ranks.length * makespan),
      peaks: lines.map((line) => Math.max(...line.held)),
    };
  }

  /** Steps of what a rank holds: held[i] from times[i] on, an F counts until its W or BW ends. */
  function memoryLine(passes, start, end, chunks) {
    const times = [], held = [];
    let now = 0;
    function step(time) {
      if (held.length && held[held.length - 1] === now / chunks) return;
      times.push(time);
      held.push(now / chunks);
    }
    passes.forEach(({ kind }, i) => {
      if (kind === F) now += 1;
      step(start[i]);
      if (kind === W || kind === BW) now -= 1;
      if (i + 1 === passes.length || start[i + 1] > end[i]) step(end[i]);
    });
    return { times, held };
  }

  // --- fixed orders ---------------------------------------------------------------------------------

  /** F and B of all microbatches: a block of offsets, one for each stage, every so many units. */
  function repeated(place, forward, backward, interval, m) {
    const timed = place.stagesOf.map(() => []);
    place.rankOf.forEach((rank, stage) => {
      for (let microbatch = 0; microbatch < m; microbatch += 1) {
        const shift = microbatch * interval;
        timed[rank].push([forward[stage] + shift, { kind: F, stage, microbatch }]);
        timed[rank].push([backward[stage] + shift, { kind: B, stage, microbatch }]);
      }
    });
    return timed.map((passes) => passes.sort((a, b) => a[0] - b[0]).map(([, pass]) => pass));
  }

  function oneFOneBOrder(place, m) {
    const p = place.p;
    return repeated(place, range(p), range(p).map((i) => 2 * p - 1 - i), 2, m);
  }

  function gpipeOrder(place, m) {
    const all = (kind, stage) => range(m).map((microbatch) => ({ kind, stage, microbatch }));
    return range(place.p).map((stage) => [...all(F, stage), ...all(BW, stage)]);
  }

  /** Warm-up forwards fill the wait for the first B. */
  function zbH2Order(place, m) {
    return range(place.p).map((stage) => {
      const warmUp = Math.min(m, 2 * (place.p - 1 - stage) + 1);
      const passes = range(warmUp).map((microbatch) => ({ kind: F, stage, microbatch }));
      for (let i = 0; i < m; i += 1) {
        passes.push({ kind: B, stage, microbatch: i });
        if (warmUp + i < m) passes.push({ kind: F, stage, microbatch: warmUp + i });
      }
      return passes;
    });
  }

  const fused = (ranks) =>
    ranks.map((passes) => passes.map((q) => (q.kind === B ? { ...q, kind: BW } : q)));

  // Offsets of a rank in unit passes: F of the chunk that goes down and of the one that comes back,
  // then their two B, the one that comes back first.
  const V_OFFSETS = {
    "v-min": (p, i) => {
      const shift = p % 3 === 0 ? 2 : 0;
      return [i, 2 * p - i - 1, 2 * p + shift + i, 4 * p + shift - i - 1];
    },
    "v-half": (p, i) => {
      const shift = p % 2 === 0 ? 3 : 0;
      return [2 * i, 3 * p - i - 2, 3 * p + shift + 2 * i - 1, 6 * p + shift - i - 2];
    },
    "v-zb": (p, i) => [4 * i, 6 * p - 5 - 2 * i, 6 * p - 4 + 4 * i, 12 * p - 9 - 2 * i],
  };

  function vOrder(name, place, m) {
    const offsets = range(place.p).map((i) => V_OFFSETS[name](place.p, i));
    const back = [...offsets].reverse();
    const forward = [...offsets.map((o) => o[0]), ...back.map((o) => o[1])];
    const backward = [...offsets.map((o) => o[3]), ...back.map((o) => o[2])];
    return repeated(place, forward, backward, INTERVAL, m);
  }

  // --- interleaved ----------------------------------------------------------------------------------

  /** Groups of p microbatches pass through both chunks in turn, with the shortest warm-up that runs. */
  function interleavedOrder(place, m, costs) {
    const groups = groupsOf(place.p, m);
    const sequence = groups.flatMap((group) =>
      range(place.chunks).flatMap((chunk) => group.map((microbatch) => [chunk, microbatch])));
    const longest = Math.max(...groups.map((group) => group.length));
    for (let extra = 0; ; extra += 1) {
      const warmUp = (place.chunks - 1) * longest + extra;
      const ranks = range(place.p).map((rank) => interleavedRank(place, rank, warmUp, sequence));
      if (simulate(place, ranks, costs) !== null) return ranks;
    }
  }

  function groupsOf(p, m) {
    const starts = range(Math.ceil(m / p)).map((i) => i * p);
    if (starts.length > 1 && m - starts[starts.length - 1] < p) starts.pop();
    return starts.map((from, i) => range((starts[i + 1] ?? m) - from).map((k) => from + k));
  }

  function interleavedRank(place, rank, warmUp, sequence) {
    const { p, chunks } = place;
    const pass = (kind, chunk, microbatch) => ({ kind, stage: chunk * p + rank, microbatch });
    const forwards = sequence.map(([chunk, mb]) => pass(F, chunk, mb));
    const backwards = sequence.map(([chunk, mb]) => pass(BW, chunks - 1 - chunk, mb));
    const first = Math.min(forwards.length, 2 * (p - rank - 1) + warmUp);
    const passes = forwards.slice(0, first);
    forwards.slice(first).forEach((forward, i) => passes.push(forward, backwards[i]));
    return [...passes, ...backwards.slice(forwards.length - first)];
  }

  // --- W into the waits -----------------------------------------------------------------------------

  /** The smallest [time, rank] first. */
  class Events {
    constructor() { this.heap = []; }

    get size() { return this.heap.length; }

    static before(a, b) { return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]); }

    push(event) {
      const heap = this.heap;
      let at = heap.length;
      heap.push(event);
      while (at > 0) {
        const above = (at - 1) >> 1;
        if (!Events.before(event, heap[above])) break;
        heap[at] = heap[above];
        at = above;
      }
      heap[at] = event;
    }

    pop() {
      const heap = this.heap;
      const top = heap[0];
      const last = heap.pop();
      if (heap.length) this.sink(last);
      return top;
    }

    sink(event) {
      const heap = this.heap;
      let at = 0;
      for (;;) {
        let below = 2 * at + 1;
        if (below >= heap.length) break;
        if (below + 1 < heap.length && Events.before(heap[below + 1], heap[below])) below += 1;
        if (!Events.before(heap[below], event)) break;
        heap[at] = heap[below];
        at = below;
      }
      heap[at] = event;
    }
  }

  /** One run over an order of F and B: each as early as it can, W where a rank would wait. */
  class Filling {
    constructor(place, order, costs, limit, eagerness) {
      Object.assign(this, { place, order, costs, limit, eagerness });
      this.done = order.map(() => []);
      this.next = order.map(() => 0);
      this.held = order.map(() => 0);
      this.pending = order.map(() => []);
      this.taken = order.map(() => 0);
      this.ready = new Map();
      this.idle = new Map();
      this.events = new Events();
    }

    run() {
      range(this.place.p).forEach((rank) => this.events.push([0, rank]));
      while (this.events.size) this.step(...this.events.pop());
      return this.done;
    }

    /** What a free rank does next: its next F or B, the oldest W, or wait. */
    step(now, rank) {
      const upcoming = this.order[rank][this.next[rank]];
      if (upcoming === undefined) {
        while (this.hasPending(rank)) this.start(now, rank, this.takePending(rank));
        return;
      }
      const ready = this.readyAt(upcoming);
      const wait = ready === undefined ? Infinity : ready - now;
      const isLong = wait > 0 && wait >= this.eagerness * this.costs.times[W];
      if (this.hasPending(rank) && (this.isFull(rank, upcoming) || isLong)) {
        this.events.push([this.start(now, rank, this.takePending(rank)), rank]);
      } else if (ready === undefined) {
        this.idle.set(this.key(upcoming), rank);
      } else if (wait > 0) {
        this.events.push([ready, rank]);
      } else {
        this.next[rank] += 1;
        this.events.push([this.start(now, rank, upcoming), rank]);
      }
    }

    hasPending(rank) { return this.taken[rank] < this.pending[rank].length; }

    takePending(rank) {
      this.taken[rank] += 1;
      return this.pending[rank][this.taken[rank] - 1];
    }

    isFull(rank, { kind }) {
      const after = this.held[rank] + this.costs.activation;
      return kind === F && after > this.limit + 1e-9 * (1 + this.limit);
    }

    key({ kind, stage, microbatch }) { return key(this.place, kind, stage, microbatch); }

    readyAt(pass) {
      const first = pass.kind === F ? 0 : this.place.stages - 1;
      return pass.stage === first ? 0 : this.ready.get(this.key(pass));
    }

    start(now, rank, pass) {
      const end = now + this.costs.times[pass.kind];
      const { kind, stage, microbatch } = pass;
      this.done[rank].push(pass);
      if (kind === F) {
        this.held[rank] += this.costs.activation;
        this.deliver({ kind, stage: stage + 1, microbatch }, end + this.costs.forwardHop[stage], now);
      } else if (kind === B) {
        this.pending[rank].push({ kind: W, stage, microbatch });
        this.deliver({ kind, stage: stage - 1, microbatch }, end + this.costs.backwardHop[stage], now);
      } else {
        this.held[rank] -= this.costs.activation;
      }
      return end;
    }

    deliver(consumer, ready, now) {
      const at = this.key(consumer);
      this.ready.set(at, ready);
      if (!this.idle.has(at)) return;
      this.events.push([now, this.idle.get(at)]);
      this.idle.delete(at);
    }
  }

  /** The shortest of a few fillings, its B and W joined where no pass starts later for it. */
  function filled(place, order, costs, limit) {
    let best = null;
    for (const eagerness of EAGERNESS) {
      const ranks = new Filling(place, order, costs, limit, eagerness).run();
      const timeline = simulate(place, ranks, costs);
      if (best === null || timeline.makespan < best.makespan) best = timeline;
    }
    return fusedForFree(best, costs);
  }

  function fusedForFree(timeline, costs) {
    const { place, ranks, start, end } = timeline;
    const starts = new Map();
    ranks.forEach((passes, rank) => passes.forEach((pass, i) => {
      if (pass.kind === B) starts.set(key(place, B, pass.stage, pass.microbatch), start[rank][i]);
    }));
    const tolerance = 1e-9 * Math.max(timeline.makespan, 1e-30);
    const isFree = ({ stage, microbatch }, endOfW) =>
      stage === 0 || endOfW + costs.backwardHop[stage]
        <= starts.get(key(place, B, stage - 1, microbatch)) + tolerance;
    return simulate(place, ranks.map((passes, rank) => joined(passes, end[rank], isFree)), costs);
  }

  function joined(passes, end, isFree) {
    const out = [];
    passes.forEach((pass, i) => {
      const last = out[out.length - 1];
      const follows = pass.kind === W && last !== undefined && last.kind === B
        && last.stage === pass.stage && last.microbatch === pass.microbatch;
      if (follows && isFree(pass, end[i])) out[out.length - 1] = { ...pass, kind: BW };
      else out.push(pass);
    });
    return out;
  }

  /** What the worst rank holds if every W runs right behind its B, and which rank that is. */
  function needs(order, chunks) {
    const most = order.map((passes) => {
      let held = 0, peak = 0;
      for (const { kind } of passes) {
        held += kind === F ? 1 : -1;
        peak = Math.max(peak, held);
      }
      return peak / chunks;
    });
    const worst = Math.max(...most);
    return { worst, rank: most.indexOf(worst) };
  }

  // --- greedy, within a memory limit ----------------------------------------------------------------

  /** Every rank takes what can start first, by these weights; null if it gets stuck. */
  class Greedy {
    constructor(place, m, costs, limit, steering) {
      Object.assign(this, { place, m, costs, limit: limit + 1e-9 * (1 + limit), steering });
      const each = () => range(place.stages).map(() => 0);
      this.forwards = each();
      this.backwards = each();
      this.ready = new Map();
      this.clock = range(place.p).map(() => 0);
      this.held = range(place.p).map(() => 0);
      this.pending = range(place.p).map(() => []);
      this.taken = range(place.p).map(() => 0);
      this.done = range(place.p).map(() => []);
      this.unit = (costs.times[F] + costs.times[B] + costs.times[W]) / 3;
      this.quota = this.inFlight(limit);
    }

    /** Microbatches in flight in the first of two chunks: they leave room for one in the other. */
    inFlight(limit) {
      const slots = limit / this.costs.activation;
      const most = Math.floor(slots - 1 + 1e-9);
      return Math.max(1, Math.min(Math.round(slots * this.steering.share), most));
    }

    run() {
      const choices = range(this.place.p).map((rank) => this.choose(rank));
      for (let left = 3 * this.place.stages * this.m; left > 0; left -= 1) {
        let rank = -1;
        choices.forEach((choice, r) => {
          if (choice && (rank < 0 || choice.start < choices[rank].start)) rank = r;
        });
        if (rank < 0) return null;
        const consumer = this.take(rank, choices[rank]);
        choices[rank] = this.choose(rank);
        if (consumer !== null) choices[consumer] = this.choose(consumer);
      }
      return this.done;
    }

    /** What has the lowest score: a start, and how much later it would have to be to be level. */
    choose(rank) {
      const now = this.clock[rank];
      const oldest = this.pending[rank][this.taken[rank]];
      let best = null;
      const offer = (pass, start, score) => {
        if (best === null || score < best.score) best = { pass, start, score };
      };
      for (const stage of this.place.stagesOf[rank]) {
        this.offerBackward(stage, now, offer);
        this.offerForward(rank, stage, now, oldest, offer);
      }
      if (oldest !== undefined) {
        const waiting = this.pending[rank].length - this.taken[rank] - 1;
        const { weight, queue } = this.steering;
        offer(oldest, now, now + (weight - queue * waiting) * this.unit);
      }
      return best;
    }

    offerBackward(stage, now, offer) {
      const microbatch = this.backwards[stage];
      const ready = this.readyAt(B, stage, microbatch);
      if (microbatch === this.m || ready === undefined) return;
      const start = Math.max(now, ready);
      offer({ kind: B, stage, microbatch }, start, start + this.steering.backward * this.unit);
    }

    /** Where there is no room, the oldest W makes some. */
    offerForward(rank, stage, now, oldest, offer) {
      const microbatch = this.forwards[stage];
      const isLast = this.place.chunkOf[stage] === this.place.chunks - 1;
      if (microbatch === this.m) return;
      if (!isLast && microbatch - this.backwards[stage] >= this.quota) return;
      const ready = this.readyAt(F, stage, microbatch);
      if (ready === undefined) return;
      const bias = (isLast ? this.steering.last : 0) * this.unit;
      if (this.held[rank] + this.costs.activation <= this.limit) {
        const start = Math.max(now, ready);
        offer({ kind: F, stage, microbatch }, start, start + bias);
      } else if (oldest !== undefined) {
        offer(oldest, now, Math.max(ready, now + this.costs.times[W]) + bias);
      }
    }

    readyAt(kind, stage, microbatch) {
      if (kind === F && stage === 0) return 0;
      return this.ready.get(key(this.place, kind, stage, microbatch));
    }

    /** Run a pass; the rank that waits for it, or null. */
    take(rank, { pass, start }) {
      const { kind, stage, microbatch } = pass;
      const end = start + this.costs.times[kind];
      this.clock[rank] = end;
      this.done[rank].push(pass);
      if (kind === W) {
        this.taken[rank] += 1;
        this.held[rank] -= this.costs.activation;
        return null;
      }
      if (kind === F) return this.forwardDone(rank, stage, microbatch, end);
      this.backwards[stage] += 1;
      this.pending[rank].push({ kind: W, stage, microbatch });
      if (stage === 0) return null;
      const arrival = end + this.costs.backwardHop[stage];
      this.ready.set(key(this.place, B, stage - 1, microbatch), arrival);
      return this.place.rankOf[stage - 1];
    }

    forwardDone(rank, stage, microbatch, end) {
      this.forwards[stage] += 1;
      this.held[rank] += this.costs.activation;
      if (stage === this.place.stages - 1) {
        this.ready.set(key(this.place, B, stage, microbatch), end);
        return rank;
      }
      const arrival = end + this.costs.forwardHop[stage];
      this.ready.set(key(this.place, F, stage + 1, microbatch), arrival);
      return this.place.rankOf[stage + 1];
    }
  }

  /** The shortest of a few greedy runs within a limit. */
  function greedy(name, place, setting) {
    const limit = (setting.limit ?? 1) * setting.p;
    if (limit < 1 - 1e-9) refuseLimit(name, setting, 1, 0);
    const costs = costsOn(place, setting);
    const passes = 3 * place.stages * setting.m;
    let best = null;
    for (const steering of steerings(place.chunks).slice(0, Math.max(3, 600000 / passes))) {
      const ranks = new Greedy(place, setting.m, costs, limit, steering).run();
      const timeline = ranks && simulate(place, ranks, costs);
      if (timeline && (best === null || timeline.makespan < best.makespan)) best = timeline;
    }
    return fusedForFree(best, costs);
  }

  // Weights that were the best of many random ones on settings of 3 to 8 ranks: the share of the limit
  // that the first of two chunks may fill, then, in mean passes, how much later than an F of the first
  // chunk a B, a W and an F of the last chunk count, and how much each waiting W hurries the next.
  const STEERINGS = {
    2: [
      [0.69, 0.39, 0.6, -0.2, 0.37], [0.66, 0.18, 2.46, -0.73, 0.51], [0.8, 0.25, 0.75, -0.1, 0.23],
      [0.96, 0.33, 1.84, -0.5, 0.16], [0.57, 0.11, 0.31, -0.29, 0.03], [0.66, 0.05, 0.52, -1.1, 0],
      [0.69, -0.29, 1.59, -0.24, 0.43], [0.8, -0.52, 0.55, -1.31, 0], [0.72, 0.42, 2.65, -0.57, 0],
      [0.81, 0.24, 0.33, -0.33, 0.02], [0.86, 0.23, 0.03, -1.5, 0.3], [0.59, -0.3, 0.18, -0.04, 0.1],
      [0.65, -0.4, 2.53, -0.49, 0.24], [0.72, -0.59, 0.31, -0.2, 0], [0.7, -0.29, 1.63, -1.06, 0],
      [0.8, 0.32, 1.22, -0.32, 0.4],
    ],
    1: [
      [1, 0, 0.95, 0.08, 0], [1, -0.33, 0.33, 0.23, 0], [1, -1.14, 0.22, -1.1, 0.53],
      [1, -0.89, 1.61, 0.7, 0.47], [1, 0.25, 0.59, 0.99, 0.45], [1, 0.32, 1.63, 0.74, 0.26],
    ],
  };

  const steerings = (chunks) => STEERINGS[chunks].map(
    ([share, backward, weight, last, queue]) => ({ share, backward, weight, last, queue }));

  // --- by name --------------------------------------------------------------------------------------

  /** A fixed order of F and B with W in its waits, within `peak` microbatches or the reader's limit. */
  function squeezed(name, place, order, setting, peak) {
    const limit = setting.limit === null ? peak : Math.min(peak, setting.limit * setting.p);
    const { worst, rank } = needs(order, place.chunks);
    if (worst > limit + 1e-9 * (1 + worst)) refuseLimit(name, setting, worst, rank);
    return filled(place, order, costsOn(place, setting), limit);
  }

  function whole(name, place, ranks, setting) {
    const timeline = simulate(place, ranks, costsOn(place, setting));
    const worst = Math.max(...timeline.peaks);
    if (setting.limit !== null && worst > setting.limit * setting.p * (1 + 1e-9)) {
      refuseLimit(name, setting, worst, timeline.peaks.indexOf(worst));
    }
    return timeline;
  }

  function refuseLimit(name, setting, needed, rank) {
    const share = Number((needed / setting.p).toPrecision(4));
    throw new Refused(`${name} cannot keep the memory limit of ${setting.limit} of 1F1B: `
      + `rank ${rank} needs at least ${share} of 1F1B`);
  }

  const V_PEAKS = {
    "v-min": (p) => Math.floor((p + 4) / 3),
    "v-half": (p) => Math.floor((p + 2) / 2),
    "v-zb": (p) => p,
  };

  function vSchedule(name, setting) {
    const place = vShape(setting.p);
    return squeezed(name, place, vOrder(name, place, setting.m), setting, V_PEAKS[name](setting.p));
  }

  const FAMILIES = {
    "gpipe": (name, s) => {
      const place = looped(s.p, 1);
      return whole(name, place, gpipeOrder(place, s.m), s);
    },
    "1f1b": (name, s) => {
      const place = looped(s.p, 1);
      return whole(name, place, fused(oneFOneBOrder(place, s.m)), s);
    },
    "interleaved": (name, s) => {
      const place = looped(s.p, 2);
      return whole(name, place, interleavedOrder(place, s.m, costsOn(place, s)), s);
    },
    "zb-h1": (name, s) => {
      const place = looped(s.p, 1);
      return squeezed(name, place, oneFOneBOrder(place, s.m), s, s.p);
    },
    "zb-h2": (name, s) => {
      const place = looped(s.p, 1);
      return squeezed(name, place, zbH2Order(place, s.m), s, 2 * s.p - 1);
    },
    "v-min": vSchedule,
    "v-half": vSchedule,
    "v-zb": vSchedule,
    "greedy-v": (name, s) => greedy(name, vShape(s.p), s),
    "greedy-1": (name, s) => greedy(name, looped(s.p, 1), s),
  };

  /** The timeline of a named schedule; throws Refused with a sentence for the reader. */
  function build(name, setting) {
    const passes = 6 * setting.p * setting.m;
    if (passes > MOST_PASSES) {
      throw new Refused(`${setting.p} ranks and ${setting.m} microbatches are too many for this `
        + `page: give at most ${Math.floor(MOST_PASSES / 6 / setting.p)} microbatches, `
        + "or use the command below");
    }
    return FAMILIES[name](name, setting);
  }

  return { build, Refused, names: Object.keys(FAMILIES), kinds: ["F", "B", "W", "BW"] };
})();
