"""``python -m benchmarks.gpu.federated_pfl JSON``: rounds of pfl-research on a device, for the benchmark beside it.

It needs torch and pfl alone; seconds of the counted rounds are its last line.
"""

from __future__ import annotations

import functools
import json
import sys

import torch

from benchmarks.federated import rival_pfl, rivals

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    rivals.CLIENTS, rivals.COHORT, rivals.EPOCHS = asked["clients"], asked["cohort"], asked["epochs"]
    rivals.BATCH, rivals.RATE, rivals.ROUNDS, rivals.WARM = (asked[n] for n in ("batch", "rate", "rounds", "warm"))
    plain_net, plain_rows, device = rivals.net, rivals.rows_of, torch.device(asked["device"])
    rivals.net = lambda name: plain_net(name).to(device)  # type: ignore[assignment]
    # On the device once, as ours.
    rivals.rows_of = functools.cache(lambda name, client: tuple(one.to(device) for one in plain_rows(name, client)))
    sys.stdout.write(json.dumps(rival_pfl.train(asked["net"])) + "\n")
