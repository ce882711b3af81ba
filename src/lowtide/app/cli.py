"""The command ``lowtide``: arguments in, an exit status out, one line for what went wrong.

0: all went well; 1: a gate or a run failed; 2: the command was not understood, nothing was run; 130: interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lowtide._version import __version__
from lowtide.app import demo, env
from lowtide.app.bench import codec, step
from lowtide.app.compare import command as compare
from lowtide.app.plan import command as plan
from lowtide.app.report import command as report
from lowtide.app.shared import allocator
from lowtide.app.shared.specs import UsageError
from lowtide.app.train import command as train
from lowtide.errors import BoundError, UnknownNameError

# A command is a module: its docstring is its help, the first line the summary; EXAMPLES, configure and run.
_COMMANDS: Mapping[str, Any] = {
    "demo": demo,
    "train": train,
    "compare": compare,
    "plan": plan,
    "report": report,
    "env": env,
}
_EPILOG = """examples:
  lowtide demo
  lowtide plan resnet50 --batch 256 --memory 16GiB
  lowtide train --model resnet18 --data digits --method fixed
  lowtide report runs/demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``--help``, ``--version`` and arguments that cannot be read leave by SystemExit."""
    options = _build_parser().parse_args(argv)
    allocator.use_expandable_segments()
    try:
        status: int = options.run(options)
        return status
    except KeyboardInterrupt:
        _complain("interrupted; what was written so far is kept")
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
        description=_fill("Train PyTorch models in a fraction of the activation memory, under a checked error bound."),
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    parser.set_defaults(run=_shows_help(parser))
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, module in _COMMANDS.items():
        _add_command(commands, name, module)
    bench = commands.add_parser(
        "bench", help="Measure codecs and training steps.", description="Measure codecs and training steps."
    )
    bench.set_defaults(run=_shows_help(bench))
    benches = bench.add_subparsers(metavar="BENCH", dest="bench")
    for name, module in (("codec", codec), ("step", step)):
        _add_command(benches, name, module)
    return parser


def _add_command(commands: Any, name: str, module: Any) -> None:
    text = module.__doc__ or ""
    leaf = commands.add_parser(name, help=text.partition("\n")[0], description=_fill(text), epilog=module.EXAMPLES)
    module.configure(leaf)
    leaf.set_defaults(run=module.run)


def _fill(text: str) -> str:
    """Paragraphs as wide as the terminal, or as a page where it is wider."""
    width = min(shutil.get_terminal_size().columns, 100) - 2
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.strip().split("\n\n"))


def _shows_help(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    return run


def _complain(message: str) -> None:
    print(f"lowtide: {_one_line(message)}", file=sys.stderr)


def _one_line(message: str) -> str:
    return " ".join(message.split())
