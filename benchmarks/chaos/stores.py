"""Stores to train over: a folder; S3 by moto's server; Azure by Microsoft's Azurite."""

import contextlib
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from . import proxy

StoreName = Literal["folder", "s3", "azure"]

# Azurite's well-known account, which its documentation publishes.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = pathlib.Path(__file__).parents[2] / ".venv" / "azurite" / "node_modules" / ".bin"


class Served(NamedTuple):
    """A place for one run, the environment that workers need for it, and its faults, if any."""

    url: str
    environment: dict[str, str]
    faults: proxy.Faults | None


@contextlib.contextmanager
def served(name: StoreName, folder: pathlib.Path, seed: int) -> Iterator[Served]:
    """A store that lives as long as this does."""
    if name == "folder":
        yield Served((folder / "store").as_uri(), {}, None)
        return
    port, faults = free_port(), proxy.Faults(seed)
    if name == "s3":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        azurite = AZURITE / "azurite-blob"
        if not azurite.exists():
            sys.exit(f"error: {azurite} is missing: make chaos installs it, with npm.")
        command = [str(azurite), "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
        command += ["--inMemoryPersistence"]
    output = (folder / "server.txt").open("w")
    server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    between = proxy.serve(("127.0.0.1", port), faults)
    try:
        wait_for(port)
        endpoint = f"http://127.0.0.1:{between.server_port}"
        yield (s3 if name == "s3" else azure)(endpoint, f"http://127.0.0.1:{port}", faults)
    finally:
        between.shutdown()
        server.kill()
        output.close()


def s3(endpoint: str, direct: str, faults: proxy.Faults) -> Served:
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{direct}/chaos", method="PUT")).read()
    environment = {
        "AWS_ENDPOINT": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    return Served("s3://chaos/run", environment, faults)


def azure(endpoint: str, direct: str, faults: proxy.Faults) -> Served:
    from azure.storage.blob import BlobServiceClient

    BlobServiceClient(f"{direct}/{ACCOUNT}", credential=KEY).create_container("chaos")
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }
    return Served("az://chaos/run", environment, faults)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port}")
        time.sleep(0.1)
