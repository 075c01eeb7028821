"use strict";
// ---- sharding/planner: two kinds of links; axes are [inside a group, between groups], sizes [m, g]
const LETTERS = "NIG";
const PLANS = [..."NIG"].flatMap((o) => [..."NIG"].flatMap((p) => [..."NIG"].map((g) => p + g + o)))
  .filter((name) => LETTERS.indexOf(name[2]) >= Math.max(LETTERS.indexOf(name[0]), LETTERS.indexOf(name[1])));
const levels = (plan) => [...plan].map((letter) => LETTERS.indexOf(letter));
const padded = (sizes, elements) => sizes[0] * sizes[1] * Math.ceil(elements / (sizes[0] * sizes[1]));
const span = (sizes, level) => (level === 0 ? 1 : level === 1 ? sizes[0] : sizes[0] * sizes[1]);
const slice = (size, sizes, level) => size / span(sizes, level);

function ring(size, sizes, axis) {
  const ranks = sizes[axis];
  return ranks > 1 ? [{ axis, elements: (size / ranks) * (ranks - 1), messages: ranks - 1 }] : [];
}
function gatherParts(size, sizes, from, to) {
  const found = [];
  for (let axis = from - 1; axis >= to; axis--) found.push(...ring(slice(size, sizes, axis), sizes, axis));
  return found;
}
function reduceParts(size, sizes, from, to) {
  const found = [];
  for (let axis = from; axis < to; axis++) found.push(...ring(slice(size, sizes, axis), sizes, axis));
  return found;
}

// jobs/plan/workloads.py: buckets in forward order, -1 before the body
function bucketsOf(s, way) {
  const found = [], frozen = way.rank ? 0 : null;
  const add = (trainable, still, root, block) => {
    if (trainable) found.push({ elements: trainable, trains: true, root, block });
    if (still) found.push({ elements: still, trains: false, root, block });
  };
  const end = (size, on, block) => add(on ? size : 0, on ? 0 : size, true, block);
  end(s.embed, way.embed, -1);
  for (let block = 0; block < s.layers; block++) {
    if (frozen === 0) add(way.rank * s.ends, s.block, false, block);
    else add(block < way.blocks ? s.block : 0, block < way.blocks ? 0 : s.block, false, block);
  }
  end(s.tail, way.tail, s.layers + 3);
  end(s.head, way.head, s.layers + 3);
  return found;
}

function workloadOf(s, way, asked, checkpointing) {
  const [again, plain] = [true, false].map((one) => price(s, way, asked, one, true));
  const mine = checkpointing ? again : plain, held = [again.forward, plain.forward].sort((a, b) => a - b);
  const activations = checkpointing ? held[0] + Math.ceil(held[1] / s.layers) : held[1];
  const spent = mine.flops, rate = asked.rate || Infinity, buckets = bucketsOf(s, way);
  const forward = spent.forward / rate, backward = (spent.inputs + spent.weights) / rate;
  const first = Math.min(...buckets.filter((b) => b.trains).map((b) => b.block));
  for (const bucket of buckets) {
    bucket.backward = +!(bucket.root || bucket.block === s.layers - 1 || bucket.block < first);
  }
  return {
    buckets, first, forward, backward: backward + (checkpointing ? forward : 0), activations,
    accumulate: asked.accumulate, prefetch: 1, buffers: 2,
  };
}

