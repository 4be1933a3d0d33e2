"""Tables of the supported model families, and of known models that are refused by name. `penstock models` lists them.

Plain data without torch: registry.py looks up the functions named here. tests/executor/test_catalogue.py checks the
rows against the families' specs and the supported GGUF architectures.
"""

from typing import NamedTuple


class Family(NamedTuple):
    name: str
    architectures: dict[str, str]  # name in config.json without ForCausalLM → function that reads the settings
    # window: sliding-window layers; experts: MoE; MLA: multi-head latent attention; unrotated: layers without RoPE;
    # caps: soft-capped scores and logits; sinks: attention sinks; longrope: different rotations for short and long
    # contexts; recurrent: layers with a state; text of images: only the text part of a multimodal model.
    features: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()  # architectures of GGUF files
    tools: tuple[str, ...] = ()  # tool-call formats of the models' chat templates
    reasoning: str = ""


FAMILIES = (
    Family("DeepSeek V2", {"DeepseekV2": "deepseek_v2"}, ("experts", "MLA"), ("deepseek2",)),
    Family(
        "DeepSeek V3, R1",
        {"DeepseekV3": "deepseek_v3"},
        ("experts", "MLA"),
        ("deepseek2",),
        ("deepseek_v3", "deepseek_v31"),
        "think",
    ),
    Family("ERNIE 4.5", {"Ernie4_5": "ernie4_5"}, (), ("ernie4_5",)),
    Family("ERNIE 4.5 MoE", {"Ernie4_5_Moe": "ernie4_5_moe"}, ("experts",)),
    Family("Gemma 2", {"Gemma2": "gemma2"}, ("window", "caps"), ("gemma2",)),
    Family("Gemma 3", {"Gemma3": "gemma3"}, ("window", "text of images"), ("gemma3",)),
    Family("Gemma 4", {"Gemma4": "gemma4"}, ("experts", "window", "caps", "text of images"), (), ("gemma4",)),
    Family("GLM-4 (0414)", {"Glm4": "glm4"}, (), ("glm4",)),
    Family("GLM-4.5 to 4.7", {"Glm4Moe": "glm4_moe"}, ("experts",), (), ("glm45", "glm47"), "think"),
    Family("GLM-4.7 Flash", {"Glm4MoeLite": "glm4_moe_lite"}, ("experts", "MLA"), (), ("glm47",), "think"),
    Family("gpt-oss", {"GptOss": "gpt_oss"}, ("experts", "window", "sinks"), ("gpt-oss",), ("harmony",), "harmony"),
    Family("Granite 3", {"Granite": "granite"}, (), ("granite",), ("granite",)),
    Family(
        "Granite 3 and 4 MoE",
        {"GraniteMoe": "granite_moe", "GraniteMoeShared": "granite_moe_shared"},
        ("experts",),
        (),
        ("granite",),
    ),
    Family("Granite 4", {"GraniteMoeHybrid": "granite_hybrid"}, ("experts", "recurrent", "unrotated"), (), ("hermes",)),
    Family("Hunyuan dense", {"HunYuanDenseV1": "hunyuan_dense"}, (), ("hunyuan-dense",), ("hunyuan_a13b",), "think"),
    Family("LFM2", {"Lfm2": "lfm2"}, ("recurrent",), (), ("lfm2",)),
    Family("Llama 1 to 3, SmolLM2", {"Llama": "llama"}, (), ("llama",), ("llama3_json",)),
    Family("MiniMax-M2", {"MiniMaxM2": "minimax_m2"}, ("experts",), (), ("minimax_m2",), "think"),
    Family(
        "Mistral",
        {"Mistral": "mistral", "Ministral": "ministral"},
        ("window", "text of images"),
        ("llama",),
        ("mistral",),
    ),
    Family("Ministral 3", {"Ministral3": "ministral3"}, ("text of images",), (), ("mistral",), "mistral"),
    Family("Mixtral", {"Mixtral": "mixtral"}, ("experts", "window"), ("llama",), ("mistral",)),
    Family("OLMo 2", {"Olmo2": "olmo2"}, (), ("olmo2",)),
    Family("OLMo 3", {"Olmo3": "olmo3"}, ("window",), (), ("olmo3",), "think"),
    Family("OPT", {"OPT": "opt"}, ("unrotated",)),
    Family("Phi-3, Phi-4", {"Phi3": "phi3"}, ("window", "longrope"), ("phi3",), ("phi4_mini_json",)),
    Family("Qwen 2 and 2.5", {"Qwen2": "qwen2"}, ("window",), ("qwen2",), ("hermes", "qwen2_5_coder")),
    Family("Qwen 2 MoE", {"Qwen2Moe": "qwen2_moe"}, ("experts",), ("qwen2moe",)),
    Family("Qwen 3", {"Qwen3": "qwen3"}, (), ("qwen3",), ("hermes",), "think"),
    Family("Qwen 3 MoE", {"Qwen3Moe": "qwen3_moe"}, ("experts",), ("qwen3moe",), ("hermes", "qwen3_coder"), "think"),
    Family("Qwen 3 Next", {"Qwen3Next": "qwen3_next"}, ("experts", "recurrent"), (), ("hermes",), "think"),
    Family("Qwen 3.5, 3.6", {"Qwen3_5": "qwen3_5"}, ("recurrent", "text of images"), (), ("qwen3_coder",), "think"),
    Family(
        "Qwen 3.5 MoE",
        {"Qwen3_5Moe": "qwen3_5_moe"},
        ("experts", "recurrent", "text of images"),
        (),
        ("qwen3_coder",),
        "think",
    ),
    Family("Seed-OSS", {"SeedOss": "seed_oss"}, (), ("seed_oss",), ("seed_oss",), "think"),
    Family("SmolLM3", {"SmolLM3": "smollm3"}, ("window", "unrotated"), ("smollm3",), ("hermes",), "think"),
)

# Multimodal models of which only the text part runs: `model_type` of their `text_config` → class of the text part.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Mistral3ForConditionalGeneration": {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
}

# Prefix of the name of a known, unsupported architecture → the missing features.
REFUSED = {
    "Bamba": "Mamba layers",
    "Bloom": "attention by distance (ALiBi) and layer norms",
    "Cohere": "layer norms, attention and MLP side by side",
    "DeepseekV32": "sparse attention",
    "Falcon": "attention and MLP side by side, Mamba layers",
    "GPT": "learned positions, layer norms, attention and MLP side by side",
    "GlmMoeDsa": "sparse attention",
    "Jamba": "Mamba layers",
    "Llama4": "attention in chunks, its experts",
    "Mamba": "Mamba layers",
    "Nemotron": "Mamba layers, squared ReLU",
    "Phi4M": "images and speech, adapters for them",
    "PhiMoE": "its router, layer norms",
    "Phimoe": "its router, layer norms",
    "Qwen2_5_VL": "positions in three dimensions",
    "Qwen3VL": "positions in three dimensions",
    "StableLm": "layer norms",
    "Starcoder2": "layer norms",
}


def runs(architecture: str) -> bool:
    """Tell whether the executor supports this architecture of config.json, or at least its text part."""
    return architecture in TEXT_PARTS or any(
        architecture == f"{name}ForCausalLM" for family in FAMILIES for name in family.architectures
    )


def missing(architecture: str) -> str | None:
    """Return the features that a known, unsupported architecture would need; None for other names."""
    found = [name for name in REFUSED if architecture.startswith(name)]
    return REFUSED[max(found, key=len)] if found else None
