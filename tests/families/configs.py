"""The smallest configuration of each family of causal language models that keeps what is particular to the family.

A family's default configuration is shrunk field by field, by what the fields mean (`_NAMES`), and its layers to the
fewest that hold one of each kind. Where that is invalid, or would lose the family's character, `OVERRIDES` has values
of the family's own. Knows no weights and nothing of training/.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY = 96
PAD, BOS, EOS = 0, 1, 2
WINDOW = 8  # tokens: shorter than the sequences of the sweep
POSITIONS = 128
MOST_LAYERS = 6

# Whole numbers, by what they count. A default of None or 0 turns a part off, and remains. Few index heads would score
# many keys 0 (ReLU), and their ties are broken by the length of the row: the model's own numbers would vary with it.
_NAMES: dict[int, str] = {
    32: """hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size word_embed_proj_dim
        output_embedding_size cross_attention_hidden_size lru_width backbone_hidden_size attention_hidden_size
        pronunciation_embed_dim shape_embed_dim ple_embed_dim vision_output_dim projection_dim image_size embed_dim""",
    64: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size d_inner dff dim_ff
        moe_intermediate_size feed_forward_size expert_ffn_hidden_size shared_expert_intermediate_size
        shared_intermediate_size moe_shared_expert_intermediate_size dense_intermediate_size intermediate_size_mlp
        prefix_dense_intermediate_size prompt_mid_dim mamba_d_ssm block_multiple_of ffn_round_up_to_multiple_of""",
    2: """num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers num_encoder_layers
        num_decoder_layers num_layers_per_stack depth num_experts_per_tok num_experts_per_token moe_topk moe_k
        top_k_experts mamba_num_heads n_mamba_heads mamba_n_heads topk_group n_group n_groups
        linear_num_key_heads num_expert_group o_groups""",
    4: """num_attention_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads num_heads
        num_decoder_attention_heads num_encoder_attention_heads linear_num_heads swa_num_attention_heads
        linear_num_value_heads num_experts n_routed_experts num_local_experts moe_num_experts index_topk time_step_rank
        mamba_dt_rank zero_expert_num index_topk_blocks index_block_size""",
    8: """head_dim attention_head_dim attention_head_size dim_head d_head kv_channels swa_head_dim linear_head_dim
        linear_key_head_dim linear_value_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_head
        mamba_head_dim mamba_headdim rotary_dim d_rel sliding_window sliding_window_size window_size patch_size
        attention_window_size attention_chunk_size local_attention local_attn_chunk_length lsh_attn_chunk_length
        global_head_dim swa_v_head_dim max_window_layers""",
    16: """index_n_heads q_lora_rank kv_lora_rank o_lora_rank qk_head_dim index_head_dim router_hidden_size laurel_rank
        adapter_rank hidden_size_per_layer_input gated_norm_rank hc_lowrank moe_latent_size chunk_size
        mamba_chunk_size block_size state_size mamba_d_state ssm_state_size rel_extent dim_model_base""",
    POSITIONS: """max_position_embeddings n_positions n_ctx context_length max_seq_len max_target_positions
        max_source_positions model_max_length position_bias_num_buckets position_bias_max_distance
        original_max_position_embeddings""",
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size",
}
SIZES: dict[str, int] = {name: value for value, names in _NAMES.items() for name in names.split()}
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

# Factors whose default is 1: another value shows whether they are applied.
_FACTORS = """embedding_multiplier residual_multiplier attention_multiplier logits_scaling lm_head_multiplier
    key_multiplier attention_in_multiplier attention_out_multiplier ssm_in_multiplier ssm_out_multiplier
    routed_scaling_factor""".split()

_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16}
_T5 = {
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
}
_CODEC = {"model_type": "encodec", "hidden_size": 32, "num_filters": 4, "codebook_size": 32, "codebook_dim": 32}
_MUSIC = {
    "text_encoder": _T5,
    "audio_encoder": _CODEC,
    "decoder": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4
    },
}  # fmt: skip
_SPARSE_INDEX = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 2,
}  # fmt: skip
_LLAMA4 = {
    "num_hidden_layers": 2, "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"],
    "moe_layers": [1],
}  # fmt: skip
_ASSISTANT = {
    "model_type": "gemma4_text", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2,
}  # fmt: skip

# Values of families for which the above is invalid or loses what the family is known for.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    # Its sub-configuration keeps what the hub's files say of it, beside its own fields.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
        "intermediate_size": [64] * 4,
        "num_kv_shared_layers": 2,
    },
    "gemma4_assistant": {"text_config": _ASSISTANT, "num_centroids": 8, "centroid_intermediate_top_k": 2},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "gemma4_unified_assistant": {
        "text_config": {**_ASSISTANT, "model_type": "gemma4_unified_text"},
        "num_centroids": 8,
        "centroid_intermediate_top_k": 2,
    },
    "granitemoehybrid": {
        **_MAMBA2, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 8]
    },
    "lfm2": {
        "num_hidden_layers": 3, "full_attn_idxs": [1], "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2,
        "index_n_heads": 2, "index_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "ministral": {"head_dim": 8},
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _SPARSE_INDEX},
    "qwen4_exp_text": _SPARSE_INDEX,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 8],
        "axial_pos_embds_dim": [16, 16], "num_buckets": 4, "hash_seed": 0,
    },
    "rwkv": {"rescale_every": 1},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "num_query_groups": 4,
    },
}  # fmt: skip