// sharding/planner/prediction.py and fsdp.py: bytes that one rank holds under a plan on fully_shard, the engine on cards
function splitBytes(work, sizes, plan) {
  const [p, g, o] = levels(plan), level = p || o, inner = span(sizes, level), outer = span(sizes, 2) / inner;
  let shards = 0, rows = 0, grads = 0, root = 0, keptGrads = 0, slices = [0, 0];
  const blocks = new Map(), others = [0], units = new Map();
  for (const { elements, trains, root: isRoot, block } of work.buckets) {
    const size = padded(sizes, elements), shard = Math.ceil(elements / inner), finer = Math.ceil(shard / outer), unit = isRoot ? "root" : block;
    shards += shard;
    slices[0] += slice(size, sizes, p);
    if (trains) {
      slices[1] += slice(size, sizes, g);
      rows += o > level ? finer : shard;
      if (g === 0) grads += elements;
      else if (g > level) grads += finer;
      else units.set(unit, (units.get(unit) || 0) + shard);
    }
    if (slice(size, sizes, p) < size) {
      if (isRoot) root += size; else blocks.set(block, (blocks.get(block) || 0) + size);
    }
    if (trains && slice(size, sizes, g) < size) { if (isRoot) keptGrads += size; else others.push(size); }
  }
  // sums of a unit are cut evenly between those who share them
  const shared = span(sizes, 2) / span(sizes, g);
  for (const shard of units.values()) grads += shared * Math.ceil((shard * inner) / span(sizes, 2));
  const params = p === 0 ? shards * inner + shards : shards;
  const most = (list, count) => sum([...list].sort((a, b) => b - a).slice(0, count));
  const whole = root + most(blocks.values(), 1 + work.prefetch);
  const passing = 2 * whole + 2 * (keptGrads + most(others, work.buffers));
  return { ...bytes(2 * params, 2 * grads, 12 * rows, work.activations, passing), slices };
}

function ringsOf(bucket, plan, sizes) {
  const [p, g, o] = levels(plan), size = padded(sizes, bucket.elements), gather = gatherParts(size, sizes, p, 0);
  if (!bucket.trains) return { gather, step: [], sync: [], back: [], refresh: [] };
  const sync = [...reduceParts(size, sizes, g, 2), ...gatherParts(size, sizes, 2, o)];
  const active = sizes.slice(o).filter((one) => one > 1).length, cut = sync.length - Math.max(active - 1, 0);
  return { gather, step: reduceParts(size, sizes, 0, g), sync: sync.slice(0, cut), back: sync.slice(cut), refresh: gatherParts(size, sizes, o, p) };
}

// sharding/planner/choose.py: what decides between equally fast plans
function plainness(work, sizes, plan, held) {
  let messages = 0, outer = 0;
  for (const bucket of work.buckets) {
    const rings = ringsOf(bucket, plan, sizes);
    const often = [[rings.gather, work.accumulate * (1 + bucket.backward)], [rings.step, work.accumulate], [rings.sync, 1], [rings.back, 1], [rings.refresh, 1]];
    for (const [list, times] of often) for (const one of list) {
      messages += one.messages * times;
      if (one.axis === 1) outer += 2 * one.elements * times;
    }
  }
  return [messages, outer, -held.slices[0], -held.slices[1], total(held)];
}

