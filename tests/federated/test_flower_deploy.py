"""A real federation on loopback: processes, TLS, registered keys; what is wrong with them is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patience import PATIENCE
from refusals import refused
from sparing.errors import RunError
from sparing.federated import flower
from sparing.federated.methods.secure import SecureSum
from sparing.federated.secure.signing import new_signers

pytest.importorskip("flwr", reason="needs the extra [flower]")

APP = Path(__file__).parents[2] / "examples" / "flower_app"

# What the app has otherwise where clients sign: each reads its own key, and all public ones, from a file of its node's.
SIGNED_TASK = """

import json, os
from dataclasses import replace
from pathlib import Path
from sparing.federated.methods.secure import SecureSum
from sparing.federated.secure.signing import Signer

plain = settings_of


def settings_of(config):
    method, schedule = plain(config)
    return SecureSum(method, signed=True), replace(schedule, batch_norm="local")


def signer_of(client):
    kept = json.loads((Path(os.environ["SIGNERS"]) / f"{client}.json").read_text())
    known = {int(number): bytes.fromhex(key) for number, key in kept["known"].items()}
    return Signer(client, bytes.fromhex(kept["private"]), known)
"""
SIGNED_CLIENT = """
from functools import cache
from flwr.clientapp import ClientApp
from flower_app.task import make_model, rows_of, settings_of, signer_of
from sparing.federated import flower

app = ClientApp()


@cache
def trainer(client, *settings):
    method, schedule = settings_of(dict(zip(("gamma", "rounds", "participation"), settings)))
    return flower.client_app(method, make_model, rows_of, schedule, signer=signer_of(client))


def answer(message, context):
    settings = [context.run_config[name] for name in ("gamma", "rounds", "participation")]
    return trainer(context.node_config["partition-id"], *settings)(message, context)


app.train()(answer)
app.query()(answer)
"""


def text(path):
    return path.read_text(encoding="utf-8", errors="replace")


@pytest.mark.slow
@pytest.mark.processes
def test_a_federation_trains_over_tls_to_the_bits_of_one_process(tmp_path, monkeypatch):
    keys = tmp_path / "signers"
    with flower.Deployment(tmp_path / "federation", nodes=2, environment={"SIGNERS": str(keys)}) as federation:
        refuse_a_stranger(federation)
        refuse_another_authority(federation, tmp_path)
        assert federation.online() == 2
        assert sorted(federation.partitions.values()) == [0, 1]
        settings = {"rounds": 2, "gamma": 0.1, "output": str(tmp_path / "out"), "partitions": federation.bindings}
        federation.run(APP, {**settings, "checkpoint": str(tmp_path / "server")})
        write_signers(keys, 2)
        # one round: it takes five exchanges, each of which starts a process at every node
        once = {"rounds": 1, "output": str(tmp_path / "signed"), "evaluation": 0.0}
        federation.run(signed_app(tmp_path), {**settings, **once}, timeout=PATIENCE)
    assert (tmp_path / "server").is_file()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [one["received"] for one in record["rounds"]] == [[0, 1], [0, 1]]
    assert [one["refused"] for one in record["rounds"]] == [[], []]
    assert 0.5 < record["metrics"]["2"]["ssr"] <= 1
    assert [one["evaluated"] for one in record["rounds"]] == [[0, 1], [0, 1]]
    monkeypatch.syspath_prepend(str(APP))
    from flower_app.task import held_of, make_model, rows_of, settings_of

    method, schedule = settings_of({"gamma": 0.1, "rounds": 2, "participation": 1.0})
    held = [held_of(0), held_of(1)]
    same = flower.run_in_process(make_model, [rows_of(0), rows_of(1)], method, schedule, held=held)
    assert record["held"]["2"]["accuracy"] == same.metrics[2]["held-accuracy"]
    signed, local = SecureSum(method, signed=True), replace(schedule, rounds=1, batch_norm="local")
    summed = flower.run_in_process(make_model, [rows_of(0), rows_of(1)], signed, local)
    for run, folder in ((same, "out"), (summed, "signed")):
        found = load_file(tmp_path / folder / "model.safetensors")
        for name, value in {**run.params, **run.buffers}.items():
            assert torch.equal(found[name], value), name
    rounds = json.loads((tmp_path / "signed" / "record.json").read_text())["rounds"]
    assert [(one["received"], one["faults"]) for one in rounds] == [([0, 1], [])]


def write_signers(folder, clients):
    """A file for each client: its private key and everybody's public ones."""
    folder.mkdir()
    for number, signer in new_signers(clients).items():
        known = {at: key.hex() for at, key in signer.known.items()}
        (folder / f"{number}.json").write_text(json.dumps({"private": signer.private.hex(), "known": known}))


