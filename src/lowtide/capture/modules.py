"""Our hooks on a model's modules: put on, taken off, and which models cannot have them [1]."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any, cast

import torch
from torch import nn

from lowtide.capture.scopes import Scopes
from lowtide.errors import AttachError
from lowtide.records import ROOT

_KEY: Any = "lowtide"


def refuse_unsuitable(model: nn.Module) -> None:
    for path, module in model.named_modules():
        name, kind = path or ROOT, type(module)
        if isinstance(module._forward_pre_hooks.get(_KEY), EnterHook):
            raise AttachError(f"module {name} is attached already; call detach() on that session first")
        if kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo"):
            raise AttachError(
                f"module {name} was made by torch.compile, which hands over all saved tensors at once, with no op to "
                "tell them apart: nothing would be gained. Attach to the original module and call compile() of the "
                "session"
            )
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise AttachError(
                f"module {name} was compiled in place by .compile(), which hides its ops; attach to a model that is "
                "not compiled, then call compile() of the session"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(f"module {name}: TorchScript modules do not run Python hooks; attach to the original one")
        if isinstance(module, nn.DataParallel):
            raise AttachError(
                f"module {name}: DataParallel runs its replicas in threads of their own, where hooks do not reach; use "
                "DistributedDataParallel, and attach to it or to the module inside"
            )


def hook(module: nn.Module, enter: EnterHook, leave: LeaveHook) -> None:
    """Register our hooks under a key of their own, which no numbered hook can share, in the module or in its copies."""
    module._forward_pre_hooks[_KEY] = enter
    cast("OrderedDict[Any, Any]", module._forward_pre_hooks).move_to_end(_KEY, last=False)
    module._forward_pre_hooks_with_kwargs[_KEY] = True
    module._forward_hooks[_KEY] = leave
    module._forward_hooks_always_called[_KEY] = True


def unhook(module: nn.Module) -> tuple[Any, Any] | None:
    """Take our hooks off; those that were there."""
    enter, leave = module._forward_pre_hooks.pop(_KEY, None), module._forward_hooks.pop(_KEY, None)
    module._forward_pre_hooks_with_kwargs.pop(_KEY, None)
    module._forward_hooks_always_called.pop(_KEY, None)
    return None if enter is None or leave is None else (enter, leave)


class _Hook:
    """A module hook that does not follow its module into copies: there it takes itself off when first called."""

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class EnterHook(_Hook):
    def __init__(self, scopes: Scopes, path: str) -> None:
        self._scopes, self._path = scopes, path

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            raise AttachError(
                "torch.compile met a model that Lowtide is attached to; its hooks cannot be compiled. Let the session "
                "that attach() gave do it: call its compile(), or detach() it first"
            )
        self._scopes.enter(module, self._path, (args, kwargs), sys._getframe(1))


class LeaveHook(_Hook):
    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._scopes.exit(module, output)


class InertHook:
    """What a copied or unpickled module carries in place of our hooks."""

    def __call__(self, module: nn.Module, *args: Any) -> None:
        for part in module.modules():
            if isinstance(part._forward_pre_hooks.get(_KEY), InertHook):
                unhook(part)
