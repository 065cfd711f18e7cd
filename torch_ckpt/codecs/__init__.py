"""Transforms of one block's bytes. Knows bytes and numpy; nothing of tensors or storage."""

from torch_ckpt.codecs.codec import Codec, CodecError
from torch_ckpt.codecs.names import NAMES, codec_named
from torch_ckpt.codecs.residual import LossyDelta

__all__ = ["NAMES", "Codec", "CodecError", "LossyDelta", "codec_named"]