# Further models of a family, whose configuration files turn on what the default leaves off: "bert+decoder".
_ENCODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod""".split()
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{name}+decoder": {"is_decoder": True} for name in _ENCODERS},
    "falcon+alibi": {"alibi": True},
    "doge+window": {"keep_window_size": WINDOW},
    "falcon+new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "granitemoe+router": {"output_router_logits": True},
    "phi3+longrope": {
        "rope_parameters": {**_LONG_ROPE, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
        "original_max_position_embeddings": 16,
    },
    "qwen2+window": {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "rwkv+unscaled": {"rescale_every": 0},
    "xlm+causal": {"causal": True},
}  # fmt: skip


# Of models of images and text: what is cut to the size of a head, and tables that a default leaves out.
_SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
_BY_SIDES = {"text_config": {"rope_parameters": _SECTIONS}}
_HALF_BY_SIDES = {"text_config": {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0}}}
OVERRIDES_OF_VISION: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "qwen2_5_omni_thinker"), _BY_SIDES),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga"), _HALF_BY_SIDES),
    "step3p7": {"text_config": {"sliding_window": WINDOW}},
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "intermediate_size": 64, "image_size": 32, "patch_size": 8},
        "decoder": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    },
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGBSZ": 91}},
    "emu3": {"vocabulary_map": {"<image>": 90, "<|visual token 000000|>": 91}},
}  # fmt: skip


def tiny_vision_config(family: str) -> Any:
    """Return the smallest configuration of a family of models of images and text."""
    return tiny_config(family, **copy.deepcopy(OVERRIDES_OF_VISION.get(family, {})))


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the smallest configuration of a family or variant. changes: further fields."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, _, _ = family.partition("+")
    config_class: Any = CONFIG_MAPPING[name]
    own = copy.deepcopy(OVERRIDES.get(name, {}))
    fields = own if config_class.has_no_defaults_at_init else _merged(shrunk(config_class()), own)
    return config_class(**_merged(_merged(fields, VARIANTS.get(family, {})), changes))


def _merged(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with `changes`; the fields of a sub-configuration are changed one by one."""
    inner = {name: _merged(fields[name], value) for name, value in changes.items() if _is_fields(fields.get(name))}
    return {**fields, **changes, **inner}


def _is_fields(value: Any) -> bool:
    return isinstance(value, dict) and "vocab_size" in value


def shrunk(default: Any) -> dict[str, Any]:
    """Return the fields of a configuration that differ from `default` once it is small."""
    from transformers import PretrainedConfig

    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    fields: dict[str, Any] = {}
    spare = iter(range(VOCABULARY - 1, BOS, -1))  # ids of images and the like: within the vocabulary, from its end
    for name, value in values.items():
        if isinstance(value, PretrainedConfig):
            fields[name] = shrunk(value)
            if value.model_type:
                fields[name]["model_type"] = value.model_type
        elif name in _SPECIAL:
            fields[name] = _SPECIAL[name]
        elif name.endswith(("_token_id", "_token_index", "_index")) and _counts(value) and value >= VOCABULARY - 40:
            fields[name] = next(spare)
        elif name in _KEY_HEADS and _counts(value):
            fields[name] = _key_heads(value, _heads(values, name))
        elif name in SIZES and _counts(value) and value > 1:
            fields[name] = SIZES[name]
        elif isinstance(value, float):
            fields |= _telling_factor(name, value)
    fields |= _fewest_layers(values)
    return fields


def _telling_factor(name: str, value: float) -> dict[str, float]:
    """Rates of dropout above 0, caps that small logits reach, factors other than 1."""
    if "drop" in name or "jitter" in name:
        return {name: 0.1}
    if "softcap" in name or "soft_cap" in name:
        return {name: 5.0 if name.startswith("attn") else 2.0} if value else {}
    return {name: 1.5} if name in _FACTORS and value == 1.0 else {}


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _heads(values: Mapping[str, Any], name: str) -> int | None:
    other = "swa_num_attention_heads" if name.startswith("swa_") else "num_attention_heads"
    return values.get(other, values.get("n_head"))


def _key_heads(value: int, heads: int | None) -> int:
    """As many as there are heads where the default has as many, one where it has one, else half."""
    return SIZES["num_attention_heads"] if value == heads else min(value, 2)


def _fewest_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that name each layer's kind, cut to the first layer of each kind in their order."""
    counts = [name for name in _LAYERS if _counts(values.get(name))]
    if not counts:
        return {}
    layers = values[counts[0]]
    kinds = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == layers > 2}
    kept = sorted(set(_first_of_each(kinds.values())))[:MOST_LAYERS]
    if not kept:
        return {}
    kept += [layers - 1] * (2 - len(kept))
    return {counts[0]: len(kept), **{name: [value[layer] for layer in kept] for name, value in kinds.items()}}


def _first_of_each(kinds: Any) -> Iterator[int]:
    for values in kinds:
        seen: list[Any] = []
        for layer, value in enumerate(values):
            if value not in seen:
                seen.append(value)
                yield layer
