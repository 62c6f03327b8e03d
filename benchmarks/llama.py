"""Stacks of Llama layers, tensor-parallel and sequence-parallel: written by hand, as Megatron does it, and Hugging Face's.

All take the same replicated rows and return the last norm's output, replicated. Tensor-parallel ones all-reduce after each
row-parallel GEMM. Sequence-parallel twins have the same weights, hold the residual stream sharded over rows, gather before
the column-parallel GEMMs and reduce-scatter after the row-parallel ones. Both have gradients.

T  rows, tokens of all sequences     D  hidden size     F  intermediate size of a rank     E  size of a head
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.models import families

#: Under Hugging Face's names, before they are sharded.
SIZES: dict[str, dict[str, int]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {  # for CPU ranks
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
STYLES = ("hand", "hf")
EPS, ROPE_THETA = 1e-5, 500000.0


def build(
    style: str,
    sizes: dict[str, int],
    layers: int,
    most_rows: int,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    sharded_rows: bool = False,
    like: nn.Module | None = None,
) -> Any:
    """A stack of random weights, the same ones each time.

    sharded_rows  the sequence-parallel twin
    like          a stack whose memory a hand-written one shares
    """
    if style == "hf":
        config = families.family_config("llama", num_hidden_layers=layers, max_position_embeddings=most_rows, **sizes)
        if not sharded_rows:
            return families.build_sharded(config, mesh, dtype).model
        whole: Any = families.build(config, mesh.device_type, dtype)
        return _shard_rows(whole.model, mesh)
    with torch.device(mesh.device_type if like is None else "meta"):
        stack = Stack(sizes, layers, mesh.get_group(), dtype, sharded_rows)
    if like is None:
        stack.draw()
    else:
        stack.load_state_dict(like.state_dict(), assign=True)
    return stack


def call(style: str, stack: Any, x: torch.Tensor, sequences: int) -> torch.Tensor:
    """[T, D] -> [T, D], of a stack or a compiled one."""
    if style == "hand":
        return stack(x, sequences)
    return stack(inputs_embeds=x.view(sequences, -1, x.shape[-1]), use_cache=False).last_hidden_state.reshape(x.shape)


def trained(stack: nn.Module) -> list[nn.Parameter]:
    """Parameters that a call has gradients of: the rows come in embedded."""
    return [parameter for name, parameter in stack.named_parameters() if not name.startswith("embed_tokens")]


# -- by hand ---------------------------------------------------------------------------------------------------------


class _Move(torch.autograd.Function):
    """A collective, and the one that its gradient takes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: str, back: str, rank: int, world: int, group: str) -> torch.Tensor:
        ctx.back, ctx.of = back, (rank, world, group)
        return _moved(x, there, rank, world, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _moved(gradient, ctx.back, *ctx.of), None, None, None, None, None


def _moved(x: torch.Tensor, kind: str, rank: int, world: int, group: str) -> torch.Tensor:
    functional = torch.ops._c10d_functional  # the Python functions around these have other names in each version of torch
    if kind == "copy":
        return x.view_as(x)
    if kind == "own_rows":
        return x.chunk(world)[rank].clone()
    if kind == "all_reduce":
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))
    if kind == "all_gather":
        return functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), world, group))
    assert kind == "reduce_scatter"
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", world, group))


#: Place -> collective, and that of the gradient, where there is one: Megatron's f and g, without and with sharded rows.
WHOLE_ROWS = {"before_columns": ("copy", "all_reduce"), "after_rows": ("all_reduce", "copy")}
SHARDED_ROWS = {
    "enter": ("own_rows", "all_gather"),
    "before_columns": ("all_gather", "reduce_scatter"),
    "after_rows": ("reduce_scatter", "all_gather"),
    "leave": ("all_gather", "own_rows"),
}


