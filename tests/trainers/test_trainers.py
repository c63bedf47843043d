"""Trainers of others train by docs/how_to/trainers.md alone, each in an environment of its own.

An environment takes about a gigabyte. It stays in ``.venv-NAME`` until ``make clean``.
"""

import json
import os
import shutil
import subprocess

import jax
import pytest

from benchmarks import hlo
from tests.trainers import of_the_page

HERE = os.path.dirname(__file__)
DEVICES = "--xla_force_host_platform_device_count=8"

MAXTEXT = dict(
    hardware="cpu",
    skip_jax_distributed_system="true",
    enable_goodput_recording="false",
    dataset_type="synthetic",
    async_checkpointing="false",
    checkpoint_period=5,
    steps=10,
    base_emb_dim=64,
    base_num_query_heads=2,
    base_num_kv_heads=2,
    head_dim=32,
    base_mlp_dim=128,
    base_num_decoder_layers=2,
    vocab_size=256,
    max_target_length=32,
    per_device_batch_size=1,
    attention="dot_product",
    learning_rate=0.003,
)


@pytest.fixture
def changed(tmp_path, record_property):
    """A function that copies a trainer's package with the page's edits, and tells how many."""

    def change(heading, package):
        section = of_the_page.section(heading)
        python = of_the_page.environment(heading.lower(), section.installs)
        find = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
        origin = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
        shutil.copytree(os.path.dirname(origin.stdout.strip()), tmp_path / "changed" / package)
        of_the_page.apply(section.edits, tmp_path / "changed")
        lines = f"{heading}: {section.added} lines added, {section.removed} removed"
        print(lines)
        record_property("trial", lines)
        return section, python

    return change


def run(python, program, *arguments, folder, **variables):
    """What a program prints last, with the changed package in front of the installed one."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_module_re=.*train_step.*"
    done = subprocess.run(
        [python, os.path.join(HERE, program), *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **environment,
            "PYTHONPATH": str(folder / "changed"),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{DEVICES} {dump}",
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_only_packets_cross(folder, mesh, axis_name, record_property):
    """Of all that crosses, one all-gather has packets; the rest are numbers of the log."""
    (program,) = (folder / "dump").glob("*train_step*after_optimizations.txt")
    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh))
    every = hlo.collectives(program.read_text())
    collectives = [each for each in every if each.crosses(mesh, axis_name)]
    packets = [each for each in collectives if each.operand_bytes > 256]
    assert [(each.kind, each.dtype) for each in packets] == [("all-gather", "u32")], collectives
    others = sum(each.operand_bytes for each in collectives) - packets[0].operand_bytes
    record_property(
        "trial", f"  {packets[0].operand_bytes} bytes of packets, {others} of other numbers"
    )


@pytest.mark.slow
def test_maxtext(changed, tmp_path, record_property):
    section, python = changed("MaxText", "maxtext")
    settings = {**MAXTEXT, **section.settings, "base_output_directory": tmp_path}

    def train(name):
        own = {"run_name": name, "metrics_file": tmp_path / name / "metrics"}
        (tmp_path / name).mkdir(exist_ok=True)
        arguments = [f"{key}={value}" for key, value in {**settings, **own}.items()]
        result = run(
            python, "train_maxtext.py", *arguments, folder=tmp_path, DECOUPLE_GCLOUD="TRUE"
        )
        lines = (tmp_path / name / "metrics").read_text().splitlines()
        losses = {each["step"]: each["learning/loss"] for each in map(json.loads, lines)}
        return result, losses

    result, losses = train("whole")
    assert result["mesh"] == {"diloco": 4, "fsdp": 2}
    assert result["drift"] == []
    assert result["participants"] == 4
    assert result["momenta_differ"]
    assert losses[9] < losses[0] - 0.5
    assert_only_packets_cross(tmp_path, result["mesh"], "diloco", record_property)
    record_property("trial", f"  loss {losses[0]:.3f} to {losses[9]:.3f}, replicas equal")

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "9")
    (tmp_path / "resumed" / "metrics").unlink()
    _, again = train("resumed")
    assert again == {step: loss for step, loss in losses.items() if step > 5}
    record_property("trial", "  a run restored at step 5 has the same losses")


@pytest.mark.slow
def test_levanter(changed, tmp_path, record_property):
    section, python = changed("Levanter", "levanter")
    names = "axes", "compute_mapping", "param_mapping"
    arguments = "10", str(tmp_path / "run"), *[section.settings[name] for name in names]

    result = run(python, "train_levanter.py", *arguments, folder=tmp_path)
    assert result["mesh"] == {"data": 2, "replica": 4}
    assert result["drift"] == []
    assert result["participants"] == 4
    assert result["momenta_differ"]
    losses = result["losses"]
    assert losses["9"] < losses["0"] - 0.5
    assert_only_packets_cross(tmp_path, result["mesh"], "replica", record_property)
    record_property("trial", f"  loss {losses['0']:.3f} to {losses['9']:.3f}, replicas equal")

    again = run(python, "train_levanter.py", *arguments, folder=tmp_path)["losses"]
    assert again == {step: loss for step, loss in losses.items() if int(step) > 5}
    record_property("trial", "  a run restored at step 5 has the same losses")
