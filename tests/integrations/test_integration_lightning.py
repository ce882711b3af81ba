"""Lightning: the callback compresses, logs, resumes bit-equal and leaves no trace."""

from __future__ import annotations

import csv
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture
def lightning(library):
    return library("lightning")


@pytest.fixture
def fit(lightning, make_net, tmp_path):
    """Trains for some epochs, from a checkpoint if one is given; trainer, module and callback."""
    from lowtide.integrations.lightning import LowtideCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.net = make_net()

        def training_step(self, batch, index):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, torch.arange(64) % 10), 16)

    def run(epochs, *, checkpoint=None, callback=None, module=None, **options):
        callback = callback or LowtideCallback("fixed", log=False)
        module = module or Module()
        trainer = lightning.Trainer(
            max_epochs=epochs, callbacks=[callback], accelerator="cpu", default_root_dir=tmp_path,
            **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
               "enable_model_summary": False, **options},
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=checkpoint)
        return trainer, module, callback

    run.module = Module
    return run


def test_the_example(library, run_example, assert_compressed):
    library("lightning")
    assert_compressed(run_example("lightning_callback", epochs=1))


def test_compresses_and_leaves_no_trace(fit, assert_compressed, assert_detached):
    _, module, callback = fit(1)
    assert_compressed(callback.tide)
    assert callback.tide.report().totals["step"] == 4  # counted by the optimizer's hook
    assert_detached(module)


def test_a_resumed_run_equals_one_that_was_not_stopped(fit, tmp_path):
    _, whole, _ = fit(2)
    trainer, _, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, callback = fit(2, checkpoint=tmp_path / "half.ckpt")
    assert callback.tide.report().totals["step"] == 8
    for expected, got in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(expected, got)


def test_a_failure_in_training_detaches(fit, assert_detached):
    class Fails(fit.module):
        def training_step(self, batch, index):
            super().training_step(batch, index)
            raise RuntimeError("no more")

    module = Fails()
    with pytest.raises(RuntimeError, match="no more"):
        fit(1, module=module)
    assert_detached(module)


def test_figures_go_to_the_loggers(fit, library, tmp_path):
    from lowtide.integrations.lightning import LowtideCallback

    logger = library("lightning.pytorch.loggers").CSVLogger(tmp_path, name="log", version=0)
    fit(1, callback=LowtideCallback("fixed"), logger=logger, log_every_n_steps=1)
    with (tmp_path / "log" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and all(float(row["lowtide/ratio"]) > 3 for row in rows)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "lowtide.integrations.lightning", raising=False)
    with warnings.catch_warnings(), pytest.raises(ImportError, match="pip install lightning"):
        warnings.simplefilter("ignore")
        import lowtide.integrations.lightning  # noqa: F401
