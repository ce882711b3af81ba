"""``lowtide bench step`` from end to end, and what it does when a method is wrong."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide import recompute
from lowtide.app import zoo
from lowtide.app.bench import meters, step
from lowtide.app.shared import variants, workload
from lowtide.app.shared.specs import UsageError
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task
from lowtide.codecs.sz import Sz
from lowtide.errors import UnknownNameError
from lowtide.graphs.step import GraphStep
from lowtide.session import Session


def test_methods_side_by_side(bench_step, read_rows, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model: model)  # what it compiles to is not what is tested
    methods = "compile,bold:blocks,fixed(linear=0.4 std, coder=blocks),exact"
    assert bench_step("--methods", methods, "--sync-check", "--profile", str(tmp_path / "deep" / "profile.txt")) == 0
    rows = read_rows()
    assert set(rows[0]) == set(step.COLUMNS)
    assert [(row["method"], row["place"]) for row in rows] == [
        ("plain", "first"),
        ("compile", ""),
        ("bold:blocks", ""),
        ("fixed(linear=0.4 std, coder=blocks)", ""),
        ("exact", ""),
        ("plain", "last"),
    ]
    assert all(row["ok"] == "True" and float(row["step_ms"]) > 0 and float(row["host_ms"]) > 0 for row in rows)
    assert all(row["waits"] == "no GPU" and row["unit"] == "images" for row in rows)
    for row in rows:
        is_lowtide = row["method"] not in ("plain", "compile")
        assert all(bool(row[name]) == is_lowtide for name in ("ledger_held", "saves", "host_us_per_save"))
    bold, plain = rows[2], rows[0]
    assert float(bold["ledger_raw"]) > 2.5 * float(bold["ledger_held"]) > 0
    beside = float(bold["step_ms"]) / float(plain["step_ms"])
    assert float(bold["step_x_first_plain"]) == pytest.approx(beside, rel=1e-4)
    assert float(plain["step_x_first_plain"]) == 1
    assert float(bold["units_per_s"]) == pytest.approx(2e3 / float(bold["step_ms"]), rel=1e-4)
    extra = 1e3 * (float(bold["host_ms"]) - float(plain["host_ms"])) / int(bold["saves"])
    assert float(bold["host_us_per_save"]) == pytest.approx(extra, rel=1e-2, abs=1)
    # Dropout draws from the same seed, so exact is plain, to the last loss.
    assert rows[4]["loss"] == plain["loss"] == rows[5]["loss"] != bold["loss"]
    profile = (tmp_path / "deep" / "profile.txt").read_text()
    assert profile.count("aten::convolution_backward") >= len(rows) and "bold:blocks\n" in profile
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2 + len(rows)
    assert "[6/6] alexnet, batch 2, tf32, plain: " in shown.err


def test_replays_among_the_timed_steps():
    graph = GraphStep.__new__(GraphStep)
    graph.replays, graph.overflows = 16, [(20, [])]
    with meters.replays(SimpleNamespace(graphed=graph)) as counts:
        graph.replays += 7
        graph.overflows += [(30, [])]
    assert counts == {"replays": 7, "overflows": 1}
    with meters.replays(SimpleNamespace(graphed=None)) as counts:
        pass
    assert counts == {}


def test_checkpoint_in_bf16(bench_step, read_rows):
    arguments = ("--methods", "checkpoint", "--precision", "bf16", "--set", "image_size=16")
    assert bench_step(*arguments, model="resnet18") == 0
    plain, checkpointed, _ = read_rows()
    assert plain["loss"] == checkpointed["loss"] and plain["channels_last"] == "True"
    assert plain["input"] == "2x3x16x16" and plain["options"] == "tiny image_size=16"


def test_the_table_divides_by_the_mean_of_both_plain_medians():
    common = {"precision": "tf32", "ok": True, "error": "", "place": ""}
    rows = [{**common, "method": "plain", "step_ms": ms} for ms in (90.0, 110.0)]
    rows.insert(1, {**common, "method": "bold", "step_ms": 150.0, "held_x_less": 9.0, "held": 1 << 30})
    cells = step.show(rows)[3].split()
    assert cells[:7] == ["bold", "tf32", "150", "1.50x", "1.00", "GiB", "9.00x"]


def test_a_broken_promise_fails_the_run(bench_step, read_rows, monkeypatch):
    decode = Sz.decode
    monkeypatch.setattr(Sz, "decode", lambda self, encoded: decode(self, encoded) * 3)
    assert bench_step("--methods", "bold:blocks") == 1
    assert [row["ok"] for row in read_rows()] == ["True", "False", "True"]
    assert read_rows()[1]["error"].startswith("BoundViolationError: ") and not read_rows()[1]["step_ms"]


def test_gradients_that_are_not_finite_fail_the_gate(bench_step, read_rows, monkeypatch):
    def prepare(self, task):
        if self.method:
            task.score = lambda output, target: output.sum() * torch.inf

    monkeypatch.setattr(Variant, "prepare", prepare)
    assert bench_step("--methods", "bold:blocks") == 1
    assert read_rows()[1]["error"] == "GateError: gate: gradients are not finite in step 1"


def test_exact_has_to_be_exact(bench_step, read_rows, monkeypatch):
    def prepare(self, task):
        if self.is_exact:
            next(task.model.parameters()).data.mul_(1.001)

    monkeypatch.setattr(Variant, "prepare", prepare)
    assert bench_step("--methods", "exact") == 1
    assert read_rows()[1]["error"].startswith("GateError: gate: 'exact' has the losses [")


def test_running_out_of_memory_is_a_result(bench_step, read_rows, monkeypatch, capsys):
    def prepare(self, task):
        if self.text == "checkpoint":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(Variant, "prepare", prepare)
    assert bench_step("--methods", "checkpoint") == 0
    rows = read_rows()
    assert [row["ok"] for row in rows] == ["True", "False", "True"]
    assert rows[1]["error"].startswith("out of memory: OutOfMemoryError: CUDA out of memory")
    assert "out of memory" in capsys.readouterr().out


def test_without_a_plain_row_nothing_is_relative_to_it(bench_step, read_rows, monkeypatch):
    def prepare(self, task):
        if self.text == "plain":
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Variant, "prepare", prepare)
    assert bench_step("--methods", "exact") == 0
    row = read_rows()[1]
    assert row["ok"] == "True" and not row["step_x_first_plain"] and not row["host_us_per_save"]


def test_a_method_that_raises_is_a_row_and_the_run_goes_on(bench_step, read_rows, capsys):
    assert bench_step("--methods", "checkpoint", "--traceback") == 1  # AlexNet has no blocks
    rows = read_rows()
    assert [row["ok"] for row in rows] == ["True", "False", "True"]
    assert rows[1]["error"].startswith("UsageError: checkpoint: this model has no blocks")
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_rows_and_the_next_appends(bench_step, read_rows, monkeypatch):
    def interrupt(self, task):
        if self.method:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Variant, "prepare", interrupt)
        assert bench_step("--methods", "bold:blocks") == 130
    assert [row["place"] for row in read_rows()] == ["first"]
    assert bench_step("--methods", "plain") == 0
    assert [row["place"] for row in read_rows()] == ["first", "first", "last"]


def test_a_file_with_other_columns_is_refused_before_any_work(bench_step, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.csv").write_text("model\n")
    monkeypatch.setattr(workload.Task, "__init__", lambda *args, **options: pytest.fail("worked"))
    assert bench_step() == 2
    assert "has other columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "count", "kind"),
    [
        ("resnet18", 8, "BasicBlock"),
        ("resnet50", 16, "Bottleneck"),
        ("gpt", 2, "PreNormBlock"),
        ("unet", 4, "Sequential"),
    ],
)
def test_blocks_are_what_stands_in_a_chain(model, count, kind):
    blocks = list(recompute.blocks(zoo.build(model, **zoo.describe(model).tiny)))
    assert [type(block).__name__ for _, block in blocks] == [kind] * count


def test_of_a_chain_of_chains_the_inner_members_are_the_blocks():
    def block():
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(block(), block()), block())
    assert [block for _, block in recompute.blocks(model)] == [model[1][0], model[1][1], model[2]]


def test_a_model_without_blocks_cannot_be_checkpointed():
    with pytest.raises(UsageError, match="this model has no blocks"):
        variants.checkpoint_blocks(nn.Linear(2, 2))


def test_presets_are_methods_with_bounds():
    bold = Variant.parse("bold:blocks(norm=0.2 std)")
    expected = {"linear": "1.0 std", "norm": "0.2 std", "log_probability": "0.1", "coder": "blocks"}
    assert bold.method == "fixed" and bold.options == expected
    careful = dict(Variant.parse("careful").options)
    assert careful.pop("log_probability") == "0.05"
    assert set(careful.values()) == {"0.4 std"} and {"linear", "norm", "attention", "pointwise"} <= careful.keys()
    assert Variant.parse("exact").is_exact and not Variant.parse("plain").method


def test_graphs_are_an_option_of_plain_and_of_methods():
    bold, plain = Variant.parse("bold:blocks(graph=true)"), Variant.parse("plain(graph=true)")
    assert bold.is_graphed and bold.options == {**Variant.parse("bold").options, "coder": "blocks"}
    assert plain.is_graphed and not plain.method and not Variant.parse("bold(graph=false)").is_graphed
    beside = Variant.parse("bold(graph=true,beside=true)")
    assert beside.is_beside and "beside" not in beside.options and not bold.is_beside
    for text in ("checkpoint(graph=true)", "plain(graphs=true)", "plain(graph=true,beside=true)"):
        with pytest.raises(UsageError, match="has no options"):
            Variant.parse(text)
    with pytest.raises(UnknownNameError, match="beside"):
        Variant.parse("bold(beside=true)")


def test_a_compiled_model_beside_an_eager_one(bench_step, read_rows, monkeypatch):
    compile_session = Session.compile
    monkeypatch.setattr(Session, "compile", lambda session: compile_session(session, backend="aot_eager"))
    assert bench_step("--methods", "fixed(coder=blocks),fixed(coder=blocks,compile=true)") == 0
    eager, compiled = read_rows()[1:3]
    assert eager["ok"] == compiled["ok"] == "True"
    assert 0 < int(compiled["ledger_held"]) <= 1.02 * int(eager["ledger_held"])
    assert int(compiled["saves"]) > 0
    assert Variant.parse("exact(compile=true)").is_compiled and not Variant.parse("exact(compile=true)").is_exact
    both = Variant.parse("bold(graph=true,compile=true)")
    assert both.is_graphed and both.is_compiled and not both.is_torchs_own
    assert Variant.parse("compile(graph=true)").is_graphed and Variant.parse("compile(graph=true)").is_torchs_own
    with pytest.raises(UsageError, match="has no options"):
        Variant.parse("compile(compile=true)")


def test_graphs_need_a_gpu(bench_step, read_rows):
    assert bench_step("--methods", "plain(graph=true),bold:blocks(graph=true)") == 1
    rows = read_rows()
    assert [row["ok"] for row in rows] == ["True", "False", "False", "True"]
    assert all("GraphError: CUDA graphs need a model on an NVIDIA GPU" in row["error"] for row in rows[1:3])


def test_a_graph_takes_the_place_of_a_step_for_a_while(monkeypatch):
    load = workload.find_workload("alexnet", {}, tiny=True)
    task, asked = Task(load, "fp32", batch=2, device=torch.device("cpu")), []
    monkeypatch.setattr(
        variants, "graph_plainly", lambda model, step, warmup: lambda *batch: asked.append(warmup) or step(*batch)
    )
    variant = Variant.parse("plain(graph=true)")
    with variant.attached(task, seed=0, check=True):
        task.step()
    assert not asked
    with variant.attached(task, seed=0):
        assert torch.isfinite(task.step()) and asked == [4]
    task.step()
    assert asked == [4]
    with variant.attached(task, seed=0, warm=24):
        task.step()
    assert asked == [4, 12], "as late as it may be"


@pytest.mark.parametrize("beside", [False, True])
def test_what_runs_beside_a_step_is_handed_on_to_its_graph(monkeypatch, beside):
    task = Task(workload.find_workload("alexnet", {}, tiny=True), "fp32", batch=2, device=torch.device("cpu"))
    asked = []
    monkeypatch.setattr(Session, "graph", lambda session, step, **options: asked.append(options) or step)
    with Variant.parse(f"bold:blocks(graph=true,beside={str(beside).lower()})").attached(task, seed=0, warm=24):
        task.step()
    assert asked == [{"warmup": 12, "beside": beside}]


@dataclasses.dataclass
class Cuda:
    """What torch.cuda would say of a step that keeps 100 bytes and needs 150 at most, over 1000 static ones."""

    current: int = 1000
    peak: int = 5000
    mode: str = "default"

    def stats(self, device):
        stats = {"allocated_bytes.all.current": self.current, "allocated_bytes.all.peak": self.peak}
        return stats | {name.replace("allocated", "requested"): value - 4 for name, value in stats.items()}

    def reset(self, device):
        self.peak = self.current


class FakeTask:
    device = torch.device("cuda", 0)

    def __init__(self, cuda):
        self.cuda, self.optimizer = cuda, torch.optim.SGD([nn.Parameter(torch.ones(1))])

    def loss(self):
        self.cuda.current, self.cuda.peak = 1100, 1150
        return self.optimizer.param_groups[0]["params"][0].sum()

    def step(self):
        if self.cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "memory_stats", fake.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: fake.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(fake, "mode", mode))
    return fake


def test_memory_is_counted_above_the_static_state(cuda):
    row = meters.measure_memory(FakeTask(cuda), None)
    assert row == {"static": 1000, "held": 100, "peak": 150, "held_requested": 100, "peak_requested": 150}


class FakeGraph:
    """Of 700 bytes; what its next steps are is given. A capture ends with a replay, and makes the pool that a replay,
    a recapture and an eager step beside it find."""

    def __init__(self, *steps):
        self.replays, self.captures, self.steps = 0, 0, list(steps)

    def step(self, cuda):
        step = self.steps.pop(0)
        cuda.peak = cuda.current + (30 if step == "replay" else 9000)
        self.replays += step not in ("eager", "beside")
        self.captures += "capture" in step

    @property
    def nbytes(self):
        return 700 if self.steps and self.steps[0] in ("replay", "recapture", "beside") else 0


@pytest.mark.parametrize(
    "steps", ["replay replay", "replay eager", "eager eager capture replay", "capture beside beside recapture replay"]
)
def test_the_peak_of_a_graph_is_its_own_bytes_and_what_lies_beside_it(cuda, monkeypatch, steps):
    """In a step that is a replay and nothing else; its last one may let go of the graph."""
    graph = FakeGraph(*steps.split())
    monkeypatch.setattr(FakeTask, "step", lambda self: graph.step(cuda))
    assert meters.measure_graph(FakeTask(cuda), graph, None) == {"peak": 730}


def test_steps_that_are_never_replayed_have_no_peak(cuda, monkeypatch):
    graph = FakeGraph(*["eager"] * 100)
    monkeypatch.setattr(FakeTask, "step", lambda self: graph.step(cuda))
    assert meters.measure_graph(FakeTask(cuda), graph, None) == {} and len(graph.steps) == 100 - 16


def test_a_wait_is_reported_and_the_mode_taken_back(cuda):
    message = r"failed: RuntimeError: called a synchronizing CUDA operation at app.bench.meters\.py:\d+"
    assert re.fullmatch(message, meters.check_waits(FakeTask(cuda)))
    assert cuda.mode == "default"


def test_no_wait_is_ok(cuda, monkeypatch):
    monkeypatch.setattr(FakeTask, "step", lambda self: None)
    assert meters.check_waits(FakeTask(cuda)) == "ok"


def test_steps_leave_no_hooks(bench_step):
    """Detached after the gate and after the measurement."""
    seen = []
    load = workload.find_workload("resnet18", {}, tiny=True)
    task = Task(load, "fp32", batch=2, device=torch.device("cpu"))
    for check in (True, False):
        with Variant.parse("bold:blocks").attached(task, seed=0, check=check) as session:
            task.step()
            seen.append(session.ledger.step)
    assert seen == [1, 1]
    assert not any(module._forward_pre_hooks for module in task.model.modules())
    assert not task.optimizer._optimizer_step_post_hooks
