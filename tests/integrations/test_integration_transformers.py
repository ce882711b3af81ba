"""transformers: the callback compresses, resumes bit-equal and leaves no trace."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from lowtide.errors import LowtideWarning

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        row = (torch.arange(48) * (index % 5 + 1) + index) % 29
        return {"input_ids": row, "labels": row}


@pytest.fixture
def train(library, tmp_path):
    """Trains a tiny GPT-2; the trainer and the callback."""
    transformers = library("transformers")
    library("accelerate")
    from lowtide.integrations.transformers import LowtideCallback

    def run(steps, *, resume=None, saving=False, name="run"):
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=29, n_positions=48, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
        )
        model = transformers.GPT2LMHeadModel(config)
        callback = LowtideCallback("fixed")
        arguments = transformers.TrainingArguments(
            str(tmp_path / name), max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3, report_to=[],
            disable_tqdm=True, use_cpu=True, save_strategy="steps" if saving else "no", save_steps=2,
            logging_strategy="no", gradient_accumulation_steps=2, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return trainer, callback

    return run


def test_the_example(library, run_example, assert_compressed):
    library("transformers"), library("accelerate")
    assert_compressed(run_example("transformers_callback", steps=4))


def test_compresses_and_leaves_no_trace(train, assert_compressed, assert_detached):
    trainer, callback = train(2)
    assert_compressed(callback.tide)
    assert callback.tide.report().totals["step"] == 2  # steps of the optimizer, not the batches that they add up
    assert_detached(trainer.model)


def test_a_resumed_run_equals_one_that_was_not_stopped(train, tmp_path):
    whole, _ = train(4, name="whole")
    train(2, saving=True, name="half")
    checkpoint = tmp_path / "half" / "checkpoint-2"
    assert (checkpoint / "lowtide.pt").is_file()
    resumed, callback = train(4, resume=str(checkpoint), name="half")
    assert callback.tide.report().totals["step"] == 4
    for expected, got in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(expected, got)


def test_resuming_without_a_state_warns(train, tmp_path):
    train(2, saving=True)
    (tmp_path / "run" / "checkpoint-2" / "lowtide.pt").unlink()
    with pytest.warns(LowtideWarning, match="resumed without Lowtide's state"):
        train(3, resume=str(tmp_path / "run" / "checkpoint-2"))


def test_one_process_of_several_writes_the_state(train, tmp_path):
    """On one machine all of them see the folder, and would write to one file at the same time."""
    _, callback = train(2)
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    for should_save in (False, True):
        arguments = SimpleNamespace(output_dir=str(tmp_path), should_save=should_save)
        callback.on_save(arguments, SimpleNamespace(global_step=2), None)
        assert (folder / "lowtide.pt").is_file() is should_save


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lowtide.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match="pip install transformers"):
        import lowtide.integrations.transformers  # noqa: F401
