"""The command ``demo-optax``, whose subcommands are modules of this folder."""

import argparse
import collections
import functools
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from demo_optax._src.commands import bytes_of, choose, key, roster, swarm

DESCRIPTION = "Chooses an optimizer for a link, counts bytes, and looks after swarms."
COMMANDS: dict[str, Any] = {
    "choose": choose,
    "bytes": bytes_of,
    "swarm": swarm,
    "key": key,
    "roster": roster,
}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of the examples, and shows every default."""


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands; of arguments with the same ``one_of`` one is needed."""
    parser = argparse.ArgumentParser(prog="demo-optax", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary, about = module.__doc__.partition("\n")[0], module.__doc__
        command = commands.add_parser(name, description=about, help=summary, formatter_class=Help)
        command.set_defaults(run=module.run)
        one = functools.partial(command.add_mutually_exclusive_group, required=True)
        groups: Any = collections.defaultdict(one, {None: command})
        for flag, (options, meaning) in module.ARGUMENTS.items():
            given = {"default": argparse.SUPPRESS, "help": meaning, **options}
            groups[given.pop("one_of", None)].add_argument(flag, **given)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; settings that do not fit together end it with one line.

    Names and paths may have characters that the terminal lacks, which are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    args = make_parser().parse_args(arguments)
    try:
        args.run(args)
        print(end="", flush=True)
    except BrokenPipeError:  # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
