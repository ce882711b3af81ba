"""The command ``lowtide``: arguments in, an exit status out, one line for what went wrong.

0: all went well; 1: a gate or a run failed; 2: the command was not understood, nothing was run; 130: interrupted.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lowtide._version import __version__
from lowtide.app.bench import codec, step
from lowtide.app.bench.specs import UsageError
from lowtide.errors import BoundError, UnknownNameError

_EPILOG = """examples:
  lowtide bench codec --codecs sz:rans,sz:blocks --bytes 2GiB
  lowtide bench step resnet50 --batch 256 --precision tf32,bf16 --methods plain,checkpoint,bold,careful
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``--help``, ``--version`` and arguments that cannot be read leave by SystemExit."""
    options = _build_parser().parse_args(argv)
    try:
        status: int = options.run(options)
        return status
    except KeyboardInterrupt:
        _complain("interrupted; the rows of what was measured so far are written")
        return 130
    except Exception as error:
        if getattr(options, "traceback", False):
            traceback.print_exc()
        is_usage = isinstance(error, UsageError | UnknownNameError | BoundError)
        _complain(str(error) if is_usage else f"{type(error).__name__}: {error}")
        return 2 if is_usage else 1


class _Parser(argparse.ArgumentParser):
    """No abbreviations, descriptions as they are written, and errors of one line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)}; see {self.prog} --help\n")


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="lowtide",
        description="Train PyTorch models in a fraction of the activation memory, under a checked error bound.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    parser.set_defaults(run=_shows_help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    bench = commands.add_parser(
        "bench", help="measure codecs and training steps", description="Measure codecs and training steps."
    )
    bench.set_defaults(run=_shows_help(bench))
    benches = bench.add_subparsers(metavar="BENCH", dest="bench")
    for module, name in ((codec, "codec"), (step, "step")):
        summary, _, rest = (module.__doc__ or "").partition("\n")
        leaf = benches.add_parser(name, help=summary, description=f"{summary}\n{rest}", epilog=module.EXAMPLES)
        module.configure(leaf)
        leaf.set_defaults(run=module.run)
    return parser


def _shows_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    return run


def _complain(message: str) -> None:
    print(f"lowtide: {_one_line(message)}", file=sys.stderr)


def _one_line(message: str) -> str:
    return " ".join(message.split())
