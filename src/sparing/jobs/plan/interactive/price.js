"use strict";
// What a step of fine-tuning holds and computes, and how a plan splits it: the formulas of sparing in JavaScript.
// Each function has the name of its twin in layersample/price, jobs/lm and sharding/planner; a test holds the two
// to each other at random points.

const FLOAT = 4, INDEX = 8; // bytes
const sum = (list) => list.reduce((a, b) => a + b, 0);
const total = (held) => held.params + held.grads + held.optimizer + held.activations + held.transient;
const bytes = (params, grads, optimizer, activations, transient) => ({ params, grads, optimizer, activations, transient });
const largest = (list, key) => list.reduce((best, one) => (key(one) > key(best) ? one : best));

// ---- layersample/price/shape.py
function shapeOf(given) {
  const s = { ...given };
  s.queries = s.heads * s.head_dim;
  s.keys = s.kv_heads * s.head_dim;
  s.entrance = [[s.width, s.queries], [s.width, s.keys], [s.width, s.keys]];
  if (s.packed) s.entrance = [[s.width, s.queries + 2 * s.keys]];
  s.linears = [...s.entrance, [s.queries, s.width]];
  for (let at = 0; at < 1 + s.gated; at++) s.linears.push([s.width, s.ffn]);
  s.linears.push([s.ffn, s.width]);
  s.matmul = sum(s.linears.map(([a, b]) => a * b));
  s.tail = s.width * (s.norm === "layer" ? 2 : 1);
  const biases = s.qkv_bias * (s.queries + 2 * s.keys) + s.out_bias * s.width + s.ffn_bias * ((1 + s.gated) * s.ffn + s.width);
  s.block = s.matmul + biases + 2 * s.tail + 2 * s.qk_norm * s.head_dim;
  s.embed = (s.vocab + s.positions) * s.width;
  s.head = s.tied ? 0 : s.vocab * s.width;
  s.total = s.embed + s.layers * s.block + s.tail + s.head;
  s.ends = sum(s.linears.map(([a, b]) => a + b));
  return s;
}

// ---- layersample/price/activations.py; `on.blocks` blocks train, `on.high` of them the highest and the rest the lowest
const loraElement = (work) => (work.element < FLOAT ? FLOAT : work.element);
const adapters = (s, on) => on.rank * s.layers * s.ends;
const trains = (s, on, block) => block < on.blocks - on.high || block >= s.layers - on.high;
const lowest = (s, on) => (on.embed || on.rank || on.blocks > on.high ? 0 : s.layers - on.high);
const enters = (s, on, block) => on.embed || block > lowest(s, on);
const parts = (work) => (work.atOnce ? Math.ceil(work.tokens / work.atOnce) : 1);

function norm(s, work, entered, active) {
  const elements = work.tokens * s.width, rows = work.tokens;
  if (s.norm === "layer") return (entered || active) * (elements + 2 * rows) * work.element;
  if (s.norm === "rms") return entered * FLOAT * (elements + rows) + active * work.element * elements;
  return entered * FLOAT * (elements + rows + s.width) + active * FLOAT * elements;
}

function attention(s, work, active) {
  const pairs = work.batch * work.length ** 2;
  const keys = work.padded ? s.queries : s.keys, mask = work.padded ? pairs : 0;
  let held = work.tokens * (2 * work.element * (s.queries + keys) + FLOAT * s.heads) + work.element * mask;
  if (s.qk_norm) {
    const wide = work.tokens * (s.queries + s.keys);
    held += FLOAT * (wide + work.tokens * (s.heads + s.kv_heads)) + active * work.element * wide;
  }
  return held;
}

const ffn = (s, work, active) => ((s.gated ? 3 : s.split_activation ? 4 : 1) + active) * work.tokens * s.ffn * work.element;
const lastInput = (s, work, on, active) => (on.rank ? loraElement(work) : active * work.element) * work.tokens * s.ffn;

function inputs(s, work, on, active) {
  if (!on.rank) return active * 2 * work.tokens * s.width * work.element;
  const inner = s.linears.length * on.rank * loraElement(work), copies = sum(s.linears.map(([a]) => a));
  return work.tokens * (inner + (work.element < FLOAT ? copies * FLOAT : (2 * s.width + s.ffn) * work.element));
}

function inside(s, work, on, block) {
  const active = +trains(s, on, block), entered = +enters(s, on, block);
  return norm(s, work, entered, active) + norm(s, work, 1, active) + attention(s, work, active) + ffn(s, work, active)
    + inputs(s, work, on, active);
}

function kept(s, work, on, block) {
  if (block < lowest(s, on)) return 0;
  return work.checkpointing ? work.tokens * s.width * work.element : inside(s, work, on, block);
}

function second(s, work, on, active) {
  return norm(s, work, 1, active) + active * work.tokens * s.width * work.element + ffn(s, work, active)
    + (on.rank ? lastInput(s, work, on, active) : 0);
}

