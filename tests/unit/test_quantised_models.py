"""FP8 models on one process, as their quantisers make them: how many places become one operation, and their numbers."""

from __future__ import annotations

import pytest
import torch

import tpfuse
from tpfuse.models.families import family_config
from tpfuse.testing import interpret_graphs

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ON = {"fuse_norm_quant": True, "fuse_act_quant": True}
LAYERS = 2


class Fp8Linear(torch.nn.Module):
    """A Linear without bias, quantised as torchao (row, tensor) or compressed-tensors do, or with a scale that is given."""

    def __init__(self, linear: torch.nn.Linear, how: str) -> None:
        super().__init__()
        self.how = how
        weight = linear.weight.detach().float()
        whole = how in ("tensor", "static")
        scale = (weight.abs().amax() if whole else weight.abs().amax(1, keepdim=True)) / 448
        self.register_buffer("weight", (weight / scale).clamp(-448, 448).to(E4M3))
        self.register_buffer("weight_scale", scale.view(1, 1) if whole else scale.t().contiguous())
        self.register_buffer("input_scale", torch.full((1, 1), 0.01))

    def scale_of(self, x):
        if self.how == "static":
            return self.input_scale
        if self.how == "compressed-tensors":
            most = x.float().abs().amax(-1, keepdim=True)
            return torch.where(most > 0, most, 1.0) / 448.0
        most = x.abs().amax(list(range(x.dim())), keepdim=True) if self.how == "tensor" else x.abs().amax(-1, keepdim=True)
        return (most / 448.0).float()

    def forward(self, x):
        scale = self.scale_of(x)
        values = (x.float() / scale).clamp(-448, 448).to(E4M3)
        rows, scale = values.reshape(-1, x.shape[-1]), scale.reshape(-1, 1)
        product = torch._scaled_mm(rows, self.weight.t(), scale, self.weight_scale, out_dtype=BF16)
        return product.view(*x.shape[:-1], -1)


def quantised(family: str, how: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family)).to(BF16).eval()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name not in ("lm_head", "gate"):
                setattr(module, name, Fp8Linear(child, how))
    return model


#: (norms, activations) that are followed by a quantisation, in each layer: what q, k and v read, what gate and up read, and
#: what down reads. Experts are not Linears.
SITES = {"llama": (2, 1), "qwen3": (2, 1), "mixtral": (1, 0)}
CASES = [("llama", "row"), ("llama", "tensor"), ("llama", "static"), ("qwen3", "compressed-tensors"), ("mixtral", "row")]


@pytest.mark.parametrize("family, how", CASES)
def test_sites(family, how):
    model = quantised(family, how)
    tokens = torch.arange(3, 19).view(2, 8)
    with torch.no_grad(), interpret_graphs():
        expected = model(tokens, use_cache=False).logits
        tpfuse.apply(model, config=ON)
        found = model(tokens, use_cache=False).logits
    report = tpfuse.explain(model)
    norms, activations = SITES[family]
    assert report.count("fuse_norm_quant") == norms * LAYERS, report
    assert report.count("fuse_act_quant") == activations * LAYERS, report
    assert torch.equal(found, expected)
