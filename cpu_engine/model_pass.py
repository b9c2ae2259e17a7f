"""One pass of new tokens through a Hugging Face causal LM; checks whether a model allows that."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpu_engine.attention import NAME, Chunk, Pass
from cpu_engine.key_values import Slots


def logits_of(
    model: Any, token_ids: npt.NDArray[np.int64], batch: Pass, wanted: torch.Tensor
) -> torch.Tensor:
    """(len(wanted), V): logits of one pass of new tokens (T,) through a model of `slots_for`, for
    the tokens at the indices `wanted`."""
    return model(
        input_ids=torch.from_numpy(token_ids).unsqueeze(0),
        # transformers passes a mask of four dimensions on as it is. `attend` does not read it.
        attention_mask=torch.empty((1, 1, 0, 0)),
        position_ids=batch.places.unsqueeze(0),
        use_cache=False,
        logits_to_keep=wanted,
        decoding=batch,
    ).logits[0]


def slots_for(model: Any) -> Slots:
    """Slots for keys and values of a model, whose attention is set to `cpu_engine.attention`.

    Raises:
        ValueError: layers of the model are neither full nor sliding attention, or the model does
            not let its attention be chosen.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown or config.is_encoder_decoder or not model._supports_attention_backend:
        raise ValueError(
            f"cannot decode model_type={config.model_type!r} with layer_types={unknown}: its "
            "layers store something else than keys and values, or their attention cannot be "
            "replaced; set actor_rollout_ref.rollout.name=vllm"
        )
    model.set_attn_implementation(NAME)
    heads = config.num_attention_heads
    return Slots(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
    )


@torch.inference_mode()
def check_attention(model: Any, slots: Slots) -> None:
    """Compare nine tokens decoded in two passes with transformers' own pass of all nine.

    Raises:
        ValueError: logits differ: the model's attention does something that ours does not.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = np.random.default_rng(0).integers(0, vocabulary, 9)
    slots.make_room(1, len(ids))
    zeros = torch.zeros(1, dtype=torch.long)
    first = Pass(
        buffer=slots.buffer,
        slots=zeros.expand(8),
        places=torch.arange(8),
        copies=[],
        chunks=[Chunk(0, 0, 8)],
    )
    second = Pass(buffer=slots.buffer, slots=zeros, places=zeros + 8, copies=[], singles=1)
    try:
        logits_of(model, ids[:8], first, zeros + 7)
        ours = logits_of(model, ids[8:], second, zeros)[0].float()
        theirs = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, -1].float()
        off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        cause = f"decoded step by step its logits are off by {off:.1e}"
    except (RuntimeError, TypeError, ValueError) as error:
        off, cause = float("inf"), f"{type(error).__name__}: {error}"
    if not off < (1e-3 if model.dtype == torch.float32 else 5e-2):
        raise ValueError(
            f"cannot decode model_type={model.config.model_type!r}: {cause}; set "
            "actor_rollout_ref.rollout.name=vllm"
        )
