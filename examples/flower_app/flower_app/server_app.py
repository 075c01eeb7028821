"""The server."""

import json
from dataclasses import asdict
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from flower_app.task import make_model, settings_of
from sparing.federated import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    method, schedule = settings_of(config)
    nodes = dict(tuple(map(int, pair.split(":"))) for pair in str(config["partitions"]).split())
    server = flower.strategy(
        method, schedule, make_model, int(config["clients"]), seed=int(config["seed"]),
        evaluation=float(config["evaluation"]), nodes=nodes or None,
        checkpoint=config["checkpoint"] or None, resume=bool(config["checkpoint"]),
    )  # fmt: skip
    result = server.start(grid, server.initial_arrays(), server.left, timeout=120)
    if config["output"]:
        folder = Path(config["output"])
        folder.mkdir(parents=True, exist_ok=True)
        save_file({**server.params, **server.buffers}, folder / "model.safetensors")
        metrics = {number: dict(record) for number, record in result.train_metrics_clientapp.items()}
        held = {number: dict(record) for number, record in result.evaluate_metrics_clientapp.items()}
        record = {"rounds": [asdict(one) for one in server.rounds], "metrics": metrics, "held": held}
        (folder / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
