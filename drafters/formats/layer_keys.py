"""The key table of a decoder layer: Hugging Face's names for the parts of ours."""

from drafters.formats.keys import Key
from drafters.layers import LayerKind
from drafters.shape import TargetShape

_PLAIN = {
    "out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "down.weight": "mlp.down_proj.weight",
}
_NARROW = {"hidden_norm.weight": "input_layernorm.weight"}
_WIDE = {
    "embedding_norm.weight": "input_layernorm.weight",
    "hidden_norm.weight": "hidden_norm.weight",
}
_QK_NORM = {
    "query_norm.weight": "self_attn.q_norm.weight",
    "key_norm.weight": "self_attn.k_norm.weight",
}


def layer_keys(ours: str, theirs: str, shape: TargetShape, kind: LayerKind) -> list[Key]:
    """Return the table of one layer.

    Args:
        ours: its prefix in our state dict, such as "layers.0".
        theirs: its prefix in the dialect.
        shape: gives the rows of what we keep stacked.
        kind: which parts the layer has.
    """
    norms = _WIDE if kind.wide else _NARROW if kind.input_norm else {}
    single = {**_PLAIN, **norms, **(_QK_NORM if kind.qk_norm else {})}
    table = [Key(f"{ours}.{mine}", (f"{theirs}.{name}",)) for mine, name in single.items()]
    heads, inner = (shape.num_heads, *[shape.num_kv_heads] * 2), shape.intermediate_size
    for what in ("weight", "bias") if kind.bias else ("weight",):
        names = tuple(f"{theirs}.self_attn.{x}_proj.{what}" for x in "qkv")
        table.append(Key(f"{ours}.qkv.{what}", names, tuple(n * shape.head_dim for n in heads)))
    names = tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))
    table.append(Key(f"{ours}.gate_up.weight", names, (inner, inner)))
    return table
