"""The two files of arrays: bytes pinned, every key on the format page, later minor versions read."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headwise import artifacts
from headwise.layout import HeadId, Site, SiteKey
from headwise.measures.covariance import Scatter, SiteStatistics, Statistics
from headwise.measures.similarity import Redundancy

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "format.md"
SITES = (
    Site(SiteKey("decoder", "self", "layers.0.attn", 0), "layers.0.attn", 0, True, 7),
    Site(SiteKey("decoder", "self", "layers.0.attn", 1), "layers.0.attn", 1, True, None),
)


def statistics() -> Statistics:
    """One site with everything, one without rows."""
    z = Scatter.of(5, torch.tensor([1.0, -0.5]), torch.tensor([[2.0, 0.25], [0.25, 1.0]]))
    g = Scatter.of(4, torch.tensor([0.0, 0.5, 0.25]), torch.eye(3) * 0.125)
    sites = [SiteStatistics(SITES[0], 2, 1, z, g, 12.5), SiteStatistics(SITES[1], 2, 1, Scatter(2))]
    return Statistics(sites, model="a/b", weight_hash="h", parts=["x", "y"], skip_first=4, loss="next_token")


def redundancy() -> Redundancy:
    heads = (HeadId(SITES[0].key, 0), HeadId(SITES[1].key, 1))
    js, cka = np.array([[0.0, 0.5], [0.5, 0.0]]), np.array([[1.0, np.nan], [np.nan, 1.0]])
    patterns = {"rows": 12, "rows_per_passage": 4, "seed": 0}
    return Redundancy(
        heads, (0, 1), js, cka, patterns, {"directions": 3, "exact": False, "rows": 40}, "a/b", "h", ("x",)
    )


MADE = {"statistics": statistics, "redundancy": redundancy}
READ = {"statistics": Statistics.load, "redundancy": Redundancy.load}
FORMATS = {"statistics": artifacts.STATISTICS_FORMAT, "redundancy": artifacts.REDUNDANCY_FORMAT}


@pytest.mark.parametrize("name", MADE)
def test_bytes_are_pinned(name: str, tmp_path: Path) -> None:
    made = MADE[name]().save(tmp_path / "a.safetensors")
    assert made.read_bytes() == (GOLDEN / f"{name}.safetensors").read_bytes()


@pytest.mark.parametrize("name", MADE)
def test_the_pinned_file_is_read(name: str, tmp_path: Path) -> None:
    found = READ[name](GOLDEN / f"{name}.safetensors")
    assert found.save(tmp_path / "b.safetensors").read_bytes() == (GOLDEN / f"{name}.safetensors").read_bytes()


@pytest.mark.parametrize("name", MADE)
def test_a_later_minor_version_is_read_and_its_keys_ignored(name: str, tmp_path: Path) -> None:
    path = GOLDEN / f"{name}.safetensors"
    document, _ = artifacts.read_tensors(path, FORMATS[name])
    document |= {"version": "1.9", "new": {"deep": [1]}}
    save_file({**load_file(path), "new": np.zeros(2)}, tmp_path / "c.safetensors", {"headwise": json.dumps(document)})
    assert READ[name](tmp_path / "c.safetensors").parts == MADE[name]().parts


@pytest.mark.parametrize("name", MADE)
def test_schemas_are_valid_and_every_key_is_on_the_page(name: str) -> None:
    schema, page = artifacts.schema(FORMATS[name]), PAGE.read_text("utf-8")
    jsonschema.Draft202012Validator.check_schema(schema)
    parts = [schema, *schema["properties"].values()]
    parts += [part["items"] for part in schema["properties"].values() if "properties" in part.get("items", {})]
    for part in parts:
        for key in part.get("properties", {}):
            assert f"`{key}`" in page, key
    for array in ("i.mean", "i.covariance", "i.gradient_mean", "i.gradient_covariance", "js", "cka"):
        assert f"`{array}`" in page