function headKeeps(s, work, on) {
  const normed = norm(s, work, 1, +on.tail);
  if (parts(work) > 1) return normed + (work.tokens + on.head * s.vocab) * s.width * work.element;
  return normed + FLOAT * work.tokens * s.vocab + on.head * work.tokens * s.width * work.element;
}

function atForwardEnd(s, work, on) {
  let blocks = 0;
  for (let block = 0; block < s.layers; block++) blocks += kept(s, work, on, block);
  const places = s.positions ? on.embed * INDEX * work.length : 2 * work.length * s.head_dim * work.element;
  return blocks + places + headKeeps(s, work, on) + 3 * INDEX * work.tokens;
}

// ---- layersample/price/flops.py
function flops(s, work, on) {
  const scores = 4 * work.tokens * work.length * s.queries, adapter = on.rank * s.ends;
  const block = 2 * work.tokens * s.matmul + scores + 2 * work.tokens * adapter;
  const ends = 2 * work.tokens * s.vocab * s.width;
  const maps = on.rank ? s.entrance : [];
  const unneeded = 2 * work.tokens * sum(maps.map(([a, b]) => a * (b + on.rank)));
  const lastProduct = 2 * work.tokens * s.width * (on.rank || s.ffn);
  return {
    forward: s.layers * block + ends,
    recompute: work.checkpointing ? s.layers * (block - lastProduct) : 0,
    inputs: s.layers * (block + scores) + ends - unneeded,
    weights: 2 * work.tokens * (on.blocks * s.matmul + s.layers * adapter) + on.head * ends,
  };
}

// ---- layersample/price/walk.py
function atTheLoss(s, work) {
  if (parts(work) === 1) return 2 * FLOAT * work.tokens * s.vocab;
  const narrow = work.element < FLOAT ? work.element : 0;
  return (FLOAT + narrow) * work.atOnce * s.vocab + work.tokens * s.width * work.element;
}

const outside = (s, on) => on.embed * s.embed + on.tail * s.tail + on.head * s.head;
const gradients = (s, work, on) =>
  (outside(s, on) + on.blocks * s.block) * work.element + (on.rank ? adapters(s, on) * loraElement(work) : 0);

function backwardInstants(s, work, on, forward) {
  const found = [], logits = work.tokens * s.vocab, stream = work.tokens * s.width * work.element;
  let grads = on.head * s.vocab * s.width * work.element;
  if (parts(work) === 1) {
    found.push([0, forward, atTheLoss(s, work)], [grads, forward - FLOAT * logits, logits * work.element + stream]);
  } else {
    const wide = s.norm === "layer" ? 2 * stream : 3 * FLOAT * work.tokens * s.width + stream;
    found.push([grads, forward - grads, wide]);
  }
  let alive = forward - headKeeps(s, work, on);
  grads += on.tail * s.tail * work.element;
  const adapter = on.rank ? gradients(s, work, on) / Math.max(s.layers, 1) : 0;
  for (let block = s.layers - 1; block >= lowest(s, on); block--) {
    alive -= kept(s, work, on, block);
    const active = +trains(s, on, block);
    let computed = alive + inside(s, work, on, block);
    if (work.checkpointing) computed += stream + work.padded * work.batch * work.length ** 2;
    if (work.checkpointing && s.gated && on.rank && loraElement(work) > work.element) {
      found.push([grads, computed + work.tokens * s.ffn * FLOAT + 2 * stream, 4 * stream]);
    }
    const last = grads + active * s.ffn * s.width * work.element;
    const inner = (2 + s.gated) * work.tokens * s.ffn * work.element;
    found.push([last, computed - lastInput(s, work, on, active), inner + stream]);
    grads += adapter + active * s.block * work.element;
    const heads = 3 * work.tokens * s.queries * work.element;
    found.push([grads, computed - second(s, work, on, active), heads + 2 * stream]);
  }
  return found;
}

function passes(s, work, on, accumulates) {
  const end = atForwardEnd(s, work, on), grads = gradients(s, work, on), before = accumulates * grads;
  // frozen weights in nf4: a bound, for only a trace knows when a matrix is whole again
  const params = s.total * work.element - (on.saved || 0) + (on.cushion || 0) + (on.rank ? adapters(s, on) * loraElement(work) : 0);
  const matrix = s.vocab * s.width * work.element, table = on.embed * s.tied * matrix;
  const body = backwardInstants(s, work, on, end).map(([g, a, t]) =>
    bytes(params, Math.max(g, before + accumulates * table), 0, a, t));
  const count = (1 + (parts(work) === 1)) * s.tied + accumulates;
  const forward = bytes(params, before, 0, end, 0);
  const stretches = [
    forward, bytes(params, before, 0, end, atTheLoss(s, work)), largest(body, total),
    bytes(params, grads, 0, 2 * INDEX * work.tokens, on.embed * count * matrix),
  ];
  return {
    peak: largest(stretches, total), forward, backward: bytes(params, grads, 0, 2 * INDEX * work.tokens, 0),
    flops: flops(s, work, on),
  };
}

