"""The recipes for clusters: their files parse, their options exist, and torchrun starts what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from sparing.cli import _parse
from sparing.jobs.finetune.settings import Finetune

PAGE = (Path(__file__).parents[2] / "docs/clusters.md").read_text(encoding="utf-8")
SLURM, KUBERNETES = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("bash", "yaml"))  # type: ignore[index]
KNOWN = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output"}


def checked(words: list[str]) -> tuple[Any, Finetune]:
    """What torchrun and the command make of the words behind ``torchrun``."""
    given = get_args_parser().parse_args(words)
    assert given.module
    assert (given.training_script, given.training_script_args[0]) == ("sparing", "finetune")
    return given, _parse("finetune", Finetune, given.training_script_args[1:])


def slurm_words() -> list[str]:
    line = SLURM.replace("\\\n", " ").split("srun torchrun", 1)[1]
    for name, value in {"$SLURM_NNODES": "4", "${SLURM_GPUS_ON_NODE:-2}": "8", "$SLURM_JOB_ID": "7"}.items():
        line = line.replace(name, value)
    return line.replace('"', "").replace("$first", "node0").split()


def test_the_batch_script_asks_for_what_slurm_knows() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM, re.MULTILINE))
    assert asked.keys() == KNOWN
    # one torchrun on each machine, which starts the processes itself
    assert asked["ntasks-per-node"] == "1"
    assert subprocess.run(["bash", "-n"], input=SLURM, text=True, check=False).returncode == 0


def test_both_recipes_run_the_same_command_whose_options_exist() -> None:
    service, job = yaml.safe_load_all(KUBERNETES)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    there, theirs = checked(container["args"])
    here, ours = checked(slurm_words())
    assert (here.nnodes, here.nproc_per_node) == (there.nnodes, there.nproc_per_node) == ("4", "8")
    for name in ("method", "plan", "dtype", "save_every", "engine"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert container["command"] == ["torchrun"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(there.nproc_per_node)
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == there.nnodes
    # the first pod has this name because job, subdomain and service are called alike
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"] == name
    assert there.rdzv_endpoint == f"{name}-0.{name}:{service['spec']['ports'][0]['port']}"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.processes
@pytest.mark.slow  # two processes that import torch
def test_the_batch_script_starts_two_processes_that_meet(tmp_path: Path) -> None:
    """With stand-ins for SLURM's own commands, up to data that are not there: a line that says so, and status 1."""
    stubs = {
        "srun": 'exec "$@"',
        "scontrol": "echo localhost",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    # any free port instead of the usual one, which another test may have
    script = SLURM.replace("$first:29500", "$first:0") + "  --device cpu\n"
    script = script.replace("--out runs/finetune\n  --device", "--out runs/finetune --device").replace(
        "bfloat16", "float32"
    )
    settings = {
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash"], input=script, text=True, check=False, capture_output=True, cwd=tmp_path, env=os.environ | settings,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 1
    assert "model: got models/base; " in done.stderr
    assert not (tmp_path / "runs").exists()
