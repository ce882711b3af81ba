"""Does it work with the model that I have? Architectures of transformers, small, each with Lowtide and without.

    pip install transformers
    PYTHONPATH=src python benchmarks/architectures.py [llama,bert,...] [--precision fp32,bf16] [--layers 8]

Every architecture is built from its configuration, with few layers and random weights that are half as large again as
it wants them, so that attention is not flat; nothing is downloaded. On one batch, with weights that do not change:
- exact: whether gradients with the method ``exact`` are those of plain training bit for bit, every decode compared with
  what was saved;
- noise: what the default method adds to the gradient of all weights, its mean square as a share of the gradient's,
  over the last of ``--steps`` steps, in which bounds set themselves; 0.03 is what it is allowed;
- smaller: what plain training saves over what is held, in the last step; small models have large overheads;
- kept: the share of what plain training saves that is held as it is, and most of it because of what.
Rows are appended to a CSV file. A model that does not give the same gradients twice is said to be so, and not judged.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.app.shared import arguments
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.specs import UsageError, parse_options
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT,
    *("transformers", "architecture", "precision", "parameters", "ok", "repeats", "exact", "noise", "smaller"),
    *("kept_share", "kept_because", "error", "settings"),
)
ALLOWED = 0.03  # of noise: the default
_LAST = 4  # steps that noise is averaged over

_VOCABULARY = 128
_TEXT = {"vocab_size": _VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 80, "pad_token_id": 0}  # fmt: skip
_DECODER = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {**_DECODER, "head_dim": 16}
_IMAGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 4}  # fmt: skip
_PLANES = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
_TWO_STACKS = {"vocab_size": _VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
               "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
               "decoder_ffn_dim": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
               "decoder_start_token_id": 1}  # fmt: skip

# By name: the head it gets, or its class, and what its configuration says. The number behind is an image's size.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("CausalLM", {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("CausalLM", _DECODER),
    "mistral": ("CausalLM", {**_DECODER, "sliding_window": 16}),
    "qwen2": ("CausalLM", _DECODER),
    "qwen3": ("CausalLM", _HEADS),
    "gemma2": ("CausalLM", {**_HEADS, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("CausalLM", {**_HEADS, "query_pre_attn_scalar": 16}),
    "olmo2": ("CausalLM", _DECODER),
    "phi": ("CausalLM", {**_DECODER, "num_key_value_heads": 4}),
    "gpt_neox": ("CausalLM", _TEXT),
    "bloom": ("CausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("CausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
                            "num_attention_heads": 4}),
    "mixtral": ("CausalLM", {**_DECODER, "num_local_experts": 4}),
    "qwen3_moe": ("CausalLM", {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mamba": ("CausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}),
    "mamba2": ("CausalLM", {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8,
                            "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16}),
    "bert": ("SequenceClassification", _TEXT),
    "roberta": ("SequenceClassification", _TEXT),
    "distilbert": ("SequenceClassification", {"vocab_size": _VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4,
                                              "hidden_dim": 128}),
    "albert": ("SequenceClassification", {**_TEXT, "embedding_size": 32}),
    "deberta-v2": ("SequenceClassification", {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "electra": ("SequenceClassification", {**_TEXT, "embedding_size": 32}),
    "modernbert": ("SequenceClassification", {**_TEXT, "global_attn_every_n_layers": 2, "local_attention": 16}),
    "xlnet": ("SequenceClassification", {"vocab_size": _VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4,
                                         "d_inner": 128}),
    "longformer": ("SequenceClassification", {**_TEXT, "attention_window": 16}),
    "t5": ("Seq2SeqLM", {"vocab_size": _VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
                         "num_heads": 4, "decoder_start_token_id": 0}),
    "bart": ("Seq2SeqLM", {**_TWO_STACKS, "max_position_embeddings": 64}),
    "whisper": ("SpeechSeq2Seq", {**_TWO_STACKS, "max_source_positions": 50, "max_target_positions": 32,
                                  "num_mel_bins": 16}),
    "wav2vec2": ("CTC", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32,
                         "intermediate_size": 128, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8),
                         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}),
    "vit": ("ImageClassification 32", _IMAGE),
    "dinov2": ("ImageClassification 32", _IMAGE),
    "swin": ("ImageClassification 32", {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2],
                                        "num_heads": [2, 4], "window_size": 4}),
    "convnext": ("ImageClassification 32", {**_PLANES, "patch_size": 2}),
    "resnet": ("ImageClassification 32", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2],
                                          "layer_type": "basic"}),
    "regnet": ("ImageClassification 32", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2],
                                          "groups_width": 8}),
    "bit": ("ImageClassification 64", {"embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1],
                                       "num_groups": 8}),
    "segformer": ("ImageClassification 64", {**_PLANES, "num_attention_heads": [1, 2, 2, 4]}),
    "poolformer": ("ImageClassification 64", _PLANES),
    "mobilenet_v2": ("ImageClassification 64", {"depth_multiplier": 0.35}),
    "mobilevit": ("ImageClassification 64", {"image_size": 64, "hidden_sizes": [32, 40, 48], "num_attention_heads": 2,
                                             "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64]}),
    "levit": ("LevitForImageClassification 64", {"image_size": 64, "hidden_sizes": [32, 48, 64], "depths": [1, 1, 1],
                                         "num_attention_heads": [2, 3, 4], "key_dim": [8, 8, 8]}),
}  # fmt: skip


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")  # what configurations call their number


def build(name: str, layers: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in training, with larger weights than it begins with, and a batch with labels; ``layers``: if not 0."""
    import transformers

    transformers.logging.set_verbosity_error()
    head, _, size = ARCHITECTURES[name][0].partition(" ")
    torch.manual_seed(0)
    wanted = copy.deepcopy(ARCHITECTURES[name][1])
    if layers:
        wanted |= {key: layers for key in _LAYERS if key in wanted}
    config = transformers.AutoConfig.for_model(name, **wanted)
    if "For" in head:
        model: nn.Module = getattr(transformers, head)(config)
    else:
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(1.5)
    return model.float().train(), _batch(head.rpartition("For")[2], int(size or 0))


