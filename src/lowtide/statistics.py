"""What is measured for controllers, and the words in which they ask for it.

The added variance of a gradient is v * S: v the variance of a stored value's error, S the sensitivity of the op that
reads it. A ``Claim`` pairs S with the energy of that gradient, so that v * S / energy is the noise as a share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

WEIGHT = "weight"  # the gradient of a parameter: noise ends there
SCALE = "scale"  # the same for the scale of a norm
BELOW = "below"  # the gradient of the weight whose output a batch norm reads
PROPAGATED = "propagated"  # the gradient that goes on to the layers below
STEPS = tuple(2.0**-octave for octave in range(3, 22))  # bounds of probabilities
KINDS = (WEIGHT, SCALE, BELOW, PROPAGATED)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a controller asks to be measured during one step; whatever is not asked for costs nothing.

    ``noise``: sensitivities and energies. ``spread``: share and standard deviation of the non-zero values (of a large
    tensor, of some). ``peaks``: the largest |gY| of each sample, averaged. ``channels``: what AC-GC's rule for batch
    norm reads, by channel. ``momentum``: the mean magnitude of each weight's momentum. ``shadow``: a step of the
    momentum that is kept for optimizers that have none. ``flow``: what arrives at each parameter of the noise that goes
    on. ``checks``: sites at which the real error is measured as well.
    """

    noise: bool = False
    spread: bool = False
    peaks: bool = False
    channels: bool = False
    momentum: bool = False
    shadow: bool = False
    flow: bool = False
    checks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Claim:
    """One gradient that a site's error reaches.

    ``sensitivity``: added variance of that gradient for an error of variance one in the unit of the site's bound.
    ``energy``: its squared norm. ``uses``: how many sites feed their noise into the same gradient, ``weight`` a number
    that the claims of these sites have in common; None if the gradient is this site's alone.
    """

    kind: str
    sensitivity: float
    energy: float
    uses: int = 1
    weight: int | None = None

    @property
    def gain(self) -> float:
        """Noise as a share of the energy, per unit of variance; zero where there is no gradient to disturb."""
        return self.sensitivity / self.energy if self.energy > 0 else 0.0

    def without_noise(self, noise: float) -> Claim:
        """The energy as it would be without this added variance, which was measured along with it."""
        return replace(self, energy=self.energy - min(noise, self.energy / 2))


@dataclass(frozen=True, slots=True)
class SiteStatistics:
    """One step at one site. Sums run over all forwards of the step; gradients are as backward left them, so they carry
    the factor of a gradient scaler, and clipping has not touched them: shares depend on neither.

    ``unit`` is that of a bound here: ``absolute``, or ``std`` for norms, whose bounds follow each channel's or row's
    spread. ``leader`` is the first site that saved the same tensor in this step. ``source`` is given for a tensor that
    is made again in backward: the site whose stored tensor it is made from. Unit, dtype, sizes, spread and claims are
    then those of an error in that one, and so is ``leader``. A tensor that is made of several has statistics for each,
    all but the first under names of their own; ``saved`` is the site whose tensor it is, and ``slope`` what multiplies
    the variance of an error on the way from the stored tensor to it. ``passes`` is how many backwards came
    by; ``numel`` and ``samples`` (the length of the first axis) are of one save. ``outputs`` are the channels of gY,
    ``reuse`` is how many windows read a value (taps / strides).

    ``gradient`` is ||gY||^2, ``stepped`` is ||gW||^2 as the optimizer saw it (unscaled, clipped) and ``momentum`` the
    mean magnitude of the momentum, whose entries have the scale of a gradient. ``error`` is the measured variance of a
    stored value's error, from a check of this site. ``governed`` is the share of values whose errors follow from the
    bound of this site: those of a tensor that shares a payload with another one follow in part from the other's.
    ``curve`` is there for probabilities, whose roundings depend on how large they are: the variance of their error
    under each of ``STEPS``, in the unit that the claim's sensitivity takes, that under the first one.
    """

    site: str
    op: str
    family: str
    unit: str
    dtype: str
    leader: str
    numel: int
    source: str = ""
    saved: str = ""
    passes: int = 1
    samples: int = 1
    outputs: int = 1
    reuse: float = 1.0
    claims: tuple[Claim, ...] = ()
    gradient: float | None = None
    nonzero: float | None = None
    std: float | None = None
    peak: float | None = None
    stepped: float | None = None
    momentum: float | None = None
    error: float | None = None
    governed: float = 1.0
    slope: float = 1.0
    curve: tuple[float, ...] = ()
    channels: Mapping[str, list[float]] = field(default_factory=dict)

    def claim(self, kind: str) -> Claim | None:
        return next((claim for claim in self.claims if claim.kind == kind), None)

    @property
    def stored_by(self) -> str:
        """The op that saved the tensor that is stored."""
        return (self.source or self.site).rpartition(":")[2].partition(".")[0]

    @property
    def is_finite(self) -> bool:
        numbers = [self.gradient, self.stepped, self.momentum, self.peak, self.std]
        numbers += [number for claim in self.claims for number in (claim.sensitivity, claim.energy)]
        return all(number is None or math.isfinite(number) for number in numbers)

    @property
    def overflows(self) -> bool:
        """Whether a sensitivity is too large for a number while all else is finite, as is that of what is divided by
        next to nothing: gradients as they are say nothing of what an error would do to them. Or the spread is, as that
        of exponentials may be, whose squares leave float32."""
        is_wide = self.std is not None and not math.isfinite(self.std)
        if not is_wide and not any(claim.sensitivity == math.inf for claim in self.claims):
            return False
        numbers = [0.0 if claim.sensitivity == math.inf else claim.sensitivity for claim in self.claims]
        claims = [replace(claim, sensitivity=n) for claim, n in zip(self.claims, numbers, strict=True)]
        return replace(self, claims=tuple(claims), std=None).is_finite


@dataclass(frozen=True, slots=True)
class Arrival:
    """What arrives at a parameter, or at several, of the noise that sites add to gradients that go on to it.

    ``shares``: by site, how much of its share of noise; nothing of sites that are not there. ``energy`` is that of the
    parameters' gradients. ``is_scale``: they are few, as the scales of norms are.
    """

    shares: Mapping[str, float]
    energy: float
    is_scale: bool = False


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was measured during step ``step``: sites if a controller asked, the loss if it was watched.

    ``arrivals`` are there if a controller asked for them and one forward of the step was followed by its backward.
    ``is_skipped`` says that a gradient scaler managed the step, so that numbers that are not finite are its business.
    """

    step: int
    sites: Mapping[str, SiteStatistics] = field(default_factory=dict)
    loss: float | None = None
    is_skipped: bool = False
    arrivals: tuple[Arrival, ...] = ()

    @property
    def is_finite(self) -> bool:
        return all(site.is_finite for site in self.sites.values())

    def to_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "sites": [dataclasses.asdict(site) for site in self.sites.values()],
            "loss": self.loss,
            "is_skipped": self.is_skipped,
            "arrivals": [dataclasses.asdict(arrival) for arrival in self.arrivals],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Statistics:
        sites = {}
        for item in state["sites"]:
            claims = tuple(Claim(**claim) for claim in item["claims"])
            sites[item["site"]] = SiteStatistics(**{**item, "claims": claims, "curve": tuple(item.get("curve", ()))})
        arrivals = tuple(Arrival(**item) for item in state.get("arrivals", ()))
        return cls(state["step"], sites, state["loss"], state["is_skipped"], arrivals)
