"""Well-known models in the numbers that their authors published, and the totals that they published.

Configs are transformers' classes with the fields of the released config.json files that decide the size.
"""

from __future__ import annotations

from typing import Any

import transformers as t


def llama(vocab: int, width: int, ff: int, layers: int, heads: int, groups: int, **more: Any) -> t.LlamaConfig:
    return t.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        **more,
    )


def modern(kind: Any, vocab: int, width: int, ff: int, layers: int, heads: int, groups: int, **more: Any) -> Any:
    return kind(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        **more,
    )


def whisper(width: int, layers: int, heads: int, vocab: int, bins: int = 80) -> t.WhisperConfig:
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 4 * width}
    return t.WhisperConfig(d_model=width, vocab_size=vocab, num_mel_bins=bins, **sides)


#: Model: (config, parameters as released).
PUBLISHED: dict[str, tuple[Any, int]] = {
    "GPT-2": (t.GPT2Config(), 124_439_808),
    "GPT-2 XL": (t.GPT2Config(n_embd=1600, n_layer=48, n_head=25), 1_557_611_200),
    "GPT-J-6B": (t.GPTJConfig(), 6_050_882_784),
    "GPT-NeoX-20B": (
        t.GPTNeoXConfig(
            vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576
        ),
        20_554_567_680,
    ),
    "OPT-6.7B": (
        t.OPTConfig(
            vocab_size=50272,
            hidden_size=4096,
            ffn_dim=16384,
            num_hidden_layers=32,
            num_attention_heads=32,
            word_embed_proj_dim=4096,
        ),
        6_658_473_984,
    ),
    "BLOOM-560M": (t.BloomConfig(vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16), 559_214_592),
    "BLOOM-176B": (t.BloomConfig(vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112), 176_247_271_424),
    "Falcon-7B": (
        t.FalconConfig(
            vocab_size=65024,
            hidden_size=4544,
            num_hidden_layers=32,
            num_attention_heads=71,
            multi_query=True,
            parallel_attn=True,
            bias=False,
        ),
        6_921_720_704,
    ),
    "Falcon-40B": (
        t.FalconConfig(
            vocab_size=65024,
            hidden_size=8192,
            num_hidden_layers=60,
            num_attention_heads=128,
            num_kv_heads=8,
            new_decoder_architecture=True,
            bias=False,
        ),
        41_303_293_952,
    ),
    "StarCoder": (
        t.GPTBigCodeConfig(
            vocab_size=49152,
            n_embd=6144,
            n_inner=24576,
            n_layer=40,
            n_head=48,
            n_positions=8192,
            multi_query=True,
            bos_token_id=0,
            eos_token_id=0,
        ),
        15_517_456_384,
    ),
    "Llama-2-7B": (llama(32000, 4096, 11008, 32, 32, 32), 6_738_415_616),
    "Llama-2-70B": (llama(32000, 8192, 28672, 80, 64, 8), 68_976_648_192),
    "Llama-3-8B": (llama(128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3-70B": (llama(128256, 8192, 28672, 80, 64, 8), 70_553_706_496),
    "Llama-3.1-405B": (llama(128256, 16384, 53248, 126, 128, 8), 405_853_388_800),
    "SmolLM2-135M": (llama(49152, 576, 1536, 30, 9, 3, tie_word_embeddings=True), 134_515_008),
    "Mistral-7B": (modern(t.MistralConfig, 32000, 4096, 14336, 32, 32, 8, sliding_window=4096), 7_241_732_096),
    "Mixtral-8x7B": (
        modern(t.MixtralConfig, 32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen2.5-7B": (modern(t.Qwen2Config, 152064, 3584, 18944, 28, 28, 4), 7_615_616_512),
    "Qwen3-4B": (
        modern(t.Qwen3Config, 151936, 2560, 9728, 36, 32, 8, head_dim=128, tie_word_embeddings=True),
        4_022_468_096,
    ),
    "Qwen3-30B-A3B": (
        modern(
            t.Qwen3MoeConfig,
            151936,
            2048,
            6144,
            48,
            32,
            4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        30_532_122_624,
    ),
    "Gemma-7B": (modern(t.GemmaConfig, 256000, 3072, 24576, 28, 16, 16, head_dim=256), 8_537_680_896),
    "Gemma-2-2B": (modern(t.Gemma2Config, 256000, 2304, 9216, 26, 8, 4, head_dim=256), 2_614_341_888),
    "Gemma-2-9B": (modern(t.Gemma2Config, 256000, 3584, 14336, 42, 16, 8, head_dim=256), 9_241_705_984),
    "Gemma-2-27B": (modern(t.Gemma2Config, 256000, 4608, 36864, 46, 32, 16, head_dim=128), 27_227_128_320),
    "Gemma-3-1B": (
        modern(t.Gemma3TextConfig, 262144, 1152, 6912, 26, 4, 1, head_dim=256, sliding_window=512),
        999_885_952,
    ),
    # The released files hold 671,026,419,200 numbers beside scales and the layer for multi-token prediction. Of these
    # 58 x 256 are biases of the routers (e_score_correction_bias), which transformers keeps as buffers.
    "DeepSeek-V3": (t.DeepseekV3Config(), 671_026_419_200 - 58 * 256),
    "gpt-oss-20B": (t.GptOssConfig(num_hidden_layers=24, num_local_experts=32), 20_914_757_184),
    "gpt-oss-120B": (t.GptOssConfig(num_hidden_layers=36, num_local_experts=128), 116_829_156_672),
    "Phi-2": (modern(t.PhiConfig, 51200, 2560, 10240, 32, 32, 32), 2_779_683_840),
    "Phi-3-mini": (t.Phi3Config(), 3_821_079_552),
    "Phi-4": (
        modern(t.Phi3Config, 100352, 5120, 17920, 40, 40, 10, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        14_659_507_200,
    ),
    "T5-small": (t.T5Config(), 60_506_624),
    "Whisper tiny": (whisper(384, 4, 6, 51865), 37_760_640),
    "Whisper large-v3": (whisper(1280, 32, 20, 51866, 128), 1_543_490_560),
    "BERT-base": (t.BertConfig(), 109_482_240),
    "BERT-large": (
        t.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
        335_141_888,
    ),
    "DistilBERT": (t.DistilBertConfig(), 66_362_880),
    "RoBERTa-base": (
        t.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
        124_645_632,
    ),
    "ALBERT-base": (
        t.AlbertConfig(
            embedding_size=128, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
        ),
        11_683_584,
    ),
    "ViT-base": (t.ViTConfig(), 86_389_248),
}

#: Heads, key-value heads, width of a head of the first layer, and number of attention layers.
HEADS: dict[str, tuple[int, int, int, int]] = {
    "GPT-2 XL": (25, 25, 64, 48),
    "Falcon-7B": (71, 1, 64, 32),
    "Falcon-40B": (128, 8, 64, 60),
    "BLOOM-176B": (112, 112, 128, 70),
    "StarCoder": (48, 1, 128, 40),
    "Qwen3-4B": (32, 8, 128, 36),
    "Gemma-2-9B": (16, 8, 256, 42),
    "gpt-oss-20B": (64, 8, 64, 24),
    "Phi-4": (40, 10, 128, 40),
    "T5-small": (8, 8, 64, 18),
    "Whisper large-v3": (20, 20, 64, 96),
    "ALBERT-base": (12, 12, 64, 12),
    "DeepSeek-V3": (128, 128, 192, 61),
}

#: Bytes of cache per token at 16 bits while no window is full (case 39 and its kind).
CACHE: dict[str, int] = {
    "Llama-3-8B": 131_072,
    "Llama-2-7B": 524_288,
    "Llama-2-70B": 327_680,
    "Qwen3-4B": 147_456,
    "DeepSeek-V3": 70_272,
    "Falcon-7B": 8_192,
    "BLOOM-176B": 4_014_080,
    "gpt-oss-120B": 73_728,
}

#: Parameters that one token goes through, in billions, as the authors round them (embeddings included in theirs).
ACTIVE: dict[str, float] = {
    "Mixtral-8x7B": 12.9,
    "DeepSeek-V3": 37.0,
    "gpt-oss-20B": 3.6,
    "gpt-oss-120B": 5.1,
    "Qwen3-30B-A3B": 3.3,
}
