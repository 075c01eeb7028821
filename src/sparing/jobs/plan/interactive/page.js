"use strict";
// What the page does: reads its controls, asks the formulas, shows what they say. No request leaves it.
const at = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const PARTS = {
  params: "weights", grads: "gradients", optimizer: "optimizer", activations: "activations", transient: "for a moment",
};
const three = (value) => (value >= 100 ? Number(value.toPrecision(3)).toLocaleString("en") : value.toPrecision(3));
const gib = (value) => `${three(value / 2 ** 30)} GiB`;
const rate = (value) => (value >= 1e6 ? `${three(value / 1e6)} M` : value >= 1e4 ? `${three(value / 1e3)} k` : three(value));
const time = (value) => (value >= 120 ? `${three(value / 60)} min` : value >= 1 ? `${three(value)} s` : `${three(value * 1e3)} ms`);

const powers = (from, to) => Array.from({ length: Math.log2(to / from) + 1 }, (_, n) => from * 2 ** n);
const DIALS = {
  length: { steps: powers(128, 131072), say: (value) => `${value.toLocaleString("en")} tokens` },
  batch: { steps: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64], say: String },
  accumulate: { steps: [1, 2, 4, 8, 16, 32, 64], say: String },
  per_group: { steps: [1, 2, 4, 8, 16], say: String },
  groups: { steps: [1, 2, 3, 4, 6, 8, 12, 16, 32, 64], say: String },
  intra: { steps: [16, 32, 64, 300, 450, 900], say: (value) => `${value} GB/s` },
  inter: { steps: [1, 10, 25, 50, 100, 200, 400, 800], say: (value) => `${value} Gbit/s` },
};
const shapes = new Map(FACTS.models.map((one) => [one.name, shapeOf(one.shape)]));

const read = (name) => DIALS[name].steps[+at(name).value];
function asked() {
  const card = FACTS.cards[at("card").value], cards = read("groups") * read("per_group");
  return {
    model: FACTS.models.find((one) => one.name === at("model").value), card: at("card").value, memory: card.memory,
    length: read("length"), batch: read("batch"), accumulate: read("accumulate"), groups: read("groups"),
    per_group: read("per_group"), intra: read("intra"), inter: read("inter"), cards,
    rate: card.peak ? card.peak * FACTS.reached * 1e12 : null, moves: 1e9 * card.bandwidth,
  };
}

function plan(now) {
  const s = shapes.get(now.model.name);
  if (now.cards === 1) return onDevice(s, now.model.ways, now, now.memory);
  const layers = s.layers;
  const able = now.model.ways.filter((way) => !way.saved && way.optimizer === "adamw" && way.label !== "BAdam" && way.blocks <= layers);
  const topology = { sizes: [now.per_group, now.groups], rates: [now.intra * 1e9, (now.inter * 1e9) / 8] };
  return onCluster(s, able, now, now.memory, topology);
}

// Of two rows of a method: without checkpointing if that fits, else with it, as in the planner's table.
function shown(found, now) {
  if (now.cards > 1) return found.rows;
  return found.rows.filter((row, index) => (row.checkpointing ? !found.rows[index - 1].fits : row.fits)).map((row) => row);
}
const named = (row) => row.way.label + (row.plan ? ` · ${row.plan}` : "");
const speed = (row, now) => (row.seconds ? (now.cards * now.batch * now.length * now.accumulate) / row.seconds : null);
const held = (row) => (row.way.saved ? "≤ " : "") + gib(row.peak);

