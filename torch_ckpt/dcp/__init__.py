"""Storage for torch.distributed.checkpoint: its planners, this package's format and promises.

Knows DCP's public classes. Knows nothing of the checkpointer, slabs or the side process.
"""

from torch_ckpt.dcp.reader import Reader
from torch_ckpt.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
