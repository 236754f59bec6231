"""HuggingFace Flax models from small configurations; nothing is downloaded.

transformers 4 is the last line with Flax models.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from sources import integers, normal
from transformers import (
    BertConfig,
    CLIPTextConfig,
    DistilBertConfig,
    FlaxBertModel,
    FlaxCLIPTextModel,
    FlaxDistilBertModel,
    FlaxGPT2LMHeadModel,
    FlaxLlamaForCausalLM,
    FlaxMistralForCausalLM,
    FlaxResNetModel,
    FlaxRobertaModel,
    FlaxT5ForConditionalGeneration,
    FlaxViTModel,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ResNetConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
)
from transformers.models.t5 import modeling_flax_t5

# FlaxT5 calls clip by a name that newer releases of jax do not know.
modeling_flax_t5.jnp = types.SimpleNamespace(
    **{**vars(jnp), "clip": lambda x, a_min=None, a_max=None: jnp.clip(x, a_min, a_max)}
)

BERT = {
    "vocab_size": 1000,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 768,
}
LLAMA = BERT | {"num_key_value_heads": 2, "max_position_embeddings": 128}


def model(kind: Any, config: Any, **inputs: Any) -> tuple[Callable, tuple]:
    """A model as a function of its parameters and named inputs."""
    made = kind(config, seed=0)

    def apply(params, inputs):
        return made(params=params, train=False, **inputs)

    return apply, (made.params, inputs)


def tokens(batch: int = 2, length: int = 64, **more: Any) -> dict[str, Any]:
    ids = integers(1000, batch, length)
    return {"input_ids": ids, "attention_mask": (ids % 7 > 0).astype("int32"), **more}


MODELS = {
    "FlaxBert": lambda: model(FlaxBertModel, BertConfig(**BERT), **tokens()),
    "FlaxRoberta": lambda: model(FlaxRobertaModel, RobertaConfig(**BERT), **tokens()),
    "FlaxDistilBert": lambda: model(
        FlaxDistilBertModel,
        DistilBertConfig(vocab_size=1000, dim=192, n_layers=4, n_heads=4, hidden_dim=768),
        **tokens(),
    ),
    "FlaxGPT2": lambda: model(
        FlaxGPT2LMHeadModel,
        GPT2Config(vocab_size=1000, n_positions=128, n_embd=192, n_layer=4, n_head=4),
        **tokens(),
    ),
    "FlaxLlama": lambda: model(FlaxLlamaForCausalLM, LlamaConfig(**LLAMA), **tokens()),
    "FlaxMistral": lambda: model(FlaxMistralForCausalLM, MistralConfig(**LLAMA), **tokens()),
    "FlaxT5": lambda: model(
        FlaxT5ForConditionalGeneration,
        T5Config(vocab_size=1000, d_model=192, d_kv=48, d_ff=768, num_layers=3, num_heads=4),
        **tokens(decoder_input_ids=integers(1000, 2, 32, seed=1)),
    ),
    "FlaxViT": lambda: model(
        FlaxViTModel,
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=768,
            image_size=64,
            patch_size=8,
        ),
        pixel_values=normal(2, 3, 64, 64),
    ),
    "FlaxCLIPText": lambda: model(
        FlaxCLIPTextModel, CLIPTextConfig(**BERT, eos_token_id=999), **tokens()
    ),
    "FlaxResNet": lambda: model(
        FlaxResNetModel,
        ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1]),
        pixel_values=normal(2, 3, 64, 64),
    ),
}