function sayAnswer(found, now, rows) {
  const box = at("answer"), pick = found.pick;
  box.classList.toggle("none", !pick);
  const each = now.cards > 1 ? ` on each of ${now.cards} cards` : "";
  const memory = `${now.card.toUpperCase()}, ${now.memory / 1e9} GB`;
  const bold = (text) => make("b", "", text), whole = (text) => make("b", "whole", text);
  if (!pick) {
    const least = rows.reduce((a, b) => (b.peak < a.peak ? b : a));
    box.replaceChildren("Nothing fits. The least is ", bold(named(least)), " at ", whole(held(least)), `${each}.`,
      make("span", "why", `${now.model.name} on ${memory}: shorter rows, fewer at once, more cards, or a larger card.`));
    return;
  }
  const pace = speed(pick, now);
  const parts = [bold(named(pick)), `${pick.checkpointing ? " with checkpointing" : ""}: `, whole(held(pick)), `${each}`];
  if (pace) parts.push(", ", whole(`${rate(pace)} tokens/s`), ", ", whole(time(pick.seconds)), " a step");
  const spare = now.memory - pick.peak;
  const why = ["the reference, and it fits", "full fine-tuning with 8-bit moments", "full does not fit; LoRA led where both were measured",
    "neither full nor LoRA fits", "only rounded weights fit"][pick.way.tier];
  parts.push(".", make("span", "why", `${now.model.name} on ${memory}: ${gib(spare)} to spare; ${why}.`));
  box.replaceChildren(...parts);
}

function drawBars(found, now, rows) {
  const pace = rows.some((row) => row.seconds), scale = 1.6 * now.memory, list = at("bars");
  const head = make("div", "row head");
  head.append(make("span", "", "way"), make("span", "track"), make("span", "number", "peak"), make("span", "number", pace ? "tokens/s" : ""));
  const made = rows.map((row) => {
    const mine = found.pick && row.way.label === found.pick.way.label && row.checkpointing === found.pick.checkpointing;
    const line = make("div", `row${mine ? " pick" : ""}${row.fits ? "" : " over"}`);
    const name = make("span", "name", named(row)), again = [];
    if (row.checkpointing) again.push("checkpointing");
    if (!row.fits) again.push(`${gib(row.peak - now.memory)} too much`);
    if (again.length) name.append(make("small", "", again.join(", ")));
    const track = make("span", "track"), fill = make("span", "fill"), limit = make("span", "limit");
    const words = Object.keys(PARTS).map((part) => `${PARTS[part]} ${gib(row.bytes[part])}`).join(", ");
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", `${named(row)}: ${words}${row.fits ? "" : "; does not fit"}`);
    track.title = words;
    let left = scale;
    for (const part of Object.keys(PARTS)) {
      const piece = make("i"), size = Math.min(row.bytes[part], left);
      left -= size;
      piece.style.width = `${(100 * size) / scale}%`;
      piece.style.background = `var(--${part})`;
      fill.append(piece);
    }
    limit.style.left = `${100 / 1.6}%`;
    track.append(fill, limit);
    const tokens = speed(row, now);
    line.append(name, track, make("span", "number", held(row)), make("span", "number", tokens ? rate(tokens) : "–"));
    return line;
  });
  list.replaceChildren(head, ...made);
  at("bars-title").textContent = `Bytes at the peak of a step${now.cards > 1 ? ", on each card, under each way's best plan" : ""}`;
  const fits = rows.filter((row) => row.fits).length;
  at("bars-note").textContent = `${fits} of ${rows.length} fit. The dashed line is the card's memory, ${gib(now.memory)}; bars end at 1.6 times it.`
    + (pace ? "" : ` No times: ${now.card.toUpperCase()} has no matrix units for bfloat16.`);
}

