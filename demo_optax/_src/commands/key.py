"""Makes the key of a member, or of an owner, of a swarm for members only.

demo-optax key paris
"""

import argparse
import pathlib
from collections.abc import Callable


def add_arguments(add: Callable[..., None]) -> None:
    add("name", "the name of the worker; NAME.key and NAME.pub are written")


def run(args: argparse.Namespace) -> None:
    from demo_optax._src.swarm import seals  # needs cryptography

    public = seals.make_key(f"{args.name}.key", args.name)
    pathlib.Path(f"{args.name}.pub").write_text(public.line + "\n")
    print(public.line)
    print(f"wrote {args.name}.key, for you alone, and {args.name}.pub, the line for the owner")
