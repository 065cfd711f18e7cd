"""Transforms of one block's bytes. Knows bytes and numpy; nothing of tensors or storage."""

from torch_ckpt.codecs.codec import Codec, CodecError
from torch_ckpt.codecs.names import NAMES, codec_named

__all__ = ["NAMES", "Codec", "CodecError", "codec_named"]