def _batch(head: str, size: int) -> dict[str, Tensor]:
    tokens, classes = torch.randint(3, _VOCABULARY, (4, 48)), torch.randint(0, 2, (4,))
    if head == "SequenceClassification":
        seen = torch.ones_like(tokens)
        seen[1, 30:] = seen[2, 10:] = 0
        return {"input_ids": tokens, "attention_mask": seen, "labels": classes}
    if head == "ImageClassification":
        return {"pixel_values": torch.randn(4, 3, size, size), "labels": classes}
    if head == "SpeechSeq2Seq":
        return {"input_features": torch.randn(4, 16, 100), "labels": tokens[:, :20]}
    if head == "CTC":
        return {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 32, (2, 10))}
    return {"input_ids": tokens, "labels": tokens.clone()}


class Bench:
    """A model whose weights and buffers do not change from step to step, and the same random numbers in each."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor], precision: str) -> None:
        self.model, self._loss = model, loss
        self._is_cast = precision == "bf16"
        self._state = copy.deepcopy(self.model.state_dict())

    def gradients(self) -> dict[str, Tensor]:
        torch.manual_seed(1)
        self.model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_cast):
            loss = self._loss(self.model)
        loss.backward()
        self.model.load_state_dict(self._state)
        return {name: part.grad.clone() for name, part in self.model.named_parameters() if part.grad is not None}


def bench_of(name: str, precision: str, layers: int = 0) -> Bench:
    model, batch = build(name, layers)
    return Bench(model, lambda model: model(**batch).loss, precision)


def measure(make: Callable[[], Bench], steps: int, given: Mapping[str, Any] = {}) -> Iterator[dict[str, Any]]:
    bench = make()
    yield {"parameters": sum(part.numel() for part in bench.model.parameters())}
    plain = bench.gradients()
    yield {"repeats": are_equal(plain, bench.gradients())}
    tide = lowtide.attach(bench.model, "exact", min_size=0, check="full")
    yield {"exact": are_equal(plain, bench.gradients())}
    tide.detach()
    tide = lowtide.attach(bench.model, min_size=0, check=True, **given)
    noise = []
    for _ in range(steps):
        lossy = bench.gradients()
        noise.append(energy({key: lossy[key] - plain[key] for key in plain}) / max(energy(plain), 1e-300))
        tide.step()
    sites = tide.ledger.sites.values()
    raw, held = sum(site.raw_nbytes for site in sites), sum(site.held_nbytes for site in sites)
    kept: Counter[str] = Counter()
    for site in sites:
        if "kept" in site.codec:
            kept[site.reason] += site.raw_nbytes
    tide.detach()
    because = kept.most_common(1)[0][0] if kept else ""
    yield {"noise": statistics.fmean(noise[-_LAST:]), "smaller": raw / max(held, 1)}
    yield {"kept_share": kept.total() / max(raw, 1), "kept_because": because}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


def energy(gradients: dict[str, Tensor]) -> float:
    return sum(float(part.double().square().sum()) for part in gradients.values())


def is_fine(row: dict[str, Any]) -> bool:
    """Bit-equal where it must be, and no more noise than a factor of two beyond what is allowed, in a single net."""
    if not row["ok"] or not row["repeats"]:
        return bool(row["ok"])
    return bool(row["exact"]) and row["noise"] < 2 * ALLOWED


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("architectures", nargs="?", default=",".join(ARCHITECTURES), metavar="NAMES", help="(default: all)")
    add("--precision", default="fp32,bf16", help="of fp32, bf16 (autocast) (default: %(default)s)")
    add("--layers", type=int, default=0, help="of architectures that say how many (default: two, as a rule)")
    add("--budget-set", action="append", default=[], metavar="KEY=VALUE", help="e.g. remake=linear; may be repeated")
    add("--steps", type=int, default=18, help="in which bounds set themselves (default: %(default)s)")
    arguments.add_output(parser, out="benchmarks/results/architectures.csv")


def choose(options: argparse.Namespace) -> tuple[list[str], list[str], str]:
    """Architectures and precisions, as they were named, and the version of transformers."""
    names, precisions = options.architectures.split(","), options.precision.split(",")
    unknown = [name for name in names if name not in ARCHITECTURES]
    unknown += [name for name in precisions if name not in ("fp32", "bf16")]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: not known here; known: {', '.join(ARCHITECTURES)}; fp32, bf16")
    try:
        import transformers
    except ImportError:
        raise UsageError(
            "this measures models of transformers, which is not installed: pip install transformers"
        ) from None
    return names, precisions, transformers.__version__


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "steps")
    names, precisions, version = choose(options)
    given = parse_options(options.budget_set)
    flat = [name for name in names if options.layers and not any(key in ARCHITECTURES[name][1] for key in _LAYERS)]
    if flat:
        raise UsageError(f"{', '.join(flat)}: configured by other words than a number of layers; leave --layers out")
    shared = {"transformers": version, "settings": " ".join(options.budget_set)}
    make = partial(bench_of, layers=options.layers)
    return measure_all({name: make for name in names}, precisions, options, COLUMNS, shared, given)


def measure_all(
    makers: Mapping[str, Callable[[str, str], Bench]],
    precisions: list[str],
    options: argparse.Namespace,
    columns: tuple[str, ...],
    shared: Mapping[str, Any],
    given: Mapping[str, Any] = {},
) -> list[dict[str, Any]]:
    """A row for each model and precision, in the file as soon as it is there."""
    out = ResultFile(arguments.find_out(options), columns).begin()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    environment = describe_environment(torch.device("cpu"), options.revision)
    layers = getattr(options, "layers", 0)
    rows = []
    for name, make in makers.items():
        for precision in precisions:
            found = attempt(measure(partial(make, name, precision), options.steps, given), options)
            called = f"{name}, {layers} layers" if layers else name
            row = {**environment, **shared, "date": now(), "architecture": called, "precision": precision, **found}
            out.append(row)
            rows.append(row)
            arguments.say(" ".join(_cells(row)))
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["ok"]:
        return row["architecture"], row["precision"], "failed", "", "", row["error"]
    exact = "bit-equal" if row["exact"] else "differs" if row["repeats"] else "not repeatable"
    kept = f"{row['kept_share']:.1%}: {row['kept_because']}" if row["kept_because"] else ""
    return row["architecture"], row["precision"], exact, f"{row['noise']:.4f}", f"{row['smaller']:.1f}x", kept


def show(rows: list[dict[str, Any]]) -> list[str]:
    return list(table(("architecture", "", "exact", "noise", "smaller", "kept"), [_cells(row) for row in rows]))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show, is_fine=is_fine))
