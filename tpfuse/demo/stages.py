"""A Hugging Face causal LM cut into the stages of a pipeline (``torch.distributed.pipelining``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Elsewhere(nn.Module):
    """Stands in for a layer of another stage: what comes goes on. So layers keep their numbers."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Stage(nn.Module):
    """Some consecutive layers of a model; T tokens, H hidden size, V vocabulary.

        first stage         token ids [B, T] -> hidden states [B, T, H]
        stages in between   hidden states -> hidden states
        last stage          hidden states -> logits [B, T, V]

    No cache is kept. Made by ``split``.
    """

    def __init__(self, model: Any, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first, self.last = model, first, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        return self.model(**given).logits if self.last else self.model.model(**given).last_hidden_state


def split(model: Any, stage: int, stages: int) -> Stage:
    """One stage of a Hugging Face causal LM, in place: what belongs to the others is dropped from the model.

    Layers are shared out evenly, the first stages have one more where that does not come out. Every rank of a stage has the
    same part. Raises ValueError: there are fewer layers than stages.
    """
    base, count = model.model, len(model.model.layers)
    if not 0 <= stage < stages <= count:
        raise ValueError(f"stage {stage} of {stages} cannot be had of a model of {count} layers")
    begin, end = (number * (count // stages) + min(number, count % stages) for number in (stage, stage + 1))
    for number in range(count):
        if not begin <= number < end:
            base.layers[number] = _Elsewhere()
    first, last = stage == 0, stage == stages - 1
    if not first:
        del base.embed_tokens  # given hidden states instead of token ids, the model does not look at it
        if hasattr(base, "embedding_multiplier"):  # Granite: of embeddings, which these no longer are
            base.embedding_multiplier = 1.0
    if not last:
        base.norm = nn.Identity()
        del model.lm_head
    return Stage(model, first, last)
