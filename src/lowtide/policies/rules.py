"""Ordered rules: the first one whose patterns match a save decides; where none matches, the method's defaults do."""

from __future__ import annotations

import dataclasses
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lowtide import codecs
from lowtide.bounds import BoundRule, BoundSource
from lowtide.codecs import Codec
from lowtide.codecs.sz import Sz
from lowtide.controllers import ChoosesCodec, Controller, Keep
from lowtide.errors import LowtideWarning, PolicyError, UnknownNameError
from lowtide.records import ROOT, Kind, Need, Site, TensorSpec
from lowtide.registry import STORES
from lowtide.stores import Store


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do with saves whose module path, op, field and module type match these shell patterns (``*``, ``?``).

    ``keep`` leaves the tensor as it is. ``codec`` and ``bound`` replace the method's choice for values; masks, shapes
    and window indices are exact already, and what must be exact stays exact whatever a rule says. ``store`` is where
    payloads wait, masks and indices too: a name, or a store with options of its own.
    """

    path: str = "*"
    op: str = "*"
    field: str = "*"
    module: str = "*"
    keep: bool = False
    codec: str | None = None
    bound: Any = None
    store: str | Store | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("path", "op", "field", "module"):
            if not isinstance(getattr(self, name), str):
                raise PolicyError(f"rule: {name} is a pattern, so a string; got {getattr(self, name)!r}")
        if not isinstance(self.keep, bool) or not isinstance(self.options, Mapping):
            raise PolicyError(
                f"{self}: keep is true or false and options are a table; got {self.keep!r}, {self.options!r}"
            )
        if self.keep and (self.codec or self.bound is not None or self.options or self.store is not None):
            raise PolicyError(f"{self}: 'keep' leaves a tensor as it is, so it has no codec, bound, store or options")
        if not self.keep and self.codec is None and self.bound is None and self.store is None:
            raise PolicyError(f"{self}: say keep = true, or name a codec, a bound or a store")
        if self.options and self.codec is None:
            raise PolicyError(f"{self}: options belong to a codec; name it")
        if isinstance(self.store, str):
            STORES.load(self.store)  # an unknown one is refused by name
        if self.bound is not None:
            object.__setattr__(self, "bound", BoundRule.parse(self.bound))
        if self.codec is None:
            return
        codec = codecs.create(self.codec, **self.options)
        if not codec.carries_values:
            raise PolicyError(f"{self}: codec {codec.name!r} does not store values; it serves where no values are read")
        if self.bound is not None and not codec.takes_bound:
            raise PolicyError(f"{self}: codec {codec.name!r} takes no bound, so it cannot promise {self.bound}")

    @classmethod
    def parse(cls, source: Rule | Mapping[str, Any]) -> Rule:
        if isinstance(source, Rule):
            return source
        if not isinstance(source, Mapping):
            raise PolicyError(f"a rule is a Rule or a mapping, got {type(source).__name__}: {source!r}")
        known = [item.name for item in dataclasses.fields(cls)]
        for key in source:
            if key not in known:
                raise UnknownNameError("key of a rule", key, known)
        return cls(**source)

    def matches(self, site: Site) -> bool:
        return (
            (fnmatchcase(site.path, self.path) or (not site.path and self.path == ROOT))
            and fnmatchcase(site.op, self.op)
            and fnmatchcase(site.field, self.field)
            and fnmatchcase(site.module, self.module)
        )

    def __str__(self) -> str:
        patterns = {name: getattr(self, name) for name in ("path", "op", "field", "module")}
        shown = ", ".join(f"{name}={text!r}" for name, text in patterns.items() if text != "*")
        return f"rule({shown or 'everything'})"


def load_rules(source: str | Path | Mapping[str, Any] | Iterable[Rule | Mapping[str, Any]] | None) -> tuple[Rule, ...]:
    """Rules from Python objects, from a dict ``{"rule": [...]}``, or from a TOML file of ``[[rule]]`` tables."""
    if source is None:
        return ()
    if isinstance(source, str | Path):
        path = Path(source)
        try:
            source = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PolicyError(f"cannot read rule file {path}: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise PolicyError(f"rule file {path} is not TOML: {error}") from error
    if isinstance(source, Mapping):
        if set(source) != {"rule"} or not isinstance(source["rule"], list | tuple):
            raise PolicyError(f"rules live in a list named 'rule' ([[rule]] in TOML); found {sorted(source)}")
        source = source["rule"]
    if isinstance(source, Rule) or not isinstance(source, Iterable):
        raise PolicyError(f"rules are a list of rules, a mapping or the path of a TOML file; got {source!r}")
    return tuple(Rule.parse(item) for item in source)


@dataclass(frozen=True, slots=True)
class Decision:
    """What will be done with one save. ``codec`` None means: kept as it is, for ``reason``."""

    codec: Codec | None
    bound: BoundSource | None
    reason: str
    store: Store | None = None  # None means: the session's
    is_ruled: bool = False  # a rule says how it is stored, not the method
    is_for_now: bool = False  # kept by a controller, which may think otherwise later
    as_probabilities: bool = field(init=False, repr=False, compare=False)  # the exponential is stored, and bounded
    bound_text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "as_probabilities", _is_on_probabilities(self.bound))
        object.__setattr__(self, "bound_text", str(self.bound or ""))


@dataclass(slots=True)
class Policy:
    """Rules over a default for values; decides each (site, need) once and remembers."""

    controller: Controller
    values: Codec | None
    rules: tuple[Rule, ...] = ()
    poison: bool = False
    given: int | None = None  # how many of the rules a user has written, the first ones; None: all
    is_waiting: bool = False  # the controller has had values kept on purpose
    _decided: dict[tuple[Site, Need, Any], Decision] = field(default_factory=dict)
    _latest: dict[str, tuple[Site, Need, Any, Decision]] = field(default_factory=dict)
    _matched: set[int] = field(default_factory=set)
    _warned: bool = False
    _stores: dict[str, Store] = field(default_factory=dict)  # by name, so that all rules that name one share it

    def decide(self, site: Site, need: Need, spec: TensorSpec) -> Decision:
        # Sites and needs are the same objects from step to step as a rule, and comparing them costs much more.
        latest = self._latest.get(site.name)
        if latest is not None and latest[0] is site and latest[1] is need and latest[2] is spec.dtype:
            return latest[3]
        key = (site, need, spec.dtype)
        decision = self._decided.get(key)
        if decision is None:
            decision = self._decided[key] = self._decide(site, need, spec)
        self._latest[site.name] = (*key, decision)
        return decision

    def forget(self) -> None:
        """Bounds may have changed: decide anew."""
        self._decided.clear()
        self._latest.clear()

    def _decide(self, site: Site, need: Need, spec: TensorSpec) -> Decision:
        hits = [index for index, rule in enumerate(self.rules) if rule.matches(site)]
        self._matched.update(hits)
        rule = self.rules[hits[0]] if hits else None
        if rule is not None and rule.keep:
            return Decision(None, None, f"kept by {rule}", is_ruled=True)
        opted_in = rule is not None and rule.op != "*" and need.family == "unknown"
        if need.kind is Kind.EXACT and not opted_in:
            return Decision(None, None, need.why)
        codec, bound = self._choose(site, need, rule)
        if codec is None:
            return Decision(None, None, "values kept by the method")
        if isinstance(bound, Keep):
            self.is_waiting = True
            return Decision(None, None, bound.reason, is_for_now=True)
        if _is_on_probabilities(bound):
            codec = _for_probabilities(codec, site, need, rule)
        elif not codec.accepts(spec.dtype):
            return Decision(None, None, f"codec {codec.name} does not take {str(spec.dtype).removeprefix('torch.')}")
        is_ruled = rule is not None and (rule.codec is not None or rule.bound is not None)
        return Decision(codec, bound, need.why, self._find_store(rule), is_ruled)

    def _find_store(self, rule: Rule | None) -> Store | None:
        store = rule.store if rule is not None else None
        if isinstance(store, str):
            if store not in self._stores:
                self._stores[store] = STORES.create(store)
            return self._stores[store]
        return store

    def _choose(self, site: Site, need: Need, rule: Rule | None) -> tuple[Codec | None, BoundSource | Keep | None]:
        if need.kind is Kind.METADATA:
            return codecs.create("shape", poison=self.poison), None
        if need.kind is Kind.MASK:
            assert need.membership is not None, "a mask need carries its question"
            question = need.membership
            return codecs.create("bitmask", test=question.test, params=question.params, values=question.values), None
        if need.kind is Kind.WINDOW:
            window = dataclasses.asdict(need.window) if need.window is not None else {}
            return codecs.create("window_index", **window), None
        if rule is not None and rule.codec:
            codec: Codec | None = codecs.create(rule.codec, **rule.options)
        else:
            chooser = self.controller
            codec = chooser.codec(site, need, self.values) if isinstance(chooser, ChoosesCodec) else self.values
        if rule is not None and rule.bound is not None:
            return codec if codec is not None and codec.takes_bound else codecs.create("sz"), rule.bound
        bounded = codec is not None and codec.takes_bound
        return codec, self.controller.bound(site, need) if bounded else None

    def warn_unmatched(self, paths: Iterable[str]) -> None:
        """Once, after a whole forward: a rule whose patterns matched no save is probably a typo."""
        if self._warned:
            return
        self._warned = True
        idle = [str(rule) for index, rule in enumerate(self.rules[: self.given]) if index not in self._matched]
        if idle:
            seen = sorted(set(paths))
            warnings.warn(
                f"{'; '.join(idle)} matched none of the tensors saved in the first forward. "
                f"Module paths there: {', '.join(seen[:8])}{', ...' if len(seen) > 8 else ''}",
                LowtideWarning,
                stacklevel=2,
            )


def _is_on_probabilities(bound: BoundSource | None) -> bool:
    return isinstance(bound, BoundRule) and bound.unit == "probability"


def _for_probabilities(codec: Codec, site: Site, need: Need, rule: Rule | None) -> Codec:
    """``sz``, as the method has it if that is its codec, with the rounding that keeps zeros and signs."""
    if need.family != "log_probability":
        raise PolicyError(f"{site.name}: only log-probabilities have a bound on probabilities; write another unit")
    if isinstance(codec, Sz):
        return dataclasses.replace(codec, rounding="stochastic", keep_zeros=False)
    if rule is not None and rule.codec is not None:
        raise PolicyError(f"{rule}: a bound on probabilities is kept by codec 'sz', not by {codec.name!r}")
    return codecs.create("sz", rounding="stochastic")