// sharding/planner/simulation.py: one rank through one step, which computes on one worker and sends on a lane per axis
function simulate(work, topology, plan) {
  const { sizes, rates } = topology, lanes = [0, 0], cache = new Map();
  let now = 0, reducing = [];
  const timed = (bucket) => {
    const key = `${bucket.elements} ${bucket.trains}`;
    if (!cache.has(key)) {
      const time = (list) => list.map((one) => [one.axis, (2 * one.elements) / rates[one.axis]]);
      cache.set(key, Object.fromEntries(Object.entries(ringsOf(bucket, plan, sizes)).map(([name, list]) => [name, time(list)])));
    }
    return { ...cache.get(key), pending: 0, whole: 0, gathered: false, reduction: 0, synced: 0, root: bucket.root, block: bucket.block };
  };
  const buckets = work.buckets.map(timed), roots = buckets.filter((b) => b.root), stages = [];
  for (const bucket of buckets) if (!bucket.root) (stages[bucket.block] ||= []).push(bucket);
  const first = stages.filter((_, block) => block < work.first).length, ordered = [...roots, ...stages.flat()];
  const submit = (rings, after) => {
    for (const [axis, seconds] of rings) after = lanes[axis] = Math.max(now, lanes[axis], after) + seconds;
    return after;
  };
  const wait = (end) => { now = Math.max(now, end); };
  const free = (stage) => stage.forEach((b) => { b.gathered = false; });
  const gather = (stage) => stage.forEach((b) => {
    if (!b.gathered) { b.gathered = true; b.whole = submit(b.gather, b.pending); }
  });
  const use = (stage) => stage.forEach((b) => wait(b.whole));
  const send = (stage, last) => {
    free(stage);
    for (const b of stage) {
      if (b.step.length) {
        while (reducing.length >= Math.max(work.buffers - 1, 1)) wait(reducing.shift());
        b.reduction = submit(b.step, 0);
        reducing.push(b.reduction);
      }
      if (last) b.synced = submit(b.sync, b.reduction);
    }
  };
  const microStep = (last) => {
    [roots, ...stages.slice(0, work.prefetch)].forEach(gather);
    use(roots);
    stages.forEach((stage, at) => {
      stages.slice(at, at + 1 + work.prefetch).forEach(gather);
      use(stage);
      now += work.forward / stages.length;
      if (at !== stages.length - 1) free(stage);
    });
    while (reducing.length) wait(reducing.shift());
    for (let at = stages.length - 1; at >= first; at--) {
      if (at + 1 < stages.length) send(stages[at + 1], last);
      for (let below = at; below > Math.max(at - work.prefetch, first) - 1; below--) gather(stages[below]);
      use(stages[at]);
      now += work.backward / Math.max(stages.length - first, 1);
    }
    if (first < stages.length) send(stages[first], last);
    send(roots, last);
    [roots, ...stages].forEach(free);
  };
  for (const b of ordered) b.pending = submit(b.refresh, 0);
  let skipped = 0, before = null;
  for (let done = 1; done < work.accumulate; done++) {
    const then = now;
    microStep(false);
    const gone = now - then, state = [...lanes, ...reducing].map((end) => Math.max(end - now, 0));
    if (before && state.length === before.length && state.every((one, at) => Math.abs(one - before[at]) <= 1e-9 * gone)) {
      skipped = (work.accumulate - 1 - done) * gone;
      break;
    }
    before = state;
  }
  microStep(true);
  for (const b of [...ordered].reverse()) b.synced = submit(b.back, b.synced);
  for (const b of ordered) wait(b.synced);
  return now + skipped;
}

// ---- jobs/plan: every way on one device, or every way under every plan; the best first
const less = (a, b) => { for (let at = 0; at < a.length; at++) if (a[at] !== b[at]) return a[at] < b[at]; return false; };
const best = (list, key) => list.reduce((one, other) => (one && !less(key(other), key(one)) ? one : other), null);

function onDevice(s, ways, asked, memory) {
  const rows = ways.flatMap((way) => [false, true].map((checkpointing) => {
    const found = price(s, way, asked, checkpointing), peak = total(found.bytes);
    return { way, checkpointing, ...found, peak, fits: peak <= memory };
  }));
  const rank = (row) => [row.way.tier, row.seconds || 0, row.checkpointing, row.operations, row.peak];
  return { rows, pick: best(rows.filter((row) => row.fits), rank) };
}

const TIE = 0.001;
function onCluster(s, ways, asked, memory, topology) {
  const rows = ways.flatMap((way) => {
    const found = [false, true].map((checkpointing) => {
      const work = workloadOf(s, way, asked, checkpointing);
      const all = PLANS.map((plan) => {
        const held = splitBytes(work, topology.sizes, plan), peak = total(held), fits = peak <= memory;
        // of what does not fit nobody asks the time
        return { way, checkpointing, plan, bytes: held, peak, fits, seconds: fits ? simulate(work, topology, plan) : null, work };
      });
      const fitting = all.filter((row) => row.fits), quickest = Math.min(...fitting.map((row) => row.seconds));
      const near = fitting.filter((row) => row.seconds <= quickest * (1 + TIE));
      const first = best(near, (row) => plainness(row.work, topology.sizes, row.plan, row.bytes));
      return { all, first: first || best(all, (row) => [row.peak]) };
    });
    const firsts = found.map((one) => one.first), fitting = firsts.filter((row) => row.fits);
    const quickest = Math.min(...fitting.map((row) => row.seconds));
    const near = fitting.filter((row) => row.seconds <= quickest * (1 + TIE));
    const leader = best(near, (row) => [row.checkpointing, row.seconds]) || best(firsts, (row) => [row.peak]);
    return [{ ...leader, plans: found[+leader.checkpointing].all }];
  });
  const rank = (row) => [row.way.tier, row.seconds, row.checkpointing, row.peak];
  return { rows, pick: best(rows.filter((row) => row.fits), rank) };
}
