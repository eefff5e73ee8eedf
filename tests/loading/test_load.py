"""What can be loaded comes back whole, silent, and with a hash of what is measured."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import bert_config, edit_config, edit_weights, without
from transformers import (
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2Model,
)
from transformers.utils import logging as library

from headwise.errors import InputError, ModelError
from headwise.models import Model, as_model, load, weight_hash, wrap

Copy = Callable[[str], Path]


def test_class_is_the_one_that_the_config_names(saved: Path) -> None:
    kinds = {name: type(load(saved / name).module).__name__ for name in ("bert", "bert_mlm", "llama", "t5")}
    assert kinds == {
        "bert": "BertModel",
        "bert_mlm": "BertForMaskedLM",
        "llama": "LlamaForCausalLM",
        "t5": "T5ForConditionalGeneration",
    }


def test_model_is_ready_to_measure(saved: Path) -> None:
    model = load(saved / "bert")
    assert not model.module.training
    assert model.tokenizer is not None
    assert model.dtype == torch.float32
    assert str(model.device) == "cpu"
    assert model.name == str(saved / "bert")
    assert model.config.num_attention_heads == 5
    assert model.notes == ()
    assert "BertModel, float32 on cpu, with tokenizer" in repr(model)


def test_unknown_class_falls_back_with_a_note(copy: Copy) -> None:
    folder = copy("bert")
    edit_config(folder, architectures=["BertForTelepathy"])
    model = load(folder)
    assert type(model.module).__name__ == "BertModel"
    assert any("transformers has no BertForTelepathy" in note for note in model.notes)
    edit_config(folder, architectures=...)
    assert any("names no architectures" in note for note in load(folder).notes)


@pytest.mark.parametrize("name", ["float64", "bfloat16", "fp16", "torch.bfloat16", torch.float64])
def test_dtype(saved: Path, name: str | torch.dtype) -> None:
    wanted = {"fp16": torch.float16, "float64": torch.float64, torch.float64: torch.float64}.get(name, torch.bfloat16)
    assert load(saved / "llama", dtype=name).dtype == wanted


def test_dtype_of_the_checkpoint_is_kept(copy: Copy) -> None:
    folder = copy("llama")
    LlamaForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    assert load(folder).dtype == torch.bfloat16


def test_missing_pooler_is_tolerated_and_said(saved: Path, copy: Copy) -> None:
    folder = copy("bert_mlm")
    edit_config(folder, architectures=["BertModel"])
    model = load(folder)
    assert any("lacks pooler.dense.bias, pooler.dense.weight" in note for note in model.notes)
    assert model.source.weight_hash == load(folder).source.weight_hash, "random weights do not count"


def test_embedding_of_masked_input_may_be_missing_or_left_over(tmp_path: Path) -> None:
    """facebook/wav2vec2-base-960h and its like: only training reads it."""
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 13,
        "vocab_size": 7,
    }
    small = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (5,), "num_feat_extract_layers": 1}
    small |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    Wav2Vec2Model(Wav2Vec2Config(**sizes, **small)).save_pretrained(tmp_path)
    edit_weights(tmp_path, without("masked_spec_embed"))
    model = load(tmp_path)
    assert any("lacks masked_spec_embed" in note for note in model.notes)
    assert model.input_rules.main_input == "input_values"
    edit_weights(tmp_path, lambda weights: weights.__setitem__("masked_spec_embed", torch.ones(12)))
    edit_config(tmp_path, mask_time_prob=0.0, mask_feature_prob=0.0)
    assert load(tmp_path).source.weight_hash


def test_missing_pooler_that_a_head_reads_is_refused(tmp_path: Path) -> None:
    BertForSequenceClassification(bert_config()).save_pretrained(tmp_path)
    edit_weights(tmp_path, without("bert.pooler.dense.weight"))
    with pytest.raises(ModelError, match=r"lacks bert\.pooler\.dense\.weight, which the head of BertForSequence"):
        load(tmp_path)


def test_old_computed_buffers_are_left_out(copy: Copy) -> None:
    folder = copy("bert_mlm")
    edit_weights(folder, lambda held: held.__setitem__("bert.embeddings.position_ids", torch.arange(17)[None]))
    assert not any("position_ids" in note for note in load(folder).notes)


def test_trusting_code_where_there_is_none(saved: Path) -> None:
    assert type(load(saved / "bert", trust_remote_code=True).module).__name__ == "BertModel"


def test_missing_head_leaves_the_body(copy: Copy) -> None:
    folder = copy("llama")
    edit_weights(folder, without("lm_head.weight"))
    model = load(folder)
    assert type(model.module).__name__ == "LlamaModel"
    assert any("no weights for the head of LlamaForCausalLM (lm_head.weight)" in note for note in model.notes)


def test_tied_head_is_not_missing(copy: Copy) -> None:
    folder = copy("llama")
    edit_weights(folder, without("lm_head.weight"))
    edit_config(folder, tie_word_embeddings=True)
    model = load(folder)
    assert type(model.module).__name__ == "LlamaForCausalLM"
    assert model.notes == ("there are no tokenizer files in " + str(folder),)


def test_other_heads_in_the_checkpoint_are_said(copy: Copy) -> None:
    folder = copy("bert_mlm")
    edit_config(folder, architectures=["BertModel"])
    assert any("also holds cls.predictions" in note for note in load(folder).notes)


def test_folder_without_tokenizer(saved: Path) -> None:
    model = load(saved / "llama")
    assert model.tokenizer is None
    assert "no tokenizer files" in (model.tokenizer_note or "")


def test_tokenizer_without_vocabulary_is_none(copy: Copy) -> None:
    folder = copy("llama")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    model = load(folder)
    assert model.tokenizer is None
    assert "found no vocabulary" in (model.tokenizer_note or "")


def test_broken_tokenizer_is_none_with_the_reason(copy: Copy) -> None:
    folder = copy("bert")
    (folder / "tokenizer.json").write_text("{")
    model = load(folder)
    assert model.tokenizer is None
    assert "cannot be used" in (model.tokenizer_note or "")


def test_shards_load_as_one(saved: Path) -> None:
    """The hash does not depend on how the checkpoint is split."""
    assert load(saved / "llama_shards").source.weight_hash == load(saved / "llama").source.weight_hash


def test_hash_follows_the_weights(saved: Path) -> None:
    model = load(saved / "llama")
    before = model.source.weight_hash
    assert before == wrap(LlamaForCausalLM.from_pretrained(saved / "llama")).source.weight_hash
    with torch.no_grad():
        model.module.model.layers[1].mlp.down_proj.weight[2, 3] += 1e-3
    assert model.source.weight_hash != before
    assert load(saved / "llama", dtype="bfloat16").source.weight_hash != before


def test_hash_does_not_see_memory_layout() -> None:
    layer = torch.nn.Linear(5, 7)
    turned = torch.nn.Linear(5, 7)
    turned.load_state_dict(layer.state_dict())
    turned.weight.data = turned.weight.data.t().contiguous().t()
    assert weight_hash(layer) == weight_hash(turned)
    turned.weight.data = turned.weight.data.roll(1, 0)
    assert weight_hash(layer) != weight_hash(turned), "the same values in other places are other weights"


def test_hash_tells_names_and_empty_tensors() -> None:
    one, other = torch.nn.Module(), torch.nn.Module()
    one.a = torch.nn.Parameter(torch.ones(3))
    other.b = torch.nn.Parameter(torch.ones(3))
    assert weight_hash(one) != weight_hash(other)
    one.c = torch.nn.Parameter(torch.ones(0, 3))
    other.b, other.a = None, torch.nn.Parameter(torch.ones(3))
    other.c = torch.nn.Parameter(torch.ones(0, 2))
    assert weight_hash(one) != weight_hash(other)


def test_from_the_hub_cache(saved: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--someone--small"
    (repo / "snapshots").mkdir(parents=True)
    shutil.copytree(saved / "bert", repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    model = load("someone/small", cache_dir=tmp_path)
    assert (model.source.kind, model.source.revision, model.name) == ("hub", commit, "someone/small")
    assert model.tokenizer is not None
    assert load("someone/small", cache_dir=tmp_path, revision=commit).source.revision == commit


def test_incomplete_copy_in_the_hub_cache(saved: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--someone--small" / "snapshots" / commit
    shutil.copytree(saved / "bert", snapshot)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights .*run `hf download someone/small`"):
        load("someone/small", cache_dir=tmp_path, revision=commit)


def test_hub_copy_that_is_known_to_lack_files(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that are missing may be ones that nobody needs."""
    import huggingface_hub
    from huggingface_hub.errors import IncompleteSnapshotError

    def partial(*args: object, **options: object) -> str:
        raise IncompleteSnapshotError("README.md is missing", snapshot_path=str(saved / "bert"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", partial)
    assert load("someone/small").source.kind == "hub"


def test_a_folder_of_the_name_wins_over_the_cache(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    assert load("bert", cache_dir=tmp_path).source.kind == "folder"


FOREIGN = """
from transformers import LlamaForCausalLM

print("a word from foreign code")


class Strange(LlamaForCausalLM):
    pass
"""


def test_foreign_code_runs_when_trusted(copy: Copy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = copy("llama")
    edit_config(folder, architectures=["Strange"], auto_map={"AutoModelForCausalLM": "modeling_strange.Strange"})
    (folder / "modeling_strange.py").write_text(FOREIGN)
    plain = load(folder)
    assert any("which was not used" in note for note in plain.notes)
    model = load(folder, trust_remote_code=True)
    assert type(model.module).__name__ == "Strange"
    assert any("its model code was taken from the folder" in note for note in model.notes)
    assert any("a word from foreign code" in note for note in model.notes)


def test_loading_is_silent(copy: Copy, capfd: pytest.CaptureFixture[str]) -> None:
    folder = copy("bert_mlm")
    edit_config(folder, architectures=["BertForTokenClassification"])
    load(folder)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def interrupted(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_library_logging_is_as_before(saved: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    def state() -> tuple[object, ...]:
        loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
        seen = [(one.level, list(one.handlers), one.propagate) for one in loggers]
        return seen, library.is_progress_bar_enabled(), are_progress_bars_disabled(), list(warnings.filters)

    library.enable_progress_bar()
    before = state()
    load(saved / "bert")
    assert state() == before
    folder = copy("llama")
    edit_config(folder, intermediate_size=30)
    with pytest.raises(ModelError, match="disagree"):
        load(folder)
    assert state() == before
    monkeypatch.setattr(BertModel, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(saved / "bert")
    monkeypatch.undo()
    assert state() == before
    library.disable_progress_bar()
    before = state()
    load(saved / "bert")
    assert state() == before
    library.enable_progress_bar()


def test_warnings_of_the_library_become_notes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = BertModel.from_pretrained.__func__

    def noisy(cls: type, *args: object, **options: object) -> object:
        logging.getLogger("transformers.modeling_utils").warning("beware\nof this")
        warnings.warn("and of that", UserWarning, stacklevel=1)
        return inner(cls, *args, **options)

    monkeypatch.setattr(BertModel, "from_pretrained", classmethod(noisy))
    assert load(saved / "bert").notes == ("beware of this", "and of that")


def test_as_model(saved: Path) -> None:
    model = as_model(saved / "bert")
    assert isinstance(model, Model)
    assert as_model(model) is model
    assert as_model(model.module).source.kind == "memory"
    assert as_model(str(saved / "bert")).name == model.name
    with pytest.raises(InputError, match="a int was given"):
        as_model(3)  # type: ignore[arg-type]


def test_load_takes_no_module() -> None:
    with pytest.raises(InputError, match="a module goes to wrap"):
        load(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