// ---- jobs/lm: shapes of what trains as [rows, columns, how often] (a vector has no columns), and optimizers
function trainedShapes(s, on) {
  if (on.rank) return s.linears.flatMap(([a, b]) => [[on.rank, a, s.layers], [b, on.rank, s.layers]]);
  const found = s.linears.map(([a, b]) => [b, a, on.blocks]);
  found.push([s.block - s.matmul, 0, on.blocks]);
  if (on.embed) found.push([s.vocab, s.width, 1]);
  if (on.embed && s.positions) found.push([s.positions, s.width, 1]);
  if (on.head && !s.tied) found.push([s.vocab, s.width, 1]);
  if (on.tail) found.push([s.tail, 0, 1]);
  return found.filter(([, , times]) => times > 0);
}

const numel = ([rows, columns]) => rows * (columns || 1);
const edges = ([rows, columns]) => (columns ? rows + columns : rows);
const projects = ([rows, columns]) => columns > 0 && Math.min(rows, columns) > 1;
const OPTIMIZERS = {
  adamw: { shared: 0, state: (p, item) => 2 * numel(p) * item + FLOAT, step: () => 0 },
  "adamw-8bit": {
    shared: 2 * 256 * FLOAT, step: () => 0,
    state: (p) => (numel(p) >= 4096 ? 2 * (numel(p) + FLOAT * Math.ceil(numel(p) / 256)) : 2 * FLOAT * numel(p)),
  },
  adafactor: {
    shared: 0, state: (p) => FLOAT * (edges(p) + 1),
    step: (p, item) => FLOAT * ((2 + 2 * (item < FLOAT)) * numel(p) + (p[1] ? edges(p) : 0)),
  },
  "apollo-mini": {
    shared: 0,
    state: (p, item) => (projects(p) ? item * (2 * Math.max(p[0], p[1]) + Math.min(p[0], p[1]) + 1) : 2 * numel(p) * item),
    step: (p, item) => {
      if (!projects(p)) return 2 * numel(p) * item;
      const drawn = 2 * FLOAT * Math.min(p[0], p[1]) + (item < FLOAT ? FLOAT * numel(p) : 0);
      return Math.max(drawn, item * (2 * numel(p) + 3 * Math.max(p[0], p[1]) + 1 + 2));
    },
  },
};

// jobs/lm/step.py: tokens whose logits are held at once, those that fit 256 MiB
const tokensAtOnce = (vocab) => 2 ** Math.floor(Math.log2(Math.max(Math.floor(2 ** 28 / (4 * vocab)), 1)));

function workOf(s, asked, checkpointing, whole) {
  const tokens = asked.batch * asked.length, atOnce = whole ? 0 : tokensAtOnce(s.vocab);
  return {
    batch: asked.batch, length: asked.length, tokens, element: 2, padded: 1, checkpointing: +checkpointing,
    atOnce: atOnce < tokens ? atOnce : 0,
  };
}

// the lowest blocks, the highest (with a frozen embedding those with the first block), or both
function drawsOf(s, way, work, asked) {
  const low = { ...way, high: 0 }, high = { ...way, high: way.embed ? way.blocks : Math.max(way.blocks - 1, 0) };
  if (!way.blocks || way.blocks >= s.layers) return [low];
  return work.checkpointing ? [high] : asked.accumulate > 1 ? [low] : [low, high];
}

// ---- jobs/lm/prices.py and jobs/plan/price.py: bytes at the peak, operations, seconds of a step on one device
function price(s, way, asked, checkpointing, logits = false) {
  const work = workOf(s, asked, checkpointing, logits), optimizer = OPTIMIZERS[way.optimizer];
  const shapes = trainedShapes(s, way), draws = logits ? [{ ...way, high: 0 }] : drawsOf(s, way, work, asked);
  const item = way.rank ? loraElement(work) : work.element, elements = sum(shapes.map((p) => numel(p) * p[2]));
  // 32-bit masters of 16-bit weights: the optimizer then works in 32 bits, and needs such gradients
  const copies = way.masters && item < FLOAT ? FLOAT * elements : 0, wide = copies ? FLOAT : item;
  const state = sum(shapes.map((p) => optimizer.state(p, wide) * p[2])) + optimizer.shared + copies;
  const step = Math.max(0, ...shapes.map((p) => optimizer.step(p, wide))) + copies;
  const priced = draws.map((on) => {
    const found = passes(s, work, on, +(asked.accumulate > 1)), updating = { ...found.backward, optimizer: state, transient: step };
    return { found, bytes: largest([{ ...found.peak, optimizer: state }, updating], total) };
  });
  const { found, bytes: held } = largest(priced, (one) => total(one.bytes));
  const operations = asked.accumulate * sum(Object.values(found.flops)), moved = 2 * state + 3 * elements * item;
  return {
    bytes: held, forward: found.forward.activations,
    trainable: elements, operations, flops: found.flops,
    seconds: asked.rate ? operations / asked.rate + moved / asked.moves : null,
  };
}
