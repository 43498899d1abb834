"""nn.MultiheadAttention in plain operations: its dropout is a layer like any other, and clients can be stacked."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.MultiheadAttention):
    """Has the same parameters and gives the same answers; the layer `drop` drops attention weights."""

    drop: nn.Module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        alone = query.ndim == 2  # one sample, without an axis for it
        first = self.batch_first and not alone  # the axis of samples comes first
        given = [x.unsqueeze(1) if alone else x.transpose(0, 1) if first else x for x in (query, key, value)]
        q, k, v = (self._heads(x) for x in self._projected(*given))  # (B, heads, length, width)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if attn_mask is None and is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if attn_mask is not None:  # (T, S), or one for each sample and head
            wide = attn_mask if attn_mask.ndim == 2 else attn_mask.reshape(scores.shape)
            scores = _masked(scores, wide)
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask.reshape(len(scores), 1, 1, -1))
        weights = self.drop(scores.softmax(-1))
        made = (weights @ v).permute(2, 0, 1, 3).flatten(2)  # (length, B, width)
        made = self.out_proj(made)
        made = made.squeeze(1) if alone else made.transpose(0, 1) if first else made
        if not need_weights:
            return made, None
        weights = weights.mean(1) if average_attn_weights else weights
        return made, weights.squeeze(0) if alone else weights

    def _projected(self, *given: Tensor) -> list[Tensor]:
        """Queries, keys and values by the layer's own weights."""
        if self.in_proj_weight is not None:
            parts = self.in_proj_weight.chunk(3)
        else:
            parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [functional.linear(x, w, b) for x, w, b in zip(given, parts, biases, strict=True)]

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.num_heads, -1)).permute(1, 2, 0, 3)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def open_attention(module: nn.Module) -> None:
    """Replace every attention layer in a module, in place; torch's fused one cannot be stacked."""
    for layer in list(module.modules()):
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # of a type that only the faster one knows
        if type(layer) is nn.MultiheadAttention and layer.bias_k is None and not layer.add_zero_attn:
            layer.__class__ = Attention
            layer.drop = nn.Dropout(layer.dropout).train(layer.training)
            layer._qkv_same_embed_dim = False  # keeps nn.TransformerEncoderLayer from passing it by
