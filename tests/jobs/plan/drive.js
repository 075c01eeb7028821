// Answers lines of JSON on standard input with lines on standard output, by the page's own formulas.
const fs = require("fs"), vm = require("vm"), path = require("path");
const folder = process.argv[2];
const code = ["price.js", "split.js"].map((name) => fs.readFileSync(path.join(folder, name), "utf8")).join("\n");
const ours = vm.runInNewContext(`${code}\n({ shapeOf, price, total, workloadOf, splitBytes, simulate, onDevice, onCluster })`, {});
const say = [];
for (const line of fs.readFileSync(0, "utf8").trim().split("\n")) {
  const asked = JSON.parse(line), s = ours.shapeOf(asked.shape);
  if (asked.plan) {
    const work = ours.workloadOf(s, asked.way, asked, asked.checkpointing);
    const held = ours.splitBytes(work, asked.topology.sizes, asked.plan);
    say.push({ ...held, seconds: ours.simulate(work, asked.topology, asked.plan) });
  } else if (asked.ways) {
    const found = asked.topology ? ours.onCluster(s, asked.ways, asked, asked.memory, asked.topology) : ours.onDevice(s, asked.ways, asked, asked.memory);
    say.push(found.pick && { label: found.pick.way.label, checkpointing: found.pick.checkpointing, plan: found.pick.plan || null, peak: found.pick.peak, seconds: found.pick.seconds });
  } else {
    const found = ours.price(s, asked.way, asked, asked.checkpointing);
    say.push({ ...found.bytes, trainable: found.trainable, operations: found.operations, seconds: found.seconds, total: s.total });
  }
}
process.stdout.write(say.map((one) => JSON.stringify(one)).join("\n") + "\n");
