"""Saved, loaded in a process that never saw the original, pruned again; and what plain transformers makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import headwise as hw
from headwise import artifacts
from headwise.errors import InputError, ModelError, RunError, UnsupportedError
from headwise.models import load, wrap
from headwise.surgery import prune, verify
from tests.surgery import small
from tests.surgery.small import IDS, apart, outputs

CASE_34 = {
    "gpt2": (small.gpt2, "transformer.h.{}.attn"),
    "bert": (small.bert, "encoder.layer.{}.attention.self"),
    "llama": (lambda: small.decoder("Llama"), "model.layers.{}.self_attn"),
    "qwen2": (lambda: small.decoder("Qwen2"), "model.layers.{}.self_attn"),
    "t5": (small.t5, "encoder.block.{}.layer.0.SelfAttention"),
    "whisper": (small.whisper, "model.decoder.layers.{}.encoder_attn"),
    "albert": (small.albert, "encoder.albert_layer_groups.{}.albert_layers.0.attention"),
}
ELSEWHERE = """
import json, pickle, sys, torch
def refuse(*_args, **_kwargs):
    raise AssertionError("a pickle was read")
torch.load = pickle.load = pickle.loads = refuse
from safetensors.torch import load_file
from headwise.models import load
from headwise.models.probe import run_model, tensors_of
apart = {}
for name in sys.argv[2:]:
    model = load(f"{sys.argv[1]}/{name}")
    stored = load_file(f"{sys.argv[1]}/{name}.case")
    inputs = {key[3:]: value for key, value in stored.items() if key.startswith("in.")}
    with torch.no_grad():
        found = tensors_of(run_model(model.module, inputs))
    expected = [stored[f"out.{at}"] for at in range(len(found))]
    apart[name] = max(float((left - right).abs().max()) for left, right in zip(expected, found, strict=True))