class Layer(nn.Module):
    """The weights of one rank: GEMMs that read the same rows are one."""

    def __init__(self, sizes: dict[str, int], world: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, self.head = sizes["hidden_size"], sizes["head_dim"]
        queries, keys = sizes["num_attention_heads"] // world, sizes["num_key_value_heads"] // world
        intermediate = sizes["intermediate_size"] // world
        self.parts = [queries * self.head, keys * self.head, keys * self.head]
        self.attention_norm = nn.Parameter(torch.empty(hidden, dtype=dtype))
        self.qkv = nn.Linear(hidden, sum(self.parts), bias=False, dtype=dtype)
        self.o = nn.Linear(queries * self.head, hidden, bias=False, dtype=dtype)
        self.mlp_norm = nn.Parameter(torch.empty(hidden, dtype=dtype))
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False, dtype=dtype)
        self.down = nn.Linear(intermediate, hidden, bias=False, dtype=dtype)

    def attention(self, x: torch.Tensor, sequences: int, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[T, D] -> [T, D], a partial sum."""
        rows = x.shape[0]
        parts = self.qkv(x).split(self.parts, -1)
        q, k, v = (part.view(sequences, rows // sequences, -1, self.head).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(
            _turned(q, *turn), _turned(k, *turn), v, is_causal=True, enable_gqa=True
        )
        return self.o(mixed.transpose(1, 2).reshape(rows, -1))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D], a partial sum."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Stack(nn.Module):
    """Layers and a last norm: [T, D] -> [T, D], both replicated. With sharded rows T is a multiple of the ranks."""

    def __init__(
        self, sizes: dict[str, int], layers: int, group: dist.ProcessGroup, dtype: torch.dtype, sharded_rows: bool = False
    ) -> None:
        super().__init__()
        self.sizes, self.tp_group, self.sharded_rows = sizes, group, sharded_rows
        self.moves = SHARDED_ROWS if sharded_rows else WHOLE_ROWS
        self.place = (group.rank(), group.size(), group.group_name)
        self.layers: Any = nn.ModuleList(Layer(sizes, group.size(), dtype) for _ in range(layers))
        self.norm = nn.Parameter(torch.empty(sizes["hidden_size"], dtype=dtype))

    @torch.no_grad()
    def draw(self) -> None:
        """Random weights: of the GEMMs other ones on each rank, of the norms the same."""
        for index, parameter in enumerate(self.parameters()):
            of_norm = parameter.dim() == 1
            seed = index if of_norm else index + 1000 * (1 + self.tp_group.rank())
            generator = torch.Generator(parameter.device).manual_seed(seed)
            deviation = 0.1 if of_norm else parameter.shape[1] ** -0.5 / 2
            parameter.normal_(1.0 if of_norm else 0.0, deviation, generator=generator)

    def forward(self, x: torch.Tensor, sequences: int) -> torch.Tensor:
        turn = _turns(x.shape[0] // sequences, self.sizes["head_dim"], x)
        *norms, last = self._norms()
        x = self._move("enter", x)
        for layer, (first, second) in zip(self.layers, zip(norms[::2], norms[1::2], strict=True), strict=True):
            rows = self._move("before_columns", _normed(x, first))
            x = x + self._move("after_rows", layer.attention(rows, sequences, turn))
            rows = self._move("before_columns", _normed(x, second))
            x = x + self._move("after_rows", layer.mlp(rows))
        return self._move("leave", _normed(x, last))

    def _norms(self) -> list[torch.Tensor]:
        """Weights of all norms. With sharded rows each rank has part of their gradients, which are summed all at once."""
        weights = [weight for layer in self.layers for weight in (layer.attention_norm, layer.mlp_norm)]
        weights.append(self.norm)
        if not self.sharded_rows:
            return weights
        return list(_Move.apply(torch.stack(weights), "copy", "all_reduce", *self.place).unbind())

    def _move(self, where: str, x: torch.Tensor) -> torch.Tensor:
        return _Move.apply(x, *self.moves[where], *self.place) if where in self.moves else x


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, weight.shape, weight, EPS)


def _turns(rows: int, head: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary embeddings, [rows of a sequence, E]."""
    frequencies = ROPE_THETA ** -(torch.arange(0, head, 2, device=like.device, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(rows, device=like.device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def _shard_rows(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Sequence parallelism by DTensor's styles, as torch's own guide to tensor parallelism has it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    rows, whole = Shard(1), Replicate()
    # What is gathered stays a DTensor: all GEMMs that read it then add up their gradients before one reduce-scatter.
    of_mlp = tp.PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    of_attention = tp.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": rows}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    enter = tp.PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(rows,), use_local_output=True)
    columns, last = tp.ColwiseParallel(), tp.RowwiseParallel(output_layouts=rows)
    plan: dict[str, Any] = {"layers.0": enter, "norm": tp.SequenceParallel()}
    plan |= {f"layers.*.{name}": tp.SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    plan |= {"layers.*.self_attn": of_attention, "layers.*.mlp": of_mlp}
    plan |= {f"layers.*.{name}": last for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan |= {f"layers.*.self_attn.{name}_proj": columns for name in ("q", "k", "v")}
    plan |= {f"layers.*.mlp.{name}_proj": columns for name in ("gate", "up")}
    tp.parallelize_module(model, mesh, plan)
    leave = tp.PrepareModuleOutput(output_layouts=(rows,), desired_output_layouts=(whole,))
    tp.parallelize_module(model, mesh, {"norm": leave})
    gc.collect()
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()  # of the whole weights
    return model
