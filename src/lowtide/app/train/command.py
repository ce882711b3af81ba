"""Train a model, plainly or with Lowtide.

Metrics, checkpoints and the complete configuration go to the folder of the
run. What is not given is chosen from the model and the data. A run that was
interrupted continues with --resume as if it had not been. docs/train.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.app.shared import arguments
from lowtide.app.shared.specs import UsageError
from lowtide.app.train.advice import advise_setup, explained
from lowtide.app.train.config import Config, read_file
from lowtide.app.train.flags import add_flags, read_flags
from lowtide.app.train.loop import Loop, Stopped
from lowtide.app.train.prepare import find_device, merge, name_run, require_names, understand
from lowtide.app.train.progress import Progress, clock
from lowtide.app.train.rundir import RunFolder
from lowtide.app.train.trainer import Trainer, settings
from lowtide.reports.text import size

EXAMPLES = """examples:
  lowtide train --model resnet18 --data digits --epochs 5 --method fixed
  lowtide train --model resnet18 --data cifar10:cifar-10-binary.tar.gz \\
      --epochs 30 --batch 512 --precision bf16 --channels-last \\
      --method fixed --option linear="0.4 std" --out runs/bounded
  lowtide train --model gpt --data text:shakespeare.txt --method careful
  lowtide train --config runs/bounded/config.toml --seed 1 --out runs/second
  lowtide train --out runs/bounded --resume
"""
_UNITS = {"image": "images", "tokens": "windows", "text": "texts"}


def configure(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)
    group = parser.add_argument_group("the run")
    group.add_argument("--config", type=Path, metavar="PATH", help="a TOML file with settings; flags go before it")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the run (default: in runs/, by its name)")
    group.add_argument("--resume", action="store_true", help="continue the run in FOLDER, or begin it")
    group.add_argument("--json", action="store_true", help="print the result as JSON")
    group.add_argument("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> int:
    given = merge(read_file(options.config) if options.config else {}, read_flags(options))
    try:
        result = train(given, out=options.out, resume=options.resume)
    except Stopped as stopped:
        arguments.say(f"lowtide: {stopped}")
        return stopped.status
    print(json.dumps(result) if options.json else describe(result))
    return 0


def train(given: Mapping[str, Any], *, out: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """One run from tables of settings to its result. Nothing is written before all of it has been understood."""
    config = Config.read(given)
    default = Path("runs") / f"{name_run(config)}-{config.method.name}-{config.train.seed}"
    folder = RunFolder(out or default)
    saved = folder.read_config() if resume else None
    if saved is not None:
        config = Config.read(merge(saved.tables(), given))
    else:
        folder.check_free()
    require_names(config)
    device = find_device(config.run.device)
    with contextlib.ExitStack() as stack:
        if folder.path.exists():
            stack.enter_context(folder)
        result = folder.read_result()
        if result is not None and saved is not None:
            return result
        stack.enter_context(settings(config, device))
        config, found, model = understand(config)
        if saved is not None and (differences := config.differences(saved)):
            raise UsageError(f"this is another run than the one to resume: {'; '.join(differences)}")
        stack.enter_context(explained(lambda: advise_setup(config, model, device)))
        trainer = Trainer(config, found, model, device)
        stack.callback(trainer.close)
        if not folder.is_locked:
            stack.enter_context(folder)
        if saved is None:
            folder.begin(config, device)
        unit = _UNITS[trainer.kind]
        progress = Progress(epochs=config.train.epochs, steps=trainer.steps_per_epoch, unit=unit)
        return Loop(trainer, folder, progress).run()


def describe(result: Mapping[str, Any]) -> str:
    """The result in one line."""
    parts = [f"accuracy {100 * result['accuracy']:.2f} % (best {100 * result['best']:.2f} %)"]
    if result["held"] is not None:
        parts.append(f"held {size(result['held'])} ({result['ratio'] or 1:.2f}x less)")
    if result["peak"] is not None:
        parts.append(f"peak {size(result['peak'])}")
    parts.append(f"{clock(result['seconds'])}, {result['images_per_second']:.0f} a second")
    return f"{result['method']}: {', '.join(parts)}"
