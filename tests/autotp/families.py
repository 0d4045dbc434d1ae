"""Tiny random models, one for each family that AutoTP shards, with inputs for them.

Sizes are chosen to be awkward where a family allows it: fewer KV heads than ranks, a vocabulary and
MLP widths that are no multiples of the group size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

HIDDEN = 256
LAYERS = 2
VOCAB = 300
MLP = 688  # 43 times 16, as 11008 is 43 times 256
_SMALL = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "vocab_size": VOCAB}
_GATED = {**_SMALL, "intermediate_size": MLP, "num_key_value_heads": 2}
_MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration.

    Attributes:
        model: Class in transformers.
        config: Configuration class in transformers.
        settings: What differs from the configuration's defaults.
        kind: ``causal``, ``masked`` or ``seq2seq``.
        max_tp: Ranks beyond which stock AutoTP itself fails: these families need a KV head for each.
        broken: How stock AutoTP itself fails, for a family that it does not shard rightly.
    """

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "causal"
    max_tp: int = 4
    broken: str = ""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _GATED),
    "llama-tied": Family("LlamaForCausalLM", "LlamaConfig", {**_GATED, "tie_word_embeddings": True}),
    "llama-bias": Family(
        "LlamaForCausalLM", "LlamaConfig", {**_GATED, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-uneven": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **_GATED,
            "hidden_size": 192,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "vocab_size": VOCAB + 1,
        },
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_GATED, "head_dim": 32}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", _GATED),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_GATED, "head_dim": 32}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**_GATED, "head_dim": 32}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**_GATED, "head_dim": 32}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GATED, "head_dim": 32}),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", _GATED),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", _GATED),
    "cohere": Family("CohereForCausalLM", "CohereConfig", _GATED),
    "llama4-dense": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_GATED,
            "intermediate_size_mlp": MLP,
            "moe_layers": [],
            "head_dim": 32,
            "attn_temperature_tuning": False,
        },
        max_tp=2,
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {
            **_SMALL,
            "ffn_dim": MLP,
            "word_embed_proj_dim": 128,
            "max_position_embeddings": 64,
            "pad_token_id": 1,
        },
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 8, "vocab_size": VOCAB},
    ),
    "falcon-40b": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
        max_tp=2,
    ),
    "falcon-mha": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**_SMALL, "multi_query": False, "new_decoder_architecture": False, "alibi": False, "bias": True},
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SMALL, "intermediate_size": MLP}),
    "gptj": Family(
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "n_embd": HIDDEN,
            "n_layer": 2,
            "n_head": 8,
            "vocab_size": VOCAB,
            "rotary_dim": 16,
            "n_positions": 64,
        },
    ),
    "phi": Family("PhiForCausalLM", "PhiConfig", {**_SMALL, "intermediate_size": MLP}),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", _GATED),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": HIDDEN,
            "num_layers": 2,
            "num_heads": 8,
            "vocab_size": VOCAB,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "intermediate_size": MLP,
        },
    ),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**_GATED, "num_local_experts": 4}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**_GATED, **_MOE, "shared_expert_intermediate_size": 192}
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GATED, **_MOE, "head_dim": 32}),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            **_SMALL,
            "intermediate_size": MLP,
            "num_key_value_heads": 8,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "glm4": Family("Glm4ForCausalLM", "Glm4Config", {**_GATED, "head_dim": 32, "pad_token_id": 0}),
    "codegen": Family(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {
            "n_embd": HIDDEN,
            "n_layer": 2,
            "n_head": 16,
            "vocab_size": VOCAB,
            "rotary_dim": 16,
            "n_positions": 64,
        },
    ),
    "mpt": Family(
        "MptForCausalLM", "MptConfig", {"d_model": HIDDEN, "n_layers": 2, "n_heads": 8, "vocab_size": VOCAB}
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 8, "vocab_size": VOCAB, "n_positions": 64},
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", {**_SMALL, "intermediate_size": MLP}, kind="masked"),
    "roberta": Family(
        "RobertaForMaskedLM", "RobertaConfig", {**_SMALL, "intermediate_size": MLP}, kind="masked"
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": HIDDEN,
            "d_ff": MLP,
            "d_kv": 32,
            "decoder_start_token_id": 0,
            "num_layers": 2,
            "num_heads": 8,
            "vocab_size": VOCAB,
        },
        kind="seq2seq",
    ),
    "t5-gated": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": HIDDEN,
            "d_ff": MLP,
            "d_kv": 32,
            "decoder_start_token_id": 0,
            "num_layers": 2,
            "num_heads": 8,
            "vocab_size": VOCAB,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        kind="seq2seq",
    ),
    "llama4-moe": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_GATED,
            "intermediate_size_mlp": MLP,
            "num_local_experts": 4,
            "head_dim": 32,
            "attn_temperature_tuning": False,
        },
        broken="it replaces the router, whose forward returns two tensors",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_GATED, "pad_token_id": 0},
        broken="its attention and the shard of o_proj differ in width",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "Olmo2Config",
        {**_GATED, "pad_token_id": 0},
        broken="q_norm and k_norm keep the width of all heads",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": 8, "vocab_size": VOCAB, "n_positions": 64},
        broken="AutoTP refuses it; DeepSpeed serves it by kernel injection",
    ),
    "falcon-7b": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**_SMALL, "multi_query": True, "new_decoder_architecture": False, "alibi": False},
        broken="its attention cannot split the shard of the fused multi-query weight",
    ),
    "falcon-rw": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**_SMALL, "multi_query": False, "new_decoder_architecture": False, "alibi": True, "bias": True},
        broken="its alibi bias is made for all heads",
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, empty: bool = False, **overrides: Any) -> nn.Module:
    """A model of a family with weights that differ in scale and offset, the same on every call.

    Args:
        name: The family.
        dtype: Of the parameters.
        empty: Whether to leave the parameters on the meta device, for DeepSpeed to load.
        overrides: Settings of the configuration.
    """
    import transformers

    family = FAMILIES[name]
    settings = {"use_cache": False, **family.settings, **overrides}
    config = getattr(transformers, family.config)(**settings)
    torch.manual_seed(0)
    if empty:
        with parameters_on_meta():
            return getattr(transformers, family.model)(config).eval().to(dtype)
    model = getattr(transformers, family.model)(config).eval()
    skew(model)
    return model.to(dtype)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters made inside the block have no memory; buffers, which checkpoints lack, do."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return None if parameter is None or parameter.is_meta else nn.Parameter(parameter.to("meta"))

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def skew(model: nn.Module) -> None:
    """Give matrices an offset and columns of different scales, so that no two groups look alike."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
                continue
            spread = torch.rand(parameter.shape[-1], generator=generator) + 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.04 * spread + 0.003)


def working(tp: int) -> list[str]:
    """Families that stock AutoTP shards rightly over so many ranks."""
    return [name for name, family in FAMILIES.items() if not family.broken and family.max_tp >= tp]


def inputs(name: str) -> dict[str, Tensor]:
    """Token ids, and what else the family's forward asks for."""
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "bloom":
        # Without padding transformers drops the mask, and with it the alibi bias that AutoTP shards.
        batch["attention_mask"][0, :2] = 0
    if FAMILIES[name].kind == "seq2seq":
        batch["decoder_input_ids"] = ids[:, :5]
    return batch
