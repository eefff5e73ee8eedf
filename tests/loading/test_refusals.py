"""Everything that cannot be loaded gives one sentence: what, why, and what to do next."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import edit_config, edit_weights, without
from transformers import LlamaForCausalLM

from headwise.errors import HeadwiseError, InputError, ModelError, UnsupportedError
from headwise.models import load

Copy = Callable[[str], Path]


def refusal(path: Path | str, kind: type[HeadwiseError] = ModelError, **options: object) -> str:
    with pytest.raises(kind) as caught:
        load(path, **options)
    said = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in said
    assert len(said) < 700
    return said


def test_missing_path_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nothing")
    assert "there is no such folder" in refusal(str(tmp_path / "nothing"))
    assert "not of the form of a hub id" in refusal("./not here/at all")


def test_name_that_could_be_either_was_looked_for_as_both(tmp_path: Path) -> None:
    said = refusal("someone/nothing", cache_dir=tmp_path)
    assert "as a folder" in said
    assert "as a hub id" in said
    assert str(tmp_path) in said
    assert "hf download someone/nothing" in said
    assert "at revision v2" in refusal("nothing", cache_dir=tmp_path, revision="v2")


def test_nothing_is_fetched_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    seen: list[bool] = []
    real = huggingface_hub.snapshot_download

    def watched(*args: object, **options: object) -> str:
        seen.append(bool(options.get("local_files_only", False)))
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", watched)
    refusal("someone/nothing", cache_dir=tmp_path)
    assert seen == [True]


def test_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **options: object) -> str:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    said = refusal("someone/nothing", cache_dir=tmp_path, local_files_only=False)
    assert "fetching it from the hub failed (ConnectionError: no route to the hub)" in said


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    assert "cannot be read (Permission denied)" in refusal(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    assert "the folder is empty" in refusal(tmp_path)


@pytest.mark.parametrize("given", ["", "  "])
def test_empty_name(given: str) -> None:
    assert "path_or_id is empty" in refusal(given, InputError)


def test_revision_of_a_folder(saved: Path) -> None:
    assert "revision='main' chooses a version of a hub id" in refusal(saved / "bert", InputError, revision="main")


def test_single_file(saved: Path) -> None:
    said = refusal(saved / "bert" / "model.safetensors")
    assert "is a single file; give the folder" in said


def test_no_config(copy: Copy) -> None:
    folder = copy("bert")
    (folder / "config.json").unlink()
    said = refusal(folder)
    assert "has no config.json" in said
    assert "model.safetensors" in said


def test_config_one_folder_down(copy: Copy, tmp_path: Path) -> None:
    copy("bert")
    said = refusal(tmp_path)
    assert f"give {tmp_path / 'bert'}" in said


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "is not valid JSON"),
        ("[1, 2]", "holds a JSON list"),
        ('{"hidden_size": 3}', "has no model_type"),
        ("\xff\xfe", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"foo": %s}' % ("9" * 5000), "is not valid JSON (Exceeds the limit (4300 digits)"),
    ],
)
def test_config_that_is_none(copy: Copy, text: str, rule: str) -> None:
    folder = copy("bert")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert rule in refusal(folder)


def test_a_pipe_in_the_folder_is_not_waited_for(copy: Copy) -> None:
    folder = copy("bert")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json is a pipe or a device, not a file; give a folder of regular files" in refusal(folder)


@pytest.mark.parametrize("length", ["many", [1], {}, True])
def test_a_tokenizer_whose_longest_length_is_no_number(copy: Copy, length: object) -> None:
    folder = copy("bert")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": length}))
    model = load(folder)
    assert model.tokenizer is None
    assert f"model_max_length in tokenizer_config.json is {length!r}, and a number is needed" in str(
        model.tokenizer_note
    )


def test_unknown_model_type(copy: Copy) -> None:
    folder = copy("bert")
    edit_config(folder, model_type="bert2030")
    assert "model type 'bert2030' is not known to transformers" in refusal(folder, UnsupportedError)


def test_config_with_wrong_values(copy: Copy) -> None:
    folder = copy("bert")
    edit_config(folder, hidden_size="wide")
    assert "the config cannot be used" in refusal(folder)


def test_no_weights(copy: Copy) -> None:
    folder = copy("bert")
    (folder / "model.safetensors").unlink()
    said = refusal(folder)
    assert "has no weights (model.safetensors)" in said
    assert "tokenizer.json" in said


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.onnx", "an ONNX export"),
        ("tf_model.h5", "TensorFlow weights"),
        ("flax_model.msgpack", "Flax weights"),
        ("model.bin", "CTranslate2"),
        ("consolidated.00.pth", "authors' own format"),
    ],
)
def test_weights_of_another_program(copy: Copy, name: str, what: str) -> None:
    folder = copy("bert")
    (folder / "model.safetensors").rename(folder / name)
    assert what in refusal(folder)


def test_weights_under_another_name(copy: Copy) -> None:
    folder = copy("bert")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "weights.safetensors is not loaded by that name" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 4000, -1])
def test_truncated_safetensors(copy: Copy, keep: int) -> None:
    path = copy("bert") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    said = refusal(path.parent)
    assert "is empty (0 bytes)" in said if keep == 0 else "is not a readable safetensors file" in said


def test_corrupted_header(copy: Copy) -> None:
    path = copy("bert") / "model.safetensors"
    held = bytearray(path.read_bytes())
    held[:8] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(held)
    assert "is not a readable safetensors file" in refusal(path.parent)


def test_corrupted_values_show_as_not_finite(copy: Copy) -> None:
    folder = copy("llama")

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")

    edit_weights(folder, spoil)
    assert "model.layers.1.self_attn.k_proj.weight holds values that are not finite" in refusal(folder)


def test_git_lfs_pointer(copy: Copy) -> None:
    folder = copy("bert")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    assert "git lfs pull" in refusal(folder)


def test_missing_shard(copy: Copy) -> None:
    folder = copy("llama_shards")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3
    shards[1].unlink()
    said = refusal(folder)
    assert f"1 of the {len(shards)} files of its index are missing" in said
    assert shards[1].name in said


def test_index_and_shards_disagree(copy: Copy) -> None:
    folder = copy("llama_shards")
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["model.extra.weight"] = next(iter(held["weight_map"].values()))
    index.write_text(json.dumps(held))
    assert "lacks model.extra.weight, which the index says is in it" in refusal(folder)


@pytest.mark.parametrize(
    ("held", "rule"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": 3}', "has no weight_map"),
        ('{"weight_map": {}}', "names no files"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "which is not in its folder"),
    ],
)
def test_broken_index(copy: Copy, held: str, rule: str) -> None:
    folder = copy("llama_shards")
    (folder / "model.safetensors.index.json").write_text(held)
    assert rule in refusal(folder)


def test_shapes_that_contradict_the_config(copy: Copy) -> None:
    folder = copy("llama")
    edit_config(folder, intermediate_size=30)
    said = refusal(folder)
    assert "config and weights disagree" in said
    assert "(31, 24)" in said or "(24, 31)" in said
    assert "(30, 24)" in said or "(24, 30)" in said


def test_missing_weight_is_never_random(copy: Copy) -> None:
    folder = copy("llama")
    edit_weights(folder, without("model.layers.1.self_attn.q_proj.weight"))
    said = refusal(folder)
    assert "lacks model.layers.1.self_attn.q_proj.weight" in said
    assert "would be random" in said


def test_missing_layer(copy: Copy) -> None:
    folder = copy("bert")
    edit_config(folder, num_hidden_layers=3)
    said = refusal(folder)
    assert "lacks encoder.layer.2." in said
    assert "and 13 more" in said


def test_left_over_layer(copy: Copy) -> None:
    folder = copy("bert")
    edit_config(folder, num_hidden_layers=1)
    said = refusal(folder)
    assert "the checkpoint holds encoder.layer.1." in said
    assert "strict=False" in said
    model = load(folder, strict=False)
    assert any("left out" in note and "encoder.layer.1." in note for note in model.notes)


def test_left_over_bias(copy: Copy) -> None:
    folder = copy("llama")
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_weights(folder, lambda weights: weights.__setitem__(name, torch.ones(24)))
    assert f"holds {name}" in refusal(folder)


def test_unmerged_adapter_inside_the_checkpoint(copy: Copy) -> None:
    folder = copy("llama")
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    edit_weights(folder, lambda weights: weights.__setitem__(name, torch.ones(2, 24)))
    assert "an adapter that is not merged" in refusal(folder, UnsupportedError)


def test_heads_that_kv_heads_do_not_divide(copy: Copy) -> None:
    """Case 11: a Llama with 4 query heads and 3 KV heads is refused, and both numbers are named."""
    folder = copy("llama")
    edit_config(folder, num_key_value_heads=3)
    assert "num_attention_heads 4 is not a multiple of num_key_value_heads 3" in refusal(folder)
    edit_config(folder, num_key_value_heads=2, text_config={"num_attention_heads": 6, "num_key_value_heads": 4})
    assert "text_config.num_attention_heads 6" in refusal(folder)


@pytest.fixture
def pickled(copy: Copy, saved: Path) -> Path:
    folder = copy("llama")
    torch.save(LlamaForCausalLM.from_pretrained(saved / "llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickle_only(pickled: Path, saved: Path) -> None:
    said = refusal(pickled, UnsupportedError)
    assert "pytorch_model.bin" in said
    assert "allow_pickle=True" in said
    model = load(pickled, allow_pickle=True)
    assert model.source.weight_hash == load(saved / "llama").source.weight_hash


def test_pickle_is_read_with_weights_only(pickled: Path) -> None:
    class Danger:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("run by unpickling",))

    torch.save({"model.norm.weight": Danger()}, pickled / "pytorch_model.bin")
    said = refusal(pickled, allow_pickle=True)
    assert "hold more than tensors" in said or "Weights only load failed" in said


@pytest.mark.parametrize("keep", [0, 1, 3000])
def test_truncated_pickle(pickled: Path, keep: int) -> None:
    path = pickled / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    assert "pytorch_model.bin: is" in refusal(pickled, allow_pickle=True)


def test_adapter_folder(saved: Path, copy: Copy, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/base", "r": 4}))
    shutil.copy(saved / "bert" / "model.safetensors", folder / "adapter_model.safetensors")
    said = refusal(folder, UnsupportedError)
    assert "PEFT adapter of someone/base" in said
    assert "merge_and_unload()" in said


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantised_folder(copy: Copy, method: str) -> None:
    folder = copy("llama")
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    said = refusal(folder, UnsupportedError)
    assert f"is quantised ({method})" in said
    assert "dequantise" in said


def test_foreign_code_is_not_run_unasked(copy: Copy) -> None:
    folder = copy("llama")
    edit_config(folder, model_type="strange", auto_map={"AutoModel": "modeling_strange.Strange"})
    said = refusal(folder, UnsupportedError)
    assert "modeling_strange.Strange" in said
    assert "trust_remote_code=True" in said


def test_broken_foreign_code(copy: Copy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = copy("llama")
    edit_config(folder, auto_map={"AutoModel": "modeling_strange.Strange"})
    (folder / "modeling_strange.py").write_text("def broken(:\n")
    assert "modeling_strange.Strange cannot be used" in refusal(folder, trust_remote_code=True)


def test_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.Q4_0.gguf", "a.Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    said = refusal(tmp_path)
    assert "holds 2 GGUF files" in said
    assert "a.Q8_0.gguf" in said


def test_damaged_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(3))
    assert re.search("config cannot be used|could not build", refusal(tmp_path))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "wide", torch.int64, 3])
def test_dtype_that_is_none(saved: Path, dtype: object) -> None:
    assert "dtype must be float32, float64, float16 or bfloat16" in refusal(saved / "bert", InputError, dtype=dtype)


@pytest.mark.parametrize(
    ("device", "rule"),
    [("cuda:97", "is not available here"), ("moon", "is not understood"), ("meta", "holds no values")],
)
def test_device_that_is_none(saved: Path, device: str, rule: str) -> None:
    assert rule in refusal(saved / "bert", InputError, device=device)


def test_unreadable_gzip_is_not_a_model(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "model.gz", "wb") as stream:
        stream.write(b"x")
    assert "is a file, and a model is a folder" in refusal(tmp_path / "model.gz")
