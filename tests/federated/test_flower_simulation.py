"""Flower's own simulation (Ray) runs our client app and strategy, unchanged, to the bits of the in-process grid."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patience import PATIENCE
from sparing.federated import flower

pytest.importorskip("flwr", reason="needs the extra [flower]")
pytest.importorskip("ray", reason="needs flwr[simulation]")

APP = Path(__file__).parents[2] / "examples" / "flower_app"
PROGRAM = """
    import sys
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation
    from safetensors.torch import save_file
    from flower_app.task import make_model, rows_of, settings_of
    from sparing.federated import flower

    method, schedule = settings_of({"gamma": 0.1, "rounds": 2, "participation": 1.0})
    clients = flower.client_app(method, make_model, rows_of, schedule, mods=[flower.sign_telemetry])
    app = ServerApp()

    @app.main()
    def main(grid, context):
        server = flower.strategy(method, schedule, make_model, 2, seed=0)
        server.start(grid, server.initial_arrays(), schedule.rounds, timeout=float(sys.argv[2]))
        save_file({**server.params, **server.buffers}, sys.argv[1])

    run_simulation(app, clients, num_supernodes=2, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.slow
@pytest.mark.processes
def test_the_simulation_gives_the_bits_of_the_grid(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{APP}:{Path(__file__).parents[2] / 'src'}")
    out = tmp_path / "model.safetensors"
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM), out, str(PATIENCE)], check=True, timeout=PATIENCE)
    monkeypatch.syspath_prepend(str(APP))
    from flower_app.task import make_model, rows_of, settings_of

    method, schedule = settings_of({"gamma": 0.1, "rounds": 2, "participation": 1.0})
    same = flower.run_in_process(make_model, [rows_of(0), rows_of(1)], method, schedule)
    found = load_file(out)
    for name, value in {**same.params, **same.buffers}.items():
        assert torch.equal(found[name], value), name
