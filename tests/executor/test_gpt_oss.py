"""gpt-oss as its checkpoints are: experts of MXFP4 in one tensor a layer. The table of stored models has its tokens."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.executor.loading.arrangement import Arranged
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.moe_families import GPT_OSS
from tests.support.checkpoints import WEIGHTS, copied, edit_weights, refusal
from tests.support.small_models import folder, reference
from tests.support.stored_models import stored

NAME = "mxfp4/gpt-oss"


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_scale_that_is_no_number_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    path, name = copied(stored(NAME)[0], tmp_path / "broken"), "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(path / WEIGHTS)[name]
    scales[2, 7, 1] = 255
    edit_weights(path, {name: scales})
    assert "layers.1.mlp.experts.2.down_proj.weight': row 7 has a scale" in refusal(path, dtype=dtype)


def test_experts_lie_in_tensors_of_their_own_for_whoever_reads() -> None:
    view = Arranged(open_checkpoint(stored(NAME)[0]), GPT_OSS)
    assert view.has_codes
    assert view.shape("model.layers.0.mlp.experts.5.up_proj.weight") == (96, 64)
    assert view.shape("model.layers.0.mlp.experts.5.up_proj.bias") == (96,)
    assert not any(name.endswith(("_blocks", "_scales")) for name in view.names())
    plain = Arranged(open_checkpoint(folder("gpt-oss")), GPT_OSS)
    experts = reference("gpt-oss").state_dict()["model.layers.2.mlp.experts.gate_up_proj"]
    gate, up = (plain.read(f"model.layers.2.mlp.experts.3.{part}_proj.weight") for part in ("gate", "up"))
    assert isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)
    assert torch.equal(gate, experts[3, :, 0::2].T) and torch.equal(up, experts[3, :, 1::2].T)
