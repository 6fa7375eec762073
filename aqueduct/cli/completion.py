"""``aqueduct completion``: what a shell needs to complete the command line.

The script is made by ``shtab`` from the parser, and holds the names of commands and options. So a
shell that completes starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from aqueduct.cli.common import CommandFailed, Commands

__all__ = ["add", "run"]

SHELLS: Final = ("bash", "zsh", "fish")
_EPILOG: Final = (
    'bash: eval "$(aqueduct completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after '
    "compinit; fish: aqueduct completion fish > ~/.config/fish/completions/aqueduct.fish"
)


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "completion",
        help="a script that completes this command in bash, zsh or fish",
        epilog=_EPILOG,
    )
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    command.set_defaults(run=run, usage=command)


def run(args: argparse.Namespace) -> int:
    """Prints the script; the exit status."""
    try:
        import shtab
    except ImportError:
        raise CommandFailed("completion needs shtab: pip install 'aqueduct-arrow[cli]'") from None
    _note_files(args.parser, shtab.FILE)
    for line in shtab.complete(args.parser, args.shell).splitlines():
        print(line)
    return 0


def _note_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Notes on each argument that takes a file that files complete it."""
    for action in getattr(parser, "_actions", ()):
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _note_files(command, files)
        elif action.metavar == "FILE":
            noted: Any = action
            noted.complete = files