function drawPlans(found, now) {
  const box = at("plans");
  if (now.cards === 1) { box.replaceChildren(); return; }
  const lead = found.pick || found.rows.reduce((a, b) => (b.peak < a.peak ? b : a)), cells = make("div", "cells");
  for (const row of [...lead.plans].sort((a, b) => b.fits - a.fits || (a.seconds ?? a.peak) - (b.seconds ?? b.peak))) {
    const cell = make("div", `cell${row.plan === lead.plan && row.fits ? " pick" : ""}${row.fits ? "" : " over"}`);
    cell.append(make("b", "", row.plan), make("span", "", gib(row.peak)), make("br"),
      make("span", "", row.fits ? time(row.seconds) : "does not fit"));
    cells.append(cell);
  }
  box.replaceChildren(make("h2", "", `Fourteen ways to split ${lead.way.label}${lead.checkpointing ? ", with checkpointing" : ""}`), cells,
    make("p", "note", "Letters: parameters, gradients, optimizer state; N whole on every card, I cut inside a machine, G cut over all cards. "
      + `Seconds of a step${now.rate ? "" : ", of the links alone"}. NNN is plain data parallelism, GGG is FSDP.`));
}

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`);
function sayCommand(found, now) {
  const pick = found.pick, step = `--dtype bfloat16 --batch ${now.batch * now.cards} --length ${now.length} --accumulate ${now.accumulate}`;
  if (!pick) {
    at("command").textContent = "–";
    at("command-note").textContent = "Nothing fits, so there is nothing to run.";
    return;
  }
  const many = now.cards > 1, again = pick.checkpointing ? " --checkpointing" : "";
  const launch = many ? `torchrun --nnodes ${now.groups} --nproc-per-node ${now.per_group} --no-python sparing` : "sparing";
  const split = many ? ` --plan ${pick.plan} --groups ${now.groups}` : "";
  const written = `${launch} finetune ${quoted(now.model.path)} DATA.jsonl ${pick.way.flags} ${step}${again}${split}`;
  // a flag and its value stay on one line
  at("command").replaceChildren(...written.split(/ (?=-)/).flatMap((words, n) => [n ? " " : "", make("span", n ? "whole" : "", words)]));
  at("command-note").textContent = (many ? "Run it on every machine, with --rdzv-endpoint naming one of them; --batch counts the rows of all cards. " : "")
    + ([now.model.name, "MODEL"].includes(now.model.path) ? "Put the folder of the model in place of its name, and your file in place of DATA.jsonl." : "Put your file in place of DATA.jsonl.");
}

function update() {
  for (const [name, dial] of Object.entries(DIALS)) {
    const words = dial.say(read(name));
    at(`${name}-said`).textContent = words;
    at(name).setAttribute("aria-valuetext", words);
  }
  const now = asked(), found = plan(now), rows = shown(found, now);
  for (const [name, on] of [["intra", now.per_group > 1], ["inter", now.groups > 1]]) {
    at(name).disabled = !on;
    at(`${name}-dial`).classList.toggle("off", !on);
  }
  sayAnswer(found, now, rows);
  drawBars(found, now, rows);
  drawPlans(found, now);
  sayCommand(found, now);
}

function begin() {
  for (const one of FACTS.models) at("model").append(new Option(`${one.name} · ${Number((one.total / 1e9).toPrecision(3))} B`, one.name));
  for (const [name, card] of Object.entries(FACTS.cards)) at("card").append(new Option(`${name.toUpperCase()} · ${card.memory / 1e9} GB`, name));
  at("model").value = FACTS.start.model;
  at("card").value = FACTS.start.card;
  const near = (steps, value) => steps.reduce((best, step, index) =>
    (Math.abs(Math.log(step / value)) < Math.abs(Math.log(steps[best] / value)) ? index : best), 0);
  for (const [name, dial] of Object.entries(DIALS)) {
    const input = at(name);
    input.min = 0;
    input.max = dial.steps.length - 1;
    input.value = near(dial.steps, FACTS.start[name] || { intra: 450, inter: 100 }[name]);
  }
  for (const [part, words] of Object.entries(PARTS)) {
    const item = make("li"), sign = make("i");
    sign.style.background = `var(--${part})`;
    item.append(sign, words);
    at("legend").append(item);
  }
  at("rule").textContent = FACTS.rule;
  let asleep = false;
  at("controls").addEventListener("input", () => {
    if (asleep) return;
    asleep = true;
    requestAnimationFrame(() => { asleep = false; update(); });
  });
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("copy").addEventListener("click", async () => {
    const range = document.createRange();
    range.selectNodeContents(at("command"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    try { await navigator.clipboard.writeText(at("command").textContent); } catch { document.execCommand("copy"); }
    at("copy").textContent = "Copied";
    setTimeout(() => { at("copy").textContent = "Copy"; }, 1500);
  });
  update();
}
begin();
