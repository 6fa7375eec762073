"""What commands have in common: their parser, failures, and the options of a client."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from aqueduct.arguments import KINDS
from aqueduct.errors import ConfigError
from aqueduct.escaping import near_miss
from aqueduct.service.signals import say, tell
from aqueduct.settings.secret_files import password_in, secret_in

if TYPE_CHECKING:
    from aqueduct.carriers.certificates import ClientTls

__all__ = [
    "CALL_FAILED",
    "FAILED",
    "WRONG_USAGE",
    "CommandFailed",
    "CommandParser",
    "Commands",
    "ShowVersion",
    "Terminated",
    "add_client_tls",
    "add_token",
    "client_tls",
    "ended_by_signals",
    "give_up_output",
    "guess",
    "open_if_closed",
    "reader",
    "require_standard_input",
    "require_standard_output",
    "shown_token",
]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds itself."""

_TOKEN: Final = "AQUEDUCT_TOKEN"


FAILED: Final = 1
"""The exit status of a command that failed: by its settings, its files, or the connection."""
WRONG_USAGE: Final = 2
"""The exit status for arguments that do not fit."""
CALL_FAILED: Final = 3
"""The exit status where a service was reached, and a call of it failed."""


class CommandFailed(Exception):
    """An expected failure; its text is the line that the user reads."""


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block by Terminated, so that it leaves nothing behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # else nohup, say, has decided
                previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, which names the option or command that was meant.

    Options are not abbreviated: a script would fail once there is another option of that beginning.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._given: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As that of argparse, but the command says what it does not know."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: argparse.ArgumentParser = getattr(found, "usage", self)
            command.error(f"unknown: {' '.join(unknown)}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As that of argparse; each command parses its own arguments by it."""
        if args is not None:
            self._given = list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line, and ends the process with status 2."""
        with contextlib.suppress(OSError):  # nobody can be told; the status says it
            tell(f"{self.prog}: {message}{self._meant()} (usage: {self.prog} --help)")
        self.exit(WRONG_USAGE)

    def print_help(self, file: Any = None) -> None:
        """As that of argparse, but a help that cannot be written is an error of the command."""
        if file is None:
            require_standard_output()
            file = sys.stdout
        file.write(self.format_help())
        file.flush()

    def _meant(self) -> str:
        """The option or the command that the user may have meant."""
        options = [
            name for name in getattr(self, "_option_string_actions", ()) if name.startswith("--")
        ]
        for text in self._given:
            name = text.partition("=")[0]
            if name == "--":
                break
            if name.startswith("--") and name not in options:
                return guess(name, options)
        for action in getattr(self, "_actions", ()):
            if isinstance(action, argparse._SubParsersAction):
                names = [text for text in self._given if not text.startswith("-")][:1]
                if names and names[0] not in action.choices:
                    return guess(names[0], action.choices)
        return ""


class ShowVersion(argparse.Action):
    """An option that tells the version and ends the command; not to write it is an error, too."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, const=const, help="the version of this"
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """See argparse."""
        require_standard_output()
        say(str(self.const))
        parser.exit()


def guess(name: str, names: Iterable[str]) -> str:
    """The end of an error for a name that is none of ``names``: which was meant, if one is near."""
    near = near_miss(name, names)
    return f"; {name} is unknown: did you mean {near}?" if near else ""


def add_client_tls(command: argparse.ArgumentParser) -> None:
    """Adds the TLS options of a client."""
    command.add_argument("--certificate", metavar="FILE", help="a client's own certificate, PEM")
    command.add_argument("--key", metavar="FILE", help="its private key, PEM")
    command.add_argument(
        "--key-password-file",
        metavar="FILE",
        help="holds the password of a private key that is encrypted",
    )
    command.add_argument(
        "--key-password",
        metavar="TEXT",
        help="the same as text, which others on this machine may see: use the file",
    )
    command.add_argument("--ca", metavar="FILE", help="CAs of the service's certificate, PEM")


def client_tls(args: argparse.Namespace) -> ClientTls | None:
    """What the TLS options say; None: none of them is given.

    Raises ConfigError for a file that holds no password, or cannot be read.
    """
    from aqueduct.carriers.certificates import ClientTls

    if bool(args.certificate) != bool(args.key):
        args.usage.error("--certificate and --key belong together")
    if args.key_password is not None and args.key_password_file is not None:
        args.usage.error("--key-password and --key-password-file exclude each other")
    password = args.key_password
    if args.key_password_file is not None:
        password = password_in(args.key_password_file)
    if password is not None and not args.key:
        option = "--key-password" if args.key_password_file is None else "--key-password-file"
        args.usage.error(f"{option} belongs to --certificate and --key")
    if not args.certificate and not args.ca:
        return None
    return ClientTls(ca=args.ca, certificate=args.certificate, key=args.key, key_password=password)


def add_token(command: argparse.ArgumentParser) -> None:
    """Adds the options of a token."""
    command.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds what the service asks of its callers (or the variable {_TOKEN} does)",
    )
    command.add_argument(
        "--token", help="the same as text, which others on this machine may see: use the file"
    )


def shown_token(args: argparse.Namespace) -> str | None:
    """The token to show: of ``--token``, of the file, or of the environment; None: there is none.

    Raises CommandFailed for a file that holds none, and ConfigError for one that cannot be read.
    """
    if args.token is not None and args.token_file is not None:
        args.usage.error("--token and --token-file exclude each other")
    if args.token is not None:
        return str(args.token)
    if args.token_file is None:
        return os.environ.get(_TOKEN) or None
    text = secret_in(args.token_file, "token").strip()
    if not text or len(text.split()) > 1:
        raise CommandFailed(
            f"{args.token_file} must hold one token, and nothing else; it has "
            f"{len(text.split())} words"
        )
    return text


def require_standard_input() -> None:
    """Raises CommandFailed if the process has no standard input."""
    if sys.stdin is None:
        raise CommandFailed("standard input is closed: give a file, or connect it")


def require_standard_output() -> None:
    """Raises CommandFailed if the process has no standard output."""
    if sys.stdout is None:
        raise CommandFailed("standard output is closed: connect it, to /dev/null if need be")


def open_if_closed(name: str) -> None:
    """Gives the process the stream ``stdout`` or ``stderr``, which nobody reads, if it has none.

    Else a socket would get its number, and with it what other processes and C libraries write.
    """
    if getattr(sys, name) is not None:
        return
    number = {"stdout": 1, "stderr": 2}[name]
    found = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(found, number)
        os.close(found)
        found = number
    os.set_inheritable(found, True)  # workers have the same
    # Python closes no stream of the process either.
    stream = open(found, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)


def give_up_output() -> None:
    """What is left in buffers and cannot be written is dropped; Python's end would complain."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError):  # it is none of the system's
                os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def reader(kind: str) -> Callable[[str], Any]:
    """A reader of arguments of this kind, one of ``aqueduct.arguments.KINDS``."""

    def read(text: str) -> Any:
        try:
            return KINDS[kind].value(text, "the value")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
