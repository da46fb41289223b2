"""How a type's config is made small: by the names of its fields, and what a type needs besides."""

from __future__ import annotations

from typing import Any

WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 32, 4, 2, 8
VOCABULARY, WINDOW, PATCH = 100, 8, 8
MOST_LAYERS = 4

SIZES: list[tuple[int, str]] = [
    (
        WIDTH,
        """hidden_size d_model n_embd dim embedding_dim word_embed_proj_dim emb_dim lru_width
        embedding_size backbone_hidden_size input_embedding_size output_embedding_size
        vector_quantization_hidden_dimension embed_dim decoder_hidden_size audio_embed_dim""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads attention_heads num_encoder_attention_heads
        num_decoder_attention_heads swa_num_attention_heads conf_num_attention_heads""",
    ),
    (KEY_HEADS, "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads"),
    (
        HEAD_WIDTH,
        """head_dim kv_channels d_kv swa_head_dim d_head dim_head attention_head_dim
        attention_head_size v_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim
        linear_head_dim mamba_d_head mamba_head_dim mamba_headdim index_head_dim""",
    ),
    (
        4,
        """qk_rope_head_dim linear_num_key_heads linear_num_value_heads linear_num_heads
        mamba_n_heads n_mamba_heads mamba_num_heads num_experts n_routed_experts num_local_experts
        moe_num_experts rotary_dim decoder_num_key_heads index_block_size""",
    ),
    (
        2,
        """num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts
        num_nextn_predict_layers""",
    ),
    (
        1,
        """n_group topk_group num_expert_group n_shared_experts num_shared_experts
        index_topk_blocks""",
    ),
    (
        64,
        """intermediate_size moe_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim d_ff
        ffn_hidden_size dim_ff dff d_inner n_inner mlp_dim feed_forward_size intermediate_size_mlp
        expert_ffn_hidden_size dense_intermediate_size shared_intermediate_size
        shared_expert_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size""",
    ),
    (
        16,
        """kv_lora_rank q_lora_rank o_lora_rank mamba_d_state state_size ssm_state_size
        mamba_dt_rank time_step_rank router_hidden_size loop_gate_rank laurel_rank hc_lowrank d_rel
        rel_extent index_n_heads global_head_dim hidden_size_per_layer_input shape_embed_dim
        pronunciation_embed_dim shape_vocab_size pronunciation_vocab_size""",
    ),
    (
        VOCABULARY,
        """vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size
        src_vocab_size tgt_vocab_size""",
    ),
    (
        128,
        """max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
        max_target_positions model_max_length max_sequence_length""",
    ),
    (
        WINDOW,
        """sliding_window sliding_window_size window_size attention_window_size local_attention
        attention_chunk_size keep_window_size index_topk""",
    ),
]
SMALL = {name: size for size, names in SIZES for name in names.split()}
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
    "num_blocks",
    "conf_num_hidden_layers",
)
TOKENS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "decoder_start_token_id",
    "forced_eos_token_id",
)

SLIDING = ["sliding_attention", "full_attention"]
MAMBA = {"mamba_d_head": 16, "mamba_chunk_size": 8}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
IMAGE = {"image_size": 4 * PATCH, "patch_size": PATCH}
STAGES = {  # a pyramid of two stages
    "image_size": 32,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "embed_dim": 16,
    "window_size": 4,
    "num_layers": 2,
    "hidden_size": 32,
    "patch_size": 4,
}
PYRAMID = {
    "num_encoder_blocks": 3,
    "depths": [1, 1, 2],
    "hidden_sizes": [16, 32, 32],
    "num_attention_heads": [1, 2, 4],
    "mlp_ratios": [2, 2, 2],
    "strides": [4, 2, 2],
}
PERCEIVER = {
    "num_latents": 8,
    "d_latents": 32,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "max_position_embeddings": 24,
    "image_size": 16,
}
GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": SLIDING * 2,
    "intermediate_size": [64] * 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": SLIDING * 2,
    "global_head_dim": 16,
}
GEMMA3N_VISION = {"vocab_offset": 200, "vocab_size": 10, "rms_norm_eps": 1e-6}
GRANITE_SPEECH = {
    "encoder_config": {"hidden_dim": 32, "input_dim": 32},
    "projector_config": {"encoder_hidden_size": 32},
}
DOTS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "head_dim": 12,
}
# what its own default config cannot be made without
FIRST: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
        }
    },
}
# what a type needs besides
OVERRIDES: dict[str, dict[str, Any]] = {
    # causal language models
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "local_attention_window_len": WINDOW,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32, "num_hidden_layers": 2},
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in SLIDING
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {
        "text_config": DOTS,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS,
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_chunk_size": 8},
    "gemma3n": {"text_config": GEMMA3N, "audio_config": {"vocab_offset": 300}},
    "gemma3n_text": GEMMA3N,
    "gemma4_assistant": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_assistant": {"text_config": {"global_head_dim": 16}},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 1, "chunk_size": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 16],
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 16,
        "num_query_groups": 4,
        "chunk_size": 8,
    },
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"], "num_experts_per_tok": 1},
    # masked language models
    "big_bird": {"attention_type": "original_full"},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": HEADS},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "mobilebert": {
        "intra_bottleneck_size": 32,
        "embedding_size": 32,
        "num_feedforward_networks": 2,
        "true_hidden_size": 32,
    },
    "neomme": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            for kind in SLIDING
        },
        "embedding_rank": 16,
    },
    "perceiver": PERCEIVER,
    # encoder–decoders
    "bigbird_pegasus": {"attention_type": "original_full"},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "granite_speech": GRANITE_SPEECH,
    "granite_speech_plus": GRANITE_SPEECH,
    "vibevoice_asr": {
        name: {"depths": [1, 1], "downsampling_ratios": [2], "num_filters": 4}
        for name in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
    },
    "led": {"attention_window": [8, 8], "max_encoder_position_embeddings": 64},
    # vision
    "cvt": {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "donut-swin": STAGES,
    "swin": STAGES,
    "swinv2": {**STAGES, "pretrained_window_sizes": [0, 0]},
    "hiera": {
        "image_size": [32, 32],
        "embed_dim": 8,
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 4],
        "hidden_size": 64,
    },
    "siglip2": {"vision_config": {"patch_size": PATCH, "num_patches": 16}},
    "levit": {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    },
    "mobilevit": {
        "image_size": 64,
        "patch_size": 2,
        "hidden_sizes": [32, 32, 32],
        "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
    },
    "pvt": {
        **PYRAMID,
        "image_size": 64,
        "sequence_reduction_ratios": [4, 2, 1],
        "patch_sizes": [4, 2, 2],
    },
    "pvt_v2": {**PYRAMID, "image_size": 64, "sr_ratios": [4, 2, 1], "patch_sizes": [7, 3, 3]},
    "segformer": {**PYRAMID, "sr_ratios": [4, 2, 1], "patch_sizes": [7, 3, 3]},
}
