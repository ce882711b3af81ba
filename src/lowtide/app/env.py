"""Say what is installed, which kernels are live, and test them.

Every codec encodes and decodes on every device, and what comes back is compared with what was promised; then a training
step is made. Takes seconds. The exit status is 1 if a test fails. Paste the output into a bug report.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from lowtide import codecs, kernels
from lowtide._version import __version__
from lowtide.app import selftest
from lowtide.app.selftest import Verdict
from lowtide.app.shared import allocator
from lowtide.kernels import _nvrtc
from lowtide.registry import CODECS, METHODS
from lowtide.reports.text import size, table
from lowtide.session import DEFAULT_METHOD

EXAMPLES = """examples:
  lowtide env
  lowtide env --json > environment.json
"""
PACKAGES = (
    *("triton", "numpy", "rich", "tensorboard", "torchvision", "timm"),
    *("transformers", "lightning", "accelerate"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--no-test", action="store_true", help="skip the test")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> int:
    """1 if a test failed."""
    about = describe()
    verdicts = [] if options.no_test else list(selftest.run(find_devices()))
    if options.json:
        print(json.dumps({**about, "tests": [asdict(verdict) for verdict in verdicts]}, indent=2))
    else:
        print("\n".join([*_show(about), *_show_verdicts(verdicts)]))
    return 1 if any(verdict.fault for verdict in verdicts) else 0


def find_devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def describe() -> dict[str, Any]:
    """Versions, devices, kernels and methods, under stable keys."""
    return {
        "lowtide": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": _nvrtc.available(),
        "allocator": allocator.describe_setting(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "devices": {str(device): _device(device) for device in find_devices()},
        "kernels": {str(device): _kernels(device) for device in find_devices()},
        "methods": list(METHODS.names()),
        "default_method": DEFAULT_METHOD,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {"name": about.name, "capability": f"{about.major}.{about.minor}", "free": free, "total": total}


def _kernels(device: torch.device) -> dict[str, str]:
    """By codec: what runs on this device for the dtypes that matter, the same for all of them or dtype by dtype."""
    found = {}
    for name in CODECS.names():
        codec = codecs.create(name)
        live = {
            str(dtype).removeprefix("torch."): selftest.kernel_of(kernels.twin(codec, device, dtype))
            for dtype in selftest.DTYPES
            if codec.accepts(dtype)
        }
        kinds = set(live.values())
        found[name] = kinds.pop() if len(kinds) == 1 else ", ".join(f"{key}: {kind}" for key, kind in live.items())
    return found


def _show(about: Mapping[str, Any]) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    nvrtc = "yes" if about["nvrtc"] else "no"
    lines = [
        f"lowtide   {about['lowtide']}",
        f"python    {about['python']} on {about['platform']}",
        f"torch     {about['torch']}, CUDA {about['cuda'] or 'none'}, NVRTC {nvrtc}",
        f"allocator {_show_allocator(about['allocator'])}",
        f"packages  {packages or 'none of the optional ones'}",
        f"methods   {', '.join(about['methods'])} (default: {about['default_method']})",
    ]
    for name, device in about["devices"].items():
        memory = f", {size(device['free'])} of {size(device['total'])} free" if "total" in device else ""
        rest = f", capability {device['capability']}" if "capability" in device else f", {device['threads']} threads"
        lines.append(f"device    {name}: {device['name']}{rest}{memory}")
    names = list(about["kernels"])
    rows = [(codec, *(about["kernels"][name][codec] for name in names)) for codec in about["kernels"][names[0]]]
    return [*lines, "", *table(("codec", *names), rows)]


def _show_allocator(setting: str) -> str:
    ours = f"{allocator.VARIABLE}={allocator.SETTING}"
    note = " (our commands set it unless you have; your own programs do not)" if setting == ours else ""
    return f"{setting or 'as torch has it'}{note}"


def _show_verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    if not verdicts:
        return []
    rows = [
        (
            f"{item.device}: {item.name}",
            item.promise,
            "ok" if not item.fault else "FAILED",
            f"{item.milliseconds:.0f} ms",
        )
        for item in verdicts
    ]
    faults = [f"{item.device}: {item.name}: {item.fault}" for item in verdicts if item.fault]
    passed = f"{len(verdicts) - len(faults)} of {len(verdicts)} tests passed"
    return ["", *table(("test", "promise", "", "time"), rows), "", *faults, passed]
