"""The papers' experiments: what they train on, and that one which was stopped goes on as if it had not been."""

import dataclasses
import sys
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from parallel import common

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "papers"))
import adacomp
import apmsqueeze
import experiment
import quantizers


@pytest.fixture(autouse=True)
def _horovod():
    torch.set_num_threads(1)
    hvd.init()


@pytest.fixture
def folder(tmp_path, _horovod):
    """Of rank 0, for all."""
    return Path(hvd.broadcast_object(str(tmp_path)))


def small_task(epochs):
    data = experiment.images(None, "mnist")
    few = dataclasses.replace(
        data, train=tuple(part[:256] for part in data.train), test=tuple(part[:100] for part in data.test)
    )
    return experiment.classification(few, lambda: adacomp.mnist_cnn(10), epochs, lr=0.05)


def test_a_training_that_was_stopped_goes_on(folder):
    whole = experiment.Training("whole", small_task(3), "adacomp", 5, folder).run()
    stopped = experiment.Training("stopped", small_task(3), "adacomp", 5, folder)
    save, saved = stopped._save, []

    def save_and_stop():
        save()
        saved.append(stopped.progress.epoch)
        if hvd.rank() == 0 or len(saved) < 2:  # rank 0 stops an epoch later than the others
            if len(saved) == 2:
                raise KeyboardInterrupt
            return
        stopped._file(2).unlink()
        raise KeyboardInterrupt

    stopped._save = save_and_stop
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    hvd.barrier()
    again = experiment.Training("stopped", small_task(3), "adacomp", 5, folder)
    resumed = again.run()
    assert again.progress.steps == whole["steps"] == 3 * (256 // hvd.size() // 32)
    for key in ("value", "curve", "steps", "ratios"):
        assert resumed[key] == whole[key]
    assert resumed["ratios"]["conv"] > 10
    assert resumed["ratios"]["fc"] > 10
    assert set(resumed["ratios"]) == {"conv", "fc", "all"}
    finished = experiment.Training("stopped", small_task(3), "adacomp", 5, folder).run()
    assert finished == resumed
    assert common.gather(resumed["value"], hvd) == [resumed["value"]] * hvd.size()


def test_a_checkpoint_of_another_task_is_refused(folder):
    experiment.Training("same", small_task(1), "none", 0, folder).run()
    hvd.barrier()
    other = dataclasses.replace(small_task(1), name="other digits")
    with pytest.raises(SystemExit, match=r"is of another training \(other data\): choose another --out"):
        experiment.Training("same", other, "none", 0, folder).run()
    longer = dataclasses.replace(small_task(2), settings={**small_task(2).settings, "lr": 1.0})
    with pytest.raises(SystemExit, match=r"\(other epochs, lr\)"):
        experiment.Training("same", longer, "none", 0, folder).run()


def test_what_normalization_has_seen_is_one_on_all_ranks(folder):
    data = experiment.images(None, "cifar10")
    few = dataclasses.replace(data, train=tuple(part[:128] for part in data.train), test=tuple(part[:33] for part in data.test))
    task = experiment.classification(few, lambda: quantizers.resnet(1, 10), 1, lr=0.05, flip=True)
    modes = []
    evaluate = task.evaluate
    task.evaluate = lambda model: (modes.append(model.training), evaluate(model))[1]
    training = experiment.Training("norm", task, "nuqsgd", 0, folder)
    training.run()
    assert modes == [False]
    assert training._model.training
    common.assert_equal_on_all_ranks([buffer.numpy() for _, buffer in training._model.named_buffers()], hvd)


@pytest.mark.parametrize("kind", ["keras", "ours", "jpeg", "cifar-10-batches-py"])
def test_image_files(kind, tmp_path):
    random = np.random.default_rng(0)
    name = "mnist" if kind == "keras" else "cifar10"
    shape = (28, 28) if kind == "keras" else (32, 32, 3)
    pixels = {part: random.integers(0, 256, (n, *shape), np.uint8) for part, n in (("train", 20), ("test", 10))}
    labels = {part: random.integers(0, 10, len(of)) for part, of in pixels.items()}
    if kind == "keras":
        np.savez(tmp_path / "mnist.npz", **{f"x_{p}": pixels[p] for p in pixels}, **{f"y_{p}": labels[p] for p in pixels})
    elif kind == "ours":
        arrays = {f"{p}_images": pixels[p] for p in pixels} | {f"{p}_labels": labels[p] for p in pixels}
        np.savez(tmp_path / "cifar10_small.npz", **arrays)
    elif kind == "jpeg":
        _save_jpeg(tmp_path / "cifar10_jpeg.npz", pixels, labels)
    else:
        _save_batches(tmp_path / "cifar-10-batches-py", pixels, labels)
    found = experiment.images(str(tmp_path), name)
    for part, (images, numbers) in (("train", found.train), ("test", found.test)):
        assert images.shape == (len(pixels[part]), 1 if kind == "keras" else 3, *shape[:2])
        assert numbers.tolist() == labels[part].tolist()
        expected = pixels[part][:, None] if kind == "keras" else pixels[part].transpose(0, 3, 1, 2)
        if kind != "jpeg":
            scaled = (expected - pixels["train"].mean()) / pixels["train"].std()
            assert torch.allclose(images, torch.from_numpy(scaled).float(), atol=1e-4)


def _save_jpeg(path, pixels, labels):
    import io

    from PIL import Image

    arrays = {}
    for part in pixels:
        files = []
        for image in pixels[part]:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "JPEG")
            files.append(buffer.getvalue())
        arrays[f"{part}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, files)])
        arrays[f"{part}_labels"] = labels[part]
    np.savez(path, **arrays)


def _save_batches(folder, pixels, labels):
    import pickle

    folder.mkdir()
    rows = {part: pixels[part].transpose(0, 3, 1, 2).reshape(len(pixels[part]), -1) for part in pixels}
    for name, part, of in (
        ("data_batch_1", "train", slice(0, 12)),
        ("data_batch_2", "train", slice(12, 20)),
        ("test_batch", "test", slice(0, 10)),
    ):
        (folder / name).write_bytes(pickle.dumps({b"data": rows[part][of], b"labels": labels[part][of].tolist()}))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no cifar10\*\.npz"):
        experiment.images(str(tmp_path), "cifar10")
    with pytest.raises(SystemExit, match=r"there is no \*shakespeare\*\.txt"):
        experiment.text(str(tmp_path))


def test_what_is_trained_can_be_chosen(monkeypatch, capsys, folder):
    def parsed(*options):
        monkeypatch.setattr(sys, "argv", ["papers", *options])
        return experiment.parse_args("Tries.", ["a", "b"], ["none", "adacomp"])

    assert (parsed().codec, parsed().seed, parsed().task) == (["none", "adacomp"], [0], None)
    args = parsed("--codec", "adacomp:bin=50", "--codec", "none", "--seed", "7", "--out", str(folder), "--task", "a")
    experiment.run({"a": lambda: small_task(1), "b": None}, args)
    if hvd.rank() == 0:
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" | ")[:4] for line in lines[2:]] == [
            ["| a", "digits instead of mnist", f"`{spec}`", "7"] for spec in ("adacomp:bin=50", "none")
        ]
        assert (folder / "a-adacomp_bin=50-none-7.json").exists()
    with pytest.raises(SystemExit):
        parsed("--codec", "adacomp:bin=0")
    assert "--codec adacomp:bin=0: " in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["adam", "apmsqueeze", "qsgd:bits=4,error_feedback=true"])
def test_the_language_model_learns(spec, folder):
    data = experiment.text(None)
    task = experiment.language(
        data,
        lambda: apmsqueeze.GPT(data.characters, 64, 32, 1),
        2,
        lambda model, of: apmsqueeze.optimizer_of(model, of, 40, lr=1e-2),
        steps=20,
    )
    row = experiment.Training("language", task, spec, 0, folder).run()
    assert row["curve"][-1] < row["curve"][0] < np.log(data.characters)
    assert row["ratios"]["all"] == pytest.approx(1, rel=0.01) if spec == "adam" else row["ratios"]["all"] > 1.5
    lines = experiment.table([{"task": "language", "data": data.name, **row}]).splitlines()
    assert [line.count("|") for line in lines] == [lines[0].count("|")] * 3
    assert (set(row["ratios"]) > {"attention", "fc", "embedding"}) == (spec != "adam")


@pytest.mark.parametrize(("blocks", "convolutions"), [(1, 9), (3, 21)])
def test_the_residual_network(blocks, convolutions):
    model = quantizers.resnet(blocks, 10)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == convolutions


def test_the_recurrent_network():
    assert adacomp.CharLSTM(30, 16)(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 30)