print(json.dumps(apart))
"""


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    if name == "whisper":
        features = torch.randn(2, 7, 22, generator=torch.Generator().manual_seed(1))
        return {"input_features": features, "decoder_input_ids": IDS}
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if name == "t5" else {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model of case 34, pruned, saved and beside it what it gives."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("case34")
    for name, (make, path) in CASE_34.items():
        plan = {path.format(0): [1]} | ({} if name == "albert" else {path.format(1): [0, 2]})
        pruned = prune(make(), plan, repair="none")
        pruned.save(root / name)
        given = inputs_of(name)
        stored = {f"in.{key}": value for key, value in given.items()}
        stored |= {f"out.{at}": one for at, one in enumerate(outputs(pruned.module, **given))}
        save_file({key: value.clone() for key, value in stored.items()}, root / f"{name}.case")
    return root


def test_case_34_a_new_process_gives_the_same(folders: Path) -> None:
    """In a process that never saw the originals, and in which a pickle cannot be read."""
    asked = [sys.executable, "-W", "error", "-c", ELSEWHERE, str(folders), *CASE_34]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(CASE_34, 0.0)


@pytest.mark.parametrize("name", list(CASE_34))
def test_case_34_only_safetensors_and_json(name: str, folders: Path) -> None:
    assert {file.suffix for file in (folders / name).iterdir()} == {".json", ".md", ".safetensors"}


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_plain_from_pretrained_fails_loudly(name: str, tmp_path: Path) -> None:
    make, path = CASE_34[name]
    pruned = prune(make(), {path.format(0): [1]}, repair="none")
    folder = pruned.save(tmp_path / "small")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        type(pruned.module).from_pretrained(folder)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        type(pruned.module).from_pretrained(folder, ignore_mismatched_sizes=True)


UNIFORM = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Gemma", "Qwen2", "Granite"])
def test_case_34_uniform_is_a_stock_checkpoint(name: str, tmp_path: Path) -> None:
    """3 of 4 heads everywhere, hidden 16: plain transformers loads it, difference 0.0, and generates the same."""
    own = {} if name in ("Qwen2", "Granite") else {"head_dim": 4}  # those have no such field until it is written
    model = small.decoder(name, **UNIFORM, **own)
    pruned: Any = prune(model, {f"model.layers.{layer}.self_attn": [layer] for layer in (0, 1)}, repair="none")
    assert (pruned.config.num_attention_heads, pruned.config.num_key_value_heads, pruned.config.head_dim) == (3, 3, 4)
    folder = pruned.save(tmp_path / "small")
    stock = type(pruned.module).from_pretrained(folder).eval()
    assert apart(outputs(stock, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0
    ours = load(folder)
    assert apart(outputs(ours.module, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0
    assert ours.surgery == pruned.surgery
    asked = {"max_new_tokens": 5, "do_sample": False}
    assert stock.generate(IDS, **asked).tolist() == pruned.module.generate(IDS, **asked).tolist()


@pytest.mark.parametrize("make", [lambda: small.decoder("Llama", **UNIFORM), lambda: small.bert(hidden_size=16)])
def test_case_34_families_that_refuse_are_named_before_saving(make: Callable[[], Any], tmp_path: Path) -> None:
    from headwise.models.stock import expressible

    model = make()
    layers = "model.layers.{}.self_attn" if hasattr(model, "lm_head") else "encoder.layer.{}.attention.self"
    pruned = prune(model, {layers.format(layer): [layer] for layer in (0, 1)}, repair="none")
    why = expressible(pruned.module)
    assert why is not None
    assert "(24, 24)" in why or "(16, 16)" in why or "multiple" in why, why
    folder = pruned.save(tmp_path / "small")
    assert not (folder / "model.safetensors").exists()
    assert apart(outputs(load(folder).module, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0


@pytest.mark.parametrize(
    ("name", "repair", "removed", "card"),
    [
        ("Qwen3", "none", {0: [0], 1: [1]}, "also a plain transformers checkpoint"),
        ("Qwen3", "bias", {0: [0], 1: [1]}, "The config gives the intercept a place by `attention_bias` = `True`"),
        ("Mistral", "bias", {0: [0], 1: [1]}, "builds no model.layers.0.self_attn.o_proj.bias, which holds the inter"),
        ("Mistral", "least_squares_no_bias", {0: [0], 1: [1]}, "repaired by least squares without an intercept, from"),
        ("Qwen3", "none", {0: [0], 1: [1, 2]}, "its layers have different numbers of heads"),
        ("Qwen3", "none", {0: [0]}, "its layers have different numbers of heads"),
    ],
)
def test_the_card_says_whether_transformers_can(
    name: str, repair: str, removed: dict[int, list[int]], card: str, tmp_path: Path
) -> None:
    model = small.decoder(name, **UNIFORM, head_dim=4)
    heads = {f"model.layers.{layer}.self_attn": gone for layer, gone in removed.items()}
    learned = {"inputs": [{"input_ids": IDS}]} if repair != "none" else {}
    folder = hw.prune(model, heads, repair=repair, **learned).save(tmp_path / "small")
    written = (folder / "README.md").read_text()
    assert card in written
    assert (folder / "model.safetensors").exists() == ("also a plain transformers checkpoint" in written)
    assert ("config cannot say it" in written) != (folder / "model.safetensors").exists()


def test_pruned_again_after_loading(tmp_path: Path) -> None:
    llama = small.decoder("Llama")
    once = prune(llama, {"model.layers.0.self_attn": [1]}, repair="none").save(tmp_path / "once")
    twice = prune(
        load(once), {"model.layers.0.self_attn": [0], "model.layers.1.self_attn": [0, 1, 2, 3]}, repair="none"
    )
    folder = twice.save(tmp_path / "twice")
    again = load(folder)
    at_once = prune(
        llama, {"model.layers.0.self_attn": [0, 1], "model.layers.1.self_attn": [0, 1, 2, 3]}, repair="none"
    )
    expected = outputs(at_once.module, input_ids=IDS)
    assert apart(outputs(again.module, input_ids=IDS), expected) <= 1e-5
    assert again.surgery == twice.surgery
    found = verify(llama, again)
    assert found.removed == {"model.layers.0.self_attn": (0, 1), "model.layers.1.self_attn": (0, 1, 2, 3)}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    gpt2: Any = small.gpt2()
    folder = prune(gpt2, {"transformer.h.0.attn": [1]}, repair="none").save(tmp_path / "small")
    with safe_open(folder / "headwise.safetensors", framework="pt") as stored:
        names = list(stored.keys())
    assert ("lm_head.weight" in names) + ("transformer.wte.weight" in names) == 1
    loaded: Any = load(folder).module
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    pruned = prune(small.bert().to(dtype), {"encoder.layer.0": [1]}, repair="none")
    loaded = load(pruned.save(tmp_path / "small"))
    assert loaded.dtype == dtype
    assert apart(outputs(loaded.module, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0
    assert load(tmp_path / "small", dtype="float32").dtype == torch.float32


def test_shards(tmp_path: Path) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    folder = pruned.save(tmp_path / "small", max_shard_size=3000)
    files = json.loads((folder / "headwise.json").read_text())["weights"]["files"]
    assert len(files) > 3
    assert all((folder / name).stat().st_size < 9000 for name in files)
    assert apart(outputs(load(folder).module, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0
    (folder / files[1]).unlink()
    with pytest.raises(ModelError, match="are not there"):
        load(folder)


def test_repaired_biases_come_back(tmp_path: Path) -> None:
    from headwise.verbs.statistics import statistics

    llama = small.decoder("Llama")
    known = statistics(llama, inputs=[{"input_ids": IDS}])
    pruned = prune(llama, {"model.layers.0.self_attn": [1]}, statistics=known)
    loaded = load(pruned.save(tmp_path / "small"))
    assert apart(outputs(loaded.module, input_ids=IDS), outputs(pruned.module, input_ids=IDS)) == 0.0
    found = verify(llama, loaded)
    assert found.repaired == ("model.layers.0.self_attn.o_proj",)
    assert found.recorded


def test_an_uncut_model_can_be_saved(tmp_path: Path) -> None:
    bert = wrap(small.bert())
    loaded = load(bert.save(tmp_path / "whole"))
    assert apart(outputs(loaded.module, input_ids=IDS), outputs(bert.module, input_ids=IDS)) == 0.0
    assert loaded.surgery is None


def test_the_card_says_what_was_done(tmp_path: Path) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1, 2]}, repair="none")
    card = (pruned.save(tmp_path / "small") / "README.md").read_text()
    assert "| `encoder.layer.0.attention.self` | 1, 2 | 4 -> 2 | 4 -> 2 |" in card
    assert "nothing was repaired" in card
    assert card.startswith("---\nlibrary_name: headwise\n")


def test_targets_that_are_refused(tmp_path: Path) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(RunError, match="is a file"):
        pruned.save(file)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"was not saved by headwise \(it holds thesis\.tex\)"):
        pruned.save(foreign, overwrite=True)
    folder = pruned.save(tmp_path / "small")
    with pytest.raises(RunError, match="holds a saved model"):
        pruned.save(folder)
    pruned.save(folder, overwrite=True)
    with pytest.raises(InputError, match="max_shard_size"):
        pruned.save(tmp_path / "other", max_shard_size=0)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "foreign", "small"]


def test_nothing_half_done_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    folder = pruned.save(tmp_path / "small")
    before = (folder / "headwise.json").read_bytes()

    def full(*_given: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwise.models.saving._write_companions", full)
    with pytest.raises(RunError, match="No space left on device; nothing was changed"):
        pruned.save(folder, overwrite=True)
    with pytest.raises(RunError, match="No space left"):
        pruned.save(tmp_path / "new")
    assert [one.name for one in tmp_path.iterdir()] == ["small"]
    assert (folder / "headwise.json").read_bytes() == before


def test_a_full_disk_and_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be a mounted volume: it is filled, and empty again after a failure."""
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    folder = tmp_path / "volume"
    folder.mkdir()
    before = folder.stat().st_ino
    with monkeypatch.context() as patched:
        import safetensors.torch

        def full(*_given: Any, **_more: Any) -> None:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

        patched.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(RunError, match=r"No space left on device .*; nothing was changed"):
            pruned.save(folder)
    assert list(folder.iterdir()) == []
    real, calls = os.rename, []

    def third_time(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", third_time)
        with pytest.raises(KeyboardInterrupt):
            pruned.save(folder)
    assert list(folder.iterdir()) == []
    (folder / ".headwise-new-volume-killed").mkdir()
    pruned.save(folder)
    assert folder.stat().st_ino == before
    assert load(folder).surgery == pruned.surgery
    assert not [one for one in folder.iterdir() if one.name.startswith(".")]


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    folder = pruned.save(tmp_path / "small")
    os.rename(folder, tmp_path / ".small.headwise-old")
    with pytest.raises(RunError, match="holds a saved model; choose another folder, or overwrite it"):
        pruned.save(folder)
    assert load(folder).surgery == pruned.surgery
    assert [one.name for one in tmp_path.iterdir()] == ["small"]


def test_what_lies_beside_a_saved_model_is_not_deleted(tmp_path: Path) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    folder = pruned.save(tmp_path / "small")
    (folder / ".git").mkdir()
    with pytest.raises(RunError, match=r"holds a saved model and \.git, which headwise did not save"):
        pruned.save(folder, overwrite=True)
    (folder / ".git").rmdir()
    (folder / "results.csv").write_text("mine")
    with pytest.raises(RunError, match=r"and results\.csv, which headwise did not save; move it away"):
        pruned.save(folder, overwrite=True)
    assert (folder / "results.csv").read_text() == "mine"


class Own(nn.Module):
    """A class of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = small.bert()
        self.config = self.inner.config
        self.main_input_name = "input_ids"

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids).last_hidden_state


def test_classes_of_the_users_own_are_refused(tmp_path: Path) -> None:
    pruned = prune(Own(), {"inner.encoder.layer.0": [1]}, repair="none", example={"input_ids": IDS})
    with pytest.raises(UnsupportedError, match="not one of transformers' own model classes"):
        pruned.save(tmp_path / "small")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "headwise.json").read_text())
    change(document)
    (folder / "headwise.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda one: one.update(version="2.0"), "newer headwise"),
        (lambda one: one["class"].update(module="os", name="system"), "does not have"),
        (
            lambda one: one["class"].update(module="transformers.models.bert.modeling_bert", name="torch"),
            "does not have",
        ),
        (
            lambda one: one["config"].update(module="transformers.models.bert.configuration_bert", name="Nope"),
            "does not have",
        ),
        (lambda one: one["weights"].update(files=["../../etc/passwd"]), "are not there"),
        (lambda one: one["cuts"][0].update(module="encoder.layer.9"), "does not have"),
        (lambda one: one["weights"].update(tied={"a.b": "c.d"}), "ties a.b to c.d"),
        (lambda one: one["cuts"][0].update(heads=[-1]), "does not follow"),
        (lambda one: one.pop("cuts"), "does not follow"),
    ],
)
def test_hostile_documents(change: Callable[[dict[str, Any]], object], rule: str, tmp_path: Path) -> None:
    folder = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none").save(tmp_path / "small")
    edit(folder, change)
    with pytest.raises(ModelError, match=rule):
        load(folder)


def test_damaged_weights(tmp_path: Path) -> None:
    folder = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none").save(tmp_path / "small")
    raw = (folder / "headwise.safetensors").read_bytes()
    (folder / "headwise.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("embeddings.word_embeddings.weight", lambda one: one[:9], r"which is not \(31, 20\), as in a layer not cut"),
        (
            "encoder.layer.0.intermediate.dense.weight",
            lambda one: one.long(),
            "is torch.int64, and the model has torch",
        ),
        ("encoder.layer.0.attention.output.dense.weight", lambda one: one[:, :, None], "with one axis cut"),
    ],
)
def test_weights_that_do_not_fit(name: str, change: Any, words: str, tmp_path: Path) -> None:
    folder = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none").save(tmp_path / "small")
    file = folder / "headwise.safetensors"
    stored = load_file(file)
    save_file({**stored, name: change(stored[name]).contiguous()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{re.escape(name)} of a .*{words}"):
        load(folder)


def test_an_intercept_that_fits_no_row(tmp_path: Path) -> None:
    pruned = prune(small.decoder("Llama", head_dim=6), {"model.layers.0": [1]}, repair="none")
    folder = pruned.save(tmp_path / "small")
    file, name = folder / "headwise.safetensors", "model.layers.0.self_attn.o_proj.bias"
    stored = load_file(file)
    save_file({**stored, name: torch.ones(7)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"o_proj\.bias has the shape \(7,\), and the Linear has no place for that"):
        load(folder)


def test_the_document_is_valid_and_its_bytes_a_function_of_the_content(tmp_path: Path) -> None:
    pruned = prune(small.bert(), {"encoder.layer.0": [1]}, repair="none")
    one, two = pruned.save(tmp_path / "one"), pruned.save(tmp_path / "two")
    for name in ("headwise.json", "headwise.safetensors", "config.json", "README.md"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    artifacts.read_document(one / "headwise.json", artifacts.MODEL_FORMAT)
