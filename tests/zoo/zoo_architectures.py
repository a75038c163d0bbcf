"""Architectures of transformers by ``model_type``: the head, and the configuration with its sizes set down."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96

#: Sizes under the names that most configurations use.
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_MOE = {
    **_LLAMA,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "output_router_logits": True,
}
_ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
_PYRAMID = {"num_labels": 5, "image_size": 64}
_SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 5,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "num_adapter_layers": 1,
    "tdnn_dim": (16, 16),
}


def _without(sizes: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key != name}


_NO_LAYERDROP = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}

#: Head, base sizes, what differs.
Architecture = tuple[str, dict[str, Any], dict[str, Any]]

_CAUSAL: dict[str, Architecture] = {
    "gpt2": ("CausalLM", _TEXT, {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "gpt_bigcode": ("CausalLM", _TEXT, {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "gpt_neo": (
        "CausalLM",
        _TEXT,
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2},
    ),
    "gpt_neox": ("CausalLM", _TEXT, {}),
    "gptj": ("CausalLM", _TEXT, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "codegen": ("CausalLM", _TEXT, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "openai-gpt": ("CausalLM", _TEXT, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "ctrl": ("CausalLM", _TEXT, {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64}),
    "opt": ("CausalLM", _TEXT, {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.0}),
    "bloom": ("CausalLM", _TEXT, {"n_layer": 3, "n_head": 4}),
    "mpt": ("CausalLM", _TEXT, {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "falcon": ("CausalLM", _TEXT, {}),
    "biogpt": ("CausalLM", _TEXT, {"layerdrop": 0.0}),
    "xglm": (
        "CausalLM",
        _TEXT,
        {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "layerdrop": 0.0},
    ),
    "xlnet": (
        "CausalLM",
        _without(_TEXT, "max_position_embeddings"),
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "llama": ("CausalLM", _LLAMA, {}),
    "mistral": ("CausalLM", _LLAMA, {"sliding_window": 8}),
    "qwen2": ("CausalLM", _LLAMA, {}),
    "qwen3": ("CausalLM", _LLAMA, {}),
    "gemma": ("CausalLM", _LLAMA, {}),
    "gemma2": ("CausalLM", _LLAMA, {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("CausalLM", _LLAMA, {"sliding_window": 8}),
    "phi": ("CausalLM", _TEXT, {}),
    "phi3": ("CausalLM", _LLAMA, {}),
    "stablelm": ("CausalLM", _LLAMA, {}),
    "starcoder2": ("CausalLM", _LLAMA, {}),
    "olmo": ("CausalLM", _LLAMA, {}),
    "olmo2": ("CausalLM", _LLAMA, {}),
    "cohere": ("CausalLM", _LLAMA, {}),
    "persimmon": ("CausalLM", _TEXT, {}),
    "glm": ("CausalLM", _LLAMA, {}),
    "glm4": ("CausalLM", _LLAMA, {}),
    "granite": ("CausalLM", _LLAMA, {}),
    "nemotron": ("CausalLM", _LLAMA, {}),
    "smollm3": ("CausalLM", _LLAMA, {}),
    "ernie4_5": ("CausalLM", _LLAMA, {}),
    "helium": ("CausalLM", _LLAMA, {}),
    "diffllama": ("CausalLM", _LLAMA, {}),
    "seed_oss": ("CausalLM", _LLAMA, {}),
    "exaone4": ("CausalLM", _LLAMA, {"sliding_window": 8}),
    "mamba": ("CausalLM", _TEXT, {"state_size": 8, "time_step_rank": 4}),
    "rwkv": ("CausalLM", _TEXT, {"attention_hidden_size": 32, "context_length": 16}),
    "recurrent_gemma": ("CausalLM", _LLAMA, {"lru_width": 32, "attention_window_size": 16}),
    "modernbert-decoder": ("CausalLM", _TEXT, {"local_attention": 8}),
}

_EXPERTS: dict[str, Architecture] = {
    "mixtral": ("CausalLM", _MOE, {}),
    "qwen2_moe": ("CausalLM", _MOE, {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("CausalLM", _MOE, {}),
    "olmoe": ("CausalLM", _MOE, {}),
    "phimoe": ("CausalLM", _MOE, {}),
    "granitemoe": ("CausalLM", _MOE, {}),
    "gpt_oss": ("CausalLM", _MOE, {"sliding_window": 8}),
    "deepseek_v3": (
        "CausalLM",
        _MOE,
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "switch_transformers": (
        "Seq2SeqLM",
        _T5,
        {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "nllb-moe": ("Seq2SeqLM", _ENCODER_DECODER, {"num_experts": 4, **_NO_LAYERDROP}),
}

_ENCODERS: dict[str, Architecture] = {
    "bert": ("MaskedLM", _TEXT, {}),
    "roberta": ("MaskedLM", _TEXT, {}),
    "xlm-roberta": ("MaskedLM", _TEXT, {}),
    "camembert": ("MaskedLM", _TEXT, {}),
    "albert": ("MaskedLM", _TEXT, {"embedding_size": 16}),
    "distilbert": ("MaskedLM", _TEXT, {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}),
    "electra": ("MaskedLM", _TEXT, {"embedding_size": 16}),
    "deberta": ("MaskedLM", _TEXT, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v2": (
        "MaskedLM",
        _TEXT,
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3},
    ),
    "mobilebert": (
        "MaskedLM",
        _TEXT,
        {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
    ),
    "squeezebert": (
        "MaskedLM",
        _TEXT,
        {
            "embedding_size": 32,
            **{f"{n}_groups": 2 for n in ("q", "k", "v", "post_attention", "intermediate", "output")},
        },
    ),
    "convbert": ("MaskedLM", _TEXT, {"embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3}),
    "fnet": ("MaskedLM", _TEXT, {}),
    "funnel": (
        "MaskedLM",
        _without(_TEXT, "num_hidden_layers"),
        {"d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 64},
    ),
    "mpnet": ("MaskedLM", _TEXT, {}),
    "nystromformer": ("MaskedLM", _TEXT, {"num_landmarks": 12, "segment_means_seq_len": 12}),
    "roformer": ("MaskedLM", _TEXT, {"embedding_size": 32}),
    "layoutlm": ("MaskedLM", _TEXT, {}),
    "longformer": ("MaskedLM", _TEXT, {"attention_window": 4}),
    "big_bird": ("MaskedLM", _TEXT, {"attention_type": "original_full"}),
    "ibert": ("MaskedLM", _TEXT, {}),
    "megatron-bert": ("MaskedLM", _TEXT, {}),
    "rembert": ("MaskedLM", _TEXT, {"input_embedding_size": 16, "output_embedding_size": 16}),
    "xlm": ("MaskedLM", _TEXT, {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "modernbert": ("MaskedLM", _TEXT, {"local_attention": 8}),
    "data2vec-text": ("MaskedLM", _TEXT, {}),
    "esm": ("MaskedLM", _TEXT, {"position_embedding_type": "rotary"}),
    "xmod": ("MaskedLM", _TEXT, {"default_language": "en_XX"}),
}

_TRANSLATORS: dict[str, Architecture] = {
    "t5": ("Seq2SeqLM", _T5, {}),
    "mt5": ("Seq2SeqLM", _T5, {}),
    "umt5": ("Seq2SeqLM", _T5, {}),
    "longt5": ("Seq2SeqLM", _T5, {"local_radius": 4}),
    "bart": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "mbart": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "pegasus": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "pegasus_x": ("Seq2SeqLM", _ENCODER_DECODER, {"num_global_tokens": 4, "block_size": 4}),
    "marian": ("Seq2SeqLM", _ENCODER_DECODER, {"decoder_vocab_size": VOCABULARY}),
    "blenderbot": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "blenderbot-small": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "m2m_100": ("Seq2SeqLM", _ENCODER_DECODER, _NO_LAYERDROP),
    "led": (
        "Seq2SeqLM",
        _ENCODER_DECODER,
        {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    "plbart": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "mvp": ("Seq2SeqLM", _ENCODER_DECODER, {}),
    "bigbird_pegasus": ("Seq2SeqLM", _ENCODER_DECODER, {"attention_type": "original_full"}),
    "prophetnet": (
        "Seq2SeqLM",
        _without(_ENCODER_DECODER, "decoder_layers"),
        {
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "disable_ngram_loss": True,
        },
    ),
    "fsmt": (
        "Seq2SeqLM",
        _ENCODER_DECODER,
        {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]},
    ),
}

_IMAGES: dict[str, Architecture] = {
    "vit": ("ImageClassification", _VIT, {}),
    "deit": ("ImageClassification", _VIT, {}),
    "beit": ("ImageClassification", _VIT, {}),
    "data2vec-vision": ("ImageClassification", _VIT, {}),
    "dinov2": ("ImageClassification", _VIT, {}),
    "dinov2_with_registers": ("ImageClassification", _VIT, {}),
    "ijepa": ("ImageClassification", _VIT, {}),
    "vit_msn": ("ImageClassification", _VIT, {}),
    "hiera": (
        "ImageClassification",
        _PYRAMID,
        {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "image_size": [64, 64]},
    ),
    "swin": (
        "ImageClassification",
        _PYRAMID,
        {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "swinv2": (
        "ImageClassification",
        _PYRAMID,
        {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": ("ImageClassification", _PYRAMID, {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]}),
    "convnextv2": ("ImageClassification", _PYRAMID, {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]}),
    "resnet": (
        "ImageClassification",
        _PYRAMID,
        {"embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 2, 1]},
    ),
    "regnet": (
        "ImageClassification",
        _PYRAMID,
        {"embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 2, 1], "groups_width": 16},
    ),
    "bit": (
        "ImageClassification",
        _PYRAMID,
        {"embedding_size": 32, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 2, 1], "num_groups": 4},
    ),
    "mobilenet_v1": ("ImageClassification", _PYRAMID, {"depth_multiplier": 0.25}),
    "mobilenet_v2": ("ImageClassification", _PYRAMID, {"depth_multiplier": 0.25}),
    "mobilevit": (
        "ImageClassification",
        _PYRAMID,
        {"hidden_sizes": [16, 16, 32], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]},
    ),
    "mobilevitv2": ("ImageClassification", _PYRAMID, {"width_multiplier": 0.5}),
    "segformer": ("ImageClassification", _PYRAMID, {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    "poolformer": ("ImageClassification", _PYRAMID, {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1]}),
    "pvt": (
        "ImageClassification",
        _PYRAMID,
        {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 8]},
    ),
    "pvt_v2": (
        "ImageClassification",
        _PYRAMID,
        {
            "hidden_sizes": [8, 16, 32, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 4, 8],
            "image_size": {"height": 64, "width": 64},
        },
    ),
    "cvt": ("ImageClassification", _PYRAMID, {"embed_dim": [16, 32, 64], "depth": [1, 2, 3], "num_heads": [1, 2, 4]}),
    "levit": (
        "ImageClassification",
        _PYRAMID,
        {"hidden_sizes": [32, 48, 64], "depths": [1, 1, 1], "num_attention_heads": [2, 3, 4], "key_dim": [8, 8, 8]},
    ),
    "focalnet": ("ImageClassification", _PYRAMID, {"embed_dim": 16, "depths": [1, 1, 2, 1]}),
    "efficientnet": (
        "ImageClassification",
        _PYRAMID,
        {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    ),
    "swiftformer": ("ImageClassification", _PYRAMID, {"embed_dims": [16, 16, 32, 32], "depths": [1, 1, 2, 1]}),
}

_AUDIO: dict[str, Architecture] = {
    "wav2vec2": ("AudioClassification", _SPEECH, {}),
    "hubert": ("AudioClassification", _SPEECH, {}),
    "wavlm": ("AudioClassification", _SPEECH, {}),
    "unispeech": ("AudioClassification", _SPEECH, {}),
    "unispeech-sat": ("AudioClassification", _SPEECH, {}),
    "sew": ("AudioClassification", _SPEECH, {"squeeze_factor": 2}),
    "sew-d": ("AudioClassification", _SPEECH, {"squeeze_factor": 2}),
    "data2vec-audio": ("AudioClassification", _SPEECH, {}),
    "wav2vec2-conformer": ("AudioClassification", _SPEECH, {}),
    "audio-spectrogram-transformer": (
        "Spectrogram",
        _VIT,
        {"max_length": 24, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "whisper": (
        "SpeechSeq2Seq",
        _ENCODER_DECODER,
        {"num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 24},
    ),
    "speech_to_text": (
        "SpeechSeq2Seq",
        _ENCODER_DECODER,
        {
            "input_feat_per_channel": 16,
            "max_source_positions": 64,
            "max_target_positions": 24,
            "conv_channels": 16,
            **_NO_LAYERDROP,
        },
    ),
}

_MIXED: dict[str, Architecture] = {
    "clip": ("Contrastive", {}, {"projection_dim": 16, "text_config": _TEXT, "vision_config": _VIT}),
    "siglip": ("Contrastive", {}, {"text_config": _TEXT, "vision_config": _VIT}),
}

#: By model type.
ARCHITECTURES = {**_CAUSAL, **_EXPERTS, **_ENCODERS, **_TRANSLATORS, **_IMAGES, **_AUDIO, **_MIXED}