def signed_app(folder):
    """The example's app with a signed secure sum."""
    made = folder / "signed_app"
    if not made.exists():
        shutil.copytree(APP, made, ignore=shutil.ignore_patterns("__pycache__"))
        task = made / "flower_app" / "task.py"
        task.write_text(task.read_text() + SIGNED_TASK)
        (made / "flower_app" / "client_app.py").write_text(SIGNED_CLIENT)
        server = made / "flower_app" / "server_app.py"
        # a loaded machine takes longer to start the processes of an exchange than a minute
        told = server.read_text().replace("nodes=nodes or None,", f"nodes=nodes or None, patience={PATIENCE},")
        server.write_text(told.replace("timeout=120", f"timeout={PATIENCE}"))
    return made


def refuse_a_stranger(federation):
    """A node whose key nobody registered does not come in."""
    key = flower.node_key(federation.folder / "strangers", "stranger")
    run_until("failed to activate supernode", federation, federation.node_command(0, key))
    assert "public key" in text(federation.folder / "superlink.log")


def refuse_another_authority(federation, folder):
    """A node that trusts another authority does not talk to the SuperLink."""
    other = flower.certificates(folder / "other", ["127.0.0.1"])
    command = federation.node_command(0)
    command[command.index("--root-certificates") + 1] = str(other.authority)
    run_until("certificate", federation, [*command, "--max-retries", "1"])


def run_until(words, federation, command):
    """Run a node until it says these words; it must before it ends by itself."""
    log = federation.folder / "refused.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=federation.environment, start_new_session=True
        )
    try:
        end = time.monotonic() + PATIENCE
        while words not in text(log).lower() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
    finally:
        flower.end_process(process)
    assert words in text(log).lower()


def test_certificates_are_of_the_authority_and_of_the_hosts(tmp_path):
    from cryptography import x509

    made = flower.certificates(tmp_path, ["127.0.0.1", "localhost"])
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    server = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert made.key.stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob("ca.key"))


def test_certificates_and_keys_are_kept(tmp_path):
    first = flower.certificates(tmp_path, ["localhost"]).certificate.read_bytes()
    assert flower.certificates(tmp_path, ["localhost"]).certificate.read_bytes() == first
    key = flower.node_key(tmp_path, "node").private.read_bytes()
    assert flower.node_key(tmp_path, "node").private.read_bytes() == key
    assert (tmp_path / "node").stat().st_mode & 0o077 == 0


def test_certificates_that_are_over_are_made_anew(tmp_path):
    first = flower.certificates(tmp_path, ["localhost"], days=1).certificate.read_bytes()
    assert flower.certificates(tmp_path, ["localhost"]).certificate.read_bytes() != first


def test_a_file_that_is_no_certificate_is_refused(tmp_path):
    flower.certificates(tmp_path, ["localhost"])
    (tmp_path / "server.pem").write_text("hello")
    refused("it is no certificate", flower.certificates, tmp_path, ["localhost"])


def test_a_superlink_that_ends_at_once_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(flower.Deployment, "superlink_command", lambda self: ["sh", "-c", "echo no luck; exit 3"])
    with pytest.raises(RunError, match="superlink: ended with status 3; no luck"), flower.Deployment(tmp_path):
        pass


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        (["running", "finished:completed"], None),
        (["running", "finished:failed"], "run 7: finished:failed; no memory"),
        (["running", "finished:stopped"], "run 7: still running after -?0 s; stopped"),
    ],
)
def test_a_run_that_ends_between_the_last_look_and_the_limit_is_what_it_is(tmp_path, monkeypatch, statuses, says):
    seen = iter(statuses)

    def answer(self, *words):
        if words[0] == "stop" and statuses[1] != "finished:stopped":
            raise RunError("flwr stop: the run has ended already")
        return {"run-id": 7}

    monkeypatch.setattr(flower.Deployment, "_flwr", answer)
    monkeypatch.setattr(flower.Deployment, "_status", lambda self, number: next(seen))
    monkeypatch.setattr(flower.Deployment, "_call", lambda self, *words: "no memory")
    monkeypatch.setattr(flower.Deployment, "_log", lambda self, name: "")
    federation = flower.Deployment(tmp_path)
    if says is None:
        assert federation.run(tmp_path, timeout=-1.0) == "no memory"
    else:
        with pytest.raises(RunError, match=says):
            federation.run(tmp_path, timeout=-1e-9)


def test_there_is_no_plaintext(tmp_path):
    refused("there is no plaintext mode", flower.Deployment(tmp_path).superlink_command)
    refused("nodes: got 0", flower.Deployment, tmp_path, 0)
