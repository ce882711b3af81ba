"""Statistics for controllers, gathered on the device while a normal step runs, and only in steps that ask for them.

In such a step every node whose saved values are coded gets a hook. When backward has run the node, the hook reduces the
gradient that arrived and those that go on to a few numbers. What became of a weight's gradient is read from the weight
itself when backward has added to it: before a scaler or a clipping touches it, so that it matches the gradients above.
At the end of the step all numbers travel to the host in one copy; they are handed over one step later, always, so that
a run does not depend on how fast they were.

Gradients may be accumulated over several forwards: sums run over all of them. If a weight's gradient was thrown away in
between (a scaler found inf and skipped the step), so are the sums that belong to it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import bounds
from lowtide.capture import identity, makers, sensitivity
from lowtide.capture.attention import is_attention
from lowtide.capture.channels import Channels
from lowtide.capture.flow import Flow
from lowtide.capture.handles import Alias, Entry, Handle, Passed
from lowtide.capture.momentum import Momentum
from lowtide.capture.numbers import Known, Record, read
from lowtide.capture.parcel import Parcel
from lowtide.capture.producer import Producer, weight_edge
from lowtide.capture.sensitivity import Probe
from lowtide.capture.spot import SpotCheck
from lowtide.capture.sums import Arrived, count_nonzero, norm, working
from lowtide.records import Kind, Site
from lowtide.statistics import PROPAGATED, WEIGHT, Statistics, Wish

# A record, and where its tensor is made of another one: what multiplies the variance of that one's error.
Part = tuple[Record, Tensor | None]

_LAYERS = 2  # whose outputs no norm has read yet: two branches of a net may run side by side


class Collector:
    """Collects what a ``Wish`` names between ``begin`` and ``finish``; ``deliver`` hands it over one step later."""

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, has_bound: Callable[[Handle], bool] = lambda _: True
    ) -> None:
        """``has_bound``: whether a save is held under a bound, or exactly, and not by a codec of a user's rule that
        promises none. Of a tensor that is held so nothing is made again."""
        self._optimizer = optimizer
        self._has_bound = has_bound
        self._momentum = Momentum(optimizer)
        self._under_way: tuple[Parcel, Callable[[list[list[float]]], Statistics]] | None = None
        self._arrived: Statistics | None = None
        self._loss: Tensor | None = None
        self.has_measured = False  # in the step whose numbers are handed over next
        self._clear()

    def _clear(self) -> None:
        self._wish = Wish()
        self._records: dict[str, Record] = {}
        self._leaders: weakref.WeakKeyDictionary[Entry, str] = weakref.WeakKeyDictionary()
        self._named: dict[str, Tensor] = {}  # weights by the sites that serve them
        self._gradients: dict[int, Tensor] = {}  # norms by weight
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # gradients and their versions, by weight
        self._since = 0  # the first backward pass whose gradients were not thrown away
        self.restarts = 0  # how often they were
        self._hooks: dict[int, Any] = {}  # by weight
        self._layers: dict[int, Producer] = {}  # those that ran last, by their nodes' numbers
        self._flow = Flow()

    def reduce(self, wish: Wish | None) -> Wish | None:
        """What is left of a wish: nothing, if it is for a shadow of a momentum that the optimizer keeps itself."""
        return None if wish == Wish(shadow=True) and self._momentum.is_the_optimizers() else wish

    def begin(self, wish: Wish) -> None:
        """A step begins in which this is to be measured."""
        self.close()
        self._wish = wish

    def close(self) -> None:
        """Take hooks off the weights and forget what was collected."""
        for hook in self._hooks.values():
            hook.remove()
        self._clear()

    def watch(self, loss: Tensor) -> None:
        """The loss of this step."""
        self._loss = loss.detach()

    def observe(self, node: Any, handle: Handle) -> None:
        """A save has been named and still holds its tensor: have its node report."""
        site, need, wish = handle.site, handle.need, self._wish
        assert site is not None and need is not None, "the save has been named"
        if need.kind is not Kind.VALUES:
            return
        edge = weight_edge(site)
        weight = None if edge is None else identity.parameter_behind(node.next_functions[edge][0])
        if weight is not None:
            self._named.setdefault(site.name, weight)
        if not wish.noise:
            return
        with torch.no_grad(), torch.autocast(handle.spec.device.type, enabled=False):
            x = handle.restore()
            again = is_attention(site.op, site.field) and makers.makes_output(node)
            parts = self._parts(node, handle, x, is_alone=again and site.field == "output")
            below = self._below(node) if "batch_norm" in site.op else None
            even = parts[0][1] is not None  # made again of another tensor, whose errors know nothing of these rows
            probes = sensitivity.probes(site, need.family, node, x, below, again=again, even=even)
            for probe in probes:
                self._find_weight(node, probe, [record for record, _ in parts])
            if wish.flow:
                if weight is None and edge is not None and self._flow.goes_on(site.name, node.next_functions[edge][0]):
                    probes = [dataclasses.replace(p, kind=PROPAGATED) if p.kind == WEIGHT else p for p in probes]
                self._flow.add(site.name, node, [probe.edge for probe in probes if probe.kind == PROPAGATED])
            self._remember(Producer.of(site, node, x))
            is_checked = site.name in wish.checks and len(parts) == 1
            check = SpotCheck.of(site, node, x, even=even) if is_checked else None
            channels = Channels.of(node, x) if wish.channels and "batch_norm" in site.op else None
        uneven = weakref.ref(handle) if "batch_norm" in site.op else None
        hook = _Hook(parts, probes, peaks=wish.peaks, channels=channels, uneven=uneven)
        if check is not None:
            hook.check = check, handle
        node.register_hook(hook)

    def _parts(self, node: Any, handle: Handle, x: Tensor, *, is_alone: bool) -> list[Part]:
        """The records that a save's gradients count for: its own or, where it is made again of several stored tensors,
        one for each of these. ``is_alone``: what attention made has its own in any case, since what it saved is
        measured together."""
        found = [] if is_alone else makers.origins(handle)
        if not found or any(origin.handle.site is None or not self._has_bound(origin.handle) for origin in found):
            return [(self._record(node, handle, handle, x, ""), None)]  # or its input is nobody's to store: no error
        parts: list[Part] = []
        for number, origin in enumerate(found, 1):
            name = handle.name if number == 1 else f"{handle.name} ({number})"
            record = self._record(node, handle, origin.handle, origin.stored, name)
            record.add("slope", origin.gain)
            parts.append((record, origin.gain))
        return parts

    def _record(self, node: Any, handle: Handle, held: Handle, stored: Tensor, name: str) -> Record:
        """A record of the site; the first forward of a step begins it. ``held`` is the save of ``stored``, which its
        error is an error of, and ``name`` what the record goes by where that is another tensor than was saved."""
        site, need, source = handle.site, handle.need, held.site
        assert site is not None and need is not None and source is not None
        if (name or site.name) not in self._records:
            leader = self._leaders.setdefault(held.entry, source.name) if held.entry is not None else source.name
            shape = sensitivity.geometry(site.op, node)
            self._records[name or site.name] = Record({
                "site": name or site.name,
                "saved": site.name,
                "op": site.op,
                "family": need.family,
                "unit": sensitivity.unit_of(source.op),
                "dtype": str(stored.dtype).removeprefix("torch."),
                "leader": leader,
                "numel": stored.numel(),
                "source": source.name if name else "",
                "samples": stored.shape[0] if stored.dim() else 1,
                "outputs": shape.outputs,
                "reuse": shape.reuse,
            })  # fmt: skip
        record = self._records[name or site.name]
        if self._wish.spread:
            part = bounds.sample(stored, ())
            record.sampled += part.numel()
            record.add("nonzero", count_nonzero(part))
            record.add("sum", part.sum(dtype=working(part)))
            record.add("root", norm(part))
        return record

    def _remember(self, layer: Producer | None) -> None:
        if layer is not None:
            self._layers[layer.number] = layer
            if len(self._layers) > _LAYERS:
                del self._layers[next(iter(self._layers))]

    def _below(self, node: Any) -> Producer | None:
        """The layer whose output ``node`` reads with no op between them, be its input ours to store or not."""
        below = node.next_functions[0][0]
        if below is None:
            return None
        layer = self._layers.pop(below._sequence_nr(), None)
        if layer is not None or type(below).__name__ != "ConvolutionBackward0":
            return layer
        saved = below._raw_saved_input.data
        if type(saved) is Passed or (type(saved) is Handle and isinstance(saved.kept, Alias)):
            return Producer.of(Site("", "convolution", "input"), below, saved.restore())
        return None

    def _find_weight(self, node: Any, probe: Probe, records: Sequence[Record]) -> None:
        """The parameter that a probe's gradient ends in; its gradient is read when backward has added to it."""
        if probe.kind == PROPAGATED:
            return
        weight = probe.weight
        if weight is None:
            weight = identity.parameter_behind(node.next_functions[probe.edge][0])
        if weight is None:
            return
        for record in records:
            record.weights[probe.kind] = weight
        if id(weight) not in self._hooks:
            self._hooks[id(weight)] = weight.register_post_accumulate_grad_hook(self._accumulated)
        else:
            self._look_again(weight)

    def _look_again(self, weight: nn.Parameter) -> None:
        """Between two passes somebody may have changed the gradient in place. If that was not to throw it away, it goes
        on to add up: DistributedDataParallel averages it after each pass that is not in ``no_sync``. Only then is the
        host made to wait here."""
        before, gradient = self._seen.get(id(weight)), weight.grad
        if before is None or gradient is None or before[0]() is not gradient or before[1] == gradient._version:
            return
        if bool(gradient.any()) or not bool(self._gradients[id(weight)]):
            self._seen[id(weight)] = (before[0], gradient._version)

    def _accumulated(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is None:
            return
        before = self._seen.get(id(weight))
        if before is not None and (before[0]() is not gradient or before[1] + 1 != gradient._version):
            backward = torch._C._current_graph_task_id()
            self.restarts += backward > self._since
            self._since = max(self._since, backward)
        self._seen[id(weight)] = (weakref.ref(gradient), gradient._version)
        with torch.no_grad():
            self._gradients[id(weight)] = norm(gradient)

    def finish(self, step: int) -> None:
        """The step has ended, the optimizer has done its work: send the numbers off."""
        self.has_measured = self._wish != Wish()
        if self._wish.shadow:
            self._momentum.update(self._named)
        if self._records or self._loss is not None:
            with torch.no_grad():
                self._send(step)
        if self._wish.momentum:
            self._momentum.end()
        self._loss = None
        self.close()

    def _send(self, step: int) -> None:
        names: list[tuple[str, str]] = []
        numbers: list[Tensor] = []
        if self._loss is not None:
            names.append(("", "loss"))
            numbers.append(self._loss)
        feeding = Counter(id(weight) for record in self._records.values() for weight in record.weights.values())
        places = {weight: (uses, number) for number, (weight, uses) in enumerate(feeding.items())}
        known: list[Known] = []
        for site, record in self._records.items():
            found = record.totals(self._since)
            found.update(self._of_weights(site, record.weights))
            names += [(site, name) for name in found]
            numbers += found.values()
            record.facts["passes"] = record.passes(self._since)
            weights = {kind: places[id(weight)] for kind, weight in record.weights.items()}
            known.append(Known(record.facts, record.sampled, weights))
        norms, arrivals = self._flow.finish()
        sent, is_skipped = len(numbers), getattr(self._optimizer, "found_inf", None) is not None

        def reader(parts: list[list[float]]) -> Statistics:
            found = read(step, names, parts[:sent], known, is_skipped)
            return dataclasses.replace(found, arrivals=arrivals([part[0] for part in parts[sent:]]))

        self._under_way = Parcel([*numbers, *norms]), reader

    def _of_weights(self, site: str, weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """Norms of the gradients that ended in weights, and what the optimizer knows about them."""
        found: dict[str, Tensor] = {}
        for kind, weight in weights.items():
            if id(weight) not in self._gradients:
                continue
            found[f"energy.{kind}"] = self._gradients[id(weight)]
            if self._wish.momentum and kind == WEIGHT:
                found["stepped"] = norm(weight.grad) if weight.grad is not None else self._gradients[id(weight)]
                mean = self._momentum.mean(site, weight)
                if mean is not None:
                    found["momentum"] = mean
        return found

    def deliver(self) -> Statistics | None:
        """What was sent off at the end of the previous step; None if that was nothing."""
        arrived, under_way = self._arrived, self._under_way
        self._arrived = self._under_way = None
        if under_way is not None:
            parcel, reader = under_way
            arrived = reader(parcel.open())
        return arrived

    def state_dict(self) -> dict[str, Any]:
        self._arrived = self.deliver()
        return {
            "arrived": None if self._arrived is None else self._arrived.to_state(),
            "momentum": self._momentum.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._under_way = None
        self._arrived = None if state["arrived"] is None else Statistics.from_state(state["arrived"])
        self.has_measured = self._arrived is not None and bool(self._arrived.sites)
        self._momentum.load_state_dict(state["momentum"])


class _Hook:
    """Runs when backward has run a node: its gradients become a few numbers of the node's site."""

    def __init__(
        self,
        parts: list[Part],
        probes: list[Probe],
        *,
        peaks: bool,
        channels: Channels | None,
        uneven: weakref.ref[Handle] | None,
    ) -> None:
        self._parts, self._probes, self._peaks, self._channels = parts, probes, peaks, channels
        self._uneven = uneven  # the save whose errors may have different variances; its payload is to die with it
        self.check: tuple[SpotCheck, Handle] | None = None

    @torch.no_grad()
    def __call__(self, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        gy, (record, gain) = grad_outputs[0], self._parts[0]
        if gy is None:
            return
        backward, arrived = torch._C._current_graph_task_id(), Arrived(gy)
        felt = self._felt(arrived)
        for probe in self._probes:
            outgoing = grad_inputs[probe.edge]
            if outgoing is None or any(grad_inputs[edge] is None for edge in probe.reads):
                continue  # ``torch.autograd.grad`` has asked for some gradients only
            reaction = probe.measure(grad_inputs, felt)
            energy = norm(outgoing) if probe.kind not in record.weights else None
            for part, slope in self._parts:
                part.add(f"sensitivity.{probe.kind}", reaction if slope is None else reaction * slope, backward)
                if energy is not None:
                    part.add(f"energy.{probe.kind}", energy, backward)
        if felt.evenness is not None:
            record.add("governed", felt.evenness.mean(), backward)
        for part, _ in self._parts:
            part.add("gradient", arrived.square(), backward)
        if self._peaks and gy.dim() > 1:
            record.add("peak", torch.linalg.vector_norm(gy.flatten(1), torch.inf, 1).mean(), backward)
        if self._channels is not None:
            for name, number in self._channels.measure(grad_inputs, gy).items():
                record.add(f"channel.{name}", number, backward)
        if self.check is not None:
            check, handle = self.check
            self.check = None  # or the payload would live as long as the graph
            variance = check.variance(handle.restore(), gy, felt.gradient)
            record.add("error", variance if gain is None else variance / gain, backward)

    def _felt(self, arrived: Arrived) -> Arrived:
        """The gradient as errors feel it."""
        handle = self._uneven() if self._uneven is not None else None
        variances = getattr(handle.kept, "variances", None) if handle is not None else None
        found = variances() if variances is not None else None
        return arrived if found is None else arrived.felt(found)
