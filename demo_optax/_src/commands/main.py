"""The command ``demo-optax``, whose subcommands are modules of this folder."""

import argparse
import collections
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

from demo_optax._src.commands import bytes_of, choose, key, roster, swarm

DESCRIPTION = "Chooses an optimizer for a link, counts bytes, and looks after swarms."
COMMANDS = {"choose": choose, "bytes": bytes_of, "swarm": swarm, "key": key, "roster": roster}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo-optax", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        about = str(module.__doc__)
        summary = about.partition("\n")[0]
        command = commands.add_parser(name, description=about, help=summary, formatter_class=Help)
        command.set_defaults(run=module.run)
        module.add_arguments(_adder(command))
    return parser


def _adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """Returns a function that adds arguments, of which one of each ``one_of`` is needed."""
    groups: Any = collections.defaultdict(
        lambda: parser.add_mutually_exclusive_group(required=True), {None: parser}
    )

    def add(flag: str, meaning: str, default=argparse.SUPPRESS, one_of=None, **options) -> None:
        groups[one_of].add_argument(flag, help=meaning, default=default, **options)

    return add


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of the examples, and shows every default."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; settings that do not fit together end it with one line.

    Names and paths may have characters that the terminal lacks, which are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    args = make_parser().parse_args(arguments)
    try:
        args.run(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
