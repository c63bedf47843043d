"""Places that are no folders of this machine never become some."""

import os
import pathlib

import pytest

from demo_optax.checkpoint import Checkpointer, folder_of, load_params
from demo_optax.swarm import ObjectStore
from tests import workers
from tests.saved_runs import TX


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (pathlib.Path("gs://bucket/run"), "give the URL as a string that begins with 'gs://'"),
        (pathlib.Path("s3://bucket/run").absolute(), "a string that begins with 's3://'"),
        (os.path.join("/runs", "az://container/run"), "a string that begins with 'az://'"),
        ("file://another.host/run", "names a folder on the host 'another.host'"),
        ("file://run", "names a folder on the host 'run'"),
        ("file:///runs/s3:/bucket", "a string that begins with 's3://'"),
        ("", "names no place"),
    ],
    ids=str,
)
def test_a_place_that_is_another_on_each_machine_is_refused(place, error):
    with pytest.raises(ValueError, match=error):
        folder_of(place)


@pytest.mark.parametrize(
    ("use", "place", "error"),
    [
        (load_params, "hdfs://cluster/run", "checkpoints cannot be kept at hdfs://cluster/run"),
        (load_params, pathlib.Path("s3://bucket/run"), "a string that begins with 's3://'"),
        (Checkpointer, "GS://bucket/run", "checkpoints cannot be kept at GS://bucket/run"),
        (Checkpointer, pathlib.Path("s3://bucket/run"), "a string that begins with 's3://'"),
        (ObjectStore, pathlib.Path("s3://bucket/run"), "no store that can be opened: .* give the"),
    ],
)
def test_who_is_given_such_a_place_makes_no_folder_of_it(use, place, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((OSError, ValueError), match=error):
        use(place, *[TX, workers.mesh_of(2)] * (use is Checkpointer))
    assert not os.listdir()
