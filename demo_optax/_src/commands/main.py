"""The command ``demo-optax``, whose subcommands are modules of this folder."""

import argparse
import functools
import io
import sys
from collections.abc import Sequence

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
        module.add_arguments(functools.partial(_add, command))
    return parser


def _add(parser, flag: str, meaning: str, default=argparse.SUPPRESS, **options) -> None:
    parser.add_argument(flag, help=meaning, default=default, **options)


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
