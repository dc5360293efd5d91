"""Configurations of small models, one or more for each architecture, as transformers' classes take them.

Windows are shorter than the tests' prompts; layers of every kind that an architecture has are there.
"""

from typing import Any, NamedTuple

from tests.engine.models import VOCABULARY

WINDOW = 24


UNPLANNED = {"hunyuan_v1_dense", "bitnet", "gpt2", "falcon_h1", "lfm2", "mamba2", "bamba", "zamba2"}
UNDIVIDED = dict.fromkeys(("phi3", "nemotron_h"), "its plan for shards divides nothing")


class Architecture(NamedTuple):
    """A model of the zoo."""

    model_type: str
    fields: dict[str, Any]
    refused: str = ""
    """Part of the reason for which it is not served."""
    stages: bool = True
    """It runs in two pipeline stages, too."""

    @property
    def undivided(self) -> str:
        """Why shards cannot divide it (--tp)."""
        return "transformers has no plan" if self.model_type in UNPLANNED else UNDIVIDED.get(self.model_type, "")


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXED = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 32,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
PIXELS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_PIXELS: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
}  # fmt: skip
IMAGE_TOKEN, IMAGE_START, IMAGE_END, IMAGE_BREAK, VIDEO_TOKEN = 10, 11, 12, 13, 14
QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN, "vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END,
    "video_token_id": VIDEO_TOKEN,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6, "original_max_position_embeddings": 48,
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    # of which our own layers compute some, too
    "llama": Architecture("llama", {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral-window": Architecture("mistral", {**SIZES, "sliding_window": WINDOW}),
    "mistral": Architecture("mistral", {**SIZES, "head_dim": 32, "sliding_window": None}),
    "mixtral": Architecture("mixtral", {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2": Architecture("qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": Architecture("qwen3", {**SIZES, "head_dim": 32}),
    "qwen3-moe": Architecture("qwen3_moe", {**SIZES, **EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "deepseek-v2": Architecture(
        "deepseek_v2", {**LATENT, "n_group": 2, "topk_method": "group_limited_greedy"}, stages=True
    ),
    "deepseek-v3": Architecture(
        "deepseek_v3", {**LATENT, "n_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "kimi-k2": Architecture("deepseek_v3", LATENT),
    # of other inputs, their text
    "qwen3-vl": Architecture(
        "qwen3_vl",
        {
            "text_config": {
                **SIZES, "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
                },
            },
            "vision_config": {**QWEN_PIXELS, "depth": 2, "deepstack_visual_indexes": [0, 1]},
            **QWEN_TOKENS,
        },
    ),
    "qwen2.5-vl": Architecture(
        "qwen2_5_vl",
        {
            "text_config": {
                **SIZES,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            },
            "vision_config": QWEN_PIXELS,
            **QWEN_TOKENS,
        },
    ),
    "gemma3-vision": Architecture(
        "gemma3",
        {"text_config": {**SIZES, "head_dim": 32, **WINDOWS}, "vision_config": PIXELS, "mm_tokens_per_image": 4},
    ),
    "mistral3": Architecture(
        "mistral3",
        {
            "text_config": {**SIZES, "model_type": "mistral", "head_dim": 32, "sliding_window": None},
            "vision_config": {**PIXELS, "model_type": "pixtral", "head_dim": 16, "image_size": 112},
            "image_token_id": IMAGE_TOKEN,
        },
    ),
    # windows, sinks, caps
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **SIZES, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": Architecture("gemma2", {**SIZES, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32}),
    "gemma3": Architecture("gemma3_text", {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, **WINDOWS}),
    "gemma3n": Architecture(
        "gemma3n_text",
        {
            **SIZES, "head_dim": 32, **WINDOWS, "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        stages=False,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **SIZES, "head_dim": 32, **WINDOWS, "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
        },
        stages=False,
    ),
    "llama4": Architecture(
        "llama4_text",
        {
            **SIZES, "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2,
        },
    ),
    "ministral": Architecture("ministral", {**SIZES, "head_dim": 32, **WINDOWS}),
    "olmo3": Architecture("olmo3", {**SIZES, **WINDOWS}),
    "exaone4": Architecture("exaone4", {**SIZES, **WINDOWS}),
    "cohere2": Architecture("cohere2", {**SIZES, "head_dim": 16, **WINDOWS}),
    "mimo-v2-flash": Architecture(
        "mimo_v2_flash",
        {
            **SIZES, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, **WINDOWS,
        },
    ),
    # positions
    "ministral3": Architecture(
        "ministral3",
        {
            **SIZES, "head_dim": 32, "sliding_window": None,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512},
        },
    ),
    "phi4-mini": Architecture(
        "phi3",
        {**SIZES, "sliding_window": None, "original_max_position_embeddings": 48, "rope_parameters": LONGROPE},
    ),
    "smollm3": Architecture("smollm3", {**SIZES, "no_rope_layer_interval": 4}),
    # latents
    "mistral4": Architecture("mistral4", LATENT),
    "glm4.7-flash": Architecture("glm4_moe_lite", LATENT),
    "longcat-flash": Architecture(
        "longcat_flash",
        {
            **LATENT, "num_layers": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96,
            "zero_expert_num": 2, "head_dim": 8,
        },
        stages=False,
    ),
    # of other layers and routers
    "phi3": Architecture("phi3", {**SIZES, "sliding_window": None}),
    "glm4": Architecture("glm4", {**SIZES, "head_dim": 16}),
    "glm4.5": Architecture(
        "glm4_moe",
        {
            **SIZES, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
        },
    ),
    "minimax-m2": Architecture(
        "minimax_m2", {**SIZES, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "olmo2": Architecture("olmo2", SIZES),
    "granite": Architecture(
        "granite",
        {
            **SIZES, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "nemotron": Architecture("nemotron", SIZES),
    "qwen2-moe": Architecture("qwen2_moe", {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "seed-oss": Architecture("seed_oss", {**SIZES, "head_dim": 32}),
    "ernie4.5": Architecture("ernie4_5", {**SIZES, "head_dim": 16}),
    "ernie4.5-moe": Architecture(
        "ernie4_5_moe",
        {
            **SIZES, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan": Architecture("hunyuan_v1_dense", {**SIZES, "head_dim": 16}),
    "hunyuan3": Architecture("hy_v3", {**SIZES, **EXPERTS, "head_dim": 16, "num_shared_experts": 1}),
    "command-r": Architecture("cohere", SIZES),
    "starcoder2": Architecture("starcoder2", {**SIZES, "sliding_window": None}),
    "bitnet": Architecture("bitnet", SIZES),
    "apertus": Architecture("apertus", SIZES),
    "arcee": Architecture("arcee", SIZES),
    "gpt2": Architecture("gpt2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    # with an index of positions, which is cached, too
    "glm5": Architecture("glm_moe_dsa", {**LATENT, **INDEXED}, stages=False),
    "deepseek-v3.2": Architecture("deepseek_v32", {**LATENT, **INDEXED}),
    # with states
    "qwen3.5": Architecture("qwen3_5_text", {**SIZES, **LINEAR}),
    "qwen3.5-moe": Architecture(
        "qwen3_5_moe_text", {**SIZES, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "qwen3-next": Architecture(
        "qwen3_next", {**SIZES, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        {
            **LATENT, "q_lora_rank": None, "num_local_experts": 8, "linear_head_dim": 16, "linear_num_heads": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
            ),
    "minimax-m1": Architecture(
        "minimax",
        {
            **SIZES, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16,
        },
            ),
    "granite4": Architecture(
        "granitemoehybrid",
        {
            **SIZES, **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
            "layer_types": ["mamba"] * 3 + ["attention"],
        },
            ),
    "nemotron-h": Architecture(
        "nemotron_h",
        {
            **SIZES, "head_dim": 16, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8, "mamba_head_dim": 16,
            "ssm_state_size": 16, "n_groups": 1, "time_step_min": 1e-6, "chunk_size": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        }, stages=False),
    "falcon-h1": Architecture(
        "falcon_h1",
        {
            **SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
            "mamba_d_state": 16, "mamba_chunk_size": 16,
        }, stages=False),
    "lfm2": Architecture(
        "lfm2",
        {**SIZES, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention", "conv"]},
            ),
    "mamba2": Architecture(
        "mamba2",
        {
            "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16,
            "state_size": 16, "n_groups": 1, "chunk_size": 16,
        },
            ),
    "bamba": Architecture(
        "bamba",
        {
            **SIZES, "attn_layer_indices": [1, 3], "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16,
            "mamba_chunk_size": 16,
        }, stages=False),
    "jamba": Architecture(
        "jamba",
        {
            **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
            ),
    "zamba2": Architecture(
        "zamba2",
        {
            **SIZES, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16,
            "n_mamba_heads": 8, "mamba_ngroups": 1, "time_step_min": 1e-6, "chunk_size": 16,
            "use_mem_rope": True, "adapter_rank": 8, "num_key_value_heads": 4,
        }, stages=False),
    "deepseek-v4": Architecture(
        "deepseek_v4",
        {
            **SIZES, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 24, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "sliding_window": WINDOW,
            "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16,
            "num_nextn_predict_layers": 0,
        }, refused="cache of its own"),
}  # fmt: skip
