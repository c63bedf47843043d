"""Makes the key of a member, or of an owner, of a swarm for members only.

demo-optax key paris
"""

import argparse
import os
import pathlib

ARGUMENTS = {"name": ({}, "the name of the worker; NAME.key and NAME.pub are written")}


def run(args: argparse.Namespace) -> None:
    from demo_optax._src.swarm import seals  # needs cryptography

    files = f"{args.name}.key", f"{args.name}.pub"
    for file in filter(os.path.lexists, files):
        raise FileExistsError(
            f"The file {file!r} is there already: give another name, or take both files away."
        )
    if os.path.dirname(args.name):
        raise ValueError(
            f"{args.name!r} is no name of a worker: leave its folder out, and run this there."
        )
    public = seals.make_key(files[0], args.name)
    pathlib.Path(files[1]).write_text(public.line + "\n")
    print(public.line)
    print(f"wrote {files[0]}, for you alone, and {files[1]}, the line that others may have")
