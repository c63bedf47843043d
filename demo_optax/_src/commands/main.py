"""The command ``demo-optax``, whose subcommands are modules of this folder."""

import argparse
import io
import sys
from collections.abc import Sequence

from demo_optax._src.commands import bytes_of, choose, swarm

DESCRIPTION = "Chooses an optimizer for a link, counts bytes, and looks at swarms."
COMMANDS = {"choose": choose, "bytes": bytes_of, "swarm": swarm}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo-optax", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        first_line = str(module.__doc__).partition("\n")[0]
        command = commands.add_parser(
            name, description=module.__doc__, help=first_line, formatter_class=Help
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


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
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
