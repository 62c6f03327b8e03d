"""Small models of the Hugging Face families that tpfuse is tested on, and how to shard any Hugging Face causal LM.

Everything is made from a configuration and a seed: no checkpoint, no network, no ``accelerate``. Each family is kept
small but whole: grouped-query heads, both kinds of layers where a family has two (DeepSeek-V3: dense and MoE).
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

#: Family name -> (Hugging Face model type, what it sets besides the sizes that all have).
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {"sliding_window": 32}),
    "gemma3": ("gemma3_text", {"sliding_window": 32}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "granite": ("granite", {"residual_multiplier": 0.22}),
    "cohere": ("cohere", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)

#: These take the size of a head from hidden_size / num_attention_heads and must not be told another.
_NO_HEAD_DIM = ("phi3", "olmo2", "cohere", "qwen2", "granite", "deepseek_v3")


def family_config(name: str, **overrides: Any) -> Any:
    """Configuration of a small model of the family: 2 layers, hidden size 64, 4 heads, vocabulary 128 by default.

    name       one of ``FAMILIES``
    overrides  fields of the Hugging Face configuration. What depends on a size and is not given follows it:
               ``hidden_size`` sets the number and size of heads, the key-value heads and the MLP's widths.

    Raises ValueError: unknown family, or sizes that do not divide. Raises ModuleNotFoundError: transformers is missing.
    """
    if name not in _FAMILIES:
        raise ValueError(f"unknown family {name!r}; known are {', '.join(FAMILIES)}")
    model_type, special = _FAMILIES[name]
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_sizes(name, overrides),
        **special,
        **overrides,
    }
    return import_transformers().AutoConfig.for_model(model_type, **fields)


def _sizes(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Everything that follows from the hidden size and the number of heads."""
    hidden = given.get("hidden_size", 64)
    usual_head_dim = 16 if hidden < 512 else 64 if hidden < 2048 else 128
    heads = given.get("num_attention_heads") or hidden // given.get("head_dim", usual_head_dim)
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}")
    kv_heads = given.get("num_key_value_heads") or (heads // 2 if heads % 2 == 0 and heads < 16 else max(1, heads // 4))
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
    head_dim, width = hidden // heads, given.get("intermediate_size", hidden * 3 // 2)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        # Large enough that a lost projection or bias is far above rounding, also in a narrow model.
        "initializer_range": hidden**-0.5 / 2,
    }
    if name not in _NO_HEAD_DIM:
        sizes["head_dim"] = head_dim
    if name in ("qwen3_moe", "deepseek_v3"):
        sizes["moe_intermediate_size"] = width // 3
    if name == "deepseek_v3":
        sizes.update(
            num_key_value_heads=heads,
            q_lora_rank=hidden // 2,
            kv_lora_rank=hidden // 2,
            qk_rope_head_dim=head_dim // 2,
            qk_nope_head_dim=head_dim,
            v_head_dim=head_dim,
        )
    return sizes


def build(config_or_path: Any, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """An unsharded causal LM, in eval mode.

    config_or_path  Hugging Face configuration (random weights), or a local checkpoint folder
    seed            of the weights; the generators' states are as before afterwards

    From a configuration the weights of norms and the biases are random as well, for a lost one to show.
    Raises ValueError: the folder is not there.
    """
    transformers = import_transformers()
    if isinstance(config_or_path, (str, os.PathLike)):
        if not os.path.isdir(config_or_path):
            raise ValueError(f"no checkpoint folder {os.fspath(config_or_path)!r}")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(config_or_path, dtype=dtype, local_files_only=True)
        return loaded.to(device).eval()
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config_or_path, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) / 8)
    return model.to(device).eval()


def build_sharded(config_or_path: Any, mesh: DeviceMesh, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """A causal LM in eval mode, sharded by its Hugging Face ``tp_plan`` over a one-dimensional mesh.

    Arguments as for ``build``. Every rank makes (or loads, into host memory) the whole model and keeps its own part.
    Collective: every rank of the mesh calls it.
    Raises ValueError: the model has no tp_plan, or the folder is not there.
    """
    from_folder = isinstance(config_or_path, (str, os.PathLike))
    model = build(config_or_path, "cpu" if from_folder else mesh.device_type, dtype, seed)
    return shard(model, mesh)


def shard(model: Any, mesh: DeviceMesh) -> torch.nn.Module:
    """Shard an unsharded Hugging Face model in place over a one-dimensional mesh. Returns the model.

    The model knows of it as one that ``from_pretrained`` has sharded does, so ``save_pretrained`` gathers the shards.
    """
    import_transformers()
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if not model.tp_plan:
        raise ValueError(f"{type(model).__name__} has no tensor-parallel plan (tp_plan)")
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size(), tp_plan="auto")
    model._device_mesh, model._tp_size = mesh, mesh.size()
    apply_tensor_parallelism(model, mesh)
    # Sharded parameters are on the mesh's device by now, one after the other; this moves the replicated ones.
    return model.to(mesh.device_type)


def import_transformers() -> types.ModuleType:
    """The transformers module. Raises ModuleNotFoundError, with the extra to install, if it is missing."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Hugging Face models need transformers: pip install 'tpfuse[hf]'") from error
    return transformers
